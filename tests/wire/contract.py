"""What the package leaves in Redis and in messages, in a text that is the same in each run.

``python -m tests.wire.contract --write`` writes it to contract.txt, after a change that the rules of
docs/wire-contract.rst allow.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempprefix
from typing import Any

import redis

CONTRACT = Path(__file__).with_name("contract.txt")
EXPIRIES = [5.5, 10, 30, 61, 120, 130, 300, 3600, 4800, 86400, 2592000, 7776000]
"""The expiries that keys have, in seconds; a key may be 20 s old when it is read."""
REPLACED = [
    (r"redislock:wake:[0-9a-f]{16}:\d+:[^\s\\\"]+", "<channel>"),
    (r'"host":"[^"]*","pid":\d+,"thread":"[^"]*"', '"host":"<host>","pid":<pid>,"thread":"<thread>"'),
    (r'"(worker)":"[^"]*"', r'"\1":"<worker>"'),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<task id>"),
    (r"^m\d+: \d+ \d+ (\d+)$", r"m<minute % 80>: <minute> <milliseconds> \1"),
    (r"^(n.*: )\d+ \d+ (\d+ \d+ \d+ \d+;)$", r"\1<window> <milliseconds> \2"),
    (r"(\bid <id> =) \d+$", r"\1 <number>"),
    (r"\b[0-9a-f]{40}\b", "<SHA-1>"),
    (r"\b[0-9a-f]{24}\b", "<nonce of the execution>"),
    (r"\b[0-9a-f]{32}\b", "<id>"),
    (r"\b[0-9a-f]{8}\b", "<nonce>"),
    (r"\b1\d{15}(\.0)?\b", "<us>"),
    (r"\b1\d{12}(\.0)?\b", "<ms>"),
    (r"\b1\d{9}\.\d+(?= \d)", "<s>"),
    (r"\bon \S+ at \d{4}-\d\d-\d\d \S+", "on <host> at <time>"),
]


def plain(data: bytes) -> str:
    """Return a text for the bytes, with names in place of the parts that differ from run to run."""
    text = repr(data)[2:-1].replace("\\n", " \\n ")
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text)
    return text


def content(client: redis.Redis, key: bytes, kind: str) -> list[str]:
    match kind:
        case "string":
            return [plain(client.get(key))]
        case "zset":
            members = client.zrange(key, 0, -1, withscores=True)
            return sorted(f"{plain(member)} = {plain(b'%.0f' % score)}" for member, score in members)
        case "hash":
            return sorted(plain(field + b": " + value) for field, value in client.hgetall(key).items())
    raise AssertionError(f"{key!r} is a {kind}")


def expiry(client: redis.Redis, key: bytes) -> str:
    left = client.pttl(key) / 1000
    fitting = [expiry for expiry in EXPIRIES if expiry - 20 < left <= expiry]
    return f"at most {fitting[0]:g} s" if fitting else f"??? {left}"


class Snapshot:
    """Collects what is in Redis at points of a scenario; only what has changed since the last point is written down."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.lines: list[str] = []
        self._before: dict[str, list[str]] = {}
        self._messages = client.pubsub()
        self._messages.psubscribe("redislock:wake:*")
        self._messages.get_message(timeout=10)

    def take(self, title: str) -> None:
        """Write down the keys that differ from the last time, those that are gone, and the messages since then."""
        now: dict[str, list[str]] = {}
        for key in sorted(self.client.scan_iter()):
            kind = self.client.type(key).decode()
            tag = re.sub(r"^\{redislock:\d+\}", "{redislock:<bucket>}", plain(key))
            now[tag] = [f"  {tag}: {kind}, {expiry(self.client, key)}"]
            now[tag] += [f"    {line}" for line in content(self.client, key, kind)]
        self.lines += ["", title, "-" * len(title)]
        for tag, described in now.items():
            if self._before.get(tag) != described:
                self.lines += described
        self.lines += [f"  {tag}: gone" for tag in self._before if tag not in now]
        self._before = now
        while True:
            message = self._messages.get_message(timeout=0.05)
            if message is None:
                break
            if message["type"] == "pmessage":
                self.lines.append(f"  message to <channel>: {plain(message['data'])}")


def wait_for(condition: Callable[[], Any]) -> None:
    from tests.support import wait_until

    wait_until(condition)


@contextmanager
def in_a_thread(run: Callable[[], Any]) -> Iterator[None]:
    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


