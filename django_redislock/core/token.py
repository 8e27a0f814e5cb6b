"""redis-py's words for an owner id: the token of ``acquire(token=…)``, and ``lock.local.token``."""

from __future__ import annotations

import math
from typing import Any

from . import operations
from .base import BaseLock
from .clock import monotonic
from .driver.effects import Operation, Sleep
from .keys import new_id
from .records import Token
from .validation import check_token

RETRY_EVERY = 0.1
"""Seconds between two tries for a lock that is held by the same token, because the queue knows only one entry of it."""


class TokenLock(BaseLock):
    """A lock that can be acquired by a token, and that shows its id as one."""

    @property
    def local(self) -> Local:
        """Return an object whose `token` is the `id` as bytes, and None instead of an error where there is none."""
        return Local(self)

    def _acquire_by(self, acquirer: Any, token: object, timeout: float | None) -> Operation[bool]:
        """Acquire the lock by this token."""
        until = math.inf if timeout is None else monotonic() + timeout
        by = Token(check_token(token), b',"by":"%b"' % new_id().encode())
        while True:
            (stored,) = yield from operations.read([self.name], [self._keys])
            by.recorded = stored is not None and by.mark in stored.record
            left = None if timeout is None else max(0.0, until - monotonic())
            if stored is None or stored.id != by.id or by.recorded or acquirer in self._leases:
                by.refused = False
                if (yield from self._acquire(acquirer, left, by)):
                    return True
                if not by.refused:
                    return False
            elif left == 0.0:
                return False
            else:
                yield Sleep(RETRY_EVERY if left is None else min(RETRY_EVERY, left))


class Local:
    """The object that redis-py calls ``lock.local``."""

    __slots__ = ("_lock",)

    def __init__(self, lock: TokenLock) -> None:
        self._lock = lock

    @property
    def token(self) -> bytes | None:
        """The id of the caller's acquisition, None when there is none.

        Set it to the token of an acquisition that was made elsewhere, to release or to extend that one.
        """
        id = self._lock._owner_id(self._lock._acquirer())
        return None if id is None else id.encode()

    @token.setter
    def token(self, token: str | bytes | None) -> None:
        self._lock._given_id = None if token is None else check_token(token)
