"""cache_page around a view that fails: who sees the error, and how often the view is tried again."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse, StreamingHttpResponse
from django.test import RequestFactory
from django.views.decorators.vary import vary_on_headers

from django_redislock.cache import cache_page, pages
from tests.support import wait_until
from tests.support.cache_programs import followers, held
from tests.support.pages import counted_page, get

pytestmark = pytest.mark.usefixtures("caches_in_settings")


class Gate:
    """Lets one call of a view at a time tell that it runs, and wait."""

    def __init__(self):
        self.running, self.end = threading.Event(), threading.Event()
        self.calls = self.at_once = self.most = 0
        self._mutex = threading.Lock()

    def __enter__(self):
        with self._mutex:
            self.calls += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        self.running.set()
        assert self.end.wait(20)

    def __exit__(self, *error):
        with self._mutex:
            self.at_once -= 1


def fail(request):
    raise ZeroDivisionError("the origin is sick")


def with_cookie_and_status(status):
    response = HttpResponse("yours", status=status, headers={"Retry-After": "7"})
    response.set_cookie("whose", "yours")
    return response


FAILING = {
    "raises": fail,
    "503": lambda request: HttpResponse("sick", status=503, headers={"Retry-After": "7"}),
    "503 with a cookie": lambda request: with_cookie_and_status(503),
    "503 streaming": lambda request: StreamingHttpResponse(["sick"], status=503),
}


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("what", FAILING)
def test_a_failing_view_is_tried_by_one_request_for_all_who_wait(what, kind, client, monkeypatch):
    # The pause is over at once, because one of the nine may look again later than that: it must know without it.
    monkeypatch.setattr(pages, "PAUSE", 0)
    gate = Gate()

    def slowly(request):
        with gate:
            return FAILING[what](request)

    async def aslowly(request):
        return await asyncio.to_thread(slowly, request)

    view = cache_page(60)(slowly if kind == "sync" else aslowly)

    def ask():
        try:
            response = view(get()) if kind == "sync" else asyncio.run(view(get()))
        except ZeroDivisionError as error:
            return str(error)
        return response.status_code, response.get("Retry-After"), bool(response.cookies)

    with ThreadPoolExecutor(10) as pool:
        first = pool.submit(ask)
        assert gate.running.wait(10)
        others = [pool.submit(ask) for _ in range(9)]
        wait_until(lambda: followers() == 9)
        gate.end.set()
        own, answers = first.result(20), {other.result(20) for other in others}
    if what == "raises":
        assert own == "the origin is sick"
        assert answers <= {own, (503, "0", False)}
        assert gate.most == 1, "they take turns"
    else:
        assert own[0] == 503
        assert answers == {(503, "0", False)}, "only the fact is shared"
        assert gate.calls == 1
    assert not held(client)


def test_a_view_that_failed_is_tried_again_after_a_pause_by_one_at_a_time(client):
    gate, healthy = Gate(), threading.Event()
    gate.end.set()

    @cache_page(60)
    def view(request):
        with gate:
            return HttpResponse("page") if healthy.is_set() else HttpResponse("sick", status=503)

    assert [view(get()).status_code for _ in range(5)] == [503] * 5
    assert gate.calls == 1
    assert max(client.pttl(key) for key in client.keys("*redislock.page*")) <= 1000
    client.delete(*client.keys("*redislock.page*"))  # the pause is over
    healthy.set()
    gate.end.clear()
    gate.running.clear()
    with ThreadPoolExecutor(10) as pool:
        futures = [pool.submit(view, get()) for _ in range(10)]
        wait_until(lambda: followers() == 9)
        gate.end.set()
        assert [future.result(20).content for future in futures] == [b"page"] * 10
    assert gate.calls == 2
    assert not client.keys("*redislock.page*")


def test_a_page_that_may_be_stored_ends_the_word_about_an_uncacheable_one(client):
    """Or for the rest of a minute nobody would wait for anybody when the page ends. The next request stores it: this
    one did not mark its rendering."""
    headers = {"Cache-Control": "private"}
    view, calls = counted_page(lambda request: HttpResponse("page", headers=headers))
    view(get())
    assert client.keys("*redislock.page*")
    headers.clear()
    view(get())
    assert not client.keys("*redislock.page*")
    view(get())
    view(get())
    assert len(calls) == 3


class Refused(Exception):
    """What a middleware turns into a redirect."""


def sick_for(name):
    response = HttpResponse(f"sorry {name}", status=503, headers={"X-Name": name, "Vary": "X-Name"})
    response.set_cookie("whose", name)
    return response


def refuse(name):
    raise Refused(name)


def deny(name):
    raise PermissionDenied(name)


@pytest.mark.parametrize("names_known", [False, True], ids=["Vary unknown", "Vary known"])
@pytest.mark.parametrize("stale", [0, 600])
@pytest.mark.parametrize("failure", [sick_for, refuse, deny], ids=["503", "raises", "is denied"])
def test_a_failure_for_one_visitor_reaches_no_other_one(failure, stale, names_known, client):
    """Django's own decorator would send nothing of it, neither to those who wait nor to those who come later."""
    gate = Gate()

    @cache_page(60, stale=stale)
    @vary_on_headers("X-Name")
    def view(request):
        name = request.headers["X-Name"]
        with gate:
            return failure(name) if name == "ann" else HttpResponse(f"page of {name}")

    def ask(name):
        try:
            response = view(get(**{"X-Name": name}))
        except (Refused, PermissionDenied) as error:
            return f"refused {error}"
        return response.status_code, response.content, response.get("X-Name"), bool(response.cookies)

    if names_known:
        gate.end.set()
        ask("eve")
        pages = [key for key in client.keys("*cache_page*") if b"cache_header" not in key]
        assert all(client.ttl(key) > 3600 for key in client.keys("*cache_header*")), "the names outlive the page"
        client.delete(*pages)
        gate.end.clear()
        gate.running.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(ask, "ann")
        assert gate.running.wait(10)
        others = {name: pool.submit(ask, name) for name in ("bob", "cat")}
        if not names_known:
            wait_until(lambda: followers() == 2)
        gate.end.set()
        own = (503, b"sorry ann", "ann", True) if failure is sick_for else "refused ann"
        assert first.result(20) == own
        for name, other in others.items():
            assert other.result(20) == (200, f"page of {name}".encode(), None, False)
    assert ask("dan") == (200, b"page of dan", None, False)
    assert ask("ann") == ((503, b"", None, False) if failure is sick_for else "refused ann")


def test_an_async_view_behind_a_sync_decorator_is_an_error_in_words(client):
    async def view(request):
        return HttpResponse("page")

    def decorator(view):
        return lambda request: view(request)

    for shown in (cache_page(60)(decorator(view)), cache_page(60, wait=0)(decorator(view))):
        with pytest.raises(TypeError, match="a decorator between them hides that the view is asynchronous"):
            shown(get())
    with pytest.raises(TypeError, match="may lack a return"):
        cache_page(60)(lambda request: None)(get())
    with pytest.raises(TypeError, match="may lack a return"):
        cache_page(60)(lambda request: None)(RequestFactory().post("/"))
    with pytest.raises(TypeError, match=r"from the view tests\.cache\.test_pages_failing\.Slots"):
        cache_page(60)(Slots())(get())


class Slots:
    """A view without a dict of attributes."""

    __slots__ = ()

    def __call__(self, request):
        return None
