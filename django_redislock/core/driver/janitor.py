"""Calls that give something back after their callers have gone; a thread sends them until the server answers.

A caller that is interrupted (a signal handler raises, a task is cancelled, a generator is destroyed, a loop is closed)
does no I/O: it appends a call here. The call may arrive before the one that it takes back, and more than once, because
its script keeps a note (undone.lua). So it goes over any connection, at any time.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from redis.exceptions import AuthenticationError, NoScriptError, ResponseError

from .. import events
from ..clock import monotonic
from . import os_threads, process
from .effects import ScriptBatch, ScriptCall, is_temporary
from .os_threads import OsEvent, Slot

NAME = "redislock-janitor"
"""The name of the threads."""
PATIENCE = 2.0
"""Seconds for which replies are waited for."""
PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds until calls that were not answered are sent again; the pause doubles each time."""
BATCH = 100
"""Calls that are sent together."""
MOST, LONGEST = 10_000, 3600.0
"""Calls that wait for one server, and the seconds for which each waits: it is dropped then, because the server may be
gone for good."""
DROPPED = (
    "A Redis server has not answered for long: calls that give back locks are dropped. Locks that it grants by calls "
    "which were given up stay until their expiry."
)
AT_EXIT = 1.0
"""Seconds for which a process that ends waits for these calls."""


class _Due(NamedTuple):
    call: ScriptCall
    until: float


class Janitor:
    """The calls for one server, and the thread that sends them. No other server waits for it."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = process.pid
        self._due: deque[_Due] = deque(maxlen=MOST)
        self._worker: Slot[object] = Slot()
        """A token of the running thread."""

    def send(self, server: Any, call: ScriptCall) -> None:
        """Have the call sent until the server answers it.

        Any thread may call this, a signal handler and a destructor, at any point: it takes no lock.
        """
        if self._pid != process.pid:  # a forked child: its parent sends its own calls
            self._begin()
        self._due.append(_Due(call, monotonic() + LONGEST))
        self._start(server)

    def _start(self, server: Any) -> None:
        token = object()
        try:
            if self._worker.put_if_empty(token) is token:
                os_threads.start_raw(partial(self._run, server, token), NAME)
        except BaseException as error:
            # Perhaps a signal, at any point. A token of a thread that never started would keep all calls for ever. A
            # thread that did start goes on, and another one beside it does no harm.
            self._worker.remove(token)
            if not isinstance(error, RuntimeError):  # no further thread can be started: the next call tries again
                self._start(server)
                raise

    def _run(self, server: Any, token: object) -> None:
        _wait_at_exit()
        pause, dropped = PAUSE, False
        try:
            while self._due:
                again = self._send_some(server)
                if not again:
                    pause = PAUSE
                    continue
                living = [due for due in again if monotonic() < due.until]
                if not dropped and (len(living) < len(again) or len(living) + len(self._due) > MOST):
                    dropped = True
                    events.log.warning(DROPPED)
                self._due.extendleft(reversed(living))
                OsEvent().wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            server.leave()
            self._worker.remove(token)
        if self._due:  # one that came at this moment
            self._start(server)

    def _send_some(self, server: Any) -> list[_Due]:
        """Send some calls, and return those to be sent again."""
        some: list[_Due] = []
        while len(some) < BATCH:
            try:
                some.append(self._due.popleft())
            except IndexError:
                break
        replies: list[object]
        try:
            replies = server.renew(ScriptBatch(tuple(due.call for due in some)), PATIENCE)
        except Exception as error:  # of the server, or of a function that gives a password, for example
            replies = [error] * len(some)
        again: list[_Due] = []
        for due, reply in zip(some, replies, strict=True):
            if isinstance(reply, NoScriptError):
                again.append(due._replace(call=due.call.with_text()))
            elif is_unanswered(reply):
                again.append(due)
        return again


def is_unanswered(reply: object) -> bool:
    """Whether the server has neither done what a call said nor refused it for good."""
    is_refusal = isinstance(reply, (ResponseError, AuthenticationError))
    return is_temporary(reply) or (isinstance(reply, Exception) and not is_refusal)


_exits: set[int] = set()
"""The processes whose end waits for the threads."""


def _wait_at_exit() -> None:
    if process.pid not in _exits:
        _exits.add(process.pid)
        Finalize(None, _wait, exitpriority=0)  # atexit is not called in children of multiprocessing


@atexit.register
def _wait() -> None:
    give_up = monotonic() + AT_EXIT
    while os_threads.running(NAME) and monotonic() < give_up:
        time.sleep(0.001)
