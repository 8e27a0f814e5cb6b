"""ClusterCache: its URLs and options, its methods over many slots and nodes, its errors and checks.

What it shares with the other backends is tested with them: the fixture `backend` has it, too.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import redis
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from redis.crc import key_slot

from django_redislock import get_client
from django_redislock.exceptions import LockBackendError
from tests.support import Cluster, Proxy, free_port, in_a_fork, wait_until
from tests.support.cache_programs import cache_at

BACKEND = "ClusterCache"
pytestmark = pytest.mark.usefixtures("backend")

KEYS = [f"k{number}" for number in range(50)]


@pytest.fixture
def check(settings):
    """Return the messages of the checks of a cache of this kind, as {id: [message, hint]}."""

    def check(backend: str, location: object, deploy: bool = False, **options: object) -> dict[str, list[str]]:
        path = f"django_redislock.cache.{backend}"
        settings.CACHES = {"default": {"BACKEND": path, "LOCATION": location, "OPTIONS": options}}
        messages = checks.run_checks(tags=["redislock"], include_deployment_checks=deploy)
        return {str(message.id): [message.msg, str(message.hint)] for message in messages}

    return check


@pytest.fixture(params=[BACKEND])
def backend(request):
    return request.param


@pytest.fixture
def nodes(client):
    """A client of each primary alone."""
    return [node.redis_connection for node in client.get_primaries()]


def test_the_methods_for_many_keys_work_over_all_slots(cache, client):
    values = {key: f"v of {key}" for key in KEYS}
    assert cache.set_many(values, 60) in ([], None)
    assert cache.get_many([*KEYS, "missing"]) == values
    assert 50_000 < client.pttl(":1:k0") <= 60_000
    assert cache.delete_many(["k0", "k1", "k2", "missing"]) == 3
    assert cache.get_many(KEYS).keys() == set(KEYS[3:])
    cache.set_many(values, 0)
    assert cache.get_many(KEYS) == {}
    assert cache.get_many([]) == {}
    assert not cache.delete_many([])


def test_the_asynchronous_methods_for_many_keys_work_over_all_slots(cache):
    async def use():
        await cache.aset_many(dict.fromkeys(KEYS, 1), 60)
        assert await cache.aget_many(KEYS) == dict.fromkeys(KEYS, 1)
        assert await cache.aset("k0", 5)
        assert await cache.aincr("k0") == 6
        assert await cache.atouch("k0", 90)
        assert await cache.ahas_key("k0")
        await cache.adelete_many(KEYS[:20])
        assert (await cache.aget_many(KEYS)).keys() == set(KEYS[20:])
        await cache.aclear()
        assert await cache.aget_many(KEYS) == {}

    asyncio.run(use())


def test_the_methods_for_one_key_are_those_of_django_redis(cache, client):
    assert cache.add("k", 1, 60)
    assert not cache.add("k", 2)
    assert cache.incr("k", 4) == 5
    assert cache.decr("k") == 4
    assert cache.ttl("k") in (59, 60)
    assert cache.touch("k", 90)
    assert 80_000 < cache.pttl("k") <= 90_000
    assert cache.expire("k", 30)
    assert cache.persist("k")
    assert client.ttl(":1:k") == -1
    assert cache.has_key("k")
    assert "k" in cache
    assert cache.incr_version("k") == 2
    assert cache.get("k", version=2) == 4
    assert cache.get("k") is None
    assert cache.delete("k", version=2) is True
    assert cache.delete("k", version=2) is False
    with pytest.raises(ValueError, match="not found"):
        cache.incr("k")


def test_patterns_find_the_keys_of_all_nodes(cache, nodes):
    cache.set_many(dict.fromkeys([*KEYS, "other"], 1), None)
    assert all(node.dbsize() > 5 for node in nodes)
    assert sum(node.dbsize() for node in nodes) == len(KEYS) + 1
    assert set(cache.keys("k*")) == set(cache.iter_keys("k*")) == set(KEYS)
    assert set(cache.iter_keys("*", itersize=5)) == {*KEYS, "other"}
    assert cache.delete_pattern("k*") == len(KEYS)
    assert cache.keys("*") == ["other"]


def test_clear_deletes_the_values_of_all_nodes_and_no_lock(cache, client):
    cache.set_many(dict.fromkeys(KEYS, 1))
    with cache.lock("held") as lock:
        cache.clear()
        assert lock.owned()
    assert cache.keys("*") == []
    assert [key for key in client.keys("*", target_nodes="primaries") if key.startswith(b":")] == []


def test_a_value_and_its_lease_are_in_one_slot(cache, client):
    for key in ["k", "{a}b", "ü"]:
        slots = []

        def compute(slots=slots):
            slots.extend({key_slot(key) for key in client.keys("*:lock:cache:*", target_nodes="primaries")})
            return "v"

        assert cache.get_or_set(key, compute, 60) == "v"
        assert slots == [key_slot(f":1:{key}".encode())]


# Its URLs and options


def test_any_node_that_answers_is_enough(cluster):
    urls = [f"redis://127.0.0.1:{free_port()}", cluster.nodes[2].url]
    for location in (urls, ",".join(urls)):
        cache = cache_at(location, BACKEND, KEY_PREFIX="found")
        cache.set("k", 1)
        assert cache.get("k") == 1


def test_options_go_to_the_client_of_the_cluster(redis_url):
    options = {
        "SOCKET_TIMEOUT": 3,
        "CONNECTION_POOL_KWARGS": {"max_connections": 7},
        "reinitialize_steps": 2,
        "client_name": "mine",
    }
    client = cache_at(redis_url, BACKEND, OPTIONS=options).client.get_client()
    assert client.reinitialize_steps == 2
    given = client.nodes_manager.connection_kwargs
    assert (given["socket_timeout"], given["max_connections"], given["client_name"]) == (3, 7, "mine")


def test_serializers_and_compressors_are_those_of_django_redis(redis_url, client):
    options = {
        "SERIALIZER": "django_redis.serializers.json.JSONSerializer",
        "COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor",
    }
    cache = cache_at(redis_url, BACKEND, OPTIONS=options)
    assert cache.get_or_set("k", lambda: ["x" * 500, (1, 2)], 60) == ["x" * 500, [1, 2]]
    assert len(client.get(":1:k")) < 100


@pytest.mark.parametrize(
    ("location", "options", "message"),
    [
        ("redis://127.0.0.1/1", {}, "no database but 0"),
        ("unix:///tmp/redis.sock", {}, "name the host of a node"),
        (["redis://127.0.0.1", "http://127.0.0.1"], {}, "wrong URL"),
        ("redis://127.0.0.1", {"socket_timout": 3}, "no option 'socket_timout'"),
        ("redis://127.0.0.1", {"CONNECTION_POOL_KWARGS": {"sockets": 3}}, "no option 'sockets'"),
        ("redis://127.0.0.1", {"CLIENT_CLASS": "django_redis.client.HerdClient"}, "no option 'CLIENT_CLASS'"),
        ("redis://127.0.0.1", {"SENTINELS": [("127.0.0.1", 26379)]}, "no option 'SENTINELS'"),
    ],
)
def test_a_wrong_url_or_option_is_an_error_that_names_it_at_the_first_use_and_in_a_check(
    check, location, options, message
):
    with pytest.raises(ImproperlyConfigured, match=message):
        cache_at(location, BACKEND, OPTIONS=options).get("k")
    text, hint = check(BACKEND, location, **options)["redislock.E015"]
    assert message in text
    assert "CACHES['default']" in text
    assert "in lower case" in hint


def test_a_server_that_is_no_cluster_is_an_error_that_names_the_other_backend(server):
    cache = cache_at(server.url, BACKEND, OPTIONS={"IGNORE_EXCEPTIONS": True})
    for use in (lambda: cache.get("k"), lambda: cache.get_or_set("k", lambda: 1), lambda: cache.clear()):
        with pytest.raises(ImproperlyConfigured, match=r"cluster support disabled.*use the backend .*RedisCache'"):
            use()
    with pytest.raises(LockBackendError, match="cluster support disabled"):
        cache.lock("k").acquire()


def test_a_user_who_may_not_ask_for_the_nodes_is_told_so(cluster):
    for node in cluster.nodes:
        cluster.ask(node, "ACL SETUSER", "blind", "on", ">secret", "~*", "+@all", "-cluster|slots")
    with pytest.raises(ImproperlyConfigured, match=r"NOPERM|no permissions.*CLUSTER SLOTS"):
        cache_at(cluster.url.replace("://", "://blind:secret@"), BACKEND).get("k")


# A Cluster that cannot be reached


@pytest.fixture
def nowhere():
    return f"redis://127.0.0.1:{free_port()}"


def test_without_a_node_that_answers_redis_pys_error_comes_out(nowhere):
    cache = cache_at(nowhere, BACKEND)
    for use in (
        lambda: cache.get("k"),
        lambda: cache.set("k", 1),
        lambda: cache.get_many(["k"]),
        lambda: cache.delete("k"),
        lambda: cache.clear(),
        lambda: cache.get_or_set("k", lambda: 1),
    ):
        with pytest.raises(redis.ConnectionError, match=r"cannot be connected|refused"):
            use()


def test_errors_are_ignored_if_the_settings_say_so(nowhere):
    cache = cache_at(nowhere, BACKEND, OPTIONS={"IGNORE_EXCEPTIONS": True})
    assert cache.get("k", "default") == "default"
    assert cache.get_many(["k"]) == {}
    assert not cache.set("k", 1)
    assert not cache.delete("k")
    assert cache.get_or_set("k", lambda: "computed", 60) == "computed"
    assert cache.get_or_set_many(["k"], lambda keys: dict.fromkeys(keys, 1), 60) == {"k": 1}
    assert asyncio.run(cache.aget_or_set("k", lambda: "computed", 60)) == "computed"


def test_errors_of_a_cluster_that_went_away_are_ignored_if_the_settings_say_so():
    with Cluster(1) as own:
        cache = cache_at(own.url, BACKEND, OPTIONS={"IGNORE_EXCEPTIONS": True, "SOCKET_TIMEOUT": 1})
        assert cache.set("k", 1)
        strict = cache_at(own.url, BACKEND, OPTIONS={"SOCKET_TIMEOUT": 1})
        own.nodes[0].kill()
        assert cache.get("k") is None
        assert cache.get_many(["k", "l"]) == {}
        assert cache.has_key("k") is None
        for use in (strict.get, strict.has_key, lambda key: strict.get_many([key]), strict.delete):
            with pytest.raises(redis.ConnectionError):
                use("k")


@pytest.mark.slow
def test_a_cluster_whose_nodes_all_have_new_addresses_is_found_by_its_url():
    """As after a restart of all pods: the name in the URL leads to one of the new ones."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        old, *others = pool.map(stack.enter_context, [Cluster(1) for _ in range(5)])  # each takes two seconds
        door = stack.enter_context(Proxy(old.url))
        cache = cache_at(door.url, BACKEND, OPTIONS={"SOCKET_TIMEOUT": 1})
        uses = {
            "get": lambda: cache.get("k"),
            "set_many": lambda: cache.set_many({"k": 1, "l": 2}),
            "get_or_set": lambda: cache.get_or_set("m", lambda: 3, 60),
            "lock": lambda: cache.lock("n").acquire(),
        }
        for use in uses.values():
            use()
        for (name, use), new in zip(uses.items(), others, strict=True):
            for node in old.nodes:
                node.kill()
            door.lead_to(new.url)
            old = new
            assert use() in {"get": (None,), "set_many": ([], None), "get_or_set": (3,), "lock": (True,)}[name]


