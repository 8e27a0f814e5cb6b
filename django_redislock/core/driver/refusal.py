"""Users of Redis who may not subscribe, so that no wake-up reaches their waiters."""

from __future__ import annotations

import math

from redis.exceptions import NoPermissionError

from .. import events
from ..clock import monotonic

REFUSED_FOR = 60.0
"""Seconds after which another try to subscribe is made: the user may have got the right."""
REFUSED = (
    "Redis does not let its user subscribe (%s). So waiters try for locks and values again and again, and get them "
    "later. Grant +subscribe and the channels &redislock:wake:*; 'manage.py redislock doctor --acl' prints all rights."
)


class Refusal:
    """The refusal of a server to let its user subscribe, shared by all waiting rooms of that server."""

    def __init__(self) -> None:
        self._until = -math.inf
        self._reported = False

    @property
    def stands(self) -> bool:
        """Whether the server refused to let the user subscribe a short time ago."""
        return monotonic() < self._until

    def note(self, error: NoPermissionError) -> None:
        """Note the refusal; the first one is logged."""
        self._until = monotonic() + REFUSED_FOR
        if not self._reported:
            self._reported = True
            events.log.warning(REFUSED, str(error))  # the error itself would keep frames alive
