"""The example site: the clock changes that it computes, and the pages that it serves."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.cookies import SimpleCookie
from types import ModuleType
from typing import Any

import pytest

from django_redislock.core import Lock
from tests.support import RedisServer, free_port, wait_until
from tests.support.example_project import PROJECT, Site, environment, part_of_tzdata


@pytest.fixture
def transitions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PROJECT)
    from clock_changes import transitions

    return transitions


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)


@pytest.mark.parametrize(
    ("zone", "year", "expected"),
    [
        ("Europe/Berlin", 2026, [
            (utc(2026, 3, 29, 1), 3600, 7200, "CET", "CEST"),
            (utc(2026, 10, 25, 1), 7200, 3600, "CEST", "CET"),
        ]),
        # Half an hour only, and at half past.
        ("Australia/Lord_Howe", 2026, [
            (utc(2026, 4, 4, 15), 39600, 37800, "+11", "+1030"),
            (utc(2026, 10, 3, 15, 30), 37800, 39600, "+1030", "+11"),
        ]),
        ("Asia/Tokyo", 2026, []),
        # Seconds in the offset.
        ("Africa/Monrovia", 1972, [(utc(1972, 1, 7, 0, 44, 30), -2670, 0, "MMT", "GMT")]),
        # A day skipped at midnight, local time.
        ("Pacific/Apia", 2011, [
            (utc(2011, 4, 2, 14), -36000, -39600, "-10", "-11"),
            (utc(2011, 9, 24, 14), -39600, -36000, "-11", "-10"),
            (utc(2011, 12, 30, 10), -36000, 50400, "-10", "+14"),
        ]),
        # Exactly when the year begins.
        ("America/Caracas", 1965, [(utc(1965, 1, 1, 4, 30), -16200, -14400, "-0430", "-04")]),
    ],
)  # fmt: skip
def test_transitions_of_a_zone(transitions: ModuleType, zone: str, year: int, expected: list[tuple[Any, ...]]) -> None:
    found = transitions.find_transitions(zone, year)
    assert found == [(zone, *transition) for transition in expected]
    assert found == transitions.find_transitions(zone, year, timedelta(minutes=20)), "a finer walk finds the same"


# The site


@pytest.fixture(scope="module")
def site_server() -> Iterator[RedisServer]:
    """A server for the site alone, whose reports then stay from test to test."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def site(site_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    path = part_of_tzdata(tmp_path_factory.mktemp("tzdata"), 40)
    env = environment(REDIS_URL=site_server.url, DATABASE=str(directory / "db.sqlite3"), **path)
    subprocess.run([sys.executable, "manage.py", "migrate", "-v0"], cwd=PROJECT, env=env, check=True, timeout=180)
    port = free_port()
    with (directory / "log").open("wb") as log:
        command = [sys.executable, "serve.py", "--port", str(port)]
        process = subprocess.Popen(command, cwd=PROJECT, env=env, stdout=log, stderr=log)

    def serves() -> bool:
        assert process.poll() is None, (directory / "log").read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
        return False

    try:
        wait_until(serves, timeout=120)
        yield Site(port)
    finally:
        process.kill()
        process.wait()


@pytest.mark.processes
def test_the_page_shows_the_report(site: Site) -> None:
    text = site.get("/2026/")
    assert "Every clock change of 2026" in text
    rows = [re.sub(r"<[^>]*>|\s+", " ", row) for row in re.findall(r"<tr.*?</tr>", text, re.DOTALL)]
    berlin = [" ".join(row.split()) for row in rows if "Europe/Berlin" in row]
    assert berlin == [
        "Europe/Berlin Sun 29 Mar, 01:00:00 +1 h +01:00 → +02:00 CET → CEST",
        "Europe/Berlin Sun 25 Oct, 01:00:00 −1 h +02:00 → +01:00 CEST → CET",  # noqa: RUF001
    ]
    assert "From the cache" in site.get("/2026/")
    assert "/admin/django_redislock/heldlock/" in text


@pytest.mark.processes
def test_the_card_of_held_locks_has_a_limit(site: Site, site_server: RedisServer) -> None:
    with site_server.client() as client:
        locks = [Lock(client, f"held:{number:02}", expire=600, auto_renewal=False) for number in range(13)]
        for lock in locks:
            lock.acquire()
        text = site.get("/2026/")
        for lock in locks:
            lock.release()
    assert len(re.findall(r'<b class="name">held:', text)) == 10
    assert "3 more are held" in text


@pytest.mark.processes
def test_the_filter_shows_zones_with_and_without_changes(site: Site) -> None:
    text = site.get("/2026/?zone=berlin")
    assert text.count('<td class="zone">') == 2
    text = site.get("/2026/?zone=Tokyo")
    assert "No change in 2026: Asia/Tokyo." in text
    assert "<table>" not in text
    text = site.get("/2026/?zone=%3Cscript%3E")
    assert "No zone is named like “&lt;script&gt;”." in text


@pytest.mark.processes
def test_the_json_is_exact_and_says_where_it_comes_from(site: Site) -> None:
    first, text = site.request("GET", "/2025.json")
    again, same = site.request("GET", "/2025.json")
    assert first.headers["X-Report"] in ("computed", "cached")
    assert (again.headers["X-Report"], same) == ("cached", text)
    report = json.loads(text)
    assert report["year"] == 2025
    assert {
        "zone": "Europe/Berlin",
        "instant": "2025-03-30T01:00:00Z",
        "offset_before": 3600,
        "offset_after": 7200,
        "abbreviation_before": "CET",
        "abbreviation_after": "CEST",
    } in report["transitions"]


@pytest.mark.processes
@pytest.mark.parametrize("path", ["/1969/", "/2101/", "/1969.json", "/99999999999999999999/"])
def test_a_year_without_reports_is_not_found(site: Site, path: str) -> None:
    assert site.request("GET", path)[0].status == 404


@pytest.mark.processes
def test_only_the_button_starts_a_task(site: Site, site_server: RedisServer) -> None:
    with site_server.client() as client:
        assert site.request("GET", "/2026/rebuild/")[0].status == 405
        assert site.request("POST", "/2026/rebuild/")[0].status == 403
        assert client.llen("celery") == 0

        response, text = site.request("GET", "/2026/")
        cookies = SimpleCookie(response.headers["Set-Cookie"])
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', text)
        assert token is not None
        response, _ = site.request(
            "POST",
            "/2026/rebuild/",
            f"csrfmiddlewaretoken={token[1]}",
            **{
                "Content-Type": "application/x-www-form-urlencoded",
                "Cookie": f"csrftoken={cookies['csrftoken'].value}",
            },
        )
        assert (response.status, response.headers["Location"]) == (302, "/2026/")
        messages = [json.loads(message) for message in client.lrange("celery", 0, -1)]
        assert [message["headers"]["task"] for message in messages] == ["rebuild_report"]


@pytest.mark.processes
def test_static_files_and_the_admin_are_served(site: Site) -> None:
    assert "prefers-color-scheme: dark" in site.get("/static/clock_changes/style.css")
    assert site.request("GET", "/")[0].headers["Location"] == f"/{datetime.now(UTC).year}/"
    assert "Log in" in site.get("/admin/login/")
