"""The demo: what it shows holds, and however it ends, none of its processes is left."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import psutil
import pytest

from tests.support import BUSY, free_port, wait_until
from tests.support.example_project import PROJECT, Site, environment, part_of_tzdata

MOST = 9
"""Processes: the demo itself, Valkey, two of the site, the worker and its four children."""


@pytest.fixture(scope="module")
def quicker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which the reports take half the time."""
    return part_of_tzdata(tmp_path_factory.mktemp("tzdata"), 2)


class Demo:
    """A run of demo.py, and the processes that carry its mark."""

    def __init__(self, directory: Path, variables: dict[str, str], *arguments: object) -> None:
        self.directory = str(directory)
        self.mark = uuid.uuid4().hex
        self.output = directory / "output"
        env = environment(DEMO_MARK=self.mark, TMPDIR=str(directory), **variables)
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
        """Return every living process of this run.

        Valkey's title hides its environment, but it runs in the demo's folder.
        """
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
def start_demo(tmp_path: Path, quicker: dict[str, str]) -> Iterator[Callable[..., Demo]]:
    demos = []

    def start(*arguments: object) -> Demo:
        demos.append(Demo(tmp_path, quicker, *arguments))
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


@pytest.mark.long
@pytest.mark.processes
def test_the_demo_holds_and_serves_until_ctrl_c_and_leaves_nothing_behind(
    start_demo: Callable[..., Demo], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a taken port is no error
        demo = start_demo("--serve", "--port", taken.getsockname()[1])
        wait_until(lambda: demo.said("Ctrl-C ends"), timeout=180)
        assert demo.text.count("  ok  ") == 7, demo.text
        text = " ".join(demo.text.split())  # its lines are as wide as the terminal
        assert "computed: 1, waited: 39" in text
        assert "ran: 1, refused: 19, naming the one that ran: 19" in text
        assert "messages: 20, ran once: 20, most at once: 2, in order: yes" in text
        assert "All of it held" in demo.text
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
        assert len(demo.alive()) >= MOST
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(timeout=90) == 0, demo.text
        demo.wait_gone()
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


@pytest.mark.processes
@pytest.mark.parametrize("held", [True, False])
def test_without_serve_the_demo_ends_by_itself_and_its_status_says_whether_all_held(held: bool) -> None:
    code = f"import sys, demo; demo.run = lambda *given: {held}; sys.exit(demo.main())"
    env = environment(PYTHONPATH=str(PROJECT))
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60, check=False).returncode == (not held)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the children")
def test_the_demo_that_is_killed_while_ten_processes_migrate_leaves_none_behind(
    start_demo: Callable[..., Demo], tmp_path: Path
) -> None:
    demo = start_demo("--port", free_port())
    wait_until(lambda: any(" ready." in log.read_text() for log in tmp_path.glob("*/worker.log")), timeout=150)
    assert len(demo.alive()) >= MOST
    demo.process.kill()
    assert demo.process.wait(timeout=90) == -signal.SIGKILL, demo.text
    demo.wait_gone(20)


@pytest.mark.processes
def test_the_demo_ended_while_it_starts_leaves_no_process_behind(start_demo: Callable[..., Demo]) -> None:
    demo = start_demo("--port", free_port())
    wait_until(lambda: len(demo.alive()) >= 3)
    demo.process.send_signal(signal.SIGTERM)
    assert demo.process.wait(timeout=90) == 128 + signal.SIGTERM, demo.text
    demo.wait_gone()


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


@pytest.mark.slow
def test_the_row_of_the_limit_fails_when_a_message_did_not_run_too_many_ran_at_once_or_the_order_was_another() -> None:
    """Four messages, a limit of 2, and two children: +1 is the begin of the message 1, and -1 its end."""
    expected = {
        "+0 +1 -0 +2 -1 +3 -2 -3": (True, "ran once: 4, most at once: 2, in order: yes"),
        "+1 +0 -0 +3 -1 +2 -2 -3": (True, "ran once: 4, most at once: 2, in order: yes"),
        "+0 +1 -0 +2 +3 -1 -2 -3": (False, "ran once: 4, most at once: 3, in order: yes"),
        "+0 -0 +1 -1 +2 -2 +3 -3": (False, "ran once: 4, most at once: 1, in order: yes"),
        "+0 +1 -0 +2 -1 -2": (False, "ran once: 3, most at once: 2, in order: yes"),
        "+0 +1 -0 +2 -1 +3 -2": (False, "ran once: 3, most at once: 2, in order: yes"),
        "+0 +1 -0 +2 -1 +3 -2 -3 +3 -3": (False, "ran once: 3, most at once: 2, in order: yes"),
        "+0 +1 -0 +2 -1 +3 -2 -3 +4 -4": (False, "ran once: 4, most at once: 2, in order: yes"),
        "+1 +2 -1 +0 -2 +3 -0 -3": (False, "ran once: 4, most at once: 2, in order: no"),
        "": (False, "ran once: 0, most at once: 0, in order: yes"),
    }
    names = {"+": "begun", "-": "ended"}
    notes = [[(names[note[0]], int(note[1:])) for note in text.split()] for text in expected]
    code = (
        "import json, sys, django; django.setup(); import main_job;"
        "print(json.dumps([main_job.judge_limit(notes, 4, 2, 2) for notes in json.load(sys.stdin)]))"
    )
    env = environment(DJANGO_SETTINGS_MODULE="config.settings", PYTHONPATH=f"{PROJECT}:{PROJECT.parent}")
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        input=json.dumps(notes),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    came = [(held, lines[0].removeprefix("messages: 4, ")) for held, _, lines in json.loads(output)]
    assert came == list(expected.values())
