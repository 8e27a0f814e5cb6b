"""Functions of the site (of keys, timeouts, refusals) run where Django's own asynchronous methods run them."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest
from asgiref.sync import SyncToAsync, ThreadSensitiveContext, async_to_sync, sync_to_async
from django.core.cache import cache as default_cache
from django.core.cache.backends import locmem
from django.db import connections
from django.test import override_settings

from django_redislock.cache import cached, get_cache
from tests.support.cache_programs import base_at, cache_at, held, lease_elsewhere, never

LOCAL = threading.local()
TENANT: ContextVar[str] = ContextVar("tenant of a caller", default="public")
seen: list[tuple[object, ...]] = []


def note(*args):
    """Note where the function is called: the thread, its own variables, the context, and the database's connection."""
    seen.append((threading.get_ident(), getattr(LOCAL, "tenant", None), TENANT.get(), id(connections["default"])))


def make_key(key, key_prefix, version):
    note()
    return f"{LOCAL.tenant}:{key_prefix}:{version}:{key}"


def enter(tenant):
    LOCAL.tenant = tenant
    TENANT.set(tenant)


@pytest.fixture(autouse=True)
def _forget():
    seen.clear()
    yield
    vars(LOCAL).clear()
    for kept in (*locmem._caches.values(), *locmem._expire_info.values()):
        kept.clear()


async def under_asgi(function):
    async with ThreadSensitiveContext():
        await sync_to_async(enter)("acme")
        return await function()


def behind_a_middleware_under_asgi(function):
    """Do as a synchronous middleware does in front of an asynchronous view, with the loop of the server above it."""

    def middleware():
        enter("acme")
        return async_to_sync(function)()

    async def server():
        async with ThreadSensitiveContext():
            return await sync_to_async(middleware)()

    return asyncio.run(server())


def under_wsgi(function):
    enter("acme")
    return async_to_sync(function)()


RUN = [lambda function: asyncio.run(under_asgi(function)), behind_a_middleware_under_asgi, under_wsgi]
run_everywhere = pytest.mark.parametrize("run", RUN, ids=["asgi", "asgi behind a middleware", "wsgi"])


ON_REDIS = ["RedisCache", "DjangoRedisCache", "ClusterCache"]


@pytest.fixture(params=[*ON_REDIS, "LocMemCache"])
def backend(request):
    return request.param


@pytest.fixture(params=["KEY_FUNCTION", "make_key"])
def pair(request, backend, redis_url):
    """Our cache and the base class's, both with a function of the site that makes the keys."""
    params = {"KEY_FUNCTION": make_key} if request.param == "KEY_FUNCTION" else {}
    both = [cache_at(redis_url, backend, **params), base_of(redis_url, backend, **params)]
    if request.param == "make_key":
        for each in both:
            override_make_key(each)
    return both


def base_of(url, backend, **params):
    return locmem.LocMemCache(url, params) if backend == "LocMemCache" else base_at(url, backend, **params)


def override_make_key(cache):
    """Make the cache one of a subclass that makes keys itself; with django-redis that is the client's."""
    maker = getattr(cache, "client", cache)

    def own(self, key, version=None, prefix=None):
        # django-redis marks what it has made, and makes it once.
        return key if type(key) is made is not str else made(make_key(key, cache.key_prefix, version or 1))

    made = type(type(cache).make_key(cache, "k")) if maker is cache else type(maker.make_key("k"))
    maker.__class__ = type("Own", (type(maker),), {"make_key": own})


CALLS = {
    "aget": ("k",),
    "aset": ("k", 1),
    "aadd": ("k", 1),
    "atouch": ("k", 60),
    "ahas_key": ("k",),
    "aget_many": (["k"],),
    "aset_many": ({"k": 1},),
    "aincr": ("k",),
    "adecr": ("k",),
    "aincr_version": ("k",),
    "adecr_version": ("k", 1, 2),
    "aget_or_set": ("k", lambda: 1, 60),
    "adelete": ("k",),
    "adelete_many": (["k"],),
}


@run_everywhere
def test_each_asynchronous_method_makes_keys_where_the_base_classs_does(pair, run):
    async def call_all():
        places = {}
        for used in pair:
            for method, args in CALLS.items():
                seen.clear()
                await getattr(used, method)(*args)
                places[used, method] = set(seen)
        return places

    places = run(call_all)
    assert set(map(len, places.values())) == {1}
    assert len(set().union(*places.values())) == 1, "the same as the base class's"
    ((_, *tenants, _),) = places[pair[0], "aget_or_set"]
    assert tenants == ["acme", "acme"]


@run_everywhere
@pytest.mark.parametrize("locked", [True, False], ids=["", "without a lock"])
def test_a_value_is_that_of_the_tenant_and_its_delete_finds_it(pair, run, locked):
    """The key was that of "public" for every tenant, and one tenant got the value of another."""
    cache = pair[0]

    async def work():
        stored = await cache.aget_or_set("report", lambda: "acme's", 60, lock=locked)
        many = await cache.aget_or_set_many(["a", "b"], lambda keys: dict.fromkeys(keys, "acme's"), 60, lock=locked)
        assert await cache.aget_many(["report", "a", "b"]) == {"report": stored, **many}
        again = await cache.aget_or_set_many(["a", "b"], never, 60, lock=locked)
        assert again == many
        assert await cache.adelete("report")
        assert await cache.aget("report") is None
        return stored

    assert run(work) == "acme's"
    places = set(seen)
    seen.clear()
    LOCAL.tenant = "umbrella"
    assert cache.get("a") is None
    assert len(places) == 1


