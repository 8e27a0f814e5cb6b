"""@cached and cache_page."""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import async_to_sync, iscoroutinefunction
from django.core.cache import caches
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import RequestFactory, override_settings
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import cache_control, never_cache
from django.views.decorators.vary import vary_on_headers

from django_redislock.cache import cache_page, cached
from django_redislock.core import held_locks
from django_redislock.exceptions import ComputationFailed
from tests.support import sqlite_file, using_databases, wait_until
from tests.support.cache_programs import followers


@pytest.fixture(params=["RedisCache", "DjangoRedisCache"], autouse=True)
def _backend(request, redis_url):
    default = {"BACKEND": f"django_redislock.cache.{request.param}", "LOCATION": redis_url}
    with override_settings(CACHES={"default": default, "other": default | {"KEY_PREFIX": "other"}}):
        yield


# cached


def test_a_function_runs_once_for_its_arguments(client):
    calls = []

    @cached(60, key="user:{user_id}:{full}")
    def user(user_id, *, full=False):
        """Return a user."""
        calls.append((user_id, full))
        return {"id": user_id}

    assert [user(1), user(user_id=1), user(1, full=False)] == [{"id": 1}] * 3
    assert user(2, full=True) == {"id": 2}
    assert calls == [(1, False), (2, True)]
    assert caches["default"].get("user:1:False") == {"id": 1}
    assert 50_000 < client.pttl(":1:user:1:False") <= 60_000
    assert user.__name__ == "user"
    assert user.__doc__ == "Return a user."
    assert list(inspect.signature(user).parameters) == ["user_id", "full"]


def test_invalidate_takes_what_the_function_takes():
    calls = []

    @cached(60, key="user:{user_id}")
    def user(user_id):
        calls.append(user_id)
        return user_id

    user(1), user(2)
    assert user.invalidate(1) is True
    assert user.invalidate(user_id=1) is False
    user(1), user(2)
    assert calls == [1, 2, 1]
    assert asyncio.run(user.ainvalidate(2)) is True
    assert user.key(7) == "user:7"


def test_what_is_computed_while_it_is_invalidated_is_not_stored():
    @cached(60, key="user:{user_id}")
    def user(user_id):
        user.invalidate(user_id)
        return "stale"

    assert user(1) == "stale"
    assert caches["default"].get("user:1") is None


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_invalidate_may_wait_for_the_commit(client, tmp_path, django_db_blocker, asynchronous):
    """What others compute before it comes from what was there before the transaction."""
    row = ["before"]

    @cached(60, key="user:{user_id}")
    def user(user_id):
        return row[0]

    def invalidate(**options):
        if asynchronous:
            return async_to_sync(user.ainvalidate)(1, **options)
        return user.invalidate(1, **options)

    with django_db_blocker.unblock(), using_databases(default=sqlite_file(tmp_path)):
        assert user(1) == "before"
        with transaction.atomic():
            assert invalidate(on_commit=True) is None
            assert user(1) == "before"
            row[0] = "after"
        assert user(1) == "after"
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            invalidate(on_commit=True)
            raise ZeroDivisionError
        assert caches["default"].has_key("user:1"), "rolled back"
        invalidate(on_commit=True)
        assert not caches["default"].has_key("user:1"), "at once without a transaction"


def test_a_callable_key_another_cache_and_a_version():
    @cached(60, key=lambda a, b=2: f"sum:{a + b}", using="other", version=5)
    def add(a, b=2):
        return a + b

    assert add(1) == add(2, b=1) == 3
    assert caches["other"].get("sum:3", version=5) == 3
    assert caches["default"].get("sum:3", version=5) is None
    assert add.invalidate(1)