@contextmanager
def silent_waiter(client: redis.Redis, name: str) -> Iterator[None]:
    """Put a waiter into the queue of the lock that hears of its turn and does nothing."""
    channel = "redislock:wake:0123456789abcdef:1:host"
    with client.pubsub() as listener:
        listener.subscribe(channel)
        wait_for(lambda: listener.get_message(timeout=1))
        queue = next(client.scan_iter(match=f"*:lock:{name}")).replace(b":lock:", b":queue:")
        client.zadd(queue, {f"{channel}\n{'0' * 32}": 1})
        client.pexpire(queue, 120_000)
        yield


def of_locks(snapshot: Snapshot) -> None:
    from django_redislock import LockLost, lock

    held = lock("shop:1", label="nightly", expire=10, auto_renewal=False)
    held.acquire()
    snapshot.take("A lock is held")

    def wait() -> None:
        with lock("shop:1"):
            snapshot.take("The lock is released, and the first waiter has it")

    with in_a_thread(wait):
        wait_for(lambda: list(snapshot.client.scan_iter(match="*:queue:*")))
        snapshot.take("A thread waits for the lock")
        held.release()
    snapshot.take("Nobody holds the lock")

    held = lock("shop:1", expire=10)
    held.acquire()
    held.recall(by="olga", reason="a deploy")
    snapshot.take("The holder is asked to give the lock back")
    held.reset(by="olga", reason="stuck")
    with suppress(LockLost):
        held.release()
    snapshot.take("The lock was released by force")

    attempt = lock("shop:1", expire=10)._new_request(threading.current_thread(), 0.0).attempt
    attempt.pending = True
    attempt.give_up()
    wait_for(lambda: list(snapshot.client.scan_iter(match="*:undone:*")))
    snapshot.take("An attempt to acquire was given up")

    held = lock("shop:2", expire=10)
    held.acquire()
    with silent_waiter(snapshot.client, "shop:2"):
        held.release()
        snapshot.take("The lock is reserved for a waiter that does not answer")


def of_semaphores(snapshot: Snapshot) -> None:
    from django_redislock import semaphore

    slots = [semaphore("shop:3", 2, expire=10, auto_renewal=False) for _ in range(2)]
    for slot in slots:
        slot.acquire()
    snapshot.take("Both slots of a semaphore are held")

    def wait() -> None:
        with semaphore("shop:3", 2, expire=10, auto_renewal=False):
            snapshot.take("A slot is released, and the first waiter has it")

    with in_a_thread(wait):
        wait_for(lambda: list(snapshot.client.scan_iter(match="*:queue:*")))
        snapshot.take("A thread waits for a slot")
        slots[1].release()


def of_values(snapshot: Snapshot) -> None:
    from django_redislock.cache import RedisCache

    cache = RedisCache(os.environ["REDISLOCK_TEST_URL"], {})
    goes_on = threading.Event()

    def compute() -> str:
        goes_on.wait()
        return "x"

    def caller() -> None:
        cache.get_or_set("k", compute, 60)

    with in_a_thread(caller):
        wait_for(lambda: list(snapshot.client.scan_iter(match="*:lock:cache:*")))
        snapshot.take("A value is computed")
        with silent_waiter(snapshot.client, "cache::1:k"):
            goes_on.set()
            wait_for(lambda: snapshot.client.exists(":1:k"))
            snapshot.take("The value is stored, and sent to a waiter")

    def fail() -> str:
        raise ValueError("sick")

    cache.get_or_set("old", lambda: "x", 0.001, stale=60)
    wait_for(lambda: not goes_on.wait(0.01) or True)
    snapshot.take("A value that is too old at once")
    cache.get_or_set("old", fail, 0.001, stale=60, on_error="stale")
    snapshot.take("The computation of a newer value failed")


