"""Planted defects of what a call answers, of waking, and of what is left: a rule about calm histories finds most."""

from __future__ import annotations

import itertools
from typing import Any

from django_redislock.cache.lease import obtain, store
from django_redislock.celery import execution_lock
from django_redislock.core import base, lease, operations, scripts
from django_redislock.exceptions import LockBackendError

from .driver import SimulatedWatchdog
from .patches import Defect

_acquire, _release = base.BaseLock._acquire, base.BaseLock._release
_wait_effect = operations.wait_effect
_change = lease.Lease.change
_numbers = itertools.count(1)


def _raises_at_times(self: Any, acquirer: Any, timeout: float | None) -> Any:
    if next(_numbers) % 4 == 0:
        raise LockBackendError(self.name, "planted")
    return (yield from _acquire(self, acquirer, timeout))


def _refuses_at_times(self: Any, acquirer: Any, timeout: float | None) -> Any:
    if timeout == 0 and next(_numbers) % 3 == 0:
        return False
    return (yield from _acquire(self, acquirer, timeout))


def _half_the_limit(self: Any, acquirer: Any, timeout: float | None) -> Any:
    return (yield from _acquire(self, acquirer, timeout and timeout / 2))


def _waits_twice(self: Any, acquirer: Any, timeout: float | None) -> Any:
    return (yield from _acquire(self, acquirer, timeout)) or (
        timeout != 0 and (yield from _acquire(self, acquirer, 20.0))
    )


def _released_and_raises(self: Any, lease: Any) -> Any:
    yield from _release(self, lease)
    if next(_numbers) % 3 == 0:
        raise LockBackendError(self.name, "planted")


def _does_not_release(self: Any, lease: Any) -> Any:
    self._stop(lease)
    self._forget(lease)
    yield from ()


def _seconds_for_milliseconds(waiter: Any, until: float, left_ms: int, *place: int) -> Any:
    return _wait_effect(waiter, until, left_ms * 1000 if left_ms > 0 else left_ms, *place)


def _late_change(self: lease.Lease, expire: float) -> None:
    _change(self, expire)
    self.deadline = max(self.deadline, lease.monotonic() + expire)


def _never_lost(self: lease.Lease, cause: Any) -> None:
    return None


def _remembers_longer(self: lease.Lease, sent: float, expire: float) -> None:
    _renewed(self, sent, expire)
    self.deadline += expire / 2


_renewed = lease.Lease.renewed


def _counts_no_entry(self: base.BaseLock, acquirer: Any, timeout: float | None) -> Any:
    held = self._lease_of(acquirer)
    got = yield from _enter(self, acquirer, timeout)
    if held is not None:
        held.hold_count = 1
    return got


def _enters_what_is_lost(self: base.BaseLock, acquirer: Any, timeout: float | None) -> Any:
    held = self._lease_of(acquirer)
    if held is None:
        return (yield from _enter(self, acquirer, timeout))
    held.hold_count += 1
    self._leases[acquirer] = held
    return True


_enter = base.BaseLock._acquire
Lock, Lease = base.BaseLock, lease.Lease
A, R, N, X = scripts.ACQUIRE, scripts.RELEASE, scripts.RENEW, scripts.RESET
L, S = obtain.LEASE, store.SETTLE
FINISH = execution_lock.FINISH

