"""The admin pages in a real browser: how they look, in both colour schemes, wide and narrow, and from right to left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from django_redislock.celery.execution_lock import ExecutionLock
from tests.support import wait_in_a_thread
from tests.support.admin_pages import LIST, hold, next_millisecond, rewrite, superuser

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.django_db(transaction=True)]

WINDOWS = {"desk": {"width": 1280, "height": 720}, "phone": {"width": 390, "height": 844}}
LOUD = ("serious", "critical")


def width(page: Page) -> int:
    return page.evaluate("document.documentElement.scrollWidth")


def picture(page: Page, name: str) -> None:
    """Take a picture where REDISLOCK_SCREENSHOTS names a folder."""
    folder = os.environ.get("REDISLOCK_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def check(page: Page, axe: Axe, view: str) -> None:
    """Look at a page in both schemes, wide and narrow: nothing sticks out of the window, and axe finds nothing."""
    for shown, window in WINDOWS.items():
        page.set_viewport_size(window)  # type: ignore[arg-type]
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.evaluate("Promise.allSettled(document.getAnimations().map(each => each.finished))")
            page.evaluate("document.fonts.ready")
            assert width(page) <= window["width"], (view, shown)
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(255, 255, 255)") == (scheme == "light")
            found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
            loud = {each["id"]: [node["html"] for node in each["nodes"]] for each in found if each["impact"] in LOUD}
            assert loud == {}, (view, shown, scheme)
            picture(page, f"{view}-{scheme}-{shown}")


@pytest.mark.long
def test_every_page_is_accessible_and_fits_and_follows_the_scheme(
    visit: Callable[..., Page], client: redis.Redis, listen: Callable[..., None]
) -> None:
    """REDISLOCK_SCREENSHOTS names a folder to look at."""
    hold(client, "celery:reports.tasks.rebuild:5f1c9a", kind="celery", label="reports.tasks.rebuild[0b6c8f0e-3b60]")
    hold(client, "x" * 300)
    late = hold(client, "<b>payment</b>:export", label="payments.export", auto_renewal=True)
    client.pexpire(late._keys.lock, 100_000)
    listen("redislock:wake:0:1:web")
    client.zadd(late._keys.queue, {f"redislock:wake:0:1:web\n{number}": number for number in range(2)})
    for name in ("celery:reports.tasks.rebuild:5f1c9a", "cache::1:report:1987", "x" * 300):
        ExecutionLock(client, name).count_duplicate()
    page, axe = visit(superuser()), Axe()

    check(page, axe, "list")
    late_colour = page.evaluate("getComputedStyle(document.querySelector('.redislock-late')).color")
    assert late_colour != page.evaluate("getComputedStyle(document.body).color")
    page.get_by_role("link", name="payment").click()
    page.get_by_text("View held lock").wait_for()
    check(page, axe, "detail")
    page.goto(LIST)
    for box in page.locator("input.action-select").all():
        box.check()
    page.locator("select[name=action]").select_option("force_release")
    page.locator("button[name=index]").click()
    button = page.get_by_role("button", name="Yes, force-release")
    button.wait_for()
    check(page, axe, "confirmation")
    assert button.evaluate("it => getComputedStyle(it).backgroundColor") == "rgb(186, 33, 33)"
    page.goto(f"{LIST}contention/")
    page.get_by_text("3 duplicate tasks prevented").wait_for()
    check(page, axe, "contention")
    client.delete(late._keys.queue)
    late.release()


ENDS_OF_LINES = """
element => {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), ends = [];
    let last = null, top = null;
    while (walker.nextNode()) {
        for (let index = 0; index < walker.currentNode.length; index++) {
            const range = document.createRange();
            range.setStart(walker.currentNode, index);
            range.setEnd(walker.currentNode, index + 1);
            const box = range.getBoundingClientRect();
            if (top !== null && box.top > top) ends.push(last);
            [last, top] = [range.toString(), box.top];
        }
    }
    return ends;
}
"""
"""Returns the last character of each line of an element, but for the last line."""


@pytest.mark.parametrize("language", ["en", "de"])
def test_all_columns_fit_beside_the_filters_and_the_lines_of_a_name_end_after_its_separators(
    visit: Callable[..., Page], client: redis.Redis, settings: Any, language: str
) -> None:
    """At 1280 px names were broken within a word, although the columns beside them were half empty."""
    settings.LANGUAGE_CODE = language
    name, task = "celery:reports.tasks.rebuild_report:5f1c9a", "reports.tasks.rebuild_report[0b6c8f0e-3b60-4a52-9c1f]"
    hold(client, name, kind="celery", label=task, expire=5000)
    next_millisecond(client)
    hold(client, "warehouse:berlin", label="nightly import")
    ExecutionLock(client, name).count_duplicate()
    page = visit(superuser())
    for path in (LIST, f"{LIST}contention/"):
        page.goto(path)
        for size in (1440, 1280):
            page.set_viewport_size({"width": size, "height": 720})
            table = page.locator(".results").first
            assert table.evaluate("it => it.scrollWidth - it.clientWidth") == 0, path
            shown = page.locator(".redislock-name").first
            assert shown.inner_text() == name
            assert set(shown.evaluate(ENDS_OF_LINES)) <= set(":._"), path
            picture(page, f"names-{language}-{size}-{path.rstrip('/').rpartition('/')[2]}")
            if path != LIST:
                continue
            assert page.get_by_title(task).inner_text() == "reports.tasks.rebuild_report[0b6c8f0e…]"
            line = page.locator(".field-kind").first.evaluate("it => parseFloat(getComputedStyle(it).lineHeight)")
            heights = page.locator(".redislock-name").evaluate_all(
                "all => all.map(it => it.getClientRects()[0].height)"
            )
            assert max(heights) < 4 * line
            box, button = (page.locator(each).bounding_box() for each in (".redislock-refresh", ".object-tools a"))
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


def test_from_right_to_left_every_page_keeps_the_order_of_times_and_names(
    visit: Callable[..., Page], client: redis.Redis, settings: Any
) -> None:
    settings.LANGUAGE_CODE = "ar"
    rewrite(client, hold(client, "1 invoice 42", expire=7200), younger_by=-3450)
    wait_in_a_thread(client, "2 report 43")
    page = visit(superuser(), viewport=WINDOWS["desk"])
    assert page.evaluate("document.documentElement.dir") == "rtl"
    name = page.locator(".redislock-name")

    def keep_order(view: str, age: Locator) -> None:
        age.wait_for()
        assert age.evaluate(RIGHT_TO_LEFT) == age.inner_text().split()
        assert len(age.inner_text().split()) == 4
        assert width(page) <= 1280
        picture(page, f"{view}-right-to-left")

    keep_order("list", page.locator(".field-held_for .nowrap"))
    assert name.evaluate(RIGHT_TO_LEFT) == ["1", "invoice", "42"]
    page.locator(".field-lock a").click()
    keep_order("detail", page.locator(".field-held_for .nowrap"))
    page.goto(LIST)
    page.locator("input.action-select").check()
    page.locator("select[name=action]").select_option("force_release")
    page.locator("button[name=index]").click()
    page.locator("#redislock-reason").wait_for()
    keep_order("confirmation", page.locator("td .nowrap"))
    assert name.evaluate(RIGHT_TO_LEFT) == ["1", "invoice", "42"]
    page.goto(f"{LIST}contention/")
    wait = page.locator(".redislock-results tbody td").first
    number, unit = wait.inner_text().split()
    assert wait.evaluate(RIGHT_TO_LEFT) == [number, unit]
    assert name.evaluate(RIGHT_TO_LEFT) == ["2", "report", "43"]
    ticks = [tick.bounding_box()["x"] for tick in page.locator(".redislock-axis bdi").all()]  # type: ignore[index]
    assert ticks == sorted(ticks), "time runs from left to right"
    assert width(page) <= 1280
    picture(page, "contention-right-to-left")


def test_the_page_of_contention_sorts_links_and_is_as_wide_as_its_table(
    visit: Callable[..., Page], client: redis.Redis
) -> None:
    wait_in_a_thread(client, "waited for")
    for name in ("celery:a", "celery:b", "celery:b"):
        ExecutionLock(client, name).count_duplicate()
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