def test_methods():
    calls = []

    class Cart:
        def __init__(self, pk):
            self.pk = pk

        @cached(60, key="cart:{self.pk}:{currency}")
        def total(self, currency="EUR"):
            calls.append(self.pk)
            return f"{self.pk} {currency}"

        @cached(60, key="acart:{self.pk}")
        async def atotal(self):
            calls.append(self.pk)
            return self.pk

    cart = Cart(1)
    assert [cart.total(), Cart(1).total(), Cart(2).total("USD")] == ["1 EUR", "1 EUR", "2 USD"]
    assert cart.total.invalidate() is True
    assert Cart.total.invalidate(Cart(2), "USD") is True
    assert cart.total() == "1 EUR"
    assert calls == [1, 2, 1]
    assert asyncio.run(cart.atotal()) == 1
    assert cart.atotal.invalidate()


def test_coroutine_functions():
    calls = []

    @cached(60, key="user:{user_id}")
    async def user(user_id):
        calls.append(user_id)
        await asyncio.sleep(0)
        return [user_id]

    async def main():
        return await asyncio.gather(*[user(1) for _ in range(5)])

    assert iscoroutinefunction(user)
    assert asyncio.run(main()) == [[1]] * 5
    assert calls == [1]


def test_without_parameters_the_name_is_the_key():
    @cached(60)
    def settings():
        return 1

    assert settings() == 1
    assert settings.key() == f"{__name__}.test_without_parameters_the_name_is_the_key.<locals>.settings"
    assert settings.invalidate()


def test_a_crowd_calls_once():
    running, end, calls = threading.Event(), threading.Event(), []

    @cached(60, key="k")
    def work():
        calls.append(1)
        running.set()
        assert end.wait(20)
        return "v"

    with ThreadPoolExecutor(10) as pool:
        futures = [pool.submit(work) for _ in range(10)]
        wait_until(lambda: followers() == 9)
        end.set()
        assert [future.result(20) for future in futures] == ["v"] * 10
    assert calls == [1]


def test_bad_use_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match="needs a key"):
        cached(60)(lambda a: a)
    with pytest.raises(TypeError, match="key"):
        cached(60, key=5)
    with pytest.raises(TypeError, match="nonsense"):
        cached(60, key="k", nonsense=1)
    with pytest.raises(ValueError, match="wait"):
        cached(60, key="k", wait=-1)
    with pytest.raises(TypeError, match="decorates functions"):
        cached(60, key="k")(5)
    with pytest.raises(TypeError, match=r"'\{b\}' does not fit the arguments: KeyError"):
        cached(60, key="{b}")(lambda a: a)(1)


# cache_page


def get(path="/", **headers):
    return RequestFactory().get(path, headers=headers)


def counting(response=lambda request: HttpResponse("page"), **options):
    """Return a view behind cache_page, and the list of its requests."""
    calls = []

    @cache_page(60, **options)
    def view(request):
        calls.append(request)
        return response(request)

    return view, calls


def acounting():
    calls = []

    @cache_page(60)
    async def view(request):
        calls.append(request)
        return HttpResponse("page")

    return view, calls


def test_a_page_is_rendered_once_and_carries_djangos_headers(client):
    view, calls = counting()
    first, second = view(get()), view(get())
    assert first.content == second.content == b"page"
    assert second["Cache-Control"] == "max-age=60"
    assert "Expires" in second
    assert len(calls) == 1
    assert view(get("/?a=1")).content == b"page"
    assert len(calls) == 2
    assert not list(held_locks(client))


def test_async_views():
    view, calls = acounting()

    async def main():
        return await asyncio.gather(*[view(get()) for _ in range(5)])

    assert [response.content for response in asyncio.run(main())] == [b"page"] * 5
    assert len(calls) == 1
    assert iscoroutinefunction(view)


def test_djangos_own_decorator_finds_the_same_pages():
    from django.views.decorators.cache import cache_page as djangos

    view, calls = counting()
    view(get())
    assert djangos(60)(lambda request: 1 / 0)(get()).content == b"page"
    djangos(60)(lambda request: HttpResponse("other"))(get("/other"))
    assert view(get("/other")).content == b"other"
    assert len(calls) == 1


