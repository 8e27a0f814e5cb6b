"""`cache_page` with `stale`: copies that outlive their pages, for those who come while a new one is made, or fails."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.contrib.auth.models import Group
from django.core.cache import caches
from django.db import connection, transaction
from django.http import Http404, HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import RequestFactory, override_settings

from django_redislock.cache import cache_page, pages
from django_redislock.cache.page_cache import PageCache
from tests.support import wait_until
from tests.support.cache_programs import cache_elsewhere, followers


@pytest.fixture(params=["sync", "async"])
def show(request, redis_url, backend):
    """``show(render, …)`` is a view that answers with what render(request) returns, for 60 s, as threads call it."""
    location = {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": redis_url}

    def make(render, **options):
        async def aview(request):
            return await asyncio.to_thread(render, request)

        view = cache_page(60, **options)(aview if request.param == "async" else render)

        def call(path="/", method="get", **headers):
            asked = getattr(RequestFactory(), method)(path, headers=headers)
            return asyncio.run(view(asked)) if request.param == "async" else view(asked)

        return call

    with override_settings(CACHES={"default": location}):
        yield make


class Origin:
    """Renders numbered pages, and fails on demand."""

    def __init__(self):
        self.calls = 0
        self.sick = None

    def __call__(self, request):
        self.calls += 1
        if isinstance(self.sick, Exception):
            raise self.sick
        if self.sick is not None:
            return HttpResponse("sick", status=self.sick)
        return HttpResponse(f"page {self.calls} {request.headers.get('Language', '')}", headers={"Vary": "Language"})


def end_pages(client):
    """Let all pages come to their end, and the pauses, but no copy, and no names of headers: they live longer."""
    stay = (b"redislock.stale", b"cache_page.cache_header", b"cache.cache_header")
    ended = [key for key in client.keys("*") if not key.startswith(b"{") and not any(part in key for part in stay)]
    if ended:
        client.delete(*ended)


def aged(show, client, **options):
    """Return an origin, and a view of it whose page has ended and whose copy has not."""
    origin = Origin()
    view = show(origin, stale=600, **options)
    view()
    end_pages(client)
    return origin, view


def pause_for_ever(client):
    """Let nobody try again, however slow this machine is."""
    for key in client.keys("*redislock.page*"):
        client.persist(key)


def test_a_copy_lives_longer_than_its_page_and_without_stale_there_is_none(show, client):
    show(Origin(), on_error="stale")()
    assert not client.keys("*stale*")
    client.flushdb()
    show(Origin(), stale=600)()
    page, copy, names = sorted(client.ttl(key) for key in client.keys("*views.decorators.cache*"))
    assert page <= 60
    assert 600 < copy <= 660 < names


@pytest.mark.parametrize(("headers", "seconds"), [({"Cache-Control": "max-age=30"}, 30), ({}, 600)])
def test_without_a_timeout_a_copy_lives_longer_than_the_page_or_the_caches_timeout_says(
    redis_url, client, headers, seconds
):
    location = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": redis_url, "TIMEOUT": 600}
    with override_settings(CACHES={"default": location}, CACHE_MIDDLEWARE_SECONDS=600):
        cache_page(None, stale=600)(lambda request: HttpResponse("page", headers=headers))(RequestFactory().get("/"))
    lives = [client.ttl(key) for key in client.keys("*redislock.stale*")]
    assert lives
    assert all(seconds + 590 < life <= seconds + 600 for life in lives)


@pytest.mark.parametrize("sick", [ZeroDivisionError("sick"), 500, 503])
@pytest.mark.parametrize("by", ["argument", "setting"])
def test_on_error_stale_shows_the_old_page_logs_and_counts(show, client, settings, sick, by, caplog):
    if by == "setting":
        settings.DJANGO_REDISLOCK = {"CACHE": {"ON_ERROR": "stale"}}
    origin = Origin()
    view = show(origin, stale=600, **({"on_error": "stale"} if by == "argument" else {}))
    assert view().content == b"page 1 "
    end_pages(client)
    origin.sick = sick
    before = caches["default"].stats()
    for _ in range(5):
        page = view()
        pause_for_ever(client)
        assert (page.status_code, page.content) == (200, b"page 1 ")
        assert page["Cache-Control"] == "max-age=0"
    assert origin.calls == 2, "it is not tried again at once"
    after = caches["default"].stats()
    assert after.stale_served - before.stale_served == 5
    assert after.errors - before.errors == 1
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "could not be rendered again" in errors[0].message
    pages = [key for key in client.keys("*:1:views.decorators.cache.cache_page..GET*") if b"redislock" not in key]
    assert not pages, "the old page is not stored as a new one"


def test_the_next_try_waits_for_a_pause_that_grows_and_a_new_page_ends_it(show, client):
    origin = Origin()
    view = show(origin, stale=600, on_error="stale")
    view()

    def pause():
        end_pages(client)
        assert view().content.startswith(b"page")
        return max([client.pttl(mark) / 1000 for mark in client.keys("*redislock.page*")], default=0)

    origin.sick = 503
    for longest in (1, 2, 4, 8, 16, 32, 60, 60):
        left = pause()
        assert left <= longest
        assert left > longest / 2 or longest < 8, "the shortest may be over on a busy machine"
    origin.sick = None
    end_pages(client)
    assert view().content == b"page 10 "
    origin.sick = 503
    assert pause() <= 1


@pytest.mark.parametrize("sick", [ZeroDivisionError("sick"), 500])
def test_on_error_stale_shows_the_old_page_also_after_an_answer_that_may_not_be_stored(show, client, sick, caplog):
    """For a minute each request calls the view by itself then: its exceptions reached the visitors."""
    origin, view = aged(show, client, on_error="stale")
    origin.sick = 302
    assert view().status_code == 302
    pause_for_ever(client)
    origin.sick = sick
    assert [view().content for _ in range(2)] == [b"page 1 "] * 2
    assert origin.calls == 4
    assert caplog.text.count("could not be rendered again") == 2
    origin.sick = Http404("gone")
    with pytest.raises(Http404):
        view()
    origin.sick = sick
    if isinstance(sick, Exception):
        with pytest.raises(ZeroDivisionError):
            view()
    else:
        assert view().status_code == 500


def test_an_error_404_of_another_method_deletes_no_copy(show, client):
    origin, view = aged(show, client, on_error="stale")
    origin.sick = Http404("no such comment")
    with pytest.raises(Http404):
        view(method="post")
    assert client.keys("*redislock.stale*")


@pytest.mark.django_db(transaction=True)
def test_an_old_page_in_place_of_an_exception_rolls_back_the_request(show, client, monkeypatch, request):
    """Django would have rolled back, if the exception had left the view; ATOMIC_REQUESTS is for sync views only."""
    if "async" in request.node.name:
        pytest.skip("Django refuses ATOMIC_REQUESTS with async views")
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    origin = Origin()

    def render(request):
        if origin.sick is not None:
            Group.objects.create(name="half done")
        return origin(request)

    view = show(render, stale=600, on_error="stale")
    view()
    end_pages(client)
    origin.sick = ZeroDivisionError("sick")
    with transaction.atomic():
        assert view().content == b"page 1 "
    assert not Group.objects.exists()


def test_without_on_error_only_who_tried_gets_the_failure(show, client):
    origin, view = aged(show, client)
    origin.sick = 503
    assert view().status_code == 503
    pause_for_ever(client)
    assert view().content == b"page 1 "
    assert origin.calls == 2


def test_while_one_renders_a_new_page_the_others_get_the_old_one_at_once(show, client):
    running, end = threading.Event(), threading.Event()
    origin = Origin()

    def render(request):
        if origin.calls:
            running.set()
            assert end.wait(20)
        return origin(request)

    view = show(render, stale=600)
    view()
    end_pages(client)
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(view)
        assert running.wait(10)
        try:
            assert {pool.submit(view).result(10).content for _ in range(5)} == {b"page 1 "}
        finally:
            end.set()
        assert first.result(20).content == b"page 2 "
    assert view().content == b"page 2 "
    assert origin.calls == 2


def test_who_waited_while_the_names_of_the_headers_were_unknown_gets_the_old_page_of_its_headers(show, client):
    running, end = threading.Event(), threading.Event()
    origin = Origin()

    def render(request):
        if not origin.calls:
            return origin(request)
        origin.calls += 1
        running.set()
        assert end.wait(20)
        return HttpResponse("sick", status=503, headers={"Vary": "Language"})

    view = show(render, stale=600)
    view()
    end_pages(client)
    client.delete(*client.keys("*cache_header*"))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(view)
        assert running.wait(10)
        second = pool.submit(view)
        wait_until(lambda: followers() == 1)
        end.set()
        assert first.result(20).status_code == 503
        assert second.result(20).content == b"page 1 "
    assert origin.calls == 2


def test_another_process_that_renders_is_not_waited_for_either(show, client, redis_url, backend):
    origin, view = aged(show, client, on_error="stale")
    running, end = threading.Event(), threading.Event()
    elsewhere = cache_elsewhere(redis_url, backend)

    def compute():
        running.set()
        assert end.wait(20)

    origin.sick = 503
    view()  # tells the key
    (key,) = client.keys("*redislock.page*")
    end_pages(client)
    with ThreadPoolExecutor(1) as pool:
        rendering = pool.submit(elsewhere.get_or_set, key.decode().removeprefix(":1:"), compute)
        assert running.wait(10)
        try:
            assert view().content == b"page 1 "
            assert origin.calls == 2
        finally:
            end.set()
        rendering.result(20)


def test_each_kind_of_request_has_an_old_page_of_its_own(show, client):
    origin = Origin()
    view = show(origin, stale=600, on_error="stale")
    assert view(Language="de").content == b"page 1 de"
    assert view(Language="en").content == b"page 2 en"
    end_pages(client)
    origin.sick = 503
    assert view(Language="de").content == b"page 1 de"
    assert view(Language="en").content == b"page 2 en"
    assert view(Language="fr").status_code == 503
    assert view("/other").status_code == 503


@pytest.mark.parametrize("gone", [404, 410, Http404("gone")])
def test_no_page_is_shown_in_place_of_a_refusal_nor_after_it_is_gone(show, client, gone):
    origin, view = aged(show, client, on_error="stale")
    origin.sick = 403
    assert view().status_code == 403
    end_pages(client)
    origin.sick = gone
    if isinstance(gone, Http404):
        with pytest.raises(Http404):
            view()
    else:
        assert view().status_code == gone
    end_pages(client)
    origin.sick = 503
    assert view().status_code == 503


def test_a_task_deletes_the_copy_of_a_page_that_is_gone_outside_of_its_loop(show, monkeypatch):
    """Redis may be slow, and all other requests of the loop would wait for it."""
    delete_stale, loops = PageCache.delete_stale, []

    def delete(page):
        loops.append(asyncio._get_running_loop())
        delete_stale(page)

    monkeypatch.setattr(PageCache, "delete_stale", delete)
    origin = Origin()
    origin.sick = Http404("gone")
    with pytest.raises(Http404):
        show(origin, stale=600)()
    assert loops == [None]


@pytest.mark.parametrize(("shown", "asked"), [("get", "head"), ("head", "get")])
def test_a_page_that_is_gone_for_one_method_is_gone_for_the_other_one_too(show, client, shown, asked):
    origin = Origin()
    view = show(origin, stale=600, on_error="stale")
    view(method=shown)
    for method, status in ((asked, 404), (shown, 503)):
        end_pages(client)
        origin.sick = status
        assert view(method=method).status_code == status


def test_the_old_page_is_shown_at_once_until_a_template_response_is_stored(show, client, monkeypatch):
    template, calls = engines["django"].from_string("{{ number }}"), []

    def render(request):
        calls.append(request)
        return TemplateResponse(request, template, {"number": len(calls)})

    view = show(render, stale=600)
    view().render()
    end_pages(client)
    new = view()
    monkeypatch.setattr(pages, "LOOKS", (pytest.fail("It looks for the new page.") for _ in range(1)))
    assert view().content == b"1"
    assert new.render().content == view().content == b"2"
    assert len(calls) == 2


def test_the_old_page_ends_with_stale(show, client):
    origin = Origin()
    view = show(origin, stale=0.1, on_error="stale")
    view()
    origin.sick = 503
    for key in client.keys("*"):
        client.pexpire(key, 100)
    wait_until(lambda: not client.keys("*views*"))
    assert view().status_code == 503
