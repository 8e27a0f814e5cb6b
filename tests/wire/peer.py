"""A program that uses whichever version of the package is first on its path.

It does what it is asked, one JSON line each. It uses documented names only, so that it runs with every version.
``{"do": "acquire", ...}`` calls the function of that name below; the answer is ``{"number": ..., "answer": ...}``, or
has the name of an error.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import sys
import threading
import traceback
from typing import Any

import django
from django.conf import settings

URL = os.environ["PEER_URL"]
BROKER = os.environ["PEER_BROKER"]
settings.configure(
    SECRET_KEY="x",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django_redislock"],
    CACHES={"default": {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": URL}},
    DJANGO_REDISLOCK={"URL": URL, "EXPIRE": float(os.environ.get("PEER_EXPIRE", "10"))},
)
django.setup()

from celery import Celery  # noqa: E402
from celery.contrib.testing.worker import start_worker  # noqa: E402
from django.core.cache import cache  # noqa: E402

import django_redislock  # noqa: E402
from django_redislock import held_locks, lock  # noqa: E402
from django_redislock.celery import DuplicateResult, single_instance  # noqa: E402

app = Celery("peer", broker=BROKER, backend=BROKER)
app.conf.update(task_default_queue="peers", broker_connection_retry_on_startup=True)
holders: dict[str, tuple[threading.Event, threading.Event]] = {}
gate = threading.Event()
lost: list[dict[str, Any]] = []
runs: list[str] = []


@app.task(name="peer.work", shared=False)
@single_instance(scope="job", key="{what}")
def work(what: str) -> str:
    runs.append(what)
    return what


@app.task(name="peer.newest", shared=False)
@single_instance(scope="queued+run", key="{what}", on_duplicate="replace")
def newest(what: str, rows: int) -> str:
    runs.append(f"{what} {rows}")
    return what


def where() -> str:
    return str(django_redislock.__file__)


def acquire(name: str, timeout: float = 0, limit: int = 0) -> int:
    """Return the fence, 0 when the lock was not acquired. A thread of its own holds the lock until its release.

    With a limit it is a slot of a semaphore, which only the later version knows.
    """
    make = functools.partial(django_redislock.semaphore, limit=limit) if limit else lock
    holds: queue.SimpleQueue[int] = queue.SimpleQueue()
    ends, released = threading.Event(), threading.Event()

    def hold() -> None:
        one = make(name, timeout=timeout, label="peer", on_lost=lambda it: lost.append(vars_of(it)))
        if not one.acquire():
            holds.put(0)
            return
        holders[f"{name}/{limit}" if limit else name] = ends, released
        holds.put(one.fence)
        ends.wait()
        one.release()
        released.set()

    threading.Thread(target=hold, daemon=True).start()
    return holds.get()


def vars_of(it: Any) -> dict[str, Any]:
    return {"name": it.name, "code": it.lost.code, "reason": it.lost.reason}


def release(name: str) -> bool:
    """Release the lock; False when that fails."""
    ends, released = holders.pop(name)
    ends.set()
    return released.wait(60)


def losses() -> list[dict[str, Any]]:
    return lost


def reset(name: str) -> bool:
    return bool(lock(name).reset(by="olga", reason="stuck"))


def recall(name: str) -> bool:
    return bool(lock(name).recall(by="olga", reason="a deploy"))


def held() -> list[list[str]]:
    return sorted([each.name, each.label, each.kind] for each in held_locks())


def say(line: dict[str, Any]) -> None:
    """Write a line at once: two threads may answer at the same time."""
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


def compute(key: str, value: str, wait: bool) -> str:
    """Return the cached value; compute it here if need be, and wait for `open` first if asked to."""

    def default() -> str:
        say({"computing": value})
        if wait:
            gate.wait(60)
            gate.clear()
        return value

    return str(cache.get_or_set(key, default, 300))


def open() -> None:
    gate.set()


def cached(key: str) -> str | None:
    return cache.get(key)  # type: ignore[no-any-return]


def delete(key: str) -> None:
    cache.delete(key)


def publish(what: str) -> bool:
    """Return whether a message was published; else it was a duplicate."""
    return not isinstance(work.delay(what), DuplicateResult)


def publish_newest(what: str, rows: int) -> bool:
    """Return whether a message was published; else the waiting one was given these rows."""
    return not isinstance(newest.delay(what, rows), DuplicateResult)


def consume(what: str) -> list[str]:
    """Run a worker until a task of this argument has run; return all that ran meanwhile."""
    runs.clear()
    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR", shutdown_timeout=60):
        app.AsyncResult("x")
        for _ in range(6000):
            if what in runs:
                break
            threading.Event().wait(0.01)
    return runs


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)

        def serve(request: dict[str, Any] = request) -> None:
            number, do = request.pop("number"), globals()[request.pop("do")]
            try:
                answer = {"answer": do(**request)}
            except Exception as error:
                answer = {"error": type(error).__name__, "trace": traceback.format_exc()}
            say(answer | {"number": number})

        if request.get("do") in ("open", "compute", "acquire"):
            threading.Thread(target=serve, daemon=True).start()
        else:
            serve()


if __name__ == "__main__":
    main()
