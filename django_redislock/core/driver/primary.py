"""Servers that cannot write: how they are recognised, and what follows.

After a failover an address leads to another server, while connections to the former primary stay open. The rule of
both drivers:

* An error reply that says so becomes `NotPrimary`, a ConnectionError: `with_retries` tries again.
* The driver distrusts all connections that it has. Each is closed before it is used again; a new one may lead to the
  new primary.
* Before the next subscription the role of the server is checked, because a replica accepts SUBSCRIBE and sends no
  wake-ups.
"""

from __future__ import annotations

import re
from typing import Any

from redis.exceptions import ConnectionError, RedisError

from .connection_kinds import parse_error

# From a script, Redis 6.2 puts its own words before the error.
_NOT_PRIMARY = re.compile("(?:ERR Error running script .*: -)?(?:READONLY|MASTERDOWN|NOREPLICAS|LOADING) ", re.DOTALL)


class NotPrimary(ConnectionError):
    """The server is no primary that can write now: the next connection may lead to another server."""


def error_of(line: str) -> RedisError:
    """Return the error that an error reply means."""
    return NotPrimary(line) if _NOT_PRIMARY.match(line) else parse_error(line)


def check_role(hello: Any) -> None:
    """Raise NotPrimary when the reply to HELLO is that of a replica; an error in its place proves nothing."""
    if isinstance(hello, list) and hello[hello.index(b"role") + 1] != b"master":
        raise NotPrimary("The address leads to a replica.")
