"""Servers, and proxies before them, that refuse SUBSCRIBE, so that no wake-up reaches the waiters."""

from __future__ import annotations

import math

from redis.exceptions import ResponseError

from .. import events
from ..clock import monotonic

REFUSED_FOR = 60.0
"""Seconds after which another try to subscribe is made: the user may have got the right."""
REFUSED = (
    "Redis, or a proxy before it, refuses SUBSCRIBE (%s). So waiters try for locks and values again and again, and get "
    "them later. Grant +subscribe and the channels &redislock:wake:*; 'manage.py redislock doctor --acl' prints all "
    "rights. A proxy must know channels, or locks must bypass it."
)


class Refusal:
    """The refusal of a server to let its clients subscribe, shared by all waiting rooms of that server."""

    def __init__(self) -> None:
        self._until = -math.inf
        self._reported = False

    @property
    def stands(self) -> bool:
        """Whether the server refused SUBSCRIBE a short time ago."""
        return monotonic() < self._until

    def note(self, error: ResponseError) -> None:
        """Note the refusal; the first one is logged."""
        self._until = monotonic() + REFUSED_FOR
        if not self._reported:
            self._reported = True
            events.log.warning(REFUSED, str(error))  # the error itself would keep frames alive
