"""The admin pages in a real browser, under a strict Content-Security-Policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from axe_playwright_python.sync_playwright import Axe
from django.contrib.admin.models import LogEntry
from django.http import HttpRequest, HttpResponse
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

from django_redislock.celery.execution_lock import count_duplicate
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockLost
from tests.support import find_program, wait_in_a_thread
from tests.support.admin_pages import LIST, browser, held, hold, next_millisecond, rewrite, superuser, user

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.django_db(transaction=True)]

POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
PHONE = {"viewport": {"width": 390, "height": 844}}
PATIENCE = 90_000
"""Milliseconds for which the browser waits for what is to come; Playwright's own 5 and 30 s are for machines that do nothing else."""
LOOKS: list[dict[str, Any]] = [
    {"color_scheme": "light"},
    {"color_scheme": "dark"},
    PHONE | {"color_scheme": "light"},
    PHONE | {"color_scheme": "dark"},
]


def strict(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response["Content-Security-Policy"] = POLICY
        return response

    return middleware


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
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


@pytest.fixture(autouse=True)
def _site(settings: Any, redis_url: str) -> None:
    settings.DJANGO_REDISLOCK = {"URL": redis_url}
    settings.MIDDLEWARE = [f"{__name__}.strict", *settings.MIDDLEWARE]


@pytest.fixture
def visit(chromium: Browser, live_server: Any) -> Iterator[Callable[..., Page]]:
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


def expect_names(page: Page, names: list[str]) -> None:
    expect(page.locator("#result_list .redislock-name")).to_have_text(names)


def width(page: Page) -> int:
    return page.evaluate("document.documentElement.scrollWidth")


def test_list_search_and_sort(visit: Callable[..., Page], client: redis.Redis) -> None:
    for name in ("invoice:42", "invoice:43", "report"):
        hold(client, name)
        next_millisecond(client)
    page = visit(superuser())
    expect_names(page, ["invoice:42", "invoice:43", "report"])
    page.locator(".column-held_for .text a").click()
    expect_names(page, ["report", "invoice:43", "invoice:42"])
    page.get_by_role("textbox", name="Search").fill("invoice")
    page.get_by_role("button", name="Search").click()
    expect_names(page, ["invoice:43", "invoice:42"])
    page.get_by_role("link", name="cache", exact=True).click()
    expect_names(page, [])


def test_force_release(visit: Callable[..., Page], client: redis.Redis) -> None:
    stuck, other = hold(client, "stuck", label="nightly[7]"), hold(client, "other")
    page = visit(superuser())
    page.get_by_role("checkbox", name="Select this lock: stuck").check()
    expect(page.locator(".action-counter")).to_contain_text("1 of 2 selected")
    page.locator("select[name=action]").select_option(label="Force-release selected locks…")
    page.locator("button[name=index]").click()

    page.get_by_text("The holder is not stopped. If it still runs, two holders will overlap.").wait_for()
    assert "nightly[7]" in page.get_by_role("row", name="stuck").inner_text()
    page.get_by_role("link", name="No, take me back").click()
    page.locator("#result_list").wait_for()
    assert stuck.owned()

    page.get_by_role("link", name="stuck").click()
    page.get_by_role("button", name="Force-release…").click()
    page.get_by_role("textbox", name="Reason").fill("it hangs")
    page.get_by_role("button", name="Yes, force-release").click()
    page.locator(".messagelist .success").wait_for()
    expect_names(page, ["other"])
    assert not held(client, "stuck")
    with pytest.raises(LockLost, match=r"root force-released it at .* UTC: it hangs"):
        stuck.release()
    assert other.owned()
    assert LogEntry.objects.get().object_repr == "stuck"

    page.goto("/admin/")
    page.get_by_role("link", name="stuck").click()
    page.get_by_text("This lock is free now.").wait_for()
    page.get_by_role("link", name="History").click()
    page.get_by_text("Reason: it hangs").wait_for()


def test_changed_hands_while_the_question_stands(visit: Callable[..., Page], client: redis.Redis) -> None:
    first = hold(client, "stuck")
    page = visit(superuser())
    page.get_by_role("link", name="stuck").click()
    page.get_by_role("button", name="Force-release…").click()
    page.get_by_role("button", name="Yes, force-release").wait_for()
    first.release()
    second = hold(client, "stuck")
    page.get_by_role("button", name="Yes, force-release").click()
    page.get_by_text("has another holder now and was not released").wait_for()
    assert second.owned()


def test_all_on_the_page_are_never_all_there_are(visit: Callable[..., Page], client: redis.Redis) -> None:
    locks = [hold(client, f"{number:03}") for number in range(103)]
    page = visit(superuser())
    page.locator("#action-toggle").check()
    expect(page.locator(".action-counter")).to_contain_text("100 of 100 selected")
    page.locator("select[name=action]").select_option("force_release")
    page.locator("button[name=index]").click()
    page.get_by_role("button", name="Yes, force-release").click()
    page.locator(".messagelist .success").wait_for()
    expect(page.locator("#result_list .redislock-name")).to_have_count(3)
    assert sum(lock.owned() for lock in locks) == 3


def test_a_viewer_is_offered_nothing_to_release(visit: Callable[..., Page], client: redis.Redis) -> None:
    hold(client, "stuck")
    page = visit(user("viewer", "view_heldlock"))
    expect_names(page, ["stuck"])
    assert page.locator("select[name=action]").count() == 0
    page.get_by_role("link", name="stuck").click()
    page.get_by_text("View held lock").wait_for()
    assert page.get_by_role("button", name="Force-release…").count() == 0


LOUD = ("serious", "critical")


def contend(client: redis.Redis) -> None:
    """Leave what the page about contention shows."""
    for name in ("celery:reports.tasks.rebuild:5f1c9a", "cache::1:report:1987", "x" * 300):
        count_duplicate(server_of(client), name, lock_keys("redislock", name))


def test_accessible(visit: Callable[..., Page], client: redis.Redis, listen: Callable[..., None]) -> None:
    """axe-core finds nothing serious in any page, in both schemes, wide and narrow."""
    late = hold(client, "late", label="payments.export", auto_renewal=True)
    client.pexpire(late._keys.lock, 100_000)
    hold(client, "fixed", kind="celery", label="reports.tasks.rebuild[0b6c8f0e-3b60]")
    listen("redislock:wake:0:1:web")
    client.zadd(late._keys.queue, {f"redislock:wake:0:1:web\n{number}": number for number in range(2)})
    contend(client)
    root, axe = superuser(), Axe()
    for look in LOOKS:
        page = visit(root, **look)

        def check(view: str, page: Page = page, look: dict[str, Any] = look) -> None:
            page.evaluate("document.fonts.ready")
            found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
            loud = {each["id"]: [node["html"] for node in each["nodes"]] for each in found if each["impact"] in LOUD}
            assert loud == {}, f"{view} {look}"

        check("list")
        page.get_by_role("link", name="late", exact=True).click()
        page.get_by_text("View held lock").wait_for()
        check("detail")
        page.get_by_role("button", name="Force-release…").click()
        page.get_by_role("button", name="Yes, force-release").wait_for()
        check("confirmation")
        answer = page.goto(f"{LIST}contention/")
        assert answer is not None
        assert answer.ok
        check("contention")
    client.delete(late._keys.queue)
    late.release()


def test_keyboard(visit: Callable[..., Page], client: redis.Redis) -> None:
    """From the list over the question to the release without a mouse."""
    hold(client, "stuck")
    page = visit(superuser())
    reached = []
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("(e => e.name || e.id || e.type || e.textContent.trim())(document.activeElement)"))
    assert {"q", "action-toggle", "_selected_action", "stuck", "action", "index", "checkbox"} <= set(reached)
    assert {"renewing", "Celery", "Held for"} <= set(reached)
    page.get_by_role("checkbox", name="Select this lock: stuck").focus()
    page.keyboard.press("Space")
    page.locator("select[name=action]").focus()
    page.keyboard.type("Force")
    page.locator("button[name=index]").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Yes, force-release").focus()
    page.keyboard.press("Enter")
    page.locator(".messagelist .success").wait_for()
    assert not held(client, "stuck")


