"""`Leader.run` in a greenlet, which waits for a thread of the operating system, and interrupted by a signal."""

from __future__ import annotations

import os
import subprocess
import sys
from types import FrameType
from typing import Any

import pytest

from django_redislock import Leader, held_locks
from django_redislock.run_once import election

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

candidate = Leader("scheduler", on_elected=elected, on_lost=lost, expire=6)
candidate.run()
"""


@pytest.mark.parametrize(
    "patch",
    ["from gevent import monkey; monkey.patch_all()", "import eventlet; eventlet.monkey_patch()"],
    ids=["gevent", "eventlet"],
)
def test_leader_run_in_a_greenlet_notices_that_its_term_is_lost(patch: str, redis_url: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(patch=patch), redis_url],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.stdout == "force_released\n", ran.stderr


@pytest.mark.usefixtures("locks_by_url")
def test_leader_run_that_gets_ctrl_c_as_soon_as_its_term_has_begun_hands_over() -> None:
    def interrupt(frame: FrameType, event: str, result: Any) -> None:
        if event == "return" and frame.f_code is election.elect.__code__ and result:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            Leader("scheduler", on_elected=print).run()
    finally:
        sys.setprofile(None)
    assert list(held_locks()) == []
