"""The admin pages in a real browser: what a user does, by mouse and keyboard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import redis
from django.contrib.admin.models import LogEntry
from playwright.sync_api import Error, Page, expect

from django_redislock.exceptions import LockLost
from tests.support.admin_pages import LIST, held, hold, next_millisecond, superuser

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.django_db(transaction=True)]


def expect_names(page: Page, names: list[str]) -> None:
    expect(page.locator("#result_list .redislock-name")).to_have_text(names)


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


@pytest.mark.parametrize("window", [{"width": 1280, "height": 720}, {"width": 375, "height": 667}])
def test_ask_to_stop(visit: Callable[..., Page], client: redis.Redis, window: dict[str, int]) -> None:
    """From the page of a lock, on a desk and on a phone; the other choice is still there, and works as ever."""
    stuck = hold(client, "stuck")
    page = visit(superuser(), viewport=window)
    page.get_by_role("link", name="stuck").click()
    ask, force = (page.get_by_role("button", name=name) for name in ("Ask to stop…", "Force-release…"))
    first, second = ask.bounding_box(), force.bounding_box()
    assert first is not None
    assert second is not None
    assert (first["y"], first["x"]) < (second["y"], second["x"])
    assert max(first["x"] + first["width"], second["x"] + second["width"]) <= window["width"]
    ask.click()
    page.get_by_text("Nobody else gets the lock before it is released, or expires.").wait_for()
    assert not page.get_by_text("two holders will overlap").is_visible()
    page.get_by_role("textbox", name="Reason").fill("a deploy")
    page.get_by_role("button", name="Yes, ask to stop").click()
    page.locator(".messagelist .success").wait_for()
    page.get_by_text("asked to stop", exact=True).wait_for()
    assert held(client, "stuck")
    with pytest.raises(LockLost, match=r"root asked for it back at .* UTC: a deploy"):
        stuck.extend()

    page.get_by_role("link", name="stuck").click()
    force.click()
    page.get_by_text("The holder is not stopped. If it still runs, two holders will overlap.").wait_for()
    page.get_by_role("button", name="Yes, force-release").click()
    page.locator(".messagelist .success").wait_for()
    assert not held(client, "stuck")


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
    for action, yes in (("Ask", "Yes, ask to stop"), ("Force", "Yes, force-release")):
        assert held(client, "stuck")
        page.get_by_role("checkbox", name="Select this lock: stuck").focus()
        page.keyboard.press("Space")
        page.locator("select[name=action]").focus()
        page.keyboard.type(action)
        page.locator("button[name=index]").focus()
        page.keyboard.press("Enter")
        page.get_by_role("button", name=yes).focus()
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
