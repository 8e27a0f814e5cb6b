"""Processes of two versions of the package share one server, as they do while a new version is deployed."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import Server, lived, queue_of, wait_until
from tests.support.processes import ROOT, PythonProcess

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("two versions")]

EARLIER = "72f60efa"
"""The commit of the earlier version. With the first release this becomes the last release."""
EXPIRE = 1.5
PROGRAM = Path(__file__).with_name("peer.py")


class Peer(PythonProcess):
    """A process of one version, which does what it is asked."""

    def __init__(self, package: Path, directory: Path, url: str) -> None:
        path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
        base = url.rpartition("/")[0]
        more = {"PYTHONPATH": path, "PEER_URL": url, "PEER_BROKER": f"{base}/1", "PEER_EXPIRE": str(EXPIRE)}
        environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"} | more
        self._numbers = itertools.count()
        start = partial(subprocess.Popen, [sys.executable, str(PROGRAM)], cwd=directory, start_new_session=True)
        self.talk_to(start, env=environment)

    def start(self, do: str, **arguments: Any) -> Callable[[], Any]:
        """Ask for something; return a function that waits for the answer."""
        number = next(self._numbers)
        self.send(json.dumps({"number": number, "do": do, **arguments}))

        def answer() -> Any:
            found = self.look_for(number=number)
            assert "error" not in found, found.get("trace")
            return found["answer"]

        return answer

    def ask(self, do: str, **arguments: Any) -> Any:
        return self.start(do, **arguments)()

    def look_for(self, **values: object) -> dict[str, Any]:
        """Return the first of all its lines that has these values: two threads may answer at the same time."""
        self._seen = 0
        return self.wait_for(**values)


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The earlier version of the package."""
    folder = tmp_path_factory.mktemp("earlier")
    command = ["git", "archive", "--format=tar", EARLIER, "django_redislock"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert done.returncode == 0, f"the history of the repository is needed: {done.stderr.decode()}"
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def start(earlier: Path, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Peer]]:
    """``start("earlier")`` and ``start("later")`` start a process of that version."""
    folders = {"earlier": earlier, "later": ROOT}
    with ExitStack() as stack:

        def start(version: str) -> Peer:
            peer = Peer(folders[version], tmp_path_factory.mktemp("peer"), server.url)
            stack.callback(peer.close)
            assert Path(peer.ask("where")).parents[1] == folders[version]
            return peer

        yield start


@pytest.fixture(scope="session", params=[("earlier", "later"), ("later", "earlier")], ids=" and then ".join)
def versions(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def pair(versions: tuple[str, str], start: Callable[[str], Peer]) -> tuple[Peer, Peer]:
    """One process of each version."""
    return start(versions[0]), start(versions[1])


def test_waiters_of_both_versions_get_the_lock_in_the_order_in_which_they_came(pair, client):
    one, other = pair
    assert one.ask("acquire", name="queued")
    assert other.ask("acquire", name="queued") == 0
    assert other.ask("held") == [["queued", "peer", "lock"]]
    waiting = []
    for number in range(4):
        waiting.append(((other, one)[number % 2], (other, one)[number % 2].start("acquire", name="queued", timeout=60)))
        wait_until(lambda number=number: client.zcard(queue_of("queued")) == number + 1)
    fences = []
    holder = one
    for peer, answer in waiting:
        assert holder.ask("release", name="queued")
        fences.append(answer())
        holder = peer
    assert holder.ask("release", name="queued")
    assert fences == sorted(fences)


def test_a_version_renews_its_lock_and_the_other_one_takes_it_over_when_its_process_is_killed(pair, start, versions):
    one, other = start(versions[0]), pair[1]
    first = one.ask("acquire", name="renewed")
    lived(1.5 * EXPIRE)
    assert other.ask("acquire", name="renewed") == 0
    one.kill()
    assert other.ask("acquire", name="renewed", timeout=60) > first
    assert other.ask("release", name="renewed")


def test_a_lock_of_the_earlier_version_and_slots_of_the_same_name_do_not_meet(start, client):
    earlier, later = start("earlier"), start("later")
    fences = [later.ask("acquire", name="both", limit=2)]
    fences.append(earlier.ask("acquire", name="both"))
    waits = later.start("acquire", name="both", timeout=60)
    wait_until(lambda: client.zcard(queue_of("both")))
    assert later.ask("held") == [["both", "peer", "lock"], ["both", "peer", "semaphore"]]
    assert earlier.ask("release", name="both")
    fences.append(waits())
    assert fences == sorted(set(fences))
    assert fences[0] > 0
    assert later.ask("release", name="both")
    assert later.ask("release", name="both/2")
    assert earlier.ask("held") == []


def test_a_forced_release_by_one_version_is_reported_to_the_holder_of_the_other_one_with_its_reason(pair):
    one, other = pair
    assert one.ask("acquire", name="forced")
    assert other.ask("reset", name="forced") is True
    loss = wait_until(lambda: one.ask("losses"))[0]
    assert loss["code"] == "force_released"
    assert "olga" in loss["reason"]
    assert "stuck" in loss["reason"]


def test_the_earlier_version_renews_no_lock_that_the_later_one_recalled_and_is_told(start):
    earlier, later = start("earlier"), start("later")
    first = earlier.ask("acquire", name="recalled")
    waits = later.start("acquire", name="recalled", timeout=60)
    assert later.ask("recall", name="recalled") is True
    loss = wait_until(lambda: earlier.ask("losses"))[0]
    assert "olga" in loss["reason"]
    assert later.ask("held") == [["recalled", "peer", "lock"]], "until its release or its expiry"
    assert waits() > first
    assert later.ask("release", name="recalled")


def test_one_version_computes_a_value_and_the_other_one_waits_for_it(pair, client):
    one, other = pair
    computes = one.start("compute", key="k", value="of one", wait=True)
    one.look_for(computing="of one")
    waits = other.start("compute", key="k", value="of other", wait=False)
    wait_until(lambda: any(b":queue:" in key for key in client.scan_iter()))
    one.ask("open")
    assert (computes(), waits()) == ("of one", "of one")
    assert not any(line.get("computing") == "of other" for line in other.lines)


def test_a_value_that_the_other_version_invalidates_meanwhile_is_not_stored(pair):
    one, other = pair
    computes = one.start("compute", key="invalidated", value="old", wait=True)
    one.look_for(computing="old")
    other.ask("delete", key="invalidated")
    one.ask("open")
    assert computes() == "old"
    assert other.ask("cached", key="invalidated") is None


def test_a_message_of_one_version_keeps_out_that_of_the_other_one_and_runs_there_once(pair):
    one, other = pair
    assert one.ask("publish", what="a") is True
    assert other.ask("publish", what="a") is False
    assert one.ask("publish", what="a") is False
    assert other.ask("consume", what="a") == ["a"]
    wait_until(lambda: one.ask("held") == [])


def test_a_message_of_one_version_runs_in_the_other_one_with_the_arguments_that_both_gave_it(pair):
    one, other = pair
    assert one.ask("publish_newest", what="n", rows=1) is True
    assert other.ask("publish_newest", what="n", rows=2) is False
    assert one.ask("publish_newest", what="n", rows=3) is False
    assert other.ask("consume", what="n 3") == ["n 3"]
    assert one.ask("held") == []
    assert other.ask("publish_newest", what="n", rows=4) is True, "its place is free"
    assert one.ask("consume", what="n 4") == ["n 4"]