def test_refresh(visit: Callable[..., Page], client: redis.Redis) -> None:
    """Off at first, then every five seconds; not while a box is ticked or something in the list has the focus."""
    hold(client, "first")
    page = visit(superuser())
    page.clock.install(time=0)
    page.goto(LIST)
    page.clock.pause_at(3600)
    switch = page.get_by_role("checkbox", name="Refresh every 5 seconds")
    expect(switch).not_to_be_checked()
    page.evaluate("window.seen = true")
    seconds(page, 60)
    assert unchanged(page)

    switch.check()
    next_millisecond(client)
    hold(client, "second")
    seconds(page, 4)
    assert unchanged(page)
    reloading(page, 1)
    expect_names(page, ["first", "second"])
    expect(switch).to_be_checked()
    expect(switch).to_be_focused()

    box = page.get_by_role("checkbox", name="Select this lock: first")
    box.check()
    page.evaluate("window.seen = true")
    next_millisecond(client)
    hold(client, "third")
    seconds(page, 60)
    assert unchanged(page)
    expect(box).to_be_checked()
    box.uncheck()
    page.get_by_role("textbox", name="Search").fill("half a wor")
    seconds(page, 60)
    assert unchanged(page)
    page.get_by_role("textbox", name="Search").blur()
    reloading(page, 1)
    expect_names(page, ["first", "second", "third"])

    switch.uncheck()
    page.goto(LIST)
    expect(switch).not_to_be_checked()