# One client for each process


def test_all_threads_share_one_client_and_a_forked_child_has_its_own(cache, redis_url):
    cache.set("k", 1)
    client = cache.client.get_client()
    found = []
    thread = threading.Thread(target=lambda: found.append(cache_at(redis_url, BACKEND).client.get_client()))
    thread.start()
    thread.join()
    assert found == [client]
    assert cache_at(redis_url, BACKEND, OPTIONS={"client_name": "other"}).client.get_client() is not client

    def child():
        assert cache.client.get_client() is not client
        assert cache.get_or_set("k", lambda: "computed") == 1

    in_a_fork(child)
    assert cache.get("k") == 1


def test_connections_are_closed_after_a_request_if_the_settings_say_so(redis_url, cluster):
    cache = cache_at(redis_url, BACKEND, OPTIONS={"CLOSE_CONNECTION": True, "client_name": "short"})
    cache.set_many(dict.fromkeys(KEYS, 1))

    def opened():
        return sum(each["name"] == "short" for node in cluster.nodes for each in cluster.ask(node, "CLIENT LIST"))

    assert opened()
    cache.close()
    wait_until(lambda: not opened())  # a node may answer before it has seen the end
    assert cache.get("k0") == 1


# The system checks and the doctor


def test_a_good_cache_has_no_message_and_no_check_connects(check):
    assert check("ClusterCache", f"redis://127.0.0.1:{free_port()}") == {}
    assert get_client().startup_nodes


