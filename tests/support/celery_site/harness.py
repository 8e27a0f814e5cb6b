"""What tests with workers stand on: workers kept for a whole module, and questions about what came of a task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from celery import chain, chord, group, states
from celery.result import AsyncResult, GroupResult
from kombu import pools

from tests.support import Server, wait_until
from tests.support.celery_site import tasks
from tests.support.celery_site.app import BROKER, app, use
from tests.support.celery_site.run_log import DIRECTORY, RunLog
from tests.support.fork_server import start_python
from tests.support.worker import Worker

# A solo worker does one thing at a time, so there are two of them.
POOLS = {"prefork": (1, 4), "threads": (1, 4), "solo": (2, 1), "gevent": (1, 4)}


class ListeningWorker(Worker):
    """A worker that hears what it is told from the start.

    Celery says that it is ready before it listens for commands, with gevent some time before; one that comes too early
    is lost.
    """

    _listens = False

    def wait_ready(self, timeout: float = 120) -> Self:
        super().wait_ready(timeout)
        if not self._listens:
            wait_until(lambda: app.control.ping([self.hostname], timeout=1), timeout, "the worker listens")
            self._listens = True
        return self


class WorkerPools:
    """Starts workers for the tests of one module, each pool once."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._run = uuid.uuid4().hex[:8]
        self._pools: dict[str, list[Worker]] = {}
        self._started: list[Worker] = []

    def of(self, pool: str) -> list[Worker]:
        """Return the workers of the pool that the module's tests share."""
        if pool not in self._pools:
            count, concurrency = POOLS[pool]
            self._pools[pool] = [self.start(pool, number, concurrency=concurrency) for number in range(count)]
        return [worker.wait_ready() for worker in self._pools[pool]]

    def start(self, pool: str, number: int = 0, *options: str, name: str = "", **more: Any) -> Worker:
        """Start one more worker, on the queue of its pool or of this name."""
        queue = f"{self._run}-{name or pool}"
        log = self._directory / f"{queue}-{number}.log"
        worker = self._stack.enter_context(ListeningWorker(queue, pool, log, *options, number=number, **more))
        self._started.append(worker)
        return worker

    def dismiss(self) -> None:
        """Tell all to end, so that they do it at the same time. With gevent it would take five seconds."""
        for worker in self._started:
            worker.kill() if worker.pool == "gevent" else worker.signal(signal.SIGTERM)

    def start_all(self) -> None:
        """Start the workers of every pool, so that they get ready at the same time."""
        for pool, (count, concurrency) in POOLS.items():
            self._pools[pool] = [self.start(pool, number, concurrency=concurrency) for number in range(count)]


@contextmanager
def connected(server: Server, broker_url: str | None = None) -> Iterator[None]:
    """Set the app up for this server and this broker, else the same server; forget all connections with the block.

    The next ones may be to another broker, and the app's pools would go on with the one they know.
    """
    use(server.url, broker_url)
    try:
        yield
    finally:
        pools.reset()
        app._after_fork()  # it forgets its pools, as in a forked child
        consumer = app.backend.result_consumer
        consumer.stop()
        consumer._pubsub = None  # so that a result that is garbage-collected later does not look for its server
        app.backend.client.close()


@contextmanager
def workers(server: Server, directory: Path, broker_url: str | None = None) -> Iterator[WorkerPools]:
    """Give workers that take their messages from this broker, else from the server, and end with the block."""
    with connected(server, broker_url), pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv(DIRECTORY, str(directory))
        if broker_url:
            patch.setenv(BROKER, broker_url)
        worker_pools = WorkerPools(directory, stack)
        yield worker_pools
        worker_pools.dismiss()


@contextmanager
def beat(directory: Path, seconds: float, task: Any, task_queue: TaskQueue) -> Iterator[None]:
    """Have a ``celery beat`` publish the task every so many seconds."""
    entry = {"task": task.name, "schedule": seconds, "args": [task_queue.name], "options": {"queue": task_queue.queue}}
    command = ["-m", "celery", "-A", "tests.support.celery_site.app", "beat"]
    command += [f"--schedule={directory / 'schedule'}", "--pidfile="]
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.support.celery_site.settings",
        "REDISLOCK_TEST_BEAT": json.dumps(entry),
    }
    with (directory / "beat.log").open("wb") as log:
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        process = start_python(*command, env=os.environ | environment, **files)
    try:
        yield
    finally:
        process.kill()
        process.wait()


