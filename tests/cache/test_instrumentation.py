"""What Sentry and Django Debug Toolbar see of the calls for cached values."""

from __future__ import annotations

import asyncio

import pytest
from django.conf import settings
from django.core.cache import caches

from tests.support import say, servers_of


def load():
    return 1


def load_many(keys):
    return dict.fromkeys(keys, 1)


CALLS = {
    "get_or_set": lambda cache: cache.get_or_set("k", load, 60),
    "get_or_set, stale": lambda cache: cache.get_or_set("k", load, 60, stale=60),
    "get_or_set_many": lambda cache: cache.get_or_set_many(["k"], load_many, 60),
    "aget_or_set": lambda cache: asyncio.run(cache.aget_or_set("k", load, 60)),
    "aget_or_set, stale": lambda cache: asyncio.run(cache.aget_or_set("k", load, 60, stale=60)),
    "aget_or_set_many": lambda cache: asyncio.run(cache.aget_or_set_many(["k"], load_many, 60)),
}


def in_sentry(url, backend):
    """Say which misses and hits Sentry saw of two calls each."""
    import sentry_sdk
    from sentry_sdk.integrations.django import DjangoIntegration
    from sentry_sdk.transport import Transport

    class Kept(Transport):
        def capture_envelope(self, envelope):
            spans = envelope.get_transaction_event()["spans"]
            say(seen=[(span["description"], span["data"]["cache.hit"]) for span in spans if span["op"] == "cache.get"])

    integration = DjangoIntegration(cache_spans=True)
    sentry_sdk.init(dsn="http://a@localhost/1", transport=Kept, traces_sample_rate=1.0, integrations=[integration])
    settings.CACHES = {"default": {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": url}}
    for call in CALLS.values():
        caches["default"].clear()
        with sentry_sdk.start_transaction(name="view"):
            call(caches["default"])
            call(caches["default"])


def test_sentry_sees_every_miss_and_every_hit(redis_url, backend, run_python):
    lines = run_python(in_sentry, redis_url, backend).finish()
    assert [line["seen"] for line in lines] == [[["k", False], ["k", True]]] * len(CALLS)


def watched(cache, method, seen):
    """Wrap the method of this one object, as the tools do."""
    original = getattr(cache, method)

    def wrapper(*args, **kwargs):
        value = original(*args, **kwargs)
        seen.append((args[0], value))
        return value

    setattr(cache, method, wrapper)


def hits(client):
    return sum(server.info("stats")["keyspace_hits"] for server in servers_of(client))


@pytest.mark.parametrize("call", CALLS)
def test_a_tool_sees_the_values_that_are_read_once_and_reads_nothing_itself(cache, call, client):
    many, seen = "many" in call, []
    CALLS[call](cache)
    watched(cache, "get_many" if many else "get", seen)
    before = hits(client)
    CALLS[call](cache)
    assert hits(client) - before == (2 if "stale" in call else 1)  # its life, too
    assert seen == [(["k"], {"k": 1}) if many else ("k", 1)]
    assert cache.get("other") is None  # it reads again


def test_a_missing_value_is_shown_as_the_default_that_get_was_given(cache):
    given = []
    original = cache.get

    def wrapper(key, default, version):
        given.append((default, original(key, default, version=version)))

    cache.get = wrapper
    assert asyncio.run(cache.aget_or_set("k", load, 60)) == 1
    ((default, value),) = given
    assert value is default
