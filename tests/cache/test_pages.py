"""cache_page: which responses are stored, for whom, and how often a view runs."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import iscoroutinefunction
from django.core.cache import caches
from django.http import HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import SimpleTemplateResponse, TemplateResponse
from django.test import RequestFactory, override_settings
from django.utils import translation
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import cache_control, never_cache
from django.views.decorators.vary import vary_on_headers

from django_redislock.cache import cache_page, cached, pages
from django_redislock.cache.lease import single_flight
from tests.support import wait_until
from tests.support.cache_programs import followers, held
from tests.support.pages import counted_async_page, counted_page, get

pytestmark = pytest.mark.usefixtures("caches_in_settings")


def test_a_page_is_rendered_once_and_carries_djangos_headers(client):
    view, calls = counted_page()
    first, second = view(get()), view(get())
    assert first.content == second.content == b"page"
    assert second["Cache-Control"] == "max-age=60"
    assert "Expires" in second
    view(RequestFactory().head("/"))
    assert len(calls) == 1
    assert view(get("/?a=1")).content == b"page"
    assert len(calls) == 2
    assert not held(client)


def test_async_views():
    view, calls = counted_async_page()

    async def main():
        return await asyncio.gather(*[view(get()) for _ in range(5)])

    assert [response.content for response in asyncio.run(main())] == [b"page"] * 5
    assert len(calls) == 1
    assert iscoroutinefunction(view)


def test_djangos_own_decorator_finds_the_same_pages():
    from django.views.decorators.cache import cache_page as djangos

    view, calls = counted_page()
    view(get())
    assert djangos(60)(lambda request: 1 / 0)(get()).content == b"page"
    djangos(60)(lambda request: HttpResponse("other"))(get("/other"))
    assert view(get("/other")).content == b"other"
    assert len(calls) == 1


def test_the_names_of_the_headers_are_stored_after_the_page(monkeypatch):
    """A request that found the names before the page was there rendered it, too."""
    kind, keys = type(caches["default"]), []
    store = kind.set

    def noted(self, key, *args, **options):
        keys.append(key.split(".")[3])
        return store(self, key, *args, **options)

    monkeypatch.setattr(kind, "set", noted)
    counted_page()[0](get())
    assert keys == ["cache_page", "cache_header"]


@pytest.mark.parametrize(
    ("status", "header"), [(304, "If-None-Match"), (412, "If-Match"), (206, "Range"), (416, "Range")]
)
def test_an_answer_without_the_page_to_a_conditional_request_lets_the_crowd_render_it_once(status, header):
    """For a minute each request rendered the page."""
    running, end, rendered = threading.Event(), threading.Event(), []

    @cache_page(60)
    def view(request):
        if header in request.headers:
            running.set()
            assert end.wait(20)
            return HttpResponse(status=status)
        rendered.append(1)
        return HttpResponse("page")

    with ThreadPoolExecutor(10) as pool:
        conditional = pool.submit(view, RequestFactory().get("/", headers={header: "a"}))
        assert running.wait(20)
        futures = [pool.submit(view, get()) for _ in range(9)]
        wait_until(lambda: followers() == 9)
        end.set()
        assert [future.result(20).content for future in futures] == [b"page"] * 9
        assert conditional.result(20).status_code == status
    assert len(rendered) == 1


def test_other_methods_are_never_cached_nor_waited_for():
    view, calls = counted_page()
    for method in ("post", "put", "delete", "options"):
        for _ in range(2):
            view(getattr(RequestFactory(), method)("/"))
    assert len(calls) == 8


def for_some(request):
    response = HttpResponse("page", headers={"Vary": "Cookie"})
    response.set_cookie("a", "b")
    return response


UNCACHEABLE = {
    "status": lambda request: HttpResponse("page", status=404),
    "private": cache_control(private=True)(lambda request: HttpResponse("page")),
    "no-store": never_cache(lambda request: HttpResponse("page")),
    "streaming": lambda request: StreamingHttpResponse(["page"]),
    "max-age=0 and vary *": vary_on_headers("*")(lambda request: HttpResponse("page")),
    "cookie": for_some,
}


@pytest.mark.parametrize("what", UNCACHEABLE)
def test_what_may_not_be_stored_is_rendered_for_each_and_at_the_same_time(what):
    together = threading.Barrier(4)
    view, calls = counted_page(UNCACHEABLE[what])
    view(get())

    @cache_page(60)
    def at_once(request):
        together.wait(10)  # passes only when four render at the same time
        return UNCACHEABLE[what](request)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: at_once(get()), range(4)))
    view(get())
    assert len(calls) == 2


def test_a_crowd_of_two_kinds_gets_each_its_own():
    running, end = threading.Event(), threading.Event()

    @vary_on_headers("X-Kind")
    def slowly(request):
        running.set()
        assert end.wait(20)
        return HttpResponse(request.headers["X-Kind"])

    view, calls = counted_page(slowly)
    with ThreadPoolExecutor(10) as pool:
        futures = [(kind, pool.submit(view, get(**{"X-Kind": kind}))) for kind in "ab" * 5]
        wait_until(lambda: followers() == 9)
        end.set()
        for kind, future in futures:
            assert future.result(20).content.decode() == kind
    for kind in "ab":
        assert view(get(**{"X-Kind": kind})).content.decode() == kind
    assert len(calls) == 2


HELLO = engines["django"].from_string("Hello {{ name }}")


def sent(view, request):
    """Return what Django would send."""
    response = view(request)
    return response if getattr(response, "is_rendered", True) else response.render()


def test_template_responses_and_class_based_views():
    calls = []

    @method_decorator(cache_page(60), name="dispatch")
    class Hello(View):
        def get(self, request):
            calls.append(1)
            return TemplateResponse(request, HELLO, {"name": "you"})

    view = Hello.as_view()
    assert sent(view, get()).content == b"Hello you"
    assert view(get()).content == b"Hello you"
    assert calls == [1]


def test_a_request_between_the_rendering_and_the_storing_of_a_template_response_gets_that_page(client, monkeypatch):
    """It rendered the page once more. Once the page is stored, what was said about it is forgotten."""
    calls = []

    @cache_page(60)
    def view(request):
        calls.append(1)
        return TemplateResponse(request, HELLO, {"name": "you"})

    first = view(get())
    monkeypatch.setattr(pages, "LOOKS", (first.render() and 0 for _ in range(1)))
    assert view(get()).content == first.content == b"Hello you"
    assert calls == [1]
    assert not [key for key in client.scan_iter("*", count=1000) if b"redislock.page" in key]


@pytest.mark.parametrize("outer", [vary_on_headers("X-User"), cache_control(private=True)])
def test_what_outer_decorators_say_of_a_template_response_counts(outer):
    """The account page of one user was shown to the next one."""

    @outer
    @cache_page(60)
    def account(request):
        return TemplateResponse(request, HELLO, {"name": request.headers["X-User"]})

    for user in ("anna", "bob", "anna"):
        assert sent(account, get(**{"X-User": user})).content.decode() == f"Hello {user}"


def test_a_template_response_is_rendered_under_the_lease_and_once_more_if_a_middleware_changes_its_context():
    renderings = []

    @cache_page(60)
    def view(request):
        return TemplateResponse(request, HELLO, {"name": lambda: renderings.append(held_now()) or "you"})

    def held_now():
        return len(single_flight._flights)

    response = view(get())
    assert renderings == [1]
    response.render()
    assert (renderings, response.content) == ([1], b"Hello you")
    changed = view(get("/?changed"))
    changed.context_data["name"] = "me"
    assert changed.render().content == b"Hello me"
    assert view(get("/?changed")).content == b"Hello me"


class Data(SimpleTemplateResponse):
    """As a response of REST framework."""

    @property
    def rendered_content(self):
        return self.renderer


def test_a_template_response_is_in_the_language_in_which_django_renders_it():
    """The outer decorator's language ends before that."""
    page = engines["django"].from_string("{% load i18n %}{% get_current_language as now %}{{ now }}")
    inner = cache_page(60)(lambda request: TemplateResponse(request, page))

    def view(request):
        with translation.override("de"):
            return inner(request)

    for _ in range(2):
        with translation.override("en"):
            assert sent(view, get()).content == b"en"


