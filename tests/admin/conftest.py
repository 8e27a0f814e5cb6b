"""Django's test client and a real browser for the tests of the admin pages.

The browser works under a strict Content-Security-Policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import Client

from tests.support import find_program
from tests.support.admin_pages import LIST, browser, superuser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
PATIENCE = 90_000
"""Milliseconds for which the browser waits for what is to come; Playwright's own 5 and 30 s are for idle machines."""


@pytest.fixture
def web() -> Client:
    """Return the client of a superuser."""
    return browser(superuser())


def strict(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response["Content-Security-Policy"] = POLICY
        return response

    return middleware


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    program = find_program("chromium", package="chromium")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    arguments += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright, pytest.MonkeyPatch.context() as patch:
        # Playwright leaves an event loop running in this thread; the tests all the same use the database in it.
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        running = playwright.chromium.launch(executable_path=program, args=arguments, timeout=PATIENCE)
        expect.set_options(timeout=PATIENCE)
        yield running
        running.close()


@pytest.fixture
def strict_site(settings: Any, redis_url: str) -> None:
    settings.DJANGO_REDISLOCK = {"URL": redis_url}
    settings.MIDDLEWARE = [f"{__name__}.strict", *settings.MIDDLEWARE]


@pytest.fixture
def visit(strict_site: None, chromium: Browser, live_server: Any) -> Iterator[Callable[..., Page]]:
    """``visit(user, **look)`` opens the list of held locks; nothing may be blocked or fail on the way."""
    contexts = []
    complaints: list[str] = []

    def open_(of: Any, **look: Any) -> Page:
        context = chromium.new_context(base_url=live_server.url, **look)
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        session = browser(of).cookies["sessionid"].value
        context.add_cookies([{"name": "sessionid", "value": session, "url": live_server.url}])
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(LIST)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [complaint for complaint in complaints if "favicon" not in complaint and "404" not in complaint] == []
