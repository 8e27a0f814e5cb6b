"""Defects that are planted, one at a time: the simulation must find each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django_redislock.core import lease, operations, scripts


@contextmanager
def script(which: scripts.Script, old: str, new: str) -> Iterator[None]:
    """Change the text of a script."""
    text = which.text
    assert old.encode() in text, f"{which} does not contain {old!r}"
    which.text = text.replace(old.encode(), new.encode())
    try:
        yield
    finally:
        which.text = text


@contextmanager
def attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Change a function or a constant."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _late_deadline(self: lease.Lease, sent: float, life: float) -> None:
    self.failures = 0
    now = lease.monotonic()
    self.deadline, self.next_renewal = now + life, now + life / 3


def _earlier_deadline(self: lease.Lease, sent: float, life: float) -> None:
    self.failures = 0
    life = min(life, self.expire)
    self.deadline, self.next_renewal = sent + life, sent + life / 3


def _no_undo(claim: operations.AcquireRequest, channel: bytes, join: bool, ticket: bytes) -> operations.ScriptCall:
    call = _call(claim, channel, join, ticket)
    call.undo = None
    return call


_call = operations.AcquireRequest.call

A, R, N = scripts.ACQUIRE, scripts.RELEASE, scripts.RENEW
PLANTED = {
    "a release does not ask whose lock it is": lambda: script(
        R, "is_of(value, id .. '\\n' .. fence) and fence)", "fence_of(value))"
    ),
    "whoever tries takes the lock": lambda: script(
        A, "if not (value and is_of(value, id) and", "if value and not value and not (is_of(value, id) and"
    ),
    "the lock is taken over a moment before its end": lambda: script(
        A,
        "local value = redis.call('GET', lock)",
        "local value = redis.call('PTTL', lock) > 150 and redis.call('GET', lock)",
    ),
    "the deadline is counted from the reply": lambda: attribute(lease.Lease, "renewed", _late_deadline),
    "a released lock is handed to nobody": lambda: script(
        R, "hand_over(lock, queue, id)\n  return 1", "redis.call('DEL', lock)\n  return 1"
    ),
    "a release forgets the queue": lambda: script(
        R, "hand_over(lock, queue, id)\n  return 1", "redis.call('DEL', lock, queue)\n  return 1"
    ),
    "a release keeps no receipt": lambda: script(R, "keep_receipt(receipts, held_fence, held_fence)", ""),
    "fences do not grow": lambda: script(A, "local fence = whole(now)", "local fence = whole(1e15 - now % 1000)"),
    "a lock has no expiry": lambda: script(A, "value, 'PX', expire_ms)", "value)"),
    "a queue has no expiry": lambda: script(A, "redis.call('PEXPIRE', queue, QUEUE_LIFE_MS)", ""),
    "a waiter that gives up stays in the queue": lambda: script(
        A, "redis.call('ZREM', queue, entry)\n    count_waits", "count_waits"
    ),
    "a message is sent to nobody": lambda: script(R, "redis.pcall('PUBLISH', channel, id) ~= 0", "true"),
    "the lock's life is cut in half": lambda: script(
        A, "value, 'PX', expire_ms)", "value, 'PX', math.floor(expire_ms / 2))"
    ),
    "a renewal gives no life": lambda: script(N, "redis.call('PEXPIRE', lock, expire_ms)", ""),
}
"""What each history may show, and some of a few hundred do."""

NOT_FOUND = {
    "an answer that comes late shortens the belief": lambda: attribute(lease.Lease, "renewed", _earlier_deadline),
    "a renewal does not ask whose lock it is": lambda: script(N, "and is_of(value, value_prefix)", ""),
    "a renewal asks for the id only": lambda: attribute(
        lease.Lease, "value_prefix", property(lambda self: self.id.encode())
    ),
    "a reservation has no end": lambda: script(A, "return left, left <= 0 or", "return left, false and"),
    "who is gone is handed the lock": lambda: script(
        R, "redis.pcall('PUBLISH', channel, id) ~= 0", "redis.pcall('PUBLISH', channel, id) ~= -1"
    ),
    "fences come from the clock alone": lambda: script(A, "if last and tonumber(last) >= now then", "if false then"),
    "a try that was not answered is not undone": lambda: attribute(operations.AcquireRequest, "call", _no_undo),
}
"""What no oracle sees yet, or only one history in thousands shows: given ids, clocks that step, and waits while something is wrong."""