class TaskQueue:
    """The queue of some workers, and a log of runs of a name that no other test has."""

    def __init__(self, workers: list[Worker], blocked: bool = False) -> None:
        self.workers = workers
        self.queue = workers[0].queue
        self.name = f"{'blocked' if blocked else 'free'}-{uuid.uuid4().hex}"  # the tasks read from it whether to wait
        self.run_log = RunLog(self.name)

    def with_queue_of_its_own(self) -> TaskQueue:
        """Let messages wait, in a queue of its own, until `consume` is called."""
        self.queue = self.name
        return self

    def consume(self) -> None:
        """Let the workers take the messages of that queue."""
        for worker in self.workers:
            app.control.add_consumer(self.queue, destination=[worker.hostname])

    def publish(self, task: Any, *args: object, **options: Any) -> AsyncResult[Any]:
        """Publish the task to the queue, with its name as the first argument."""
        return task.apply_async((self.name, *args), queue=self.queue, **options)

    def kill_child(self, run: dict[str, Any]) -> None:
        """Kill the child that runs the task, once its worker knows so.

        What the worker does not know to be accepted, it gives to another child.
        """
        inspect = app.control.inspect([worker.hostname for worker in self.workers])

        def known() -> bool:
            found = (inspect.query_task(run["id"]) or {}).values()
            return any(run["id"] in tasks and tasks[run["id"]][0] == "active" for tasks in found)

        wait_until(known, message="the worker knows that the task has started")
        os.kill(run["pid"], signal.SIGKILL)

    @property
    def log(self) -> str:
        return "\n".join(worker.log for worker in self.workers)


def checked_queue(task_queue: TaskQueue) -> Iterator[TaskQueue]:
    """Give a fixture's queue to its test, on which no two runs may overlap."""
    yield task_queue
    task_queue.run_log.let_bodies_end()
    assert task_queue.run_log.events("overlap") == []


def ended(result: AsyncResult[Any] | GroupResult, timeout: float = 60) -> AsyncResult[Any]:
    """Wait until the task is in a terminal state."""
    wait_until(lambda: result.state in states.READY_STATES, timeout, lambda: f"{result.id} ends; it is {result.state}")
    return result


def all_ended(results: list[AsyncResult[Any] | GroupResult], timeout: float = 90) -> None:
    """Wait until all these canvases have ended."""

    def open_ones() -> list[AsyncResult[Any] | GroupResult]:
        return [result for result in results if not result.ready()]

    wait_until(lambda: not open_ones(), timeout, lambda: f"all ends; what does not is {[*map(_states, open_ones())]}")


def _states(result: AsyncResult[Any] | GroupResult) -> list[str]:
    """Tell how a result and those before it stand."""
    if isinstance(result, GroupResult):
        return [state for child in result.results for state in _states(child)]
    before = [] if result.parent is None else _states(result.parent)
    return [*before, f"{result.id}: {result.state}"]


KINDS = ("single", "chain", "group", "chord")


def published(kind: str, task_queue: TaskQueue, task: Any, *args: object, **options: Any) -> Any:
    """Publish the task alone, or with another one in a canvas."""
    one = task.si(task_queue.name, *args).set(queue=task_queue.queue, **options)
    plain, gather = (other.set(queue=task_queue.queue) for other in (tasks.plain.si(task_queue.name), tasks.gather.s()))
    match kind:
        case "single":
            return one.apply_async()
        case "chain":
            return chain(one, plain).apply_async()
        case "group":
            return group(one, plain).apply_async()
        case "chord":
            return chord([one, plain], gather).apply_async()


def member(kind: str, result: Any) -> Any:
    """Return the result of the task itself."""
    match kind:
        case "chain":
            return result.parent
        case "group":
            return result.results[0]
        case "chord":
            return result.parent.results[0]
    return result


def ended_with_its_canvas(kind: str, result: Any) -> Any:
    """Wait until the task and the rest of its canvas ended; return the task's result, on which the rest depends."""
    one = ended(member(kind, result))
    failed = isinstance(one.result, Exception)
    match kind:
        case "chain" if one.state != "REVOKED":  # for what comes after a revoked one, Celery stores nothing
            assert type(ended(result).result) is type(one.result) if failed else ended(result).result == "plain"
        case "group":
            assert ended(result.results[1]).result == "plain"
        case "chord":
            assert ended(result).state == ("FAILURE" if failed else "SUCCESS")
    return one.result


@contextmanager
def events() -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Give the events of each task id, as Flower hears them."""
    heard: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with app.connection_for_read() as connection, app.events.default_dispatcher(hostname="test") as dispatcher:
        receiver = app.events.Receiver(connection, {"*": lambda event: heard[event.get("uuid", "")].append(event)})
        thread = threading.Thread(target=receiver.capture, kwargs={"wakeup": False})
        thread.start()
        try:
            # Until it hears an event of its own it may miss those of the workers, too.
            wait_until(lambda: dispatcher.send("test-heard") or heard.get(""))
            yield heard
        finally:
            receiver.should_stop = True
            thread.join(30)
