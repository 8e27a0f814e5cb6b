"""Under gevent and eventlet the watchdog is a thread of the operating system, so a greenlet that computes is renewed too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
{patch}
import sys, threading, time
import redis
from django_redislock.core import Lock, held_locks

client = redis.Redis.from_url(sys.argv[1])
lock = Lock(client, "a", expire=2.4)
got = []

def wait(number):
    with Lock(client, "a", timeout=20):
        got.append(number)

lock.acquire()
threads = [threading.Thread(target=wait, args=(n,)) for n in range(3)]
for thread in threads:
    thread.start()
    while lock.owner().waiting <= len(got) + threads.index(thread):
        time.sleep(0.01)
fence = lock.fence
end = time.monotonic() + 4
while time.monotonic() < end:
    pass  # the greenlet computes, and lets no other run
print(lock.owner().fence == fence, lock.lost)
lock.release()
for thread in threads:
    thread.join()
print(got)
"""


@pytest.mark.parametrize(
    "patch",
    [
        "from gevent import monkey; monkey.patch_all()",
        "import warnings; warnings.simplefilter('ignore')\nimport eventlet; eventlet.monkey_patch()",
    ],
    ids=["gevent", "eventlet"],
)
def test_a_greenlet_that_computes_keeps_its_lock(redis_url, patch):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(patch=patch), redis_url],
        env=os.environ | {"PYTHONDEVMODE": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.stdout, run.stderr) == ("True None\n[0, 1, 2]\n", "")
