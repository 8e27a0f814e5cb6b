"""Every error of the package, and its warning.

The positional arguments of an error are its data, all of them plain values, so that an error survives pickle and
Celery's JSON results. The message is made from the data.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from redis.exceptions import LockError as RedisLockError, LockNotOwnedError, RedisError

LossCode = Literal[
    "expired",
    "no_answer",
    "recalled",
    "force_released",
    "released",
    "server_lost_data",
    "too_few_servers",
    "unknown",
]
"""The cause of a loss: the lock expired without a renewal; it expired while Redis did not answer; a user asked for it
back (nobody else gets it before its release or its expiry); a user force-released it; it was released elsewhere by its
id; the server lost it (deleted, evicted, restarted or failed over); too few servers of a quorum hold it; the server no
longer has it and could not be asked for the cause."""


class LossRecord(NamedTuple):
    """The description of a lock that was lost while its holder believed to hold it."""

    name: str
    id: str
    fence: int
    reason: str
    """The cause in words; after a recall or a forced release also the user, the time and the reason given."""
    when: float
    """Unix time at which the loss was noticed."""
    code: LossCode
    """The cause for programs."""


class LockError(RedisLockError):
    """Base of every error of django-redislock; `name` is the lock's name.

    It is a ``redis.exceptions.LockError``, so that code written for redis-py's locks handles it.
    """

    def __init__(self, name: str, *data: object) -> None:
        RedisError.__init__(self, name, *data)
        self.name = self.lock_name = name

    __repr__ = Exception.__repr__

    @property
    def message(self) -> str:  # type: ignore[override]
        """The text of the error, under redis-py's name for it."""
        return str(self)

    def __str__(self) -> str:
        return f"Lock {self.name!r} failed."


class NotAcquired(LockError, LockNotOwnedError):
    """This thread or task does not hold the lock, so it can neither release nor extend it."""

    def __str__(self) -> str:
        return (
            f"Lock {self.name!r} is not held by this thread or task. Acquire it first; to release or extend it from "
            "elsewhere, make a lock of the same name with the id of the held one: lock(name, id=held.id)."
        )


class AlreadyAcquired(LockError):
    """This thread or task already holds the lock, and would wait for itself."""

    def __str__(self) -> str:
        return (
            f"Lock {self.name!r} is already held by this thread or task, or through this object by the same id, so a "
            "wait for it would never end. Release it first, or, if it is no semaphore and no quorum lock, make both "
            "acquisitions re-entrant: lock(name, reentrant=True) or rlock(name)."
        )


class AcquireTimeout(LockError, TimeoutError):
    """The lock was not free within `timeout` seconds."""

    def __init__(self, name: str, timeout: float | None = None) -> None:
        super().__init__(name, timeout)
        self.timeout = timeout

    def __str__(self) -> str:
        if not self.timeout:
            return f"Lock {self.name!r} is held by another holder."
        return f"Lock {self.name!r} was not free within {self.timeout:g} s."


class LockLost(LockError, LockNotOwnedError):
    """The lock ended while its holder still believed to hold it; `record` contains the time and the cause."""

    def __init__(self, name: str, record: LossRecord) -> None:
        super().__init__(name, tuple(record))
        self.record = LossRecord(*record)

    def __str__(self) -> str:
        return f"Lock {self.name!r} (fence {self.record.fence}) was lost: {self.record.reason}."


class StaleFence(LockError):
    """A write has an older fence than the stored one, so a later holder has already written."""

    def __init__(self, name: str, fence: int) -> None:
        super().__init__(name, fence)
        self.fence = fence

    def __str__(self) -> str:
        return f"The write of lock {self.name!r} with fence {self.fence} is stale: a later holder has already written."


class LockBackendError(LockError):
    """Redis did not answer a command of the lock, or refused it, so it is unknown whether the lock is held.

    `cause` is the text of the client's error. `refused`: Redis answered with an error (such as NOPERM); otherwise no
    answer came. `name` is empty where all locks are meant.
    """

    def __init__(self, name: str, cause: str, refused: bool = False) -> None:
        super().__init__(name, cause, refused)
        self.cause = cause
        self.refused = refused

    def __str__(self) -> str:
        what = f"lock {self.name!r}" if self.name else "the held locks"
        short = self.cause.startswith("TooFewReplicas")
        did = "refused a command" if self.refused else "did not confirm a command" if short else "did not answer"
        return f"Redis {did} for {what}: {self.cause}"


class ComputationFailed(LockError):
    """The computation of a value failed in another process; `kind` and `text` describe its exception."""

    def __init__(self, name: str, kind: str, text: str) -> None:
        super().__init__(name, kind, text)
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"The computation of {self.name!r} failed in another process: {self.kind}: {self.text}"


class TaskAlreadyRunning(LockError):
    """Another execution of the same single-instance task runs: `holder`, whose lock expires in `ttl` seconds."""

    def __init__(self, key: str, holder: str, ttl: float | None = None) -> None:
        super().__init__(key, holder, ttl)
        self.key = key
        self.holder = holder
        self.ttl = ttl

    def __str__(self) -> str:
        return f"{self.key} is already running: {self.holder}"


class LongTimeoutWarning(RuntimeWarning):
    """A lock got a `timeout` of more than two minutes, as redis-py's locks need one: it is not renewed.

    After a kill of its holder nobody gets the lock before that time is over. The first such lock of a process warns.
    Without `timeout` the lock is renewed, and ends 30 s after a kill; ``auto_renewal=False`` says that it shall not be.
    """


CALLERS_OWN = ("SoftTimeLimitExceeded", "JobTimeoutException", "TaskPredicate")
"""The names of the time limits of Celery and RQ, which are Exceptions, and of the base of Celery's Retry, Ignore and
Reject: a task that got the Retry of another one was never run again."""


def is_interruption(error: BaseException) -> bool:
    """Whether the error ends the work of one caller only, and says nothing about a value or a server.

    Such an Exception is known by its name, by its package, or by a true attribute `callers_own` of it or its class.
    """
    return (
        not isinstance(error, Exception)
        or bool(getattr(error, "callers_own", False))
        or any(
            kind.__name__ in CALLERS_OWN or kind.__module__.startswith("timeout_decorator.")
            for kind in type(error).__mro__
        )
    )