CALLS: dict[str, Defect] = {
    "acquire raises an error in one of four calls": (Lock, "_acquire", _raises_at_times),
    "a call that does not wait is refused a free lock in one of three": (Lock, "_acquire", _refuses_at_times),
    "a limit ends at its half": (Lock, "_acquire", _half_the_limit),
    "a limit does not end the wait": (Lock, "_acquire", _waits_twice),
    "a release raises an error after it has released": (Lock, "_release", _released_and_raises),
    "a release sends nothing": (Lock, "_release", _does_not_release),
    "a repeated reset releases the next holder": (
        X,
        "if redis.call('ZSCORE', receipts, receipt) then",
        "if false then",
    ),
    "a renewal goes on after a release that was not answered": (SimulatedWatchdog, "remove", lambda self, lease: True),
    "seconds are taken for milliseconds where polling hides it": (operations, "wait_effect", _seconds_for_milliseconds),
    "an extension is believed before it is confirmed": (Lease, "change", _late_change),
    "a loss is not noted": (Lease, "lose", _never_lost),
    "a renewal is believed for longer than its expiry": (Lease, "renewed", _remembers_longer),
    "a renewal says that each lock is still held": (N, "renewed[i] = 0", "renewed[i] = 1"),
    "a renewal says that no lock is held": (N, "renewed[i] = 1", "renewed[i] = 0"),
    "the queue is in the order of the ids": (
        A,
        "redis.call('ZADD', queue, 'NX', drawn, entry)",
        "redis.call('ZADD', queue, 'NX', 1, entry)",
    ),
    "whoever was woken takes another's reservation": (A, "elseif next_id == id then", "elseif next_id then"),
    "a reset ends a lock that somebody else took meanwhile": (
        X,
        "if wanted_fence ~= '' and wanted_fence ~= fence then",
        "if false then",
    ),
    "a reset hands the lock to nobody": (X, "hand_over(lock, queue, '')", "redis.call('DEL', lock)"),
    "receipts are kept for a millisecond": (R, "RECEIPT_LIFE_MS)", "1)"),
    "a recall frees the lock at once": (X, "if recalls and not is_of_message(value) then", "if false then"),
    "a recalled lock is renewed": (
        N,
        "and is_of(value, value_prefix) and",
        "and is_of(unmarked(value), value_prefix) and",
    ),
    "a recall gives the lock a new life": (X, "value, 'KEEPTTL')", "value, 'PX', 9000)"),
    "a recalled lock is taken by the next who tries": (
        A,
        "local value = redis.call('GET', lock)",
        "local value, marked = unmarked(redis.call('GET', lock))\nif marked then value = false end",
    ),
    "a recalled lock is acquired again by its id": (
        A,
        "local value = redis.call('GET', lock)",
        "local value = unmarked(redis.call('GET', lock))",
    ),
    "a holder cannot give back what was recalled": (
        R,
        "local value = unmarked(redis.call('GET', slot))",
        "local value = redis.call('GET', slot)",
    ),
    "who was told of a recall does not give the lock back": (Lease, "refused", lambda self, reply: None),
}
CALLS_OF_RLOCKS: dict[str, Defect] = {
    "entering again is not counted": (Lock, "_acquire", _counts_no_entry),
    "a lock that was lost is entered again": (Lock, "_acquire", _enters_what_is_lost),
}
CALLS_OF_CACHES: dict[str, Defect] = {
    "a waiter for a value does not join the queue": (
        L,
        "redis.call('ZADD', queue, 'NX', whole(now), channel .. '\\n' .. id)",
        "",
    ),
    "a settled value leaves its queue": (S, "redis.call('DEL', queue)", ""),
    "a waiter is sent another value": (S, "id .. message)", "id .. '\\n=0')"),
}
CALLS_OF_TASKS: dict[str, Defect] = {
    "a marker lives for a millisecond": (
        FINISH,
        "redis.call('SET', marker, after, 'PX', expire_ms)",
        "redis.call('SET', marker, after, 'PX', 1)",
    ),
    "an execution leaves no receipt": (FINISH, "keep_receipt(receipts, fence, fence)", ""),
    "a message's lock is left to nobody's id": (
        FINISH,
        "redis.call('SET', lock, keep_id ..",
        "redis.call('SET', lock, 'x' .. keep_id ..",
    ),
    "an execution releases whatever holds the lock": (
        FINISH,
        "if id ~= '' and not (value and is_of(value, of)) then",
        "if id ~= '' and not value then",
    ),
}
