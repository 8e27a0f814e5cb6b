"""The end of leases, so that what is being computed is not stored: the protocol, without I/O."""

from __future__ import annotations

import re

from .clock import monotonic
from .keys import MAX_NAME, held_keys, lock_keys, witness_key
from .protocol import names
from .scripts import Script
from .steps import Call, Commands, Steps, attempt
from .wanted import KIND, lease_name

INVALIDATE = Script("invalidate", "handover")

BATCH = 250
"""Leases ended in one call at most, so that the server is not kept busy for long."""


def invalidate(prefix: str, keys: list[str], cut: bool = False) -> Steps[int]:
    """End the leases of the values, so that what is being computed is not stored, and return how many there were.

    `cut`: the keys are what names of leases have of them.
    """
    ended = 0
    for start in range(0, len(keys), BATCH):
        some = [KIND + key if cut else lease_name(key) for key in keys[start : start + BATCH]]
        locks = [lock_keys(prefix, name) for name in some]
        call = Call(
            INVALIDATE,
            tuple(
                key
                for name, lock in zip(some, locks, strict=True)
                for key in (lock.lock, lock.held, lock.queue, witness_key(lock, name))
            ),
            tuple(name.encode() for name in some),
        )
        _, reply = yield from attempt(some[0], call, monotonic())
        ended += reply
    return ended


def leases_like(prefix: str, pattern: str) -> Steps[int]:
    """End the leases of the values whose keys match a pattern of Redis, and return how many there were."""
    matches = re.compile(glob_to_regex(pattern), re.DOTALL).fullmatch
    eras = tuple(held.removesuffix(b"held") + b"era" for held in held_keys(prefix))
    yield from attempt(
        prefix, Commands(((b"DEL", *eras),)), monotonic()
    )  # of leases that have ended nobody knows the names
    held = yield from names(prefix, monotonic())
    keys = [name.removeprefix(KIND) for name in held if name.startswith(KIND)]
    # Of a key too long for a name not all is known.
    return (
        yield from invalidate(
            prefix, [key for key in keys if len(key) + len(KIND) == MAX_NAME or matches(key)], cut=True
        )
    )


def glob_to_regex(pattern: str) -> str:
    """Return a regular expression for what Redis matches by the pattern; for ``[a-c]`` it matches any one character."""
    return _TOKEN.sub(lambda token: _REGEX.get(token[0][0]) or re.escape(token[1] or token[0]), pattern)


_TOKEN = re.compile(r"\\(.)|\[(?:\\.|[^]])*]?|.", re.DOTALL)
_REGEX = {"*": ".*", "?": ".", "[": "."}