@pytest.mark.parametrize("width", [1280, 1440])
def test_all_columns_of_the_list_fit_beside_the_filters(
    visit: Callable[..., Page], client: redis.Redis, width: int
) -> None:
    task = "reports.tasks.rebuild_report[0b6c8f0e-3b60-4a52-9c1f-2f5d0c9b6a11]"
    hold(client, "celery:reports.tasks.rebuild_report:5f1c9a", kind="celery", label=task, expire=5000)
    hold(client, "import:prices", label="nightly import", auto_renewal=True).release()
    hold(client, "warehouse:berlin", label="nightly import")
    page = visit(superuser(), viewport={"width": width, "height": 720})
    table = page.locator("#changelist .results")
    assert table.evaluate("it => it.scrollWidth - it.clientWidth") == 0
    assert page.get_by_title(task).inner_text() == "reports.tasks.rebuild_report[0b6c8f0e…]"
    heights = page.locator(".redislock-name").evaluate_all("all => all.map(it => it.getClientRects()[0].height)")
    assert max(heights) < 4 * page.locator(".field-kind").first.evaluate(
        "it => parseFloat(getComputedStyle(it).lineHeight)"
    )
    box, button = page.locator(".redislock-refresh").bounding_box(), page.locator(".object-tools a").bounding_box()
    assert box["y"] > button["y"] + button["height"]  # type: ignore[index]


RIGHT_TO_LEFT = """
cell => {
    const [text] = [document.createTreeWalker(cell, NodeFilter.SHOW_TEXT).nextNode()];
    return Array.from(text.data.matchAll(/\\S+/g), ({0: word, index}) => {
        const range = document.createRange();
        range.setStart(text, index);
        range.setEnd(text, index + word.length);
        return [range.getBoundingClientRect().left, word];
    }).sort((one, other) => one[0] - other[0]).map(([_, word]) => word);
}
"""
"""Returns the words of an element's first text, from left to right as they are drawn."""


def test_right_to_left_pages_keep_the_order_of_times_and_names(
    visit: Callable[..., Page], client: redis.Redis, settings: Any
) -> None:
    settings.LANGUAGE_CODE = "ar"
    rewrite(client, hold(client, "1 invoice 42", expire=7200), younger_by=-3450)
    page = visit(superuser(), viewport={"width": 1280, "height": 720})
    assert page.evaluate("document.documentElement.dir") == "rtl"
    age, name = page.locator(".field-held_for .nowrap"), page.locator(".redislock-name")
    assert age.evaluate(RIGHT_TO_LEFT) == age.inner_text().split()
    assert len(age.inner_text().split()) == 4
    assert name.evaluate(RIGHT_TO_LEFT) == ["1", "invoice", "42"]
    picture(page, "list-right-to-left")
    page.locator(".field-lock a").click()
    age.wait_for()
    assert age.evaluate(RIGHT_TO_LEFT) == age.inner_text().split()
    picture(page, "detail-right-to-left")


