"""Signal handlers and destructors that use locks or the cache, at whatever point they interrupt the same: they release,
look and try. To wait there is served late."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import ExitStack

import pytest

from django_redislock.core import Lock, watchdog as watchdog_module
from django_redislock.core.driver import os_threads
from django_redislock.core.keys import lock_keys
from tests.support import Proxy, client_at, interrupted_programs, names_together, queued, wait_until
from tests.support.interruptions import TimeLimit, interrupted_at_each_point, interruptions

pytestmark = pytest.mark.processes

QUICK = {"PYTHONDEVMODE": ""}
SOON = 15
"""Seconds in which a waiter that was woken has its lock on any machine; one that was not looks after 30 only."""


class HoldingProxy(Proxy):
    """Holds back the first subscription until it is told to let it go."""

    def __init__(self, url):
        super().__init__(url)
        self.subscribing = threading.Event()
        self.let_go = threading.Event()

    def _note_request(self, link, data):
        super()._note_request(link, data)
        if b"\nSUBSCRIBE" in data and not self.subscribing.is_set():
            self.subscribing.set()
            assert self.let_go.wait(60)

    def close(self):
        self.let_go.set()
        super().close()


def held(client, *names):
    locks = {name: Lock(client, name, expire=120) for name in names}
    for lock in locks.values():
        assert lock.acquire()
    return locks


def test_a_handler_that_waits_while_its_thread_subscribes_gets_its_lock(client, redis_url, run_python):
    main, inside = names_together(2)
    locks = held(client, main, inside)
    with HoldingProxy(redis_url) as proxy:
        process = run_python(interrupted_programs.acquire_in_a_handler, proxy.url, main, inside)
        assert proxy.subscribing.wait(30)
        os.kill(process.pid, signal.SIGUSR1)
        wait_until(lambda: queued(client, inside) == 1)
        locks[inside].release()
        process.wait_for(timeout=SOON, handler=True)
        locks[main].release()
        proxy.let_go.set()
        process.wait_for(timeout=SOON, main=True)
        process.finish()


def test_a_handler_that_waits_while_its_thread_reads_gets_its_lock(client, redis_url, run_python):
    main, inside = names_together(2)
    locks = held(client, main, inside)
    process = run_python(interrupted_programs.acquire_in_a_handler, redis_url, main, inside)
    wait_until(lambda: queued(client, main) == 1)
    os.kill(process.pid, signal.SIGUSR1)
    wait_until(lambda: queued(client, inside) == 1)
    locks[inside].release()
    process.wait_for(timeout=SOON, handler=True)
    locks[main].release()
    process.wait_for(timeout=SOON, main=True)
    process.finish()


def test_while_a_long_handler_runs_in_the_thread_that_reads_the_other_threads_get_their_locks(
    client, redis_url, run_python
):
    main, other, third = names_together(3)
    locks = held(client, main, other, third)
    process = run_python(interrupted_programs.acquire_while_a_handler_runs, redis_url, main, [main, other, third])
    wait_until(lambda: (queued(client, main), queued(client, other), queued(client, third)) == (2, 1, 1))
    os.kill(process.pid, signal.SIGUSR1)
    process.wait_for(handler="begins")
    for name in (other, main, third):  # a message, a lock for which the interrupted thread waits first, and a message
        locks[name].release()
        process.wait_for(timeout=SOON, got=name)
    process.send()
    process.wait_for(timeout=SOON, got=main)
    process.finish()


def test_an_interrupted_waiter_leaves_the_queue_of_a_server_that_forgot_the_scripts(client):
    keys = lock_keys("redislock", "a")
    client.set(keys.lock, "x\n1\n1\n{}", px=60_000)

    def forget_and_interrupt():
        wait_until(lambda: queued(client, "a"))
        client.script_flush()
        os.kill(os.getpid(), signal.SIGALRM)

    with interruptions(TimeLimit), pytest.raises(TimeLimit):
        threading.Thread(target=forget_and_interrupt).start()
        Lock(client, "a").acquire(timeout=60)
    wait_until(lambda: not client.exists(keys.queue), timeout=1)


@pytest.mark.parametrize("options", [{}, {"max_connections": 1}], ids=["", "one connection"])
@pytest.mark.interrupts
def test_thousands_of_handlers_and_destructors_that_release_look_and_try_end_and_count(redis_url, run_python, options):
    process = run_python(interrupted_programs.count_under_locks, redis_url, 1000, options, env=QUICK)
    said = process.wait_for(free=True)
    assert said["counts"] == said["done"]
    assert said["longest"] < SOON, "none waited for its own thread"
    process.finish()


@pytest.mark.parametrize(("backend", "times"), [("RedisCache", 1000), ("DjangoRedisCache", 200)])
def test_a_hit_in_a_handler_ends_and_is_counted(redis_url, backend, run_python, times):
    process = run_python(interrupted_programs.hit, redis_url, backend, times, env=QUICK)
    said = process.finish()[-1]
    assert said["hits"] == said["expected"] >= 20 * times


def test_a_handler_that_wants_the_value_that_its_thread_computes_gets_it(redis_url, backend, run_python):
    process = run_python(interrupted_programs.compute, redis_url, backend, 500, env=QUICK)
    said = process.finish()[-1]
    assert said["computed"] >= said["keys"]
    assert said["errors"] == 0


def test_a_time_limit_at_any_point_of_the_watchdogs_start_leaves_no_later_lock_without_renewal(redis_url):
    """Between two lines of it, a thread that never started stayed in the place of the one that was to start: no lock of
    the server was renewed any more, until the end of the process."""

    def acquire(point):
        clients.append(stack.enter_context(client_at(redis_url, client_name=f"interrupted-{point}")))
        held.append(Lock(clients[-1], f"interrupted {point}"))
        held[-1].acquire()

    clients, held, after = [], [], []
    with ExitStack() as stack:
        for point in interrupted_at_each_point(acquire, watchdog_module, os_threads):
            lock = Lock(clients[-1], f"after {point}", expire=3)
            assert lock.acquire()
            (lease,) = lock._leases.values()
            after.append((lock, lease, lease.deadline))
        assert len(after) > 50
        wait_until(lambda: all(lease.deadline > first for _, lease, first in after))
        for lock, *_ in after:
            lock.release()


def test_what_a_handler_raises_as_soon_as_a_thread_runs_is_raised(monkeypatch):
    """The clean-up of `threading` fails then."""
    name = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
    started, ran = getattr(threading, name), threading.Event()

    def start(*args, **kwargs):
        started(*args, **kwargs)
        assert ran.wait(30)
        raise TimeLimit

    monkeypatch.setattr(threading, name, start)
    with pytest.raises(TimeLimit):
        os_threads.start_here(ran.set, "test")
