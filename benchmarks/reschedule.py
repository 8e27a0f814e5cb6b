"""How well do refused messages fill the slots of a task with a limit, beside a queue with as many processes?"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import redis
from common import server, table

TASKS, LIMIT, WORK, ROUNDS = 1000, 3, 0.05, 2
PROCESSES = {"plain": LIMIT, "own-queue": LIMIT, "each-10-s": 8, "each-second": 8}
NAMES = {
    "plain": f"a plain task, {LIMIT} processes",
    "own-queue": f"limit={LIMIT}, wait, {LIMIT} processes",
    "each-10-s": f"limit={LIMIT}, reschedule, 8 processes",
    "each-second": f"limit={LIMIT}, reschedule, 8 processes, reschedule_delay=1",
}


def make_app(url: str):
    import django
    from celery import Celery

    from django_redislock.celery import single_instance

    django.setup()
    app = Celery("rescheduled", broker=f"{url[:-1]}1")
    app.conf.update(task_ignore_result=True)
    client = redis.Redis.from_url(url)

    def body(number: int) -> None:
        time.sleep(WORK)
        client.rpush("done", number)

    app.task(body, name="plain", shared=False)
    for name, options in (
        ("own-queue", {"on_conflict": "wait"}),
        ("each-10-s", {"on_conflict": "reschedule"}),
        ("each-second", {"on_conflict": "reschedule", "reschedule_delay": 1}),
    ):

        def marked(number: int) -> None:
            body(number)

        task = single_instance(key=[], limit=LIMIT, **options)(marked)
        app.task(task, name=name, shared=False)
    return app


@contextmanager
def worker(queue: str):
    """Run a prefork worker on the queue."""
    command = [sys.executable, __file__, "worker", "--pool=prefork", f"--concurrency={PROCESSES[queue]}"]
    command += [f"--queues={queue}", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    process = subprocess.Popen([*command, "--loglevel=ERROR", f"--hostname={queue}@bench"])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def published(client: redis.Redis) -> int:
    """Return how many messages were put into a queue of the broker."""
    return client.info("commandstats").get("cmdstat_lpush", {}).get("calls", 0)


def main() -> None:
    with server() as url, redis.Redis.from_url(url) as client:
        environment = {"REDISLOCK_TEST_URL": url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
        os.environ.update(environment, PYTHONPATH=str(Path(__file__).parents[1]))
        app = make_app(url)
        speed: dict[str, list[float]] = {queue: [] for queue in PROCESSES}
        sent: dict[str, list[float]] = {queue: [] for queue in PROCESSES}
        early: dict[str, list[float]] = {queue: [] for queue in PROCESSES}
        for _ in range(ROUNDS):
            for queue in PROCESSES:
                client.flushall()
                client.config_resetstat()
                for number in range(TASKS):
                    app.tasks[queue].apply_async((number,), queue=queue)
                with worker(queue):
                    while not client.llen("done"):  # it starts
                        time.sleep(0.001)
                    begin = time.perf_counter()
                    while client.llen("done") < TASKS:
                        time.sleep(0.01)
                speed[queue].append(TASKS / (time.perf_counter() - begin))
                sent[queue].append(published(client) / TASKS)
                order = [int(number) for number in client.lrange("done", 0, -1)]
                early[queue].append(statistics.mean(abs(number - place) for place, number in enumerate(order)))
        rows = [
            [
                NAMES[queue],
                f"{statistics.median(found):.1f}",
                f"{statistics.median(a / b for a, b in zip(found, speed['plain'], strict=True)):.2f}",
                f"{statistics.median(sent[queue]):.1f}",
                f"{statistics.median(early[queue]):.0f}",
            ]
            for queue, found in speed.items()
        ]
        title = f"{TASKS} tasks of {WORK * 1000:g} ms"
        table(title, ["", "tasks/s", "to a plain task", "publications/task", "places off its turn"], rows)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        make_app(os.environ["REDISLOCK_TEST_URL"]).start(sys.argv[1:])
    else:
        main()
