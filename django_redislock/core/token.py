"""redis-py's words for an acquisition's id: the token of ``acquire(token=…)``, and ``lock.local.token``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from . import operations
from .clock import monotonic
from .driver.effects import Operation, Sleep
from .records import Held, new_id
from .validation import check_token

LOOK_EVERY = 0.1
"""Seconds between two looks at a lock that another holder has by the same token. The queue cannot tell them apart."""


@dataclass(slots=True)
class Token:
    """The token by which a thread or task acquires now.

    Of two acquisitions by the same token, one holds the lock, as in redis-py. For the scripts they are one owner that
    repeats a call, so each acquisition adds a random mark to its record in Redis.
    """

    id: str
    mark: bytes
    mine: bool = False
    """Whether this very acquisition is known to hold the lock, because a reply to it was lost."""
    refused: bool = False
    """Whether the server answered that the id held the lock before."""

    def marked(self, record: bytes) -> bytes:
        """Return the record of this acquisition."""
        return record[:-1] + self.mark + record[-1:]

    def wrote(self, held: Held) -> bool:
        """Whether this acquisition wrote the value of the lock."""
        return self.mark in held.record


def acquire(lock: Any, token: object, timeout: float | None, listening: bool) -> Operation[bool]:
    """Acquire the lock by this token."""
    until = math.inf if timeout is None else monotonic() + timeout
    me = lock._me()
    mine = Token(check_token(token), b',"by":"%b"' % new_id().encode())
    lock._tokens = {**lock._tokens, me: mine}
    try:
        while True:
            (held,) = yield from operations.read([lock.name], [lock._keys])
            mine.mine = held is not None and mine.wrote(held)
            left = None if timeout is None else max(0.0, until - monotonic())
            if held is None or held.id != mine.id or mine.mine or me in lock._leases:
                mine.refused = False
                if (yield from lock._acquire(left, listening)):
                    return True
                if not mine.refused:
                    return False
            elif left == 0.0:
                return False
            else:
                yield Sleep(LOOK_EVERY if left is None else min(LOOK_EVERY, left))
    finally:
        lock._tokens = {other: token for other, token in lock._tokens.items() if other is not me}


class Local:
    """The object that redis-py calls ``lock.local``."""

    __slots__ = ("_lock",)

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    @property
    def token(self) -> bytes | None:
        """The id of the caller's acquisition, None when there is none.

        Set it to the token of an acquisition that was made elsewhere, to release or to extend that one.
        """
        id = self._lock._token()
        return None if id is None else id.encode()

    @token.setter
    def token(self, token: str | bytes | None) -> None:
        self._lock._given_id = None if token is None else check_token(token)
