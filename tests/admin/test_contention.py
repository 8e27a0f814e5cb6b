"""The admin's page of the waits of the last hour."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
import redis
from django.contrib import admin
from django.contrib.admin import AdminSite
from django.test import Client
from django.urls import path
from django.utils import translation

from django_redislock import inventory
from django_redislock.admin import HeldLockAdmin, contention
from django_redislock.admin.contention import HEIGHT, WIDTH, bars
from django_redislock.celery.execution_lock import ExecutionLock
from django_redislock.core.listing import Waits
from django_redislock.models import HeldLock
from tests.support import counting, wait_in_a_thread
from tests.support.admin_pages import LIST, browser, hold, messages, names, page_of, superuser, user

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("locks_by_url")]
PAGE = LIST + "contention/"


def get(web: Client) -> str:
    response = web.get(PAGE)
    assert response.status_code == 200
    return response.content.decode()


def plot(html: str) -> ElementTree.Element:
    found = re.search(r'<svg class="redislock-plot".*?</svg>', html, re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found[0])


def test_nobody_waited() -> None:
    web = browser(superuser())
    assert f'<a href="{PAGE}">' in web.get(LIST).content.decode()
    html = get(web)
    assert "No wait has ended in the last hour, and nothing was saved." in html
    assert "Nobody waits for a lock now." in html
    assert plot(html).findall("rect") == []


def test_names_and_plot(client: redis.Redis) -> None:
    wait_in_a_thread(client, "<b>invoice</b>")
    html = get(browser(superuser()))
    assert "&lt;b&gt;invoice&lt;/b&gt;" in html
    assert "<b>invoice" not in html
    assert "1 wait," in html
    [bar] = plot(html).findall("rect")
    assert bar.find("title") is not None
    assert 0 < float(bar.attrib["height"]) <= HEIGHT


def test_what_was_saved(client: redis.Redis) -> None:
    for _ in range(2):
        ExecutionLock(client, "celery:<i>report</i>").count_duplicate()
    html = get(browser(superuser()))
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html[html.index("<tbody>") :])
    assert cells[1:] == ["\N{EN DASH}", "\N{EN DASH}", "0", "0", "2", "0"]  # nobody waited
    assert "&lt;i&gt;report" in cells[0]
    assert "2 duplicate tasks prevented" in html
    assert "0 recomputations avoided" in html


def test_names_that_saved_most_are_shown_beside_those_waited_for_longest(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contention, "ROWS", 1)
    for name in ("waited for", "waited for longer"):
        wait_in_a_thread(client, name)
    for name in ("saved", "saved more", "saved more"):
        ExecutionLock(client, name).count_duplicate()
    html = get(browser(superuser()))
    assert len(names(html)) == 2
    assert names(html)[1] == "saved more"
    assert "Only the names with the longest waits and the highest savings are shown." in html


def test_few_commands(client: redis.Redis) -> None:
    web = browser(superuser())
    get(web)
    with counting(client) as counts:
        get(web)
    assert counts["evalsha"] == 2, "the counts of all buckets, and the numbers of held locks"


def test_the_locks_that_are_waited_for_now_come_first_with_the_number_and_the_time_of_their_waiters(
    client: redis.Redis, listen: Callable[..., None]
) -> None:
    """Three callers had waited for 20 s, and the page said that nobody had, because a wait counts at its end."""
    channels = [f"redislock:wake:0:{number}:web" for number in range(1, 6)]
    listen(*channels)
    now = client.time()[0]
    for name, waiters, seconds in (("<i>report", 5, 90), ("invoice", 1, 7200), ("idle", 0, 0)):
        lock = hold(client, name, label=f"job of {name}")
        for number, channel in enumerate(channels[:waiters]):
            client.zadd(lock._keys.queue, {f"{channel}\n{number}": (now - seconds) * 1_000_000 + number})
    wait_in_a_thread(client, "ended")
    html = get(browser(superuser()))
    assert names(html) == ["invoice", "<i>report", "ended"]
    table = html[html.index("<tbody>") : html.index("</tbody>")]
    assert re.search(
        r'1<ol class="redislock-waiters"><li><bdi>web · 1</bdi> for <bdi>2 h( \d+ s)?</bdi></li></ol>', table
    )
    assert re.search(r"5<ol.*?web · 1</bdi> for <bdi>1 min 3\d s.*?web · 3.*?<li>…</li></ol>", table)
    assert "web · 4" not in table
    assert "job of &lt;i&gt;report" in table
    assert f'href="{page_of("invoice")}"' in table
    assert "Nobody waits" not in html


def test_of_many_locks_that_are_waited_for_those_with_most_waiters_are_shown(
    client: redis.Redis, listen: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contention, "ROWS_NOW", 1)
    listen("redislock:wake:0:1:web")
    for name, waiters in (("few", 1), ("many", 2)):
        queue = hold(client, name)._keys.queue
        client.zadd(queue, {f"redislock:wake:0:1:web\n{number}": 1 + number for number in range(waiters)})
    html = get(browser(superuser()))
    assert names(html) == ["many"]
    assert "2 locks are waited for; those with most waiters are shown." in html


def test_who_may_see_it() -> None:
    assert browser(user("viewer", "view_heldlock")).get(PAGE).status_code == 200
    assert browser(user("nobody")).get(PAGE).status_code == 403
    assert Client().get(PAGE).status_code == 302


def test_a_connection_that_is_down(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It was asked for its counts and for its locks: a silent server kept the page waiting for 10 s, not for 5."""
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0"}
    response = browser(superuser()).get(PAGE)
    assert response.status_code == 200
    assert any("“url” cannot be shown: ConnectionError" in message for message in messages(response))
    html = response.content.decode()
    assert "Nobody waits" not in html
    assert "No wait has ended" not in html
    assert len([record for record in caplog.records if record.name == "django_redislock"]) == 1


