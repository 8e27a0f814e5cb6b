"""What cache.stats(), Sentry and Django Debug Toolbar see of the calls for cached values."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.conf import settings
from django.core.cache import caches
from django.test import override_settings

from django_redislock.cache.lease.counters import Counters
from django_redislock.cache.stats import counters_for
from django_redislock.core import events
from tests.support import in_a_fork, say, servers_of, wait_until
from tests.support.cache_programs import Work, followers, held, lease_elsewhere, never, waiters


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


def in_sentry(urls):
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
    settings.CACHES = {
        backend: {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": url} for backend, url in urls.items()
    }
    for backend in urls:
        for call in CALLS.values():
            caches[backend].clear()
            with sentry_sdk.start_transaction(name="view"):
                call(caches[backend])
                call(caches[backend])


def test_sentry_sees_every_miss_and_every_hit(server, cluster, run_python):
    urls = {"RedisCache": server.url, "DjangoRedisCache": server.url, "ClusterCache": cluster.url}
    lines = run_python(in_sentry, urls).finish()
    assert [line["seen"] for line in lines] == [[["k", False], ["k", True]]] * len(CALLS) * len(urls)


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


@pytest.mark.parametrize("call", CALLS)
def test_what_a_tool_reads_while_a_value_is_shown_to_it_is_of_its_own_key(cache, call):
    """It got the value that was being shown, perhaps another user's."""
    cache.set("other", "its own", 60)
    CALLS[call](cache)
    seen, method = [], "get_many" if "many" in call else "get"
    original = getattr(cache, method)

    def wrapper(*args, **kwargs):
        seen.append(original(["other"])["other"] if "many" in call else original("other"))
        return original(*args, **kwargs)

    setattr(cache, method, wrapper)
    CALLS[call](cache)
    assert set(seen) == {"its own"}


def test_a_missing_value_is_shown_as_the_default_that_get_was_given(cache):
    given = []
    original = cache.get

    def wrapper(key, default, version):
        given.append((default, original(key, default, version=version)))

    cache.get = wrapper
    assert asyncio.run(cache.aget_or_set("k", load, 60)) == 1
    ((default, value),) = given
    assert value is default


# cache.stats()


def test_counters(redis_url):
    alias = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": redis_url, "KEY_PREFIX": "counted"}
    with override_settings(CACHES={"default": alias, "counted": alias | {"VERSION": 2}}):
        cache = caches["counted"]
        before, elsewhere = cache.stats(), caches["default"].stats()
        cache.get_or_set("k", lambda: 1)
        cache.get_or_set("k", never)
        with pytest.raises(ZeroDivisionError):
            cache.get_or_set("fails", lambda: 1 / 0)
        cache.get_or_set("deleted", lambda: cache.delete("deleted"))
        cache.set("old", "old", 25)
        cache.get_or_set("old", never, refresh="thread", stale=30, wait=0)
        after = cache.stats()
        assert caches["default"].stats() == elsewhere
    change = {name: getattr(after, name) - getattr(before, name) for name in after.__slots__}
    assert change["hits"] == 1
    assert change["computed"] == 2
    assert change["errors"] >= 1
    assert change["fenced"] == 1
    assert change["stale_served"] == 1
    assert change["waited"] == change["taken_over"] == change["lease_lost"] == 0


def test_counters_of_those_who_wait_and_take_over(cache, client):
    before = cache.stats()
    work = Work("new")
    with ThreadPoolExecutor(3) as pool:
        lock = lease_elsewhere(client, "k")
        lock.acquire()
        first = pool.submit(cache.get_or_set, "k", work, 60)
        wait_until(lambda: waiters(client) == 1)
        second = pool.submit(cache.get_or_set, "k", never, 60)
        wait_until(lambda: followers() == 1)
        lock.release()
        assert work.running.wait(10)
        work.end.set()
        assert first.result(20) == second.result(20) == "new"
    after = cache.stats()
    assert after.waited - before.waited == 2
    assert after.taken_over - before.taken_over == 1
    assert after.seconds_waited > before.seconds_waited
    with override_settings(DJANGO_REDISLOCK={"CACHE": {"AUTO_RENEWAL": False}}):
        cache.get_or_set("l", lambda: wait_until(lambda: not held(client)), expire=0.1)
    assert cache.stats().lease_lost - after.lease_lost == 1


def test_a_wait_for_a_value_is_an_event_as_a_wait_for_a_lock_is(cache, client, monkeypatch):
    heard = []
    monkeypatch.setattr(events, "listeners", [lambda event, data: heard.append((event, data))])
    options = {"wait": 0.1, "on_wait_timeout": "raise"}
    work = Work("new")
    with ThreadPoolExecutor(1) as pool:
        with lease_elsewhere(client, "k"):
            with pytest.raises(TimeoutError):
                cache.get_or_set("k", never, 60, **options)
            first = pool.submit(cache.get_or_set, "k", work, 60)
            wait_until(lambda: waiters(client) == 1)
        assert work.running.wait(20)
        with pytest.raises(TimeoutError):
            cache.get_or_set("k", never, 60, **options)  # it follows the other thread of its process
        work.end.set()
        assert first.result(20) == "new"
    waits = [(data["name"], data["acquired"]) for event, data in heard if event == "waited"]
    missed, got = ("cache::1:k", False), ("cache::1:k", True)
    assert [wait for wait in waits if wait[0] == got[0]] == [missed, got, missed]


def test_no_count_is_lost_that_is_made_in_the_middle_of_another_one():
    """By another thread, as happens without the GIL, or by a signal handler or a destructor in the same one."""
    counters = Counters()
    other = threading.Thread(target=counters.count, args=("hits",))

    class Seen(int):
        """What is added when others count before the sum is written."""

        def __radd__(self, count):
            other.start()
            other.join()
            counters.count("hits")
            counters.count("computed")
            return count + int(self)

    counters.count("hits", Seen(1))
    counters.count("seconds_waited", 0.5)
    tally = counters.read()
    assert (tally.hits, tally.computed, tally.seconds_waited) == (3, 1, 0.5)


def test_counts_outlive_their_thread_and_a_forked_child_begins_anew():
    counters = counters_for("an alias of this test")
    for _ in range(3):
        thread = threading.Thread(target=counters.count, args=("computed",))
        thread.start()
        thread.join()

    def child():
        counters.count("computed")
        assert counters_for("an alias of this test").read().computed == 1

    in_a_fork(child)
    assert counters.read().computed == 3
