"""With gevent and eventlet the watchdog is a thread of the operating system, so a computing greenlet is renewed too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import RedisServer

pytestmark = pytest.mark.processes

PROGRAM = """
{patch}
import sys, threading, time
import redis
from django_redislock.core import Lock

clients = [redis.Redis.from_url(url) for url in sys.argv[1:]]
locks = [Lock(client, "a", expire=1.5) for client in clients]
got = []

def wait(number):
    with Lock(clients[0], "a", timeout=20):
        got.append(number)

def connections():
    return clients[0].info("stats")["total_connections_received"]

for lock in locks:
    lock.acquire()
threads = [threading.Thread(target=wait, args=(n,)) for n in range(3)]
for thread in threads:
    thread.start()
    while locks[0].owner().waiting <= len(got) + threads.index(thread):
        time.sleep(0.01)
before = connections()
end = time.monotonic() + 2.2
while time.monotonic() < end:
    pass  # the greenlet computes, and lets no other run
made = connections() - before  # at once, because the waiting greenlets go on now and may need one each
print([(lock.owned(), lock.lost) for lock in locks], made <= len(locks))
for lock in locks:
    lock.release()
for thread in threads:
    thread.join()
print(sorted(got))
"""

ENDS = """
{patch}
import logging, os, sys, time
import redis
from django_redislock.core import Lock, held_locks

logging.basicConfig(stream=sys.stdout, format="%(levelname)s", level=logging.WARNING)
client = redis.Redis.from_url(sys.argv[1])
lost, kept = [], []
lock = Lock(client, "a", expire=1.5, on_lost=lost.append)
ended = {spawn}(lock.acquire)

def live():
    with Lock(client, "b", expire=2.4) as held:
        while not lost:
            time.sleep(0.01)
        time.sleep(1)
        kept.append(held.owned())

lives = {spawn}(live)
while not kept:
    time.sleep(0.01)
print(lost == [lock], kept, list(held_locks(client)))
"""

QUORUM = """
{patch}
import sys, threading, time
import redis
from django_redislock.core import QuorumLock

clients = [redis.Redis.from_url(url) for url in sys.argv[1:]]
got = []

def wait(number):
    with QuorumLock(clients, "a", timeout=20):
        got.append(number)

with QuorumLock(clients, "a", expire=1.5) as lock:
    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    end = time.monotonic() + 2.2
    while time.monotonic() < end:
        pass
    print(lock.lost, got)
for thread in threads:
    thread.join()
print(sorted(got))
"""

IDLE = """
{patch}
import os, sys, time
import redis
from django_redislock.core import Lock

client = redis.Redis.from_url(sys.argv[1])

def files():
    return len(os.listdir("/proc/self/fd"))

counts = []
for _ in range(4):
    with Lock(client, "a", expire=1.5):
        time.sleep(0.7)
    time.sleep(0.7)
    counts.append(files())
print(max(counts[2:]) <= counts[1] + 2, len(client.client_list()))
"""

AT_THE_END = """
{patch}
import atexit, sys
atexit.register(lambda: print(os_threads.running(WATCHER)))  # called after the functions that are registered later
import redis
from django_redislock.core import Lock
from django_redislock.core.driver import os_threads
from django_redislock.core.watchdog import WATCHER

client = redis.Redis.from_url(sys.argv[1])
with Lock(client, "a", expire=600):
    pass
print(os_threads.running(WATCHER))
"""

PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()\nimport gevent",
    "eventlet": "import warnings; warnings.simplefilter('ignore')\nimport eventlet; eventlet.monkey_patch()",
}
everywhere = pytest.mark.parametrize("kind", PATCHES)


def run(kind, program, *args):
    ended = subprocess.run(
        [sys.executable, "-c", program.format(patch=PATCHES.get(kind, ""), spawn=f"{kind}.spawn"), *args],
        env=os.environ | {"PYTHONDEVMODE": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.stdout, ended.stderr


@everywhere
def test_a_greenlet_that_computes_keeps_its_locks(kind):
    """In two databases: each is renewed over one connection, which is not made anew each time."""
    with RedisServer() as own:
        said = run(kind, PROGRAM, own.url, own.url_of_db(1))
    assert said == ("[(True, None), (True, None)] True\n[0, 1, 2]\n", "")


@everywhere
def test_the_end_of_a_greenlet_is_noticed(redis_url, kind):
    """Python takes it for a thread that lives for ever."""
    assert run(kind, ENDS, redis_url) == ("WARNING\nERROR\nTrue [True] []\n", "")


def test_the_watchdogs_thread_leaves_nothing_of_gevent_behind():
    with RedisServer() as own:
        assert run("gevent", IDLE, own.url) == ("True 2\n", "")


@everywhere
def test_a_greenlet_that_computes_keeps_its_quorum_lock_and_greenlets_wait_for_it(server, kind):
    urls = [server.url_of_db(number) for number in range(3)]
    assert run(kind, QUORUM, *urls) == ("None []\n[0, 1, 2]\n", "")


@pytest.mark.parametrize("kind", [*PATCHES, "threads"])
def test_the_idle_watchdog_ends_before_python_finalizes(redis_url, kind):
    """Python 3.13 aborted when the watchdog woke meanwhile: gevent had left a state of greenlet in its thread."""
    assert run(kind, AT_THE_END, redis_url) == ("1\n0\n", "")