def test_of_more_locks_than_are_read_it_does_not_say_that_nobody_waits(
    client: redis.Redis, listen: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock that is waited for was beyond the 10,000 that are read, and the page knew nothing of it."""
    monkeypatch.setattr(inventory, "LIMIT", 1)
    listen("redislock:wake:0:1:web")
    queue = [hold(client, name) for name in "ab"][1]._keys.queue
    client.zadd(queue, {"redislock:wake:0:1:web\n1": 1})
    web = browser(superuser())
    response = web.get(PAGE)
    assert "holds more than 1 locks" in messages(response)[0]
    assert "Nobody waits" not in response.content.decode()
    monkeypatch.setattr(inventory, "LIMIT", 2)
    assert names(get(web)) == ["b"]


@pytest.mark.parametrize("language", ["en", "de"])
def test_bars_fit_and_are_written_with_points(language: str) -> None:
    minutes = [Waits(seconds=number / 7, waits=number % 3) for number in range(60)]
    with translation.override(language):
        drawn = bars(minutes)
    assert len(drawn) == sum(minute.waits > 0 for minute in minutes)
    for bar in drawn:
        assert 0 <= float(bar.x) <= WIDTH - float(bar.width)
        assert float(bar.y) + float(bar.height) == pytest.approx(HEIGHT, abs=0.11)


second_site = AdminSite(name="second")
second_site.register(HeldLock, HeldLockAdmin)
urlpatterns = [path("admin/", admin.site.urls), path("second/", second_site.urls)]


def test_with_two_admin_sites_each_links_to_its_own_pages(
    client: redis.Redis, settings: Any, listen: Callable[..., None]
) -> None:
    settings.ROOT_URLCONF = __name__
    listen("redislock:wake:0:1:web")
    client.zadd(hold(client, "now")._keys.queue, {"redislock:wake:0:1:web\n1": 1})
    wait_in_a_thread(client, "ended")
    web = browser(superuser())
    for at, other in (("/admin/", "/second/"), ("/second/", "/admin/")):
        listed = web.get(f"{at}django_redislock/heldlock/").content.decode()
        [address] = re.findall(r'href="([^"]+/contention/)"', listed)
        html = web.get(address).content.decode()
        assert names(html) == ["now", "ended"]
        assert f'href="{at}django_redislock/heldlock/' in html
        assert f'href="{other}' not in html
