from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.cookies import SimpleCookie
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import psutil
import pytest

from django_redislock.core import Lock
from tests.support import BUSY, RedisServer, free_port, wait_until

PROJECT = Path(__file__).parents[2] / "example_project"


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
        (
            "Europe/Berlin",
            2026,
            [(utc(2026, 3, 29, 1), 3600, 7200, "CET", "CEST"), (utc(2026, 10, 25, 1), 7200, 3600, "CEST", "CET")],
        ),
        (
            "America/New_York",
            2026,
            [(utc(2026, 3, 8, 7), -18000, -14400, "EST", "EDT"), (utc(2026, 11, 1, 6), -14400, -18000, "EDT", "EST")],
        ),
        (
            "Australia/Sydney",
            2026,
            [(utc(2026, 4, 4, 16), 39600, 36000, "AEDT", "AEST"), (utc(2026, 10, 3, 16), 36000, 39600, "AEST", "AEDT")],
        ),
        # Half an hour only, and at half past.
        (
            "Australia/Lord_Howe",
            2026,
            [(utc(2026, 4, 4, 15), 39600, 37800, "+11", "+1030"), (utc(2026, 10, 3, 15, 30), 37800, 39600, "+1030", "+11")],
        ),
        # Back for Ramadan.
        (
            "Africa/Casablanca",
            2024,
            [(utc(2024, 3, 10, 2), 3600, 0, "+01", "+00"), (utc(2024, 4, 14, 2), 0, 3600, "+00", "+01")],
        ),
        ("Asia/Tokyo", 2026, []),
        ("UTC", 2026, []),
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
    assert transitions.find_transitions(zone, year) == [(zone, *transition) for transition in expected]


@pytest.mark.parametrize("year", [1970, 1999, 2026])
def test_nothing_is_missed_where_two_years_meet(transitions: ModuleType, year: int) -> None:
    for zone in ("Europe/London", "Asia/Kathmandu", "America/Caracas", "Asia/Pyongyang"):
        found = [t for y in (year - 1, year, year + 1) for t in transitions.find_transitions(zone, y)]
        for before, after in pairwise(found):
            assert before.instant < after.instant
            assert (before.offset_after, before.abbreviation_after) == (after.offset_before, after.abbreviation_before)


def test_a_finer_walk_finds_the_same(transitions: ModuleType) -> None:
    for zone in ("Europe/Berlin", "Australia/Lord_Howe", "Africa/El_Aaiun"):
        fine = transitions.find_transitions(zone, 2026, timedelta(minutes=7))
        assert fine == transitions.find_transitions(zone, 2026)


# The site


class Site:
    """The site as served by a process of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    def request(self, method: str, path: str, body: str = "", **headers: str) -> tuple[http.client.HTTPResponse, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response, text

    def get(self, path: str) -> str:
        response, text = self.request("GET", path)
        assert response.status == 200, text[:2000]
        return text


@pytest.fixture(scope="module")
def site_server() -> Iterator[RedisServer]:
    """A server for the site alone, whose reports then stay from test to test."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def site(site_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    env = environment(REDIS_URL=site_server.url, DATABASE=str(directory / "db.sqlite3"))
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


def environment(**variables: str) -> dict[str, str]:
    """Return the environment for the example's own settings."""
    env = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    return env | {"PYTHONPATH": str(PROJECT.parent)} | variables


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


# The demo


class Demo:
    """A run of demo.py, and the processes that carry its mark."""

    def __init__(self, directory: Path, *arguments: object) -> None:
        self.directory = str(directory)
        self.mark = uuid.uuid4().hex
        self.output = directory / "output"
        env = environment(DEMO_MARK=self.mark, TMPDIR=str(directory))
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(PROJECT / "demo.py"), *map(str, arguments)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def said(self, text: str) -> bool:
        assert self.process.poll() is None, self.text
        return text in self.text

    @property
    def text(self) -> str:
        return self.output.read_text()

    def alive(self) -> list[psutil.Process]:
        """Return every living process of this run. (Valkey's title hides its environment, but it runs in the demo's folder.)"""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                ours = process.environ().get("DEMO_MARK") == self.mark or process.cwd().startswith(self.directory)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_gone(self, timeout: float = BUSY) -> None:
        """Wait until no process lives; one that was killed may take a moment to die."""
        wait_until(lambda: not self.alive(), timeout)

    def close(self) -> None:
        for process in self.alive():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    demos = []

    def start(*arguments: object) -> Demo:
        demos.append(Demo(tmp_path, *arguments))
        return demos[-1]

    yield start
    for demo in demos:
        demo.close()


