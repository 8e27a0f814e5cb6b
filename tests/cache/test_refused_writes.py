"""A server that refuses writes: a miss costs one more try than the base class's, and raises the same error."""

from __future__ import annotations

import asyncio

import pytest
import redis

from tests.support.cache_programs import base_at, cache_at, getter

FORGIVING = {"IGNORE_EXCEPTIONS": True}


class Refusing:
    """A server that refuses writes, and the words by which it does."""

    def __init__(self, server, refuse, code):
        self.server = server
        self.refuse = refuse
        self.code = code
        self.client = server.client()

    @property
    def refusals(self):
        """How many commands it has refused so."""
        return self.client.info("errorstats").get(f"errorstat_{self.code}", {"count": 0})["count"]


def _with_maxmemory(client):
    client.set("filler", b"x" * 2_000_000)
    client.config_set("maxmemory", "1mb")


REFUSALS = {
    "READONLY": lambda client: client.replicaof("127.0.0.1", 1),
    "NOREPLICAS": lambda client: client.config_set("min-replicas-to-write", 1),
    "OOM": _with_maxmemory,
}
KINDS = {"READONLY": redis.ReadOnlyError, "NOREPLICAS": redis.ResponseError, "OOM": redis.OutOfMemoryError}
"""The classes of redis-py's errors."""


@pytest.fixture(
    params=[
        *[(backend, code) for backend in ("RedisCache", "DjangoRedisCache") for code in REFUSALS],
        ("ClusterCache", "NOREPLICAS"),
        ("ClusterCache", "OOM"),  # a replica of a Cluster sends its clients to the primary
    ],
    ids="-".join,
)
def case(request):
    return request.param


@pytest.fixture
def backend(case):
    return case[0]


@pytest.fixture
def refusing(own_server, case):
    code = case[1]
    found = Refusing(own_server, REFUSALS[code], code)
    with found.client:
        yield found


def raised_by(function, *args):
    with pytest.raises(redis.RedisError) as caught:
        function(*args)
    return caught.value


@pytest.mark.parametrize("by_task", [False, True], ids=["thread", "task"])
def test_a_miss_costs_one_more_try_than_the_base_classes_and_raises_the_same(refusing, backend, by_task):
    ours, base = cache_at(refusing.server.url, backend), base_at(refusing.server.url, backend)
    assert ours.get_or_set("warm", lambda: 1) == base.get_or_set("warm", lambda: 2) == 1
    refusing.refuse(refusing.client)
    tries, errors = [], []
    for number, cache in enumerate((base, ours)):
        before = refusing.refusals
        error = raised_by(getter(cache, by_task), f"k{number}", lambda: "v", 60)
        errors.append(error)
        tries.append(refusing.refusals - before)
    assert tries[0] == 1
    assert tries[1] <= 2
    assert type(errors[0]) is type(errors[1]) is KINDS[refusing.code]
    assert errors[1].__cause__ is None


@pytest.mark.parametrize("by_task", [False, True], ids=["thread", "task"])
def test_many_misses_cost_two_tries_and_raise_the_same(refusing, backend, by_task):
    ours = cache_at(refusing.server.url, backend)
    ours.get_or_set("warm", lambda: 1)
    refusing.refuse(refusing.client)

    def many(keys):
        if by_task:
            return asyncio.run(ours.aget_or_set_many(keys, dict.fromkeys, 60))
        return ours.get_or_set_many(keys, dict.fromkeys, 60)

    before = refusing.refusals
    error = raised_by(many, ["a", "b", "c"])
    assert type(error) is KINDS[refusing.code]
    assert refusing.refusals - before <= 2 * 3


@pytest.mark.parametrize("by_task", [False, True], ids=["thread", "task"])
def test_a_value_that_cannot_be_stored_waits_for_no_primary(refusing, backend, by_task):
    """The server refuses writes from the computation on."""
    ours, base = cache_at(refusing.server.url, backend), base_at(refusing.server.url, backend)
    ours.get_or_set("warm", lambda: 1)

    def compute():
        refusing.refuse(refusing.client)
        return "v"

    error = raised_by(getter(ours, by_task), "k", compute, 60)
    assert type(error) is KINDS[refusing.code]
    assert refusing.refusals <= 4, "two tries, and one to give back the lease, of which the server counts two commands"
    assert type(raised_by(base.add, "k", 1)) is KINDS[refusing.code]


CHANGING = {
    "set": lambda cache, key: cache.set(key, 1, 10),
    "add": lambda cache, key: cache.add("new", 1, 10),
    "touch": lambda cache, key: cache.touch(key, 10),
    "incr": lambda cache, key: cache.incr(key),
    "delete": lambda cache, key: cache.delete(key),
    "adelete": lambda cache, key: asyncio.run(cache.adelete(key)),
    "delete_many": lambda cache, key: cache.delete_many([key, "l"]),
    "clear": lambda cache, key: cache.clear(),
}
OF_DJANGO_REDIS = {
    "expire": lambda cache, key: cache.expire(key, 10),
    "delete_pattern": lambda cache, key: cache.delete_pattern(f"{key}*"),
    "delete_pattern of all": lambda cache, key: cache.delete_pattern("*"),
}


def outcomes(ours, base, backend):
    """Return what each method returns, or the class of what it raises, of both caches."""
    found = {}
    for name, call in (CHANGING | (OF_DJANGO_REDIS if backend != "DjangoRedisCache" else {})).items():
        for cache, key in ((base, "base"), (ours, "ours")):
            try:
                answer = call(cache, key)
            except redis.RedisError as error:
                answer = type(error)
            found.setdefault(name, []).append(answer)
    return found


@pytest.mark.parametrize("options", [{}, FORGIVING], ids=["strict", "forgiving"])
def test_the_other_methods_answer_or_raise_as_the_base_class_does(refusing, backend, options):
    if backend == "DjangoRedisCache":
        options = {}  # Django's has no IGNORE_EXCEPTIONS
    ours, base = (at(refusing.server.url, backend, OPTIONS=options) for at in (cache_at, base_at))
    base.set_many({"base": 1, "ours": 1}, None)
    refusing.refuse(refusing.client)
    if options:
        assert ours.get_or_set("new", lambda: "v", 60) == base.get_or_set("new", lambda: "v", 60) == "v"
        assert asyncio.run(ours.aget_or_set("new", lambda: "v", 60)) == "v"
        assert ours.get_or_set_many(["new"], dict.fromkeys, 60) == {"new": None}
    found = outcomes(ours, base, backend)
    if refusing.code == "OOM":  # a server that is full deletes, and only ours says so
        assert found.pop("clear")[1] is True
    for name, (of_base, of_ours) in found.items():
        assert of_ours == of_base, name