def test_a_cluster_that_answers_is_right(check, cluster):
    assert not {"redislock.E005", "redislock.E006", "redislock.E009"} & check("ClusterCache", cluster.url, True).keys()


def test_a_cluster_cache_on_a_server_that_is_no_cluster_is_an_error(check, server):
    message, hint = check("ClusterCache", server.url, True)["redislock.E005"]
    assert "cluster support disabled" in message
    assert "django_redislock.cache.RedisCache" in hint


@pytest.mark.parametrize("kind", ["RedisCache", "DjangoRedisCache"])
def test_a_cluster_behind_a_backend_for_one_server_is_an_error(check, cluster, kind):
    message, hint = check(kind, cluster.url, True)["redislock.E009"]
    assert "one of 3 primaries" in message
    assert "django_redislock.cache.ClusterCache" in hint


def test_the_doctor_tries_locks_and_a_value_on_a_cluster(check, cluster, capsys):
    check("ClusterCache", cluster.url)
    call_command("redislock", "doctor")
    said = capsys.readouterr().out
    assert "A value was computed, read and deleted." in said
    assert "16 locks were held at once" in said
    assert "problem" not in said


def test_the_doctor_names_the_right_backend_for_a_cluster(check, cluster, capsys):
    check("RedisCache", cluster.url)
    with pytest.raises(CommandError):
        call_command("redislock", "doctor")
    assert "django_redislock.cache.ClusterCache" in capsys.readouterr().out