def contention_page(url: str) -> str:
    """Log in to the demo's admin, and return its page about contention."""
    open_url = build_opener(HTTPCookieProcessor()).open
    page = f"{url}/admin/django_redislock/heldlock/contention/"
    with open_url(page, timeout=60) as response:
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', response.read().decode())
        login = response.url
    assert token is not None
    form = urlencode({"username": "demo", "password": "demo", "csrfmiddlewaretoken": token[1], "next": page})
    with open_url(login, form.encode(), timeout=60):
        pass
    with open_url(page, timeout=60) as response:
        text: str = response.read().decode()
    return text


@pytest.mark.processes
def test_the_demo_holds_and_leaves_nothing_behind(start_demo: Callable[..., Demo], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a taken port is no error
        demo = start_demo("--port", taken.getsockname()[1])
        assert demo.process.wait(timeout=180) == 0, demo.text
        demo.wait_gone()
    assert demo.text.count("  ok  ") == 6, demo.text
    text = " ".join(demo.text.split())  # its lines are as wide as the terminal
    assert "computed: 1, waited: 39" in text
    assert "ran: 1, refused: 19, naming the one that ran: 19" in text
    assert "All of it held" in demo.text
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


@pytest.mark.processes
def test_the_demo_serves_until_ctrl_c(start_demo: Callable[..., Demo], tmp_path: Path) -> None:
    demo = start_demo("--serve", "--port", free_port())
    wait_until(lambda: demo.said("Ctrl-C ends"), timeout=180)
    address = re.search(r"The site +http://127\.0\.0\.1:(\d+)/ ", demo.text)
    assert address is not None
    site = Site(int(address[1]))
    text = site.get(f"/{datetime.now(UTC).year}/")
    assert "39 waited instead" in text
    assert "19 refused" in text
    assert 'redislock_held_locks{connection="default"}' in site.get("/metrics")
    saved = contention_page(f"http://127.0.0.1:{address[1]}")
    duplicates = re.search(r"(\d+) duplicate tasks prevented", saved)
    assert duplicates is not None
    assert int(duplicates[1]) >= 19
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(timeout=90) == 0, demo.text
    demo.wait_gone()
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_demo_ended_early_leaves_no_process_behind(start_demo: Callable[..., Demo], number: signal.Signals) -> None:
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells the children")
    demo = start_demo("--port", free_port())
    wait_until(lambda: demo.said("Started in"), timeout=150)
    assert len(demo.alive()) >= 7  # itself, Valkey, two processes of the site, the worker and its two children
    demo.process.send_signal(number)
    assert demo.process.wait(timeout=90) == (-number if number == signal.SIGKILL else 128 + number), demo.text
    demo.wait_gone(20 if number == signal.SIGKILL else BUSY)


def test_a_row_that_does_not_hold_says_what_was_expected_and_what_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(PROJECT)
    import demo

    def fail() -> None:
        raise ValueError("no such thing")

    assert demo.row("Good", lambda: (True, "one", ["one"])) is True
    assert demo.row("Bad", lambda: (False, "one", ["two"])) is False
    assert demo.row("Worse", fail) is False
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["Good", "ok", "one"],
        ["Bad", "FAILED", "expected", "one"],
        ["came", "two"],
        ["Worse", "FAILED", "expected", "no", "error"],
        ["came", "ValueError:", "no", "such", "thing"],
    ]