def test_a_template_response_whose_context_can_be_read_once_is_rendered_once():
    view = cache_page(60)(lambda request: TemplateResponse(request, HELLO, {"name": iter("you")}))
    response = view(get())
    response.context_data["more"] = 1
    assert b"iterator" in response.render().content
    assert response.template_name is HELLO


def test_a_response_that_an_outer_decorator_has_to_complete_is_stored_when_it_is_rendered():
    calls = []

    @cache_page(60)
    def inner(request):
        calls.append(1)
        return Data(None)

    def view(request):
        response = inner(request)
        response.renderer = "data"
        return response

    assert sent(view, get()).content == sent(view, get()).content == b"data"
    assert calls == [1]


class LooksWhenStored:
    """One look for a page, when all that the view has returned is sent."""

    def __init__(self, monkeypatch, calls):
        monkeypatch.setattr(pages, "LOOKS", self)
        self.calls, self.sent = calls, []

    def __iter__(self):
        wait_until(lambda: len(self.sent) == len(self.calls))
        yield 0

    def send(self, view, request):
        response = sent(view, request)
        if request in self.calls:
            self.sent.append(request)
        return response.content


def test_requests_that_wait_for_a_template_response_get_it(monkeypatch):
    rendering, calls = threading.Event(), []
    looks = LooksWhenStored(monkeypatch, calls)

    @cache_page(60)
    def view(request):
        calls.append(request)
        return TemplateResponse(request, HELLO, {"name": lambda: rendering.wait(20) and "you"})

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(looks.send, view, get()) for _ in range(4)]
        wait_until(lambda: followers() == 3)
        rendering.set()
        assert [answer.result(20) for answer in answers] == [b"Hello you"] * 4
    assert len(calls) == 1


