"""What the processes of the test of recalls do: they hold a lock, and write down when each believes so."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress

from django.test import override_settings

from django_redislock import lock
from django_redislock.exceptions import LockError
from tests.support import say

STEP = 0.002


def hold_again_and_again(url: str, ledger: str, expire: float) -> None:
    """Hold the lock ``a`` for random times until the lock is lost; write ``fence time`` for each moment of belief.

    The time is read before the belief is: whoever is frozen in between believed then, too.
    """
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with override_settings(DJANGO_REDISLOCK={"URL": url}):
        say(event="ready")
        while True:
            with suppress(LockError), lock("a", expire=expire, timeout=None) as held:
                fence, until = held.fence, time.monotonic() + random.uniform(0.05, 3 * expire)
                while time.monotonic() < until:
                    now = time.monotonic()
                    if held.lost is not None:
                        break
                    os.write(file, b"%d %.6f\n" % (fence, now))
                    time.sleep(STEP)
