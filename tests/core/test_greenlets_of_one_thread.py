"""Greenlets that Python takes for one thread, because gevent or eventlet has patched sockets, and no threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "gevent, no threads": "from gevent import monkey; monkey.patch_all(thread=False)",
    "gevent, sockets": "from gevent import monkey; monkey.patch_socket()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
    "eventlet, no threads": "import eventlet; eventlet.monkey_patch(thread=False)",
    "eventlet, sockets": "import eventlet; eventlet.monkey_patch(all=False, socket=True)",
}

START = """
import sys, warnings
warnings.simplefilter("ignore")
{patch}
import {library} as green
import redis
client = redis.Redis.from_url(sys.argv[1])

def together(work, number=6):
    spawned = [green.spawn(work, 0)]
    while not (most or ended):  # the others come while it is inside
        green.sleep(0.01)
    spawned += [green.spawn(work, each) for each in range(1, number)]
    for each in spawned:
        each.join(60) if hasattr(each, "join") else each.wait()

ended = []
inside = []
most = []

def enter(lock, pause=0.05):
    with lock:
        inside.append(1)
        most.append(len(inside))
        green.sleep(pause)
        inside.pop()
    ended.append(1)
"""

LOCKS = """
from django_redislock.core import Lock, QuorumLock, Semaphore
one = Lock(client, "one")
entries = [
    lambda _: enter(Lock(client, "r", reentrant=True, timeout=30)),
    lambda _: enter(Lock(client, "a", timeout=30)),
    lambda _: enter(one),
    lambda _: enter(Semaphore(client, "s", 2, timeout=30)),
    lambda _: enter(QuorumLock([redis.Redis.from_url(f"{sys.argv[1]}/{db}") for db in range(3)], "q", timeout=30)),
]
for entry in entries:
    together(entry, 3 if entry is entries[-1] else 6)  # attempts at a quorum lock have no order
    print(len(ended), max(most))
    ended.clear(), most.clear()

renewed = Lock(client, "renewed", expire=1)
with renewed:
    for _ in range(2):
        green.sleep(1)  # the watchdog uses a connection of its own
        renewed.raise_if_lost()
print(renewed.locked())
inner = Lock(client, "in", reentrant=True)
with inner, Lock(client, "in", reentrant=True):
    print(inner.owned())
"""

SITE = """
import django
from django.conf import settings
cache = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": sys.argv[1]}
settings.configure(CACHES={"default": cache, "local": {"BACKEND": "django_redislock.cache.LocMemCache"}})
from django.core.cache import cache, caches
from django_redislock import leader, lock_all
together(lambda _: enter(lock_all(["x", "y"], timeout=30)))
print(len(ended), max(most))
ended.clear(), most.clear()
computed = []

def compute():
    computed.append(1)
    most.append(1)
    while cache.stats().waited < 5:
        green.sleep(0.01)
    return len(computed)

got = []
together(lambda _: (got.append(cache.get_or_set("k", compute)), ended.append(1)))
print(got, cache.stats().waited)
ended.clear()
together(lambda _: enter(caches["local"].lock("l")))
print(len(ended), max(most))
ended.clear(), most.clear()
together(lambda _: enter(leader("lead", expire=5)))
print(len(ended), max(most))
"""

THREADS = """
import _thread
from django_redislock.core import Lock

def many(_):
    for _ in range(10):
        enter(Lock(client, "a", timeout=30), 0.001)

def elsewhere():
    try:
        many(None)
    except BaseException as error:
        print(repr(error))
    done.append(1)

done = []
with Lock(client, "a"):
    pass
_thread.start_new_thread(elsewhere, ())
many(None)
while not done:
    green.sleep(0.01)
print(len(ended), max(most))
"""

UNPATCHED = """
from django_redislock.core import Lock
said = []

def use(_):
    try:
        Lock(client, "a").acquire()
    except RuntimeError as error:
        said.append(str(error))
    ended.append(1)

together(use, 1)
print(said[0])
"""


def run(kind, program, url, patch=None):
    library = kind.split(",")[0]
    code = START.format(patch=PATCHES[kind] if patch is None else patch, library=library) + program
    ended = subprocess.run(
        [sys.executable, "-c", code, url],
        env=os.environ | {"PYTHONDEVMODE": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.stdout.splitlines(), ended.stderr


@pytest.mark.parametrize("kind", PATCHES)
def test_each_greenlet_is_a_holder_of_its_own_and_renewals_disturb_no_release(server, kind):
    said, errors = run(kind, LOCKS, server.url_of_db(0).rpartition("/")[0])
    assert (said, errors) == (["6 1", "6 1", "6 1", "6 2", "3 1", "False", "True"], "")


@pytest.mark.parametrize("kind", PATCHES)
def test_greenlets_take_several_locks_in_turn_and_wait_for_one_computation(redis_url, kind):
    said, errors = run(kind, SITE, redis_url)
    assert (said, errors) == (["6 1", "[1, 1, 1, 1, 1, 1] 5", "6 1", "6 1"], "")


@pytest.mark.parametrize("kind", ["gevent, no threads", "gevent, sockets", "eventlet, no threads"])
def test_threads_of_the_system_beside_the_greenlets_open_connections_of_their_own(redis_url, kind):
    said, errors = run(kind, THREADS, redis_url)
    assert (said, errors) == (["20 1"], "")


@pytest.mark.parametrize("kind", ["gevent", "eventlet"])
def test_a_greenlet_with_unpatched_sockets_is_told_so_at_its_first_lock(redis_url, kind):
    said, errors = run(kind, UNPATCHED, redis_url, patch="")
    assert errors == ""
    assert said[0].startswith(f"a greenlet of {kind} uses a lock, and its sockets are not patched")
