"""Who believes to hold a lock while another one does: failovers by Sentinel under load, with real servers.

python benchmarks/failovers.py [NUMBER] [--kind KIND]... [--expire SECONDS] [--safe] [--parallel N] [--json]

NUMBER failovers (default 4) of each kind in turn. A deployment is a primary, a replica and three Sentinels; three
processes hold and wait for four locks with an expiry of 6 s (--expire). When a replica was promoted, one of the
processes has to connect anew, as one that starts then; the others keep their connections as long as the former primary
lets them.

kill       kill -9 of the primary, which comes back 2 s after the promotion
hang       SIGSTOP of the primary, SIGCONT 2 s after the promotion
planned    SENTINEL FAILOVER
partition  the primary is cut off from Sentinels and replica, but not from the processes, until the locks held before
           the promotion have ended, and 4 s more

With --safe: min_replicas=1, min-replicas-to-write 1 and min-replicas-max-lag 2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import redis

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from django_redislock.core import Lock  # noqa: E402
from django_redislock.exceptions import LockBackendError, LockLost  # noqa: E402
from django_redislock.server_url import client_from_url  # noqa: E402
from tests.support import Deployment  # noqa: E402

NAMES = ["a", "b", "c", "d"]
PROCESSES = 3
KINDS = ["kill", "hang", "planned", "partition"]
BACK_AFTER = {"kill": 2.0, "hang": 2.0, "planned": 0.0}
"""Seconds from the promotion until the former primary is brought back."""
SAFE = {"min_replicas_to_write": "1", "min_replicas_max_lag": "2"}


class Belief(NamedTuple):
    """From when to when a thread believed to hold a lock, and how it ended: released, lost or unknown."""

    name: str
    fence: int
    began: float
    ended: float
    how: str


class Overlap(NamedTuple):
    """A time for which two threads believed to hold one lock."""

    kind: str
    seconds: float
    reported: bool
    """Whether the first holder was told of its loss."""
    fence_grew: bool


def hold(url: str, name: str, expire: float, min_replicas: int, end: threading.Event) -> None:
    """Acquire and hold the lock again and again, and print the beliefs."""
    client = client_from_url(url)
    while not end.is_set():
        over = threading.Event()
        lock = Lock(client, name, expire=expire, min_replicas=min_replicas, on_lost=lambda _, over=over: over.set())
        try:
            if not lock.acquire(timeout=2):
                continue
        except LockBackendError:
            end.wait(0.2)
            continue
        began, fence = time.monotonic(), lock.fence
        over.wait(random.uniform(0.2, 2 * expire))
        ended, how = time.monotonic(), "released"
        try:
            lock.release()
        except LockLost:
            how = "lost"
        except LockBackendError:
            how = "unknown"
        os.write(1, json.dumps(Belief(name, fence, began, ended, how)).encode() + b"\n")  # in one piece, beside others


def work(url: str, expire: float, min_replicas: int) -> None:
    """Be one of the processes, until the end of the input."""
    end = threading.Event()
    threads = [threading.Thread(target=hold, args=(url, name, expire, min_replicas, end)) for name in NAMES]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    end.set()
    for thread in threads:
        thread.join()


@contextmanager
def load(url: str, expire: float, min_replicas: int) -> Iterator[list[Belief]]:
    """Run the processes; afterwards the list has what they believed."""
    beliefs: list[Belief] = []
    processes = []
    for number in range(PROCESSES):
        options = [f"{url}?client_name=process{number}", str(expire), str(min_replicas)]
        command = [sys.executable, __file__, "--work", *options]
        output = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdin=output, stdout=output, stderr=subprocess.DEVNULL, text=True))
    with ThreadPoolExecutor(PROCESSES) as pool:
        outputs = [pool.submit(process.stdout.read) for process in processes]  # type: ignore[union-attr]
        try:
            yield beliefs
        finally:
            for process in processes:
                process.stdin.close()  # type: ignore[union-attr]
        for output in outputs:
            beliefs += [Belief(*json.loads(line)) for line in output.result(120).splitlines()]
    for process in processes:
        process.wait(60)


def fail_over(deployment: Deployment, kind: str, expire: float) -> None:
    """Let one failover happen, and return when all is whole again."""
    faults = {"kill": deployment.kill, "hang": deployment.hang, "planned": deployment.switch}
    former = faults.get(kind, deployment.cut_off)()
    deployment.wait_for_another(former)
    with suppress(redis.RedisError), deployment.client(former, retry=None, socket_timeout=0.5) as client:
        for other in client.client_list():
            if other["name"] == "process0":
                client.client_kill_filter(_id=other["id"])
    time.sleep(BACK_AFTER.get(kind, expire + 4))
    deployment.heal(former)


class Result(NamedTuple):
    """What a run of failovers showed."""

    done: list[str]
    """The kinds of the failovers after which all became whole again."""
    holders: int
    """The number of acquisitions."""
    overlaps: list[Overlap]


def run(kinds: Iterable[str], expire: float, safe: bool) -> Result:
    """Let failovers of these kinds happen, one after the other."""
    begins: list[tuple[float, str]] = []
    done = []
    with ExitStack() as stack:
        deployment = stack.enter_context(Deployment(**(SAFE if safe else {})))
        with load(deployment.url, expire, int(safe)) as beliefs:
            for kind in kinds:
                time.sleep(random.uniform(expire / 3, expire))
                begins.append((time.monotonic(), kind))
                try:
                    fail_over(deployment, kind, expire)
                except AssertionError as error:  # a busy machine, and Sentinels that do not agree
                    print(f"The run ends at a failover of the kind {kind}: {error}", file=sys.stderr)
                    break
                done.append(kind)
            time.sleep(expire)
    return Result(done, len(beliefs), overlaps(beliefs, begins))


def overlaps(beliefs: list[Belief], begins: list[tuple[float, str]]) -> list[Overlap]:
    """Return the overlaps, each with the kind of the failover before it."""
    found = []
    for _, of_name in itertools.groupby(sorted(beliefs), key=lambda belief: belief.name):
        for first, second in itertools.combinations(sorted(of_name, key=lambda belief: belief.began), 2):
            seconds = min(first.ended, second.ended) - second.began
            if seconds > 0:
                kind = next((kind for begin, kind in reversed(begins) if begin < second.began), "before")
                found.append(Overlap(kind, seconds, first.how == "lost", second.fence > first.fence))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, nargs="?", default=4)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--expire", type=float, default=6.0, help="the expiry of the locks in seconds")
    parser.add_argument("--safe", action="store_true")
    parser.add_argument("--parallel", type=int, default=1, help="so many deployments at a time")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    kinds = list(itertools.islice(itertools.cycle(given.kind or KINDS), given.number))
    with ThreadPoolExecutor(given.parallel) as pool:
        tasks = [
            pool.submit(run, kinds[part :: given.parallel], given.expire, given.safe) for part in range(given.parallel)
        ]
        results = [task.result() for task in tasks]
    kinds = [kind for result in results for kind in result.done]
    holders = sum(result.holders for result in results)
    found = [overlap for result in results for overlap in result.overlaps]
    if given.json:
        print(json.dumps({"done": kinds, "holders": holders, "overlaps": [overlap._asdict() for overlap in found]}))
        return
    print(f"{holders} acquisitions")
    print(f"{'':9}  failovers  overlaps  longest   median  reported  fence grew")
    for kind in sorted(set(kinds), key=KINDS.index):
        of_kind = sorted(overlap for overlap in found if overlap.kind == kind)
        longest, median = (of_kind[-1].seconds, of_kind[len(of_kind) // 2].seconds) if of_kind else (0.0, 0.0)
        reported, grew = (sum(overlap[place] for overlap in of_kind) for place in (2, 3))
        print(
            f"{kind:9}  {kinds.count(kind):9}  {len(of_kind):8}  {longest:5.1f} s  {median:5.1f} s  "
            f"{reported:8}  {grew:10}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
