"""How many tasks a second does a worker work off, with the lock and without?"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import psutil
import redis
from common import server, table

TASKS, ROUNDS = 10_000, 3
QUEUES = {"without a lock": "plain", "SET NX by hand": "by-hand", "django-redislock": "locked"}
RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"


def make_app(url: str):
    import django
    from celery import Celery

    from django_redislock.celery import single_instance

    django.setup()
    app = Celery("throughput", broker=f"{url[:-1]}1")
    app.conf.update(task_ignore_result=True)

    def body(key: int) -> None:
        pass

    app.task(body, name="plain", shared=False)

    client = redis.Redis.from_url(url)
    release = client.register_script(RELEASE)

    def by_hand(key: int) -> None:
        name, token = f"by-hand:{key}", uuid.uuid4().hex
        if not client.set(name, token, nx=True, ex=30):
            raise AssertionError("a key was there already")
        release([name], [token])

    app.task(by_hand, name="by-hand", shared=False)

    def marked(key: int) -> None:
        pass

    app.task(single_instance(marked), name="locked", shared=False)
    return app


@contextmanager
def worker(queue: str):
    """Run a prefork worker of two on the queue."""
    command = [sys.executable, __file__, "worker", "--pool=prefork", "--concurrency=2", f"--queues={queue}"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=WARNING"]
    process = subprocess.Popen([*command, f"--hostname={queue}@bench"])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def used_by(process: subprocess.Popen) -> float:
    """Return the CPU seconds that the worker and its children have used so far."""
    main = psutil.Process(process.pid)
    return sum(sum(each.cpu_times()[:2]) for each in [main, *main.children()])


def main() -> None:
    with server() as url, redis.Redis.from_url(f"{url[:-1]}1") as broker:
        environment = {"REDISLOCK_TEST_URL": url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
        os.environ.update(environment, PYTHONPATH=str(Path(__file__).parents[1]))
        app = make_app(url)
        speed: dict[str, list[float]] = {name: [] for name in QUEUES}
        cpu: dict[str, list[float]] = {name: [] for name in QUEUES}
        for number in range(ROUNDS * len(QUEUES)):
            name, queue = list(QUEUES.items())[(number + number // len(QUEUES)) % len(QUEUES)]
            for key in range(TASKS):
                app.tasks[queue].apply_async((key,), queue=queue)  # with what producers send along: the key in a header
            with worker(queue) as process:
                while broker.llen(queue) > TASKS - 500:  # it starts
                    time.sleep(0.001)
                left, begin, used = broker.llen(queue), time.perf_counter(), used_by(process)
                while broker.llen(queue) or broker.hlen("unacked"):
                    time.sleep(0.001)
                speed[name].append(left / (time.perf_counter() - begin))
                cpu[name].append((used_by(process) - used) / left * 1e6)
        plain = statistics.median(speed["without a lock"])
        rows = [
            [
                name,
                f"{statistics.median(found):.0f}",
                f"{statistics.median(found) / plain:.2f}",
                f"{statistics.median(cpu[name]):.0f}",
            ]
            for name, found in speed.items()
        ]
        table(f"{TASKS} tasks, a prefork worker of 2", ["", "tasks/s", "to no lock", "CPU us/task"], rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        make_app(os.environ["REDISLOCK_TEST_URL"]).start(sys.argv[1:])
    else:
        main()
