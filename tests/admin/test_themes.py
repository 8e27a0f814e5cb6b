"""The admin pages with the templates of other packages: every page shows the locks, and every button does its work."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from tests.admin.conftest import PATIENCE
from tests.support import PythonProcess, wait_in_a_thread
from tests.support.admin_pages import LIST, held, hold, page_of
from tests.support.themed_site import THEMES, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.processes, pytest.mark.browser]

WINDOWS = ({"width": 390, "height": 844}, {"width": 1280, "height": 800})
WARNING = "The holder is not stopped. If it still runs, two holders will overlap."
SEEN = """
element => {
    element.scrollIntoView({block: "center"});
    const box = element.getBoundingClientRect(), style = getComputedStyle(element);
    const at = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
    return box.x + box.width <= innerWidth && (at === element || element.contains(at)) && style.color;
}
"""
"""Returns the colour of an element's text, or false when the element is outside of the window or behind another one."""


@pytest.mark.parametrize("theme", THEMES)
def test_every_page_shows_the_locks_and_its_button_can_be_seen_and_releases_the_lock(
    theme: str, client: redis.Redis, redis_url: str, tmp_path: Path, chromium: Browser
) -> None:
    """Under grappelli the table was drawn outside of the window, and the button's words had the colour of the page."""
    hold(client, "report", label="nightly[7]")
    hold(client, "invoice:42", label="billing[9]")
    wait_in_a_thread(client, "warehouse")
    env = {
        "DJANGO_SETTINGS_MODULE": "tests.support.themed_site",
        "THEME": theme,
        "THEME_DATABASE": str(tmp_path / "db.sqlite3"),
        "THEME_REDIS": redis_url,
    }
    with closing(PythonProcess(serve, env=env, new=True)) as site:
        with chromium.new_context(base_url=site.wait_for()["url"], viewport=WINDOWS[-1]) as context:
            context.set_default_timeout(PATIENCE)
            look_at_every_page_and_release(context.new_page())
        assert not held(client, "report")
        assert held(client, "invoice:42")
        site.send()
        site.finish()


def look_at_every_page_and_release(page: Page) -> None:
    page.goto(f"/admin/login/?next={LIST}")
    page.locator("input[name=username]").fill("root")
    page.locator("input[name=password]").fill("secret")
    page.locator("input[name=password]").press("Enter")
    page.wait_for_url(f"**{LIST}")
    for name in ("report", "invoice:42"):
        assert page.get_by_role("link", name=name, exact=True).count()
    shown = page.content()
    assert "Force-release selected locks…" in shown
    assert "2 locks held" in shown

    page.goto(str(page.get_by_role("link", name="Contention in the last hour").first.get_attribute("href")))
    assert page.get_by_role("link", name="warehouse").count()
    assert "1 wait, " in page.content()

    page.goto(page_of("report"))
    assert "nightly[7]" in page.content()
    can_be_seen(page, page.locator("input[value^=Force-release]"))
    can_be_seen(page, page.locator("input[value^=Ask]"), colour="rgb(32, 80, 103)")
    page.locator("input[value^=Force-release]").click()

    button = page.get_by_role("button", name="Yes, force-release")
    button.wait_for()
    assert page.get_by_role("link", name="No, take me back").get_attribute("href") == LIST
    can_be_seen(page, button, "report", "nightly[7]", WARNING)
    button.click()
    page.get_by_text("1 lock was force-released: “report”.").first.wait_for()

    page.goto(page_of("report", view="history"))
    assert "Held by nightly[7]" in page.content()


def can_be_seen(page: Page, button: Locator, *texts: str, colour: str = "rgb(186, 33, 33)") -> None:
    """Assert that the texts, and the words on the button, can be seen in each window."""
    for window in WINDOWS:
        page.set_viewport_size(window)  # type: ignore[arg-type]
        for text in texts:
            assert page.locator("#content-main").get_by_text(text, exact=True).evaluate(SEEN), (text, window)
        assert button.evaluate(SEEN) == "rgb(255, 255, 255)"
        assert button.evaluate("it => getComputedStyle(it).backgroundColor") == colour