def of_tasks(snapshot: Snapshot) -> None:
    from celery import Celery
    from celery.contrib.testing.worker import start_worker

    from django_redislock.celery import single_instance
    from django_redislock.celery.execution_lock import PUBLISH

    snapshot.client.script_load(PUBLISH.text)  # a call that is repeated leaves a note
    app = Celery("contract", broker="memory://", backend="cache+memory://")
    app.conf.task_default_queue = "contract"

    @app.task(name="shop.report", bind=True, acks_late=True)
    @single_instance(scope="job", key="{day}", expire=10)
    def report(self: Any, day: str) -> None:
        snapshot.take("The task is executed")

    report.delay("monday")
    report.delay("monday")
    snapshot.take("A message of a task waits in a queue, and a duplicate was not published")
    with app.connection_for_read() as connection:
        message = connection.SimpleQueue("contract").queue.get(no_ack=False)
        ours = sorted((name, value) for name, value in message.headers.items() if name.startswith("single_instance"))
        snapshot.lines += [f"  header {name}: {plain(json.dumps(value).encode())}" for name, value in ours]
        message.requeue()
    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR"):
        wait_for(lambda: not list(snapshot.client.scan_iter(match="*:lock:celery*")))
    snapshot.take("The message was processed")

    @app.task(name="shop.digest")
    @single_instance(scope="queued+run", key="{day}", on_duplicate="replace")
    def digest(day: str, rows: int) -> None:
        pass

    digest.delay("monday", 1)
    snapshot.take("Another message waits")
    digest.delay("monday", 2)
    snapshot.take("A duplicate gave the message its arguments")
    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR"):
        wait_for(lambda: list(snapshot.client.scan_iter(match="*:done:*:0:*", count=1000))[1:])
    snapshot.take("The message was processed with them")


def of_refreshes(snapshot: Snapshot) -> None:
    from celery import Celery
    from django.core.cache import caches

    from django_redislock.cache import refreshable

    refreshable(gettempprefix)  # a function of a module, whose value is the same everywhere
    with Celery("refreshes", broker="memory://", set_as_current=True) as app:
        app.conf.task_default_queue = "refreshes"
        cache = caches["default"]
        cache.get_or_set("k", gettempprefix, 0.001, stale=60)
        time.sleep(0.01)  # it is too old now
        cache.get_or_set("k", gettempprefix, 0.001, stale=60, refresh="celery")
        snapshot.take("A worker is to refresh a value")
        with app.connection_for_read() as connection:
            (args, kwargs, _) = connection.SimpleQueue("refreshes").get(timeout=10).payload
    snapshot.lines += [f"  message {args[0]}: {plain(json.dumps([args[1], kwargs], sort_keys=True).encode())}"]


def of_runs(snapshot: Snapshot) -> None:
    from celery import Celery
    from django.core.management import call_command

    from django_redislock import leader
    from django_redislock.celery.beat import PersistentScheduler

    with leader("exports", expire=10):
        snapshot.take("A process is the leader")

    with TemporaryDirectory() as directory, chdir(directory):
        os.mkfifo("gate")

        def look() -> None:
            wait_for(lambda: list(snapshot.client.scan_iter(match="*:lock:migrate")))
            snapshot.take("redislock run has started its command")
            Path(directory, "gate").write_text("")  # so that the command ends

        with in_a_thread(look), suppress(SystemExit):
            call_command("redislock", "run", "migrate", "--once", "1.2", "--expire", "10", "--", "cat", "gate")
    snapshot.take("The command has ended, and its success is remembered")

    with TemporaryDirectory() as directory, Celery("shop", broker="memory://", set_as_current=False) as app:
        app.conf.update(beat_schedule={"nightly": {"task": "shop.nightly", "schedule": 0.01}}, result_expires=None)
        scheduler = PersistentScheduler(app=app, schedule_filename=f"{directory}/schedule")
        scheduler.expire = 10
        times = "{redislock:beat}:times:celery-beat:shop"
        wait_for(lambda: scheduler.tick() is None or (snapshot.client.hget(times, "nightly") or b"").endswith(b" 1"))
        snapshot.take("Beat leads, and has published an entry")
        scheduler.close()


def contract(url: str) -> str:
    """Return the text for the server at this address; it empties its database."""
    from django.conf import settings

    from django_redislock.core.keys import lock_keys

    settings.DJANGO_REDISLOCK = {"URL": url}
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        lines = []
        for part in (of_locks, of_semaphores, of_values, of_tasks, of_refreshes, of_runs):
            client.flushdb()
            snapshot = Snapshot(client)
            part(snapshot)
            lines += snapshot.lines
            snapshot._messages.close()
        client.flushdb()
    buckets = [
        f"  {name}: {plain(lock_keys('redislock', name).lock)}"
        for name in ("shop:1", "celery:shop.report:friday", "замок")
    ]
    return "\n".join(["Buckets", "-------", *buckets, *lines]) + "\n"


def main() -> None:
    """Write the text to the standard output, or with ``--write`` into contract.txt."""
    import django

    from tests.support import RedisServer

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    with RedisServer() as server:
        os.environ["REDISLOCK_TEST_URL"] = server.url
        django.setup()
        text = contract(server.url)
    if "--write" in sys.argv:
        CONTRACT.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
