"""The cache backends when Redis dies, restarts, is full or refuses."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import redis
from django.core.cache import caches
from django.http import HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.views.decorators.cache import cache_page as djangos_cache_page

from django_redislock import tasks
from django_redislock.cache import cache_page
from django_redislock.cache.compute_once import ComputeOnceMixin
from django_redislock.signals import lock_backend_error
from tests.support import Proxy, RedisServer, cache_programs, wait_until
from tests.support.cache_programs import Work, base_at, cache_at, followers, getter, held, waiters
from tests.support.pages import get


def test_without_redis_it_raises_as_the_base_class_does(own_server, backend):
    cache = cache_at(own_server.url, backend)
    assert cache.get_or_set("k", lambda: 1) == 1
    own_server.kill()
    for key in ("k", "k2"):
        with pytest.raises(redis.ConnectionError):
            cache.get_or_set(key, lambda: 2)
        with pytest.raises(redis.ConnectionError):
            asyncio.run(cache.aget_or_set(key, lambda: 2))


FORGIVING = {"IGNORE_EXCEPTIONS": True}


@pytest.fixture
def short_retries(settings):
    """Calls to a server that stays away are repeated for a moment in place of 5 s, or of 40 s on a Cluster."""
    settings.DJANGO_REDISLOCK = {"RETRY_FOR": 0.5}


def test_without_redis_threads_and_tasks_may_compute_once_a_process_at_a_time(own_server):
    cache = cache_at(own_server.url, OPTIONS=FORGIVING)
    assert cache.get_or_set("warm", lambda: 1) == 1
    own_server.kill()
    work = Work()

    async def by_tasks():
        return await asyncio.gather(*[cache.aget_or_set("k", work.async_, 60) for _ in range(5)])

    with ThreadPoolExecutor(11) as pool:
        threads = [pool.submit(cache.get_or_set, "k", work, 60) for _ in range(10)]
        tasks = pool.submit(asyncio.run, by_tasks())
        wait_until(lambda: followers() == 14, timeout=60)
        work.end.set()
        assert [future.result(60) for future in threads] == ["v"] * 10
        assert tasks.result(60) == ["v"] * 5
    assert work.calls == 1
    own_server.start()
    assert cache.get("k") is None
    assert cache.get_or_set("k", lambda: "after", 60) == "after"
    assert cache.get("k") == "after", "all is well again"


@pytest.mark.parametrize("by_task", [False, True], ids=["thread", "task"])
def test_redis_dies_before_the_value_is_stored(own_server, backend, short_retries, by_task):
    get = getter(cache_at(own_server.url, backend), by_task)

    def compute():
        own_server.kill()
        return "v"

    with pytest.raises(redis.ConnectionError):
        get("k", compute, 60)
    if backend == "RedisCache":
        own_server.start()
        assert getter(cache_at(own_server.url, OPTIONS=FORGIVING), by_task)("k", compute, 60) == "v"


def test_redis_restarts_while_the_value_is_computed(own_server, backend):
    cache = cache_at(own_server.url, backend)

    def compute():
        own_server.restart(keep_data=True)
        return "v"

    assert cache.get_or_set("k", compute, 60) == "v"
    assert cache.get("k") == "v"


def test_the_defaults_own_error_comes_out_although_redis_died(own_server, backend):
    cache = cache_at(own_server.url, backend)

    def compute():
        own_server.kill()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        cache.get_or_set("k", compute, 60)


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, FORGIVING], ids=["strict", "forgiving"])
def test_redis_dies_while_others_wait(own_server, run_python, options, short_retries):
    computing = run_python(cache_programs.ask, own_server.url, "RedisCache", "k", "v", {}, {})
    computing.wait_for(event="ready")
    computing.send("ask")
    computing.wait_for(event="computing")
    cache = cache_at(own_server.url, OPTIONS=options)
    with own_server.client() as client, ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(cache.get_or_set, "k", lambda: "own", 60) for _ in range(3)]
        wait_until(lambda: waiters(client, "k") == 1 and followers() == 2)
        own_server.kill()
        for future in futures:
            if options:
                assert future.result(60) == "own"
            else:
                assert isinstance(future.exception(60), redis.ConnectionError)


def test_a_full_redis_fails_as_in_the_base_class_and_leaves_no_lease(backend, server_kind):
    with server_kind(maxmemory="8mb", maxmemory_policy="noeviction") as server, server.client() as client:
        cache = cache_at(server.url, backend)
        cache.get_or_set("warm", lambda: 1)

        def compute():
            client.config_set("maxmemory", "1")
            return "v"

        with pytest.raises(redis.ResponseError, match="maxmemory"):
            cache.get_or_set("k", compute, 60)
        client.config_set("maxmemory", "0")
        wait_until(lambda: not held(client))  # what gives the lease back writes a note, and so is tried again
        assert cache.get_or_set("k", lambda: "v2", 60) == "v2"


@pytest.mark.parametrize("size", [10, 40_000])
def test_what_a_full_redis_does_not_store_goes_to_those_who_wait_where_errors_are_ignored(size):
    with RedisServer(maxmemory="8mb", maxmemory_policy="noeviction") as server, server.client() as client:
        cache = cache_at(server.url, OPTIONS=FORGIVING)
        elsewhere = cache_at(f"{server.url}?socket_timeout=4.9", OPTIONS=FORGIVING)  # as if it were another process
        for each in (cache, elsewhere):
            each.get_or_set("warm", lambda: 1)
        work = Work("v" * size)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(cache.get_or_set, "k", work, 60)
            assert work.running.wait(10)
            second = pool.submit(elsewhere.get_or_set, "k", lambda: "own", 60)
            wait_until(lambda: waiters(client, "k") == 1)
            client.config_set("maxmemory", "1")
            work.end.set()
            assert first.result(20) == work.value
            assert second.result(20) == (work.value if size < 100 else "own")
        assert not held(client), "nobody waits for who has ended"
        client.config_set("maxmemory", "0")
        assert cache.get_or_set("k", lambda: "v2", 60) == "v2"


@contextmanager
def deciding_decorator(cache):
    caches["tested"] = cache
    decorate = cache_page if isinstance(cache, ComputeOnceMixin) else djangos_cache_page
    try:
        yield decorate(60, cache="tested")
    finally:
        del caches["tested"]


def page_of_a_template(cache):
    template = engines["django"].from_string("")
    with deciding_decorator(cache) as decorate:
        decorate(lambda request: TemplateResponse(request, template))(get()).render()


def page_of_a_coroutine(cache):
    async def view(request):
        return HttpResponse("page")

    async def main():  # asgiref's loop has another object for the alias
        with deciding_decorator(cache) as decorate:
            await decorate(view)(get())

    asyncio.run(main())


WITHOUT_REDIS = {
    "delete": lambda cache: cache.delete("k"),
    "delete_many": lambda cache: cache.delete_many(["k", "l"]),
    "set that deletes": lambda cache: cache.set("k", 1, 0),
    "short set": lambda cache: cache.set("k", 1, 5),
    "clear": lambda cache: cache.clear(),
    "delete_pattern": lambda cache: cache.delete_pattern("k*"),
    "get_or_set": lambda cache: cache.get_or_set("k", lambda: None),
    "aget_or_set": lambda cache: asyncio.run(cache.aget_or_set("k", lambda: None)),
    "page of a template": page_of_a_template,
    "page of a coroutine": page_of_a_coroutine,
}


@pytest.mark.parametrize("what", WITHOUT_REDIS)
@pytest.mark.slow
@pytest.mark.usefixtures("without_janitor")
def test_where_errors_are_ignored_a_silent_redis_is_asked_no_more_often_than_by_the_base_class(redis_url, what):
    asked, answers = [], []
    for make in (base_at, cache_at):
        with Proxy(redis_url) as proxy:
            cache = make(f"{proxy.url}?socket_timeout=0.5&socket_connect_timeout=0.5", OPTIONS=FORGIVING)
            cache.get_or_set("warm", lambda: 1)
            proxy.deafen()
            proxy.cut()
            answers.append(WITHOUT_REDIS[what](cache))
            asked.append(proxy.unheard)
    assert 0 < asked[1] <= asked[0]
    assert answers[0] is answers[1]


def test_where_errors_are_ignored_the_log_tells_of_them_once(own_server, caplog):
    cache = cache_at(own_server.url, OPTIONS=FORGIVING)
    own_server.kill()
    for number in range(5):
        assert cache.get_or_set(f"k{number}", lambda: 1) == 1
        assert asyncio.run(cache.aget_or_set(f"k{number}", lambda: 1)) == 1
        cache.delete("k")
    told = [record for record in caplog.records if record.name == "django_redislock" and record.levelname != "DEBUG"]
    assert len(told) == 1
    assert "did not answer" in told[0].message


@pytest.mark.parametrize("forgiving", [False, True])
def test_a_value_that_cannot_be_read_is_no_error_of_a_lock(own_server, forgiving):
    """The signal tells of the right to compute alone, for threads and for tasks alike."""
    told = []

    def note(sender, name, **kwargs):
        told.append(name)

    cache = cache_at(own_server.url, OPTIONS={"IGNORE_EXCEPTIONS": forgiving})
    own_server.kill()
    lock_backend_error.connect(note)
    try:
        for get in (cache.get_or_set, lambda *args: asyncio.run(cache.aget_or_set(*args))):
            told.clear()
            if forgiving:
                assert get("k", lambda: "v", 60) == "v"
            else:
                with pytest.raises(redis.ConnectionError):
                    get("k", lambda: "v", 60)
            assert told == ["cache::1:k"] * forgiving
    finally:
        lock_backend_error.disconnect(note)


# Users with fewer rights


@pytest.fixture
def as_user(own_server):
    """Return a function that returns the URL for a user of these rules."""

    def url(*rules):
        with own_server.client() as admin:
            admin.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", *rules)
        return own_server.url.replace("//", "//app:secret@")

    return url


@pytest.mark.parametrize("backend", ["DjangoRedisCache", "ClusterCache"])
@pytest.mark.parametrize("by_task", [False, True], ids=["threads", "tasks"])
def test_who_may_not_subscribe_waits_by_looking(as_user, own_server, backend, by_task):
    url = as_user("~*", "resetchannels", "+@all")
    here, there = cache_at(url, backend), cache_at(f"{url}?socket_timeout=4.9", backend)  # as if in two processes
    work = Work()
    with ThreadPoolExecutor(2) as pool, own_server.client() as client:
        first = pool.submit(getter(here, by_task), "k", work)
        assert work.running.wait(10)
        second = pool.submit(getter(there, by_task), "k", lambda: "own")
        wait_until(lambda: there.stats().waited + here.stats().waited)
        work.end.set()
        assert [first.result(20), second.result(20)] == ["v", "v"]
        assert not held(client)


RULES = {
    "the values' keys": ("~:1:*", "&*", "+@all"),
    "no scripting": ("~*", "&*", "+@all", "-@scripting"),
}


@pytest.mark.parametrize("rules", RULES)
def test_who_may_use_values_only_has_the_base_class(as_user, own_server, backend, rules, caplog):
    cache = cache_at(as_user(*RULES[rules]), backend)
    with own_server.client() as client:
        assert cache.get_or_set("k", lambda: "v", 60) == "v"
        assert 50_000 < client.pttl(":1:k") <= 60_000
        assert cache.delete("k")
        assert not cache.delete("k")
        cache.set("k", "short", 1)
        cache.delete_many(["k"])
        assert asyncio.run(cache.aget_or_set("k", lambda: "a")) == "a"
        assert cache.get_or_set_many(["k", "l"], dict.fromkeys) == {"k": "a", "l": None}
        client.expire(":1:k", 20)
        assert cache.get_or_set("k", lambda: "new", 60, stale=30) == "new"
        assert cache.get("k") == "new"
        assert cache.get_or_set("n", lambda: "v", 60, should_cache=lambda value: False) == "v"
        assert not cache.has_key("n")
    told = [record for record in caplog.records if "The Redis user may not use leases of values" in record.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize("rules", RULES)
def test_who_may_use_values_only_has_a_worker_refresh_them_too(
    as_user, own_server, backend, rules, settings, monkeypatch
):
    """No message was ever sent, and the value ended."""
    sent = []
    monkeypatch.setattr(tasks.refresh, "apply_async", lambda args, **options: sent.append(args))
    location = {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": as_user(*RULES[rules])}
    settings.CACHES = {"default": location}
    cache = caches["default"]
    cache.set("k", "old", 25)
    default = functools.partial(cache_programs.celebrate, "worker", year=2026)
    for _ in range(3):
        assert cache.get_or_set("k", default, 60, stale=30, refresh="celery") == "old"
    assert len(sent) == 1
    tasks.refresh(*sent[0])
    assert cache.get("k")["greeting"] == "worker 2026"
