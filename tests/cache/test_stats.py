"""cache.stats(): every call is counted once, over threads, and a forked child begins anew."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.cache import caches
from django.test import override_settings

from django_redislock.cache.stats import Counters, counters_for
from tests.support import in_a_fork, wait_until
from tests.support.cache_programs import Work, followers, held, lease_elsewhere, never, waiters


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