def test_a_crowd_renders_a_page_once():
    running, end = threading.Event(), threading.Event()

    def slowly(request):
        running.set()
        assert end.wait(20)
        return HttpResponse("page")

    view, calls = counting(slowly)
    with ThreadPoolExecutor(10) as pool:
        futures = [pool.submit(view, get()) for _ in range(10)]
        wait_until(lambda: followers() == 9)
        end.set()
        assert [future.result(20).content for future in futures] == [b"page"] * 10
    assert len(calls) == 1


@pytest.mark.parametrize("method", ["post", "put", "delete", "options"])
def test_other_methods_are_never_cached_nor_waited_for(method):
    view, calls = counting()
    for _ in range(2):
        view(getattr(RequestFactory(), method)("/"))
    assert len(calls) == 2


def test_head_is_answered_from_the_page_of_get():
    view, calls = counting()
    view(get())
    view(RequestFactory().head("/"))
    assert len(calls) == 1


UNCACHEABLE = {
    "status": lambda request: HttpResponse("page", status=404),
    "private": cache_control(private=True)(lambda request: HttpResponse("page")),
    "no-store": never_cache(lambda request: HttpResponse("page")),
    "streaming": lambda request: StreamingHttpResponse(["page"]),
    "max-age=0 and vary *": vary_on_headers("*")(lambda request: HttpResponse("page")),
}


@pytest.mark.parametrize("what", UNCACHEABLE)
def test_what_may_not_be_stored_is_rendered_for_each_and_at_the_same_time(what):
    together = threading.Barrier(4)
    view, calls = counting(UNCACHEABLE[what])
    view(get())

    @cache_page(60)
    def at_once(request):
        together.wait(10)  # passes only when four render at the same time
        return UNCACHEABLE[what](request)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: at_once(get()), range(4)))
    view(get())
    assert len(calls) == 2


def test_a_cookie_for_some_is_not_stored():
    def with_cookie(request):
        response = HttpResponse("page")
        response.set_cookie("a", "b")
        response["Vary"] = "Cookie"
        return response

    view, calls = counting(with_cookie)
    view(get()), view(get())
    assert len(calls) == 2


def test_pages_vary_as_their_headers_say():
    view, calls = counting(vary_on_headers("X-Kind")(lambda request: HttpResponse(request.headers["X-Kind"])))
    for _ in range(2):
        assert view(get(**{"X-Kind": "a"})).content == b"a"
        assert view(get(**{"X-Kind": "b"})).content == b"b"
    assert len(calls) == 2


def test_a_crowd_of_two_kinds_gets_each_its_own():
    running, end = threading.Event(), threading.Event()

    @vary_on_headers("X-Kind")
    def slowly(request):
        running.set()
        assert end.wait(20)
        return HttpResponse(request.headers["X-Kind"])

    view, calls = counting(slowly)
    with ThreadPoolExecutor(10) as pool:
        futures = [(kind, pool.submit(view, get(**{"X-Kind": kind}))) for kind in "ab" * 5]
        wait_until(lambda: followers() == 9)
        end.set()
        for kind, future in futures:
            assert future.result(20).content.decode() == kind
    assert len(calls) == 2


def test_what_a_view_raises_is_for_its_own_request_alone():
    running, end = threading.Event(), threading.Event()

    def guarded(request):
        if "Allowed" not in request.headers:
            running.set()
            assert end.wait(20)
            raise PermissionDenied
        return HttpResponse("secret")

    view, _ = counting(guarded)
    with ThreadPoolExecutor(2) as pool:
        denied = pool.submit(view, get())
        assert running.wait(10)
        allowed = pool.submit(view, get(allowed="yes"))
        wait_until(lambda: followers() == 1)
        end.set()
        assert isinstance(denied.exception(20), PermissionDenied)
        assert allowed.result(20).content == b"secret"


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


