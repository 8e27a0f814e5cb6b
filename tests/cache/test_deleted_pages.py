"""Whatever deletes a page deletes its stale copy, and a page that was deleted while it was rendered is not stored."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import ThreadSensitiveContext, iscoroutinefunction
from django.core.cache import caches
from django.http import HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import RequestFactory
from django.utils.cache import get_cache_key

from django_redislock.cache import cache_page, page_cache
from django_redislock.cache.page_cache import PageCache

pytestmark = pytest.mark.usefixtures("caches_in_settings")


def get(path="/"):
    return RequestFactory().get(path)


def key_of(request):
    """Return what public code deletes."""
    return get_cache_key(request, cache=caches["default"])


def in_a_loop(awaitable):
    """Await it with a thread of its own for what is synchronous: the view may be in that of all loops."""

    async def main():
        async with ThreadSensitiveContext():
            return await awaitable

    return asyncio.run(main())


def pattern(text):
    return lambda cache, key: cache.delete_pattern(text)


BY_KEY = {
    "delete": lambda cache, key: cache.delete(key),
    "adelete": lambda cache, key: in_a_loop(cache.adelete(key)),
    "delete_many": lambda cache, key: cache.delete_many(["other", key]),
    "adelete_many": lambda cache, key: in_a_loop(cache.adelete_many(["other", key])),
    "set with a timeout of 0": lambda cache, key: cache.set(key, None, 0),
    "set_many with a timeout of 0": lambda cache, key: cache.set_many({key: None}, 0),
    "touch with a timeout of 0": lambda cache, key: cache.touch(key, 0),
    "clear": lambda cache, key: cache.clear(),
    "aclear": lambda cache, key: in_a_loop(cache.aclear()),
}
OF_DJANGO_REDIS = {
    "expire": lambda cache, key: cache.expire(key, 0),
    "delete_pattern of all pages": pattern("views.decorators.cache.cache_page*"),
    "delete_pattern of all keys": pattern("*"),
    "delete_pattern with a part": pattern("*cache_page*.GET.*"),
    "delete_pattern of the time zone": pattern("*America/Chicago"),
    "delete_pattern of the key": lambda cache, key: cache.delete_pattern(key),
    "delete_pattern of all languages": lambda cache, key: cache.delete_pattern(key.partition(".en-us")[0] + "*"),
    "delete_pattern of the address": lambda cache, key: cache.delete_pattern(f"*{key.split('.')[6]}*"),
}


every_way = pytest.mark.parametrize(
    ("backend", "way"),
    [
        (backend, way)
        for backend in ("RedisCache", "DjangoRedisCache", "ClusterCache")
        for way in BY_KEY | (OF_DJANGO_REDIS if backend != "DjangoRedisCache" else {})
    ],
)
of_all = pytest.mark.parametrize(
    ("backend", "way"),
    [
        (backend, way)
        for backend in ("RedisCache", "DjangoRedisCache", "ClusterCache")
        for way in ("clear", "delete_pattern of all pages")
        if way == "clear" or backend != "DjangoRedisCache"
    ],
)


@pytest.fixture
def delete(way):
    """``delete(key)`` deletes the page in a thread of its own, in this way."""

    def in_a_thread(key):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: (BY_KEY | OF_DJANGO_REDIS)[way](caches["default"], key)).result(30)

    return in_a_thread


@pytest.fixture(params=["sync", "async"])
def view_of(request):
    """``view_of(render, …)`` is a view behind cache_page, as threads call it."""

    def make(render, **options):
        async def aview(request):
            return await asyncio.to_thread(render, request)

        view = cache_page(60, **options)(aview if request.param == "async" else render)
        return (lambda asked: asyncio.run(view(asked))) if iscoroutinefunction(view) else view

    return make


class Origin:
    """Renders numbered pages; calls `meanwhile` once while it renders the page of that number."""

    def __init__(self):
        self.calls = 0
        self.status = 200
        self.meanwhile = {}

    def __call__(self, request):
        self.calls += 1
        page = HttpResponse(f"page {self.calls}", status=self.status)
        self.meanwhile.pop(self.calls, lambda: None)()
        return page


@every_way
def test_who_deletes_a_page_deletes_its_copy(delete, view_of, client):
    origin = Origin()
    view = view_of(origin, stale=600, on_error="stale")
    view(get())
    assert client.keys("*redislock.stale*")
    delete(key_of(get()))
    assert not client.keys("*redislock.stale*")
    origin.status = 500
    assert view(get()).status_code == 500, "the page from before the edit is not shown"


@every_way
def test_a_page_that_is_deleted_while_it_is_rendered_is_not_stored(delete, view_of, client):
    """Neither is its copy, while a request that comes after the delete renders without a wait for the old one."""
    origin = Origin()
    view = view_of(origin, stale=600)
    view(get())  # from here on the names of the headers are known
    key = key_of(get())
    caches["default"].delete(key)
    during = []
    with ThreadPoolExecutor(1) as pool:
        origin.meanwhile[2] = lambda: (delete(key), during.append(pool.submit(view, get()).result(30).content))
        assert view(get()).content == b"page 2"
    assert during == [b"page 3"]
    assert caches["default"].get(key_of(get())) is None or view(get()).content == b"page 3"
    strings = [client.get(name) for name in client.keys("*") if client.type(name) == b"string"]
    assert not [value for value in strings if b"page 2" in (value or b"")]


@of_all
def test_the_first_rendering_of_an_address_is_not_stored_when_all_pages_are_deleted_meanwhile(view_of, delete):
    """The names of its headers are not known then."""
    origin = Origin()
    view = view_of(origin)
    origin.meanwhile[1] = lambda: delete(None)
    view(get())
    assert view(get()).content == view(get()).content == b"page 2"


@every_way
@pytest.mark.parametrize("stale", [0, 600])
def test_a_template_response_that_is_deleted_before_it_is_rendered_is_not_stored(stale, delete, client):
    calls = []

    @cache_page(60, stale=stale)
    def view(request):
        calls.append(request)
        return TemplateResponse(request, engines["django"].from_string("page"))

    view(get()).render()
    key = key_of(get())
    caches["default"].delete(key)
    late = view(get())
    delete(key)
    late.render()
    assert late.content == b"page"
    assert not [name for name in client.keys("*cache_page*") if b"redislock.rendering" not in name]
    view(get()).render()
    view(get())
    assert len(calls) == 3


@every_way
def test_a_delete_between_the_page_and_its_copy_deletes_both(delete, view_of, client, monkeypatch):
    origin = Origin()
    view = view_of(origin, stale=600)
    view(get())
    key = key_of(get())
    caches["default"].delete(key)
    save = PageCache.save_stale

    def delete_and_save(self, page):
        monkeypatch.undo()
        delete(key)
        save(self, page)

    monkeypatch.setattr(PageCache, "save_stale", delete_and_save)
    assert view(get()).content == b"page 2"
    assert not [name for name in client.keys("*cache_page*") if b"redislock.rendering" not in name]


@of_all
def test_a_page_that_is_stored_behind_a_scan_is_found_by_the_second_scan(way, client, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    @cache_page(60, stale=600)
    def view(request):
        begun.set()
        assert go.wait(30)
        return HttpResponse("page")

    cache = caches["default"]
    with ThreadPoolExecutor(1) as pool:
        rendering = pool.submit(view, get())
        assert begun.wait(30)

        class Slow:
            """A client that meets the mark of a rendering when the page has been stored."""

            def __init__(self, client):
                self.client = client

            def __getattr__(self, name):
                return getattr(self.client, name)

            def scan_iter(self, **options):
                found = list(self.client.scan_iter(**options))
                yield from (key for key in found if b"rendering" not in key)
                go.set()
                rendering.result(30)
                yield from (key for key in found if b"rendering" in key)

        clients = cache._clients_to_scan()
        monkeypatch.setattr(type(cache), "_clients_to_scan", lambda self: [Slow(each) for each in clients])
        (BY_KEY | OF_DJANGO_REDIS)[way](cache, None)
    assert not client.keys("*cache_page*")


@pytest.mark.parametrize("way", ["delete"])
def test_a_page_that_was_deleted_while_it_was_rendered_is_not_taken_for_one_that_may_not_be_stored(
    view_of, delete, client
):
    origin = Origin()
    view = view_of(origin)
    view(get())
    key = key_of(get())
    caches["default"].delete(key)
    origin.meanwhile[2] = lambda: delete(key)
    view(get())
    assert not client.keys("*redislock.page*")
    view(get())
    assert view(get()).content == b"page 3"


def test_another_address_and_other_keys_keep_their_pages_and_copies(view_of, client):
    origin = Origin()
    view = view_of(origin, stale=600)
    view(get("/a"))
    view(get("/b"))
    caches["default"].delete(key_of(get("/a")))
    assert len(client.keys("*redislock.stale*")) == 1
    assert view(get("/b")).content == b"page 2"
    assert view(get("/a")).content == b"page 3"


def test_a_mark_ends_with_its_rendering(view_of, client):
    view = view_of(Origin(), stale=600)
    view(get())
    assert not client.keys("*redislock.rendering*")
    assert view(get()).content == b"page 1"


@pytest.mark.parametrize("backend", ["RedisCache"])
def test_which_keys_and_patterns_are_about_pages():
    url, headers = "a" * 32, "b" * 32
    page = f"views.decorators.cache.cache_page.shop.GET.{url}.{headers}.en-us.UTC"
    names, leases = page_cache.deleted_with(["user:1", 7, page, "views.decorators.cache.cache_page.of somebody else"])
    start, rest = page.split(f".{headers}")
    assert sorted(names) == sorted(
        [
            f"{start}.redislock.rendering.{headers}{rest}",
            f"{start}.redislock.rendering{rest}",
            f"{start}.redislock.stale.{headers}{rest}",
            f"{start}.redislock.page.{headers}{rest}",
            f"{start}.redislock.page{rest}",
        ]
    )
    assert leases == names[3:]
    assert page_cache.deleted_with(names) == ([], [])
    assert page_cache.patterns_with("*cache_page*") == ["*cache_page*"]
    assert page_cache.patterns_with(page) == [page, f"{start}.redislock*{rest}"]
    assert all(map(page_cache.may_match_pages, ("*", "views.*", "v?ews*", page, "[uv]*")))
    assert not any(map(page_cache.may_match_pages, ("user:*", "views.decorators.cache.cache_header.*")))