@run_everywhere
@pytest.mark.parametrize("locked", [True, False], ids=["", "without a lock"])
def test_functions_of_a_value_are_called_where_the_base_class_would_make_its_key(backend, redis_url, run, locked):
    cache = cache_at(redis_url, backend)
    options = {"should_cache": lambda value: note() or True, "lock": locked}

    def timeout(value):
        note()
        return 60

    async def compute():
        return "v"

    async def work():
        assert await cache.aget_or_set("k", compute, timeout, **options) == "v"
        assert await cache.aget_or_set_many(["a", "b"], compute_many, timeout, **options) == {"a": "v", "b": "v"}
        assert await cache.aget_many(["k", "a", "b"]) == {"k": "v", "a": "v", "b": "v"}
        await sync_to_async(note)()

    async def compute_many(keys):
        return dict.fromkeys(keys, "v")

    run(work)
    assert len(seen) == 7
    assert len(set(seen)) == 1


@run_everywhere
@pytest.mark.parametrize("backend", ON_REDIS)
def test_the_timeout_of_an_old_value_is_asked_there_too(backend, redis_url, run):
    cache = cache_at(redis_url, backend)
    cache.set("k", "old", 25)

    async def work():
        await cache.aget_or_set("k", never, lambda value: note() or 60, refresh_before=30, stale=30, refresh="thread")
        await sync_to_async(note)()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_redislock.cache.refresh.refresh_in_task", lambda *args: None)
        run(work)
    assert len(seen) == 2
    assert len(set(seen)) == 1


@run_everywhere
@pytest.mark.parametrize("backend", [*ON_REDIS, "LocMemCache", "Django's"])
def test_the_key_of_a_cached_coroutine_function_is_made_there(backend, redis_url, run):
    path = (
        "django.core.cache.backends.locmem.LocMemCache"
        if backend == "Django's"
        else "django_redislock.cache." + backend
    )

    @cached(lambda value: note() or 60, key=lambda number: note() or f"{LOCAL.tenant}:{number}")
    async def square(number):
        return number * number

    async def work():
        assert await square(3) == 9
        assert await default_cache.aget("acme:3") == 9
        assert await square.ainvalidate(3)
        assert await default_cache.aget("acme:3") is None
        await sync_to_async(note)()

    with override_settings(CACHES={"default": {"BACKEND": path, "LOCATION": redis_url}}):
        run(work)
    assert len(seen) == 4
    assert len(set(seen)) == 1


@run_everywhere
@pytest.mark.parametrize("backend", ON_REDIS)
def test_a_value_for_the_end_of_the_wait_is_made_there(redis_url, client, run, backend):
    cache = cache_at(redis_url, backend)

    async def work():
        options = {"wait": 0, "on_wait_timeout": lambda: note() or "late"}
        assert await cache.aget_or_set("k", never, 60, **options) == "late"
        assert await cache.aget_or_set_many(["k"], never, 60, **options) == {"k": "late"}
        await sync_to_async(note)()

    with lease_elsewhere(client, "k"):
        run(work)
    assert len(seen) == 3
    assert len(set(seen)) == 1


@pytest.mark.usefixtures("caches_in_settings")
@pytest.mark.parametrize("backend", ON_REDIS)
def test_with_djangos_own_keys_nothing_hops_to_a_thread(monkeypatch):
    hops = []
    for where, name in ((SyncToAsync, "__call__"), (asyncio, "to_thread")):
        original = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, of=original: hops.append(args) or of(*args))
    cache = get_cache()

    async def compute():
        return "v"

    async def compute_many(keys):
        return dict.fromkeys(keys, "v")

    @cached(60, key="square:{number}")
    async def square(number):
        return number * number

    async def main():
        for _ in range(2):  # a miss, and a hit
            assert await cache.aget_or_set("k", compute, 60) == "v"
            assert await cache.aget_or_set_many(["a", "b"], compute_many, 60) == {"a": "v", "b": "v"}
            assert await square(3) == 9
        assert not hops
        assert await cache.aget_or_set("plain", lambda: "v", 60) == "v"
        assert len(hops) == 1, "for the default, which is a plain function"

    asyncio.run(main())


@pytest.mark.parametrize("backend", ON_REDIS)
def test_with_a_key_function_of_the_site_a_hit_takes_one_hop_and_many_keys_one_for_all(redis_url, backend, monkeypatch):
    cache = cache_at(redis_url, backend, KEY_FUNCTION=make_key)
    hops = []
    call = SyncToAsync.__call__
    monkeypatch.setattr(SyncToAsync, "__call__", lambda *args: hops.append(args) or call(*args))

    async def main():
        await sync_to_async(enter)("acme")
        hops.clear()
        options = {"should_cache": lambda value: True}
        names = [str(number) for number in range(50)]
        await cache.aget_or_set_many(names, acompute_many, lambda value: 60, **options)
        assert len(hops) == 2, "one for the keys, one for the timeouts"
        await cache.aget_or_set_many(names, never, 60)
        assert len(hops) == 3
        await cache.aget_or_set("1", never, 60)
        assert len(hops) == 4

    async def acompute_many(keys):
        return dict.fromkeys(keys, "v")

    asyncio.run(main())


@pytest.mark.parametrize("backend", ON_REDIS)
def test_of_many_values_those_whose_functions_fail_leave_the_others_stored(redis_url, backend, client):
    cache = cache_at(redis_url, backend)

    async def compute_many(keys):
        return {key: int(key) for key in keys}

    async def main():
        with pytest.raises(ZeroDivisionError):
            await cache.aget_or_set_many(["0", "1", "2"], compute_many, lambda value: 60 / value)
        assert await cache.aget_many(["0", "1", "2"]) == {"1": 1, "2": 2}

    asyncio.run(main())
    assert not held(client)