FAILING = {
    "raises": fail,
    "503": lambda request: HttpResponse("sick", status=503, headers={"Retry-After": "7"}),
    "503 with a cookie": lambda request: with_cookie_and_status(503),
    "503 streaming": lambda request: StreamingHttpResponse(["sick"], status=503),
}


def with_cookie_and_status(status):
    response = HttpResponse("yours", status=status, headers={"Retry-After": "7"})
    response.set_cookie("whose", "yours")
    return response


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("what", FAILING)
def test_a_failing_view_is_tried_by_one_request_for_all_who_wait(what, kind, client):
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
    expected = {
        "raises": "the origin is sick",
        "503": (503, "7", False),
        "503 with a cookie": (503, "7", False),
        "503 streaming": (503, None, False),
    }[what]
    assert answers == {expected}
    assert own == (expected if "cookie" not in what else (503, "7", True))
    assert gate.calls == 1
    assert not list(held_locks(client))


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


def test_a_page_that_is_stored_ends_the_mark_of_an_uncacheable_one(client):
    """Or for the rest of a minute nobody would wait for anybody when the page ends."""
    headers = {"Cache-Control": "private"}
    view, calls = counting(lambda request: HttpResponse("page", headers=headers))
    view(get())
    assert client.keys("*redislock.page*")
    headers.clear()
    view(get())
    assert not client.keys("*redislock.page*")
    view(get())
    assert len(calls) == 2


def test_an_exception_that_cannot_be_sent_is_told_in_words(client):
    class Local(Exception):
        pass

    def raising(request):
        raise Local("sick")

    view, calls = counting(raising)
    with pytest.raises(Local, match="sick"):
        view(get())
    with pytest.raises(ComputationFailed, match=r"Local: sick"):
        view(get())
    assert len(calls) == 1


def test_template_responses_and_class_based_views():
    template = engines["django"].from_string("Hello {{ name }}")
    calls = []

    @method_decorator(cache_page(60), name="dispatch")
    class Hello(View):
        def get(self, request):
            calls.append(1)
            return TemplateResponse(request, template, {"name": "you"})

    view = Hello.as_view()
    assert view(get()).rendered_content == "Hello you"
    assert view(get()).content == b"Hello you"
    assert calls == [1]


def test_a_page_has_the_prefix_and_the_cache_it_was_given(client):
    view, _ = counting(cache="other", key_prefix="mine")
    view(get())
    keys = [key for key in client.keys("*") if b".cache" in key]
    assert len(keys) == 2
    assert all(key.startswith(b"other:1:views.decorators.cache.cache_") and b".mine." in key for key in keys)


def test_bad_arguments_of_cache_page():
    with pytest.raises(TypeError, match="jitter"):
        cache_page(60, jitter=0.5)
    with pytest.raises(ValueError, match="wait"):
        cache_page(60, wait=-1)
    with pytest.raises(TypeError, match="HttpRequest"):
        cache_page(60)(lambda self, request: None)(object())


@pytest.mark.parametrize("backend", ["locmem.LocMemCache", "dummy.DummyCache"])
def test_with_another_cache_all_is_as_in_django(backend):
    """So that a project's tests may do without Redis."""
    calls = []

    @cached(60, key="k:{a}", wait=5)
    def work(a):
        calls.append(a)
        return a

    @cached(60, key="ak:{a}", wait=5)
    async def awork(a):
        calls.append(a)
        return a

    view, requests = counting()
    with override_settings(CACHES={"default": {"BACKEND": f"django.core.cache.backends.{backend}"}}):
        caches["default"].clear()
        for _ in range(2):
            assert work(1) == 1
            assert asyncio.run(awork(2)) == 2
            assert view(get()).content == b"page"
        work.invalidate(1)
    once = backend.startswith("locmem")
    assert len(calls) == (2 if once else 4)
    assert len(requests) == (1 if once else 2)
