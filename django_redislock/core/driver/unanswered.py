"""Connections with unanswered calls: each is read until the server has answered, and closed then.

A caller that gives up a call sends an undo behind it. If the connection were closed at once, the first reply would find
it closed, and the kernel of the server would throw away what the server had not read yet: of sixty calls and their
undos, most of the undos. Then nobody held these locks, and they were not free until their expiry.
"""

from __future__ import annotations

import socket
import threading
from functools import partial

from redis.exceptions import InvalidResponse

from ..clock import monotonic
from . import os_threads
from .resp import Incomplete, Replies

DRAIN_FOR = 30.0
"""Seconds for which the replies are waited for, because a server that stands still may go on."""
AT_EXIT = 1.0
"""Seconds of these that are left when the main thread has ended, because the process ends with the connection."""
LOOK = 0.1
"""Seconds of one wait, after which the thread looks whether its time is over."""


def close_when_answered(sock: socket.socket, rest: bytes, replies: Replies | None, count: int = 1) -> None:
    """Send the rest, and close the socket when `count` more replies have come; a thread waits for them.

    Without `replies`, another object has encrypted what was sent. Then nothing more can be sent, and the socket is
    closed when the server has closed its side, because the server does that when it has executed everything.
    """
    try:
        sock.settimeout(LOOK)
        rest = _rest(sock, rest)  # here, as far as possible, because the process may end at any time
        os_threads.start_here(partial(_drain, sock, rest, replies, count), "redislock-unanswered", daemon=False)
    except BaseException as error:
        sock.close()
        if not isinstance(error, (OSError, RuntimeError)):  # RuntimeError: at the exit no thread can start
            raise


def _drain(sock: socket.socket, rest: bytes, replies: Replies | None, count: int) -> None:
    time = _TimeLeft()
    try:
        while rest and time.left:
            rest = _rest(sock, rest)
        if replies is None:
            sock.shutdown(socket.SHUT_WR)
        while count > 0 and time.left:
            try:
                data = sock.recv(1 << 16)
            except TimeoutError:
                continue
            if not data:
                break
            if replies is not None:
                count -= _completed(replies, data)
    except (OSError, InvalidResponse, ValueError):
        pass  # the server is gone
    finally:
        sock.close()


def _rest(sock: socket.socket, data: bytes) -> bytes:
    """Send what can be sent now, and return the rest."""
    try:
        return data[sock.send(data) :] if data else data
    except TimeoutError:
        return data


def _completed(replies: Replies, data: bytes) -> int:
    """Return how many replies the data completes."""
    replies.add(data)
    count = 0
    try:
        while True:
            replies.next()
            count += 1
    except Incomplete:
        return count


class _TimeLeft:
    """The time that is left for a connection: little, once the process ends."""

    def __init__(self) -> None:
        self._give_up = monotonic() + DRAIN_FOR
        self._ends = False

    @property
    def left(self) -> bool:
        now = monotonic()
        if not self._ends and not threading.main_thread().is_alive():
            self._ends, self._give_up = True, min(self._give_up, now + AT_EXIT)
        return now < self._give_up
