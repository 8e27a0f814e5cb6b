"""What does it cost to publish a unique task, a duplicate, and both in turn, next to a plain task?"""

from __future__ import annotations

import itertools
import os
import statistics
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import redis
from common import commands, server, table

ROUNDS, SECONDS = 20, 0.25


def makers(app: Any, url: str, client: redis.Redis) -> dict[str, Callable[[str], Any]]:
    """Return how each package publishes a task of this key, and a duplicate: a task of a key that waits already."""
    from django_redislock.celery import single_instance

    def body(key: str) -> None:
        pass

    plain = app.task(body, name="plain", shared=False)

    def by_hand(key: str) -> Any:
        if client.set(f"by-hand:{key}", uuid.uuid4().hex, nx=True, ex=3600):
            return plain.delay(key)
        return None

    by_name: dict[str, Callable[[str], Any]] = {"one SET NX by hand": by_hand}
    for scope in ("run", "queued", "queued+run", "job"):

        def marked(key: str) -> None:
            pass

        by_name[f'django-redislock, "{scope}"'] = app.task(
            single_instance(scope=scope)(marked), name=scope, shared=False
        ).delay
    with suppress(ImportError):
        from celery_once import AlreadyQueued, QueueOnce

        app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": url, "default_timeout": 3600}}
        once = app.task(body, name="once", base=QueueOnce, shared=False)

        def publish_once(key: str) -> Any:
            with suppress(AlreadyQueued):
                return once.delay(key)

        by_name["celery-once"] = publish_once
    with suppress(ImportError):
        from celery_singleton import Singleton

        by_name["celery-singleton"] = app.task(body, name="singleton", base=Singleton, shared=False).delay

    found: dict[str, Callable[[str], Any]] = {"plain delay()": plain.delay, **by_name}
    for name, publish in by_name.items():
        if '"run"' not in name:  # its duplicates are published

            def duplicate(_: str, publish: Callable[[str], Any] = publish) -> Any:
                return publish("of all")

            def alternate(key: str, publish: Callable[[str], Any] = publish) -> Any:
                publish("of all")
                return plain.delay(key)

            found[f"a duplicate: {name}"] = duplicate
            found[f"a duplicate, a plain delay(): {name}"] = alternate
    return found


def main() -> None:
    with server() as url, redis.Redis.from_url(url) as client:
        os.environ["REDISLOCK_TEST_URL"] = url
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        import django
        from celery import Celery

        django.setup()
        from django_redislock.celery.execution_lock import confirm_published

        app = Celery("publish", broker=f"{url[:-1]}1")
        app.conf.update(task_ignore_result=True, singleton_backend_url=url)
        publish = makers(app, url, client)
        keys = (uuid.uuid4().hex for _ in itertools.count())
        took: dict[str, list[float]] = {name: [] for name in publish}
        cpu: dict[str, list[float]] = {name: [] for name in publish}
        for one in publish.values():
            one(next(keys))
        order = list(publish)
        for number in range(ROUNDS):
            shift = number % len(order)
            for name in order[shift:] + order[:shift]:
                one, done, begin, used = publish[name], 0, time.perf_counter(), time.process_time()
                while time.perf_counter() - begin < SECONDS:
                    one(next(keys))
                    done += 1
                took[name].append((time.perf_counter() - begin) / done)
                cpu[name].append((time.process_time() - used) / done)
            app.control.purge()
        plain = took["plain delay()"]
        rows = []
        for name, times in took.items():
            ratio = statistics.median(a / b for a, b in zip(times, plain, strict=True))

            def twenty(one: Callable[[str], Any] = publish[name]) -> int:
                for _ in range(20):
                    one(next(keys))
                return 20

            rows.append(
                [
                    name,
                    f"{statistics.median(times) * 1e6:.0f}",
                    f"{ratio:.2f}",
                    f"{statistics.median(cpu[name]) * 1e6:.0f}",
                    f"{commands(client, twenty):.1f}",
                ]
            )
        table("Publishing", ["", "us", "to plain delay()", "CPU us", "commands"], rows)
        confirm_published()  # while there is a server


if __name__ == "__main__":
    main()