def test_the_page_of_contention_sorts_links_and_is_as_wide_as_its_table(
    visit: Callable[..., Page], client: redis.Redis
) -> None:
    wait_in_a_thread(client, "waited for")
    for name in ("celery:a", "celery:b", "celery:b"):
        count_duplicate(server_of(client), name, lock_keys("redislock", name))
    page = visit(superuser(), viewport={"width": 1280, "height": 720})
    page.get_by_role("link", name="Contention in the last hour").click()
    shown = page.locator("tbody .redislock-name")
    expect(shown).to_have_text(["waited for", "celery:b", "celery:a"])
    crumbs = page.locator(".breadcrumbs a")
    assert [link.inner_text() for link in crumbs.all()] == ["Home", "Redis locks", "Held locks"]
    assert (
        crumbs.first.evaluate("it => getComputedStyle(it.closest('.breadcrumbs')).backgroundColor")
        != "rgba(0, 0, 0, 0)"
    )
    graph, table = (page.locator(each).bounding_box() for each in (".redislock-graph", ".redislock-results"))
    assert graph["width"] == table["width"]  # type: ignore[index]
    assert page.locator(".redislock-scale span").count() == 3
    picture(page, "contention-sorted")
    page.get_by_role("link", name="duplicates prevented").click()
    expect(shown).to_have_text(["celery:b", "celery:a", "waited for"])
    page.get_by_role("link", name="duplicates prevented").click()
    expect(shown).to_have_text(["waited for", "celery:a", "celery:b"])
    page.get_by_role("link", name="celery:a").click()
    page.get_by_text("This lock is free now.").wait_for()


def picture(page: Page, name: str) -> None:
    """Take a picture where REDISLOCK_SCREENSHOTS names a folder."""
    folder = os.environ.get("REDISLOCK_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def seconds(page: Page, number: int) -> None:
    """Let time pass in the page."""
    page.clock.run_for(number * 1000)


def reloading(page: Page, number: int) -> None:
    """Let time pass that ends this page and begins another."""
    with page.expect_navigation(), suppress(Error):  # the old page may be gone before it can answer
        seconds(page, number)


def unchanged(page: Page) -> bool:
    """Return whether this is still the page in which `seen` was set."""
    return page.evaluate("window.seen === true")


@pytest.mark.parametrize(
    "look", LOOKS, ids=lambda look: f"{look['color_scheme']}-{'phone' if len(look) > 1 else 'desk'}"
)
def test_looks(
    visit: Callable[..., Page], client: redis.Redis, listen: Callable[..., None], look: dict[str, Any]
) -> None:
    """Nothing sticks out of the window, and colours follow the scheme. REDISLOCK_SCREENSHOTS names a folder to look at."""
    shown = f"{look['color_scheme']}-{'phone' if len(look) > 1 else 'desk'}"
    hold(client, "celery:reports.tasks.rebuild:5f1c9a", kind="celery", label="reports.tasks.rebuild[0b6c8f0e-3b60]")
    hold(client, "x" * 300)
    late = hold(client, "<b>payment</b>:export", label="payments.export", auto_renewal=True)
    client.pexpire(late._keys.lock, 100_000)
    listen("redislock:wake:0:1:web")
    client.zadd(late._keys.queue, {f"redislock:wake:0:1:web\n{number}": number for number in range(2)})
    contend(client)
    page = visit(superuser(), **look)

    def check(view: str) -> None:
        assert width(page) <= page.viewport_size["width"]  # type: ignore[index]
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (look["color_scheme"] == "light")
        picture(page, f"{view}-{shown}")

    check("list")
    late_colour = page.evaluate("getComputedStyle(document.querySelector('.redislock-late')).color")
    assert late_colour != page.evaluate("getComputedStyle(document.body).color")
    page.get_by_role("link", name="payment").click()
    page.get_by_text("View held lock").wait_for()
    check("detail")
    page.goto(LIST)
    for box in page.locator("input.action-select").all():
        box.check()
    page.locator("select[name=action]").select_option("force_release")
    page.locator("button[name=index]").click()
    button = page.get_by_role("button", name="Yes, force-release")
    button.wait_for()
    check("confirmation")
    assert button.evaluate("it => getComputedStyle(it).backgroundColor") == "rgb(186, 33, 33)"
    page.goto(f"{LIST}contention/")
    page.get_by_text("3 duplicate tasks prevented").wait_for()
    check("contention")
    client.delete(late._keys.queue)
    late.release()
