"""`Leader.run` under gevent and eventlet, where a greenlet waits for a thread of the operating system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
{patch}
import sys, threading
from django.conf import settings
settings.configure(DJANGO_REDISLOCK={{"URL": sys.argv[1]}})
import django
django.setup()
from django_redislock import Leader, lock

def elected(term):
    threading.Thread(target=depose).start()

def depose():
    lock("scheduler").reset()

def lost(term):
    print(term.lost.code)
    candidate.stop()

candidate = Leader("scheduler", on_elected=elected, on_lost=lost, expire=0.3)
candidate.run()
"""


@pytest.mark.parametrize(
    ("module", "patch"),
    [
        ("gevent", "from gevent import monkey; monkey.patch_all()"),
        ("eventlet", "import eventlet; eventlet.monkey_patch()"),
    ],
)
def test_leader_run_in_a_greenlet_notices_that_its_term_is_lost(module: str, patch: str, redis_url: str) -> None:
    pytest.importorskip(module)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(patch=patch), redis_url],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout == "force_released\n", ran.stderr