def test_each_kind_of_a_template_response_is_rendered_once(monkeypatch):
    """Who led the second round waited before it stored the page, and those who waited for it rendered their own."""
    rendering, calls = threading.Event(), []
    looks = LooksWhenStored(monkeypatch, calls)

    @cache_page(60)
    @vary_on_headers("kind")
    def view(request):
        calls.append(request)
        return TemplateResponse(request, HELLO, {"name": lambda: rendering.wait(20) and request.headers["kind"]})

    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(looks.send, view, get(kind="a"))
        wait_until(lambda: len(calls) == 1)
        others = [pool.submit(looks.send, view, get(kind="b")) for _ in range(8)]
        wait_until(lambda: followers() == 8)
        rendering.set()
        assert first.result(20) == b"Hello a"
        assert {other.result(30) for other in others} == {b"Hello b"}
    assert [request.headers["kind"] for request in calls] == ["a", "b"]


def test_no_request_waits_for_a_template_response_that_may_not_be_stored():
    inside = threading.Barrier(2)

    @cache_control(private=True)
    @cache_page(60)
    def view(request):
        if "both" in request.headers:
            inside.wait(20)  # they are in the view at the same time
        return TemplateResponse(request, HELLO, {"name": "you"})

    sent(view, get())
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(sent, view, get(both="1")) for _ in range(2)]
        assert [answer.result(20).content for answer in answers] == [b"Hello you"] * 2


def test_a_page_has_the_prefix_and_the_cache_it_was_given(client):
    view, _ = counted_page(cache="other", key_prefix="mine")
    view(get())
    keys = [key for key in client.scan_iter("*", count=1000) if b".cache" in key]
    assert len(keys) == 2
    assert all(key.startswith(b"other:1:views.decorators.cache.cache_") and b".mine." in key for key in keys)


def test_bad_arguments_of_cache_page():
    with pytest.raises(TypeError, match="jitter"):
        cache_page(60, jitter=0.5)
    for options in ({"wait": -1}, {"stale": -1}, {"on_error": "old"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            cache_page(60, **options)
    with pytest.raises(TypeError, match="HttpRequest"):
        cache_page(60)(lambda self, request: None)(object())


@pytest.mark.parametrize("backend", ["locmem.LocMemCache", "dummy.DummyCache"])
def test_with_another_cache_all_is_as_in_django(backend):
    """So that a project's tests may do without Redis."""
    view, requests = counted_page()
    work = cached(60, key="k:{a}", wait=5)(lambda a: requests.append(a) or a)
    with override_settings(CACHES={"default": {"BACKEND": f"django.core.cache.backends.{backend}"}}):
        caches["default"].clear()
        for _ in range(2):
            assert view(get()).content == b"page"
            assert work(1) == 1
        work.invalidate(1)
    assert len(requests) == (2 if backend.startswith("locmem") else 4)
