"""The admin pages with the templates of other packages: every page shows the locks, and every button does its work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from http.cookiejar import CookieJar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urljoin
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
import redis

from tests.admin.conftest import PATIENCE
from tests.support import PythonProcess, wait_in_a_thread
from tests.support.admin_pages import LIST, held, hold, page_of
from tests.support.themed_site import THEMES, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.processes

SEEN = """
element => {
    element.scrollIntoView({block: "center"});
    const box = element.getBoundingClientRect(), style = getComputedStyle(element);
    const at = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
    return box.x + box.width <= innerWidth && (at === element || element.contains(at)) && style.color;
}
"""
"""Returns the colour of an element's text, or false when the element is outside of the window or behind another one."""


class Page(HTMLParser):
    """What a page says, and what each button of it sends."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.links: dict[str, str] = {}
        """By their text."""
        self.fields: list[tuple[str, dict[str, str]]] = []
        """Each field with the id of its form."""
        self.forms: dict[str, dict[str, str]] = {}
        self._form = ""
        self._link: str | None = None
        self._words = ""
        self._hidden = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "form":
            self._form = given.get("id") or f"form {len(self.forms)}"
            self.forms[self._form] = given
        elif tag in ("input", "button"):
            self.fields.append((given.get("form", self._form), given))
        elif tag == "a":
            self._link, self._words = given.get("href"), ""
        elif tag in ("script", "style"):
            self._hidden += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._form = ""
        elif tag == "a":
            if self._link and self._words.strip():
                self.links.setdefault(self._words.strip(), self._link)
            self._link = None
        elif tag in ("script", "style"):
            self._hidden -= 1

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data
            self._words += data

    def press(self, words: str) -> tuple[str, dict[str, str]]:
        """Return the address to which the button with these words sends its form, and what the form sends."""
        [(form, button)] = [(form, field) for form, field in self.fields if field.get("value") == words]
        assert self.forms[form]["method"] == "post"
        sent = {
            field["name"]: field.get("value", "")
            for of, field in self.fields
            if of == form and "name" in field and field.get("type") != "submit"
        }
        return button.get("formaction", self.forms[form].get("action", "")), sent


class Site:
    """A site of a theme, as the superuser visits it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._cookies = CookieJar()
        self._opener = build_opener(HTTPCookieProcessor(self._cookies))

    def open(self, address: str, data: dict[str, str] | None = None) -> Page:
        sent = urlencode(data).encode() if data else None
        with self._opener.open(urljoin(self.url, address), sent) as response:
            return Page(response.read().decode())

    def cookie(self, name: str) -> str:
        [value] = [cookie.value for cookie in self._cookies if cookie.name == name]
        assert value
        return value

    def log_in(self) -> None:
        fields = self.open("/admin/login/").fields
        [token] = {field["value"] for _, field in fields if field.get("name") == "csrfmiddlewaretoken"}
        self.open(
            f"/admin/login/?next={LIST}", {"username": "root", "password": "secret", "csrfmiddlewaretoken": token}
        )


@pytest.fixture(params=THEMES, scope="module")
def site(request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    env = {
        "DJANGO_SETTINGS_MODULE": "tests.support.themed_site",
        "THEME": request.param,
        "THEME_DATABASE": str(tmp_path_factory.mktemp(request.param) / "db.sqlite3"),
        "THEME_REDIS": redis_url,
    }
    with closing(PythonProcess(serve, env=env, new=True)) as process:
        site = Site(process.wait_for()["url"])
        site.log_in()
        yield site
        process.send()
        process.finish()


def test_every_page_shows_the_locks_and_its_button_releases_the_lock(site: Site, client: redis.Redis) -> None:
    hold(client, "report", label="nightly[7]")
    hold(client, "invoice:42", label="billing[9]")
    wait_in_a_thread(client, "warehouse")

    page = site.open(LIST)
    assert {"report", "invoice:42"} <= page.links.keys()
    assert "Force-release selected locks…" in page.text
    assert "2 locks held" in page.text

    page = site.open(page.links["Contention in the last hour"])
    assert "Contention in the last hour" in page.text
    assert "warehouse" in page.links
    assert "1 wait, " in page.text

    page = site.open(page_of("report"))
    assert "report" in page.text
    assert "nightly[7]" in page.text

    page = site.open(*page.press("Force-release…"))
    assert "The holder is not stopped. If it still runs, two holders will overlap." in page.text
    assert "report" in page.text
    assert "nightly[7]" in page.text
    assert page.links["No, take me back"] == LIST

    page = site.open(*page.press("Yes, force-release"))
    assert "1 lock was force-released: “report”." in page.text
    assert not held(client, "report")
    assert held(client, "invoice:42")

    page = site.open(page_of("report", view="history"))
    assert "Held by nightly[7]" in page.text


@pytest.mark.browser
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["window", "phone"])
def test_the_confirmation_of_every_theme_lets_the_lock_and_the_words_on_the_button_be_seen(
    site: Site, client: redis.Redis, chromium: Browser, size: tuple[int, int]
) -> None:
    """Under grappelli the table was drawn outside of the window, and the button's words had the colour of the page."""
    hold(client, "report", label="nightly[7]")
    context = chromium.new_context(base_url=site.url, viewport={"width": size[0], "height": size[1]})
    context.set_default_timeout(PATIENCE)
    context.add_cookies([{"name": "sessionid", "value": site.cookie("sessionid"), "url": site.url}])
    page = context.new_page()
    page.goto(page_of("report"))
    button = page.locator("input[value^=Force-release]")
    assert button.evaluate(SEEN) == "rgb(255, 255, 255)"
    assert button.evaluate("it => getComputedStyle(it).backgroundColor") == "rgb(186, 33, 33)"
    button.click()
    button = page.get_by_role("button", name="Yes, force-release")
    button.wait_for()
    for text in ("report", "nightly[7]", "The holder is not stopped. If it still runs, two holders will overlap."):
        assert page.locator("#content-main").get_by_text(text, exact=True).evaluate(SEEN), text
    assert button.evaluate(SEEN) == "rgb(255, 255, 255)"
    assert button.evaluate("it => getComputedStyle(it).backgroundColor") == "rgb(186, 33, 33)"
    button.click()
    page.get_by_text("1 lock was force-released: “report”.").first.wait_for()
    assert not held(client, "report")
    context.close()
