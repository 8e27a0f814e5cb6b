"""Redlock: one lock on several independent servers, held while most of them hold it.

The algorithm is that of Redis' documentation ("Distributed Locks with Redis"), with one change: instead of trying again at
random times, every caller takes the servers in the order in which they were given and waits in their queues. Who holds one
server's lock waits only for servers further on, so that nobody waits in a circle.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar, Unpack

from redis import Redis

from ..exceptions import (
    AcquireTimeout,
    AlreadyAcquired,
    LockBackendError,
    LockError,
    LockLost,
    LossRecord,
    NotAcquired,
)
from . import events, operations
from .acquirers import Acquirers
from .base import chain
from .clock import monotonic
from .driver.effects import Operation
from .driver.registry import server_of
from .lock import Lock
from .loss import check_reason, report_reset
from .quorum_lease import Holding, majority
from .records import LockInfo
from .validation import (
    AS_MADE,
    AsMade,
    Nothing,
    Seconds,
    unexpected,
    wait_of,
)

T = TypeVar("T")


class QuorumLock:
    """A lock that is held on most of several independent servers, so that it outlives the loss of some of them.

    `clients` are redis-py clients of at least three servers that do not replicate each other; everybody must give them in the
    same order. The rest is as for `Lock`, and so are the methods, but for three things: there is no fence, as servers that
    do not know each other cannot draw increasing numbers together; there is no `id`; and a server that does not answer costs
    its client's socket timeout at every step.

    Its limits are those of Redlock: it relies on the servers' clocks running at about the same speed, and a server that
    lost its data must stay away for one `expire`. For a lock that guards more than efficiency see `Lock` and its fence.

    Raises TypeError and ValueError for bad arguments.
    """

    def __init__(
        self,
        clients: Iterable[Redis],
        name: str,
        *,
        expire: Seconds | None = None,
        auto_renewal: bool = True,
        max_hold: Seconds | None = None,
        blocking: bool = True,
        timeout: Seconds | None = None,
        label: str | None = None,
        on_lost: Callable[[Any], object] | None = None,
        kind: str = "lock",
        prefix: str = "redislock",
        **wrong: Unpack[Nothing],
    ) -> None:
        if wrong:
            raise unexpected(type(self).__name__, wrong, QuorumLock.__init__.__kwdefaults__ or ())
        self._servers = [server_of(client) for client in clients]
        if len(self._servers) < 3 or len({server.place for server in self._servers}) < len(self._servers):
            raise ValueError(
                "clients must be of at least three different servers: most of them must outlive the others"
            )
        self._options: dict[str, Any] = {
            "expire": expire,
            "auto_renewal": auto_renewal,
            "max_hold": max_hold,
            "label": label,
            "kind": kind,
            "prefix": prefix,
        }
        checked = Lock(
            self._servers[0], name, on_lost=on_lost, **self._options
        )  # what it says of the arguments, is said now
        self._keys = checked._keys
        self.name = name
        self.on_lost = on_lost
        self._wait = wait_of(blocking, timeout)
        self._held: Acquirers[Holding] = Acquirers()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} on {len(self._servers)} servers>"

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _held=Acquirers())
        return other

    def __deepcopy__(self, memo: object) -> Self:
        return self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a quorum lock cannot be pickled, because its acquisitions belong to this process. Pass the name ({self.name!r})"
        )

    # This acquisition, known without asking

    @property
    def lost(self) -> LossRecord | None:
        """Why this acquisition was lost, or None while it is held; local and free."""
        holding = self._latest()
        return self._held.past_loss(threading.current_thread()) if holding is None else holding.loss

    def raise_if_lost(self) -> None:
        """Raise LockLost if this acquisition was lost: call it before each irreversible step. Local and free.

        Raises NotAcquired when there is none.
        """
        holding = self._latest()
        loss = self.lost
        if loss is not None:
            raise LockLost(self.name, loss)
        if holding is None or holding.inherited_by_fork:
            raise NotAcquired(self.name)

    # The operations

    def acquire(self, blocking: bool | AsMade = AS_MADE, timeout: Seconds | AsMade | None = AS_MADE) -> bool:
        """Acquire the lock, and tell whether it was acquired.

        Waits up to `timeout` seconds, for ever with None or inf; `blocking=False` tries once. What is not given is as the object
        was made; without arguments it waits as ``with`` does.

        Raises LockBackendError when too many servers cannot answer. Raises AlreadyAcquired when this thread holds the lock through this object, or through
        another one and would wait for itself for ever. If the lock that it holds is not renewed, or has `max_hold`, it waits
        for the end of that one.
        """
        seconds = self._wait.seconds(blocking, timeout)
        before = self._mine()
        if before is not None:
            if before.loss is None:
                raise AlreadyAcquired(self.name)
            before.give_back()  # what is left of it would be waited for
        until = math.inf if seconds is None else monotonic() + seconds
        while True:
            holding = Holding(self.name, self._servers, self._options, weakref.ref(self))
            try:
                if holding.collect(until):
                    self._held[threading.current_thread()] = holding
                    events.emit("acquired", "Quorum lock %r acquired.", self.name, name=self.name, fence=0)
                    return True
            except BaseException:
                holding.give_back()
                raise
            holding.give_back()
            if monotonic() >= until:
                return False

    def release(self) -> None:
        """Release the lock on all servers and wake the next waiter.

        Raises NotAcquired when this thread does not hold it, LockLost when it was lost meanwhile, and LockBackendError when
        too many servers cannot answer: then it may be repeated, and else the lock ends by its expiry.
        """
        holding = self._own()
        holding.release()
        loss = holding.loss
        self._held.end(threading.current_thread(), loss)
        if loss is not None:
            raise LockLost(self.name, loss)
        events.emit("released", "Quorum lock %r released.", self.name, name=self.name, fence=0)

    def extend(self, expire: Seconds | None = None) -> Literal[True]:
        """Give the held lock a new life of `expire` seconds from now (None: of its own), and return True.

        Raises NotAcquired, LockLost and LockBackendError as `release` does.
        """
        holding = self._own()
        holding.extend(expire)
        if holding.loss is not None:
            raise LockLost(self.name, holding.loss)
        return True

    def owner(self) -> LockInfo | None:
        """Return who holds the lock on most servers now, or None. Raises LockBackendError when too many cannot answer."""
        replies = self._ask(lambda until: operations.read([self.name], [self._keys], until))
        found = [None if held is None else held.info for (held,) in replies]
        votes = Counter(info.id for info in found if info is not None)
        needed = majority(self._servers)
        for id, count in votes.most_common(1):
            if count >= needed:
                infos: list[LockInfo] = [info for info in found if info is not None and info.id == id]
                # That many must end before it is free.
                return sorted(infos, key=lambda info: info.ttl)[count - needed]
        return None

    def locked(self) -> bool:
        """Return whether anybody holds the lock now."""
        return self.owner() is not None

    def owned(self) -> bool:
        """Return whether this thread's acquisition holds the lock, asked of the servers now."""
        holding, holder = self._mine(), self.owner()
        return holding is not None and holder is not None and holder.id == holding.id

    def ttl(self) -> float | None:
        """Return the seconds left of the lock's life, or None when nobody holds it."""
        holder = self.owner()
        return None if holder is None else holder.ttl

    def reset(self, by: object = None, reason: str = "") -> bool:
        """Take the lock from whoever holds it, wake the next waiter, and tell whether any server held it.

        The former holder is not stopped: it is told of the loss within a third of its life. `by` is the user
        (or words) and `reason` the cause: both are reported to the former holder, in the log and to listeners.
        """
        check_reason(reason)
        freed = 1 in self._ask(lambda until: operations.reset(self.name, self._keys, None, by, reason, until))
        if freed:
            report_reset(f"Quorum lock {self.name!r}", self.name, None, by, reason)
        return freed

    def __enter__(self) -> Self:
        if not self.acquire():
            raise AcquireTimeout(self.name, self._wait.timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (
            self._mine() is None and threading.current_thread() in self._held
        ):  # a forked child leaves its parent's block
            return
        try:
            self.release()
        except LockError as failure:
            if error is None:
                raise
            events.log.warning("Lock %r could not be released after its block failed: %s", self.name, failure)
            chain(error, failure)

    # Steps

    def _ask(self, question: Callable[[float], Operation[T]]) -> list[T]:
        """Return the answers of the servers that answer at once; raises LockBackendError when they are too few."""
        answers, cause = [], ""
        for server in self._servers:
            try:
                answers.append(server.run(question(monotonic())))
            except LockBackendError as error:
                cause = error.cause
        if len(answers) < majority(self._servers):
            raise LockBackendError(self.name, cause)
        return answers

    def _mine(self) -> Holding | None:
        holding = self._held.get(threading.current_thread())
        return None if holding is None or holding.inherited_by_fork else holding

    def _own(self) -> Holding:
        holding = self._mine()
        if holding is None:
            raise NotAcquired(self.name)
        return holding

    def _latest(self) -> Holding | None:
        """Return the acquisition that the caller may look at: its own, or the only one if it never had one."""
        return self._held.told() or self._held.seen(threading.current_thread())

    def _tell_of_loss(self, holding: Holding) -> None:
        if self.on_lost is not None:
            try:
                with self._held.telling_of(holding):
                    self.on_lost(self)
            except Exception:
                events.log.exception("on_lost of lock %r failed.", self.name)
