"""Redlock: one lock on several independent servers, held while most of them hold it.

The algorithm is that of Redis' documentation ("Distributed Locks with Redis"): each server is asked for an ordinary
lock, without waiting. If most of them grant it within the time for which it is valid, the lock is held; otherwise all
is given back, and asked for again after a random pause. Each part is renewed, extended and released as any lock is, and
the whole is judged by their number. The allowance for the drift of clocks is taken from each expiry.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import combinations, starmap
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import TimeoutError

from ..exceptions import AlreadyAcquired, LockBackendError, LossCode
from . import chance, events, operations
from .acquirers import CallerView, holders, waits_for_itself
from .async_lock import AsyncLock
from .attempt import Attempt
from .base import BaseLock
from .clock import monotonic
from .driver.cluster.cluster import is_same
from .driver.effects import Operation, RunAt, RunAtEach, Sleep, is_temporary, without_frames
from .driver.registry import server_of
from .driver.server import Server
from .keys import new_id
from .lease import Cause, Lease, find_cause
from .lock import Lock
from .operations import SELF_WAIT, AcquireRequest
from .options import CoreOptions, checked_options
from .validation import Seconds, check_expire
from .watchdog import watchdog

DRIFT, SHORTEST_DRIFT = 0.01, 0.002
"""The share of the expiry, and the seconds, by which clocks may differ until then: as in Redlock."""
SHORTEST_EXPIRE = 0.01
"""Seconds; of a shorter expiry, the allowance for clocks leaves next to nothing."""
FIRST_ANSWER, SHORTEST_ANSWER = 0.25, 0.05
"""Seconds that a server has for its first answer, and at least for each, where the others may suffice."""
LEFT_OUT = 2.0
"""Seconds for which a server that did not answer is asked only where the others do not suffice."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.2
"""Seconds until the next attempt, at most; random, so that two acquisitions do not meet again. It doubles each time."""
HEARD = 1.0
"""Seconds for which the answers of most servers count at the end of the time: the lock was held a moment ago."""


class Poll:
    """A question to servers, and what they answer."""

    def __init__(
        self,
        question: Callable[[Server, float], Operation[bool]],
        enough: Callable[[Poll], bool],
        answered: Callable[[Poll], bool] | None = None,
    ) -> None:
        self.question = question
        """Asks a server, which has so many seconds to answer."""
        self._enough = enough
        self._answered = answered or enough
        self.answers: dict[Server, bool] = {}
        self.errors: dict[Server, LockBackendError] = {}

    def suffices(self) -> bool:
        """Whether no further answer is needed."""
        return self._enough(self)

    def is_answered(self) -> bool:
        """Whether no silent server is asked once more: a try that does not wait came back after 0.9 s, because one
        server had refused, one had granted, and the third was silent."""
        return self._enough(self) or self._answered(self)

    def count(self, answer: bool) -> int:
        """Return how many servers have answered this."""
        return list(self.answers.values()).count(answer)


class PartLease(Lease):
    """The lease on one server. Its loss is not yet the loss of the whole, to which `lock_ref` leads."""

    __slots__ = ("answer_within",)
    retry_for = 0.0  # the other servers may suffice

    def renewed(self, sent: float, expire: float, share: float | None = None) -> None:
        super().renewed(sent - drift_of(expire), expire, share)

    def change(self, expire: float) -> None:
        super().change(expire)
        self.deadline = min(self.deadline, monotonic() + expire - drift_of(expire))

    def report_loss(self) -> None:
        whole = self.lock_ref()
        if whole is not None:
            whole.loss  # noqa: B018  (the loss of the whole is noticed and reported where it is read)


def drift_of(expire: float) -> float:
    """Return the seconds by which an expiry ends earlier for this process than on the server."""
    return expire * DRIFT + SHORTEST_DRIFT


class QuorumLease(Lease):
    """One acquisition of the whole: it is held while so many parts as are `needed` are held."""

    __slots__ = ("needed", "parts", "released", "unanswered")

    def __init__(self, needed: int, *args: Any) -> None:
        super().__init__(*args)
        self.needed = needed
        self.parts: dict[Server, PartLease] = {}
        """The parts that were granted, and neither released nor given back."""
        self.released = 0
        """How many parts were released."""
        self.unanswered: dict[Server, Attempt] = {}
        """The attempts whose server did not answer in the time it had. One that is asked again is asked by the same
        attempt: by a new one, a free lock seemed to be taken, because the undo of the first one came later."""

    def held(self) -> list[PartLease]:
        return [part for part in list(self.parts.values()) if part.loss is None]

    @property
    def loss(self) -> Any:
        """Why and when most parts were lost, or None; sends no command."""
        if self.acquired and not (self._losses or self.ended or self.inherited_by_fork) and not self.has_most():
            self.lose(self.ending)
        return self.noted_loss

    def has_most(self) -> bool:
        return len(self.held()) + self.released >= self.needed

    @property
    def ending(self) -> Cause:
        """The cause of the loss: that of the parts, if it is the same one for all."""
        losses = [part.noted_loss for part in list(self.parts.values()) if part.noted_loss is not None]
        reason = f"fewer than {self.needed} of its servers still hold it"
        code: LossCode = "too_few_servers"
        if len({loss.code for loss in losses}) == 1:
            code, reason = losses[0].code, f"{reason}: {losses[0].reason}"
        return Cause(code, reason)

    def lose(self, cause: Cause) -> None:
        """Note the loss, give everything back, and report it once."""
        if self.note_loss(cause):
            self.give_back()
            self.report_loss()

    def stop(self) -> None:
        """Let the parts end: they are renewed no more."""
        for part in list(self.parts.values()):
            watchdog.remove(part)
            holders.remove(part)

    def give_up_unanswered(self) -> None:
        """Have everything given back that the servers granted, or grant later, without an answer."""
        for server, attempt in list(self.unanswered.items()):
            attempt.pending = True
            attempt.give_up()
            self.unanswered.pop(server, None)

    def give_back(self) -> None:
        """Have every part released, without waiting for it. Any thread may call this, at any point."""
        self.ended = True
        self.stop()
        self.give_up_unanswered()
        for server, part in list(self.parts.items()):
            part.ended = True
            operations.send_release(part)
            self.parts.pop(server, None)


class Quorum(BaseLock):
    """A lock that is held on most of several independent servers, so that it outlives the loss of some of them.

    `clients` are redis-py clients of at least three servers that do not replicate each other. A Cluster is one of them,
    by `redis.RedisCluster` or `redis.asyncio.RedisCluster`. The other arguments are those of `Lock`. There is no fence,
    because servers that do not know each other cannot draw increasing numbers together, and no `id`.

    It is an ordinary lock of that name on each server, and most of them suffice. Threads ask one server after the
    other, tasks all at once. A server has about as long to answer as it took of late; one that did not answer is left
    out for two seconds where the others suffice. An attempt that gets too few gives them back, and is repeated after a
    random pause, so waiters are not served in order. `held_locks(client)` lists the lock of each server, and
    ``Lock(client, name).reset()`` frees it.

    Its limits are those of Redlock: it relies on the servers' clocks running at about the same speed (it allows for 1 %
    of `expire`), and a server that lost its data must stay away for one `expire`. For a lock that guards more than
    efficiency see `Lock` and its fence.

    Raises TypeError and ValueError for bad arguments, and LockBackendError when too many servers cannot answer.
    """

    _without = ("id", "min_replicas", "reentrant")

    def __init__(
        self,
        clients: Iterable[Redis | AsyncRedis],
        name: str,
        *,
        blocking: bool = True,
        timeout: Seconds | None = None,
        **options: Unpack[CoreOptions],
    ) -> None:
        checked_options(type(self).__name__, options, self._without)  # first: a wrong word is told before its value
        self._servers = [server_of(client) for client in clients]
        if len(self._servers) < 3 or any(starmap(is_same, combinations(self._servers, 2))):
            raise ValueError(
                "clients must be of at least three different servers: most of them must outlive the others"
            )
        super().__init__(self._servers[0], name, blocking=blocking, timeout=timeout, **options)
        if self.expire < SHORTEST_EXPIRE:
            raise ValueError(f"expire must be at least {SHORTEST_EXPIRE} s for a quorum lock, not {self.expire!r}")
        self._needed = len(self._servers) // 2 + 1
        self._left_out: dict[Server, float] = {}
        """The servers that did not answer, each with the time until which it is left out."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} on {len(self._servers)} servers>"

    if not TYPE_CHECKING:  # what a lock has, and a quorum lock has not

        @property
        def fence(self) -> NoReturn:
            raise AttributeError(
                "a quorum lock has no id, fence and owner: each of its servers has those of an ordinary lock, as "
                "held_locks(client) and Lock(client, name) tell"
            )

        id = owner = locked = owned = ttl = reset = recall = fence

    # To ask the servers

    def _ask(self, servers: Collection[Server], poll: Poll) -> Operation[None]:
        """Ask the servers, until the answers of the poll suffice.

        First each has as long as it took of late. Then those that were left out are asked. If most are silent then, it
        is unknown how the lock stands: those are asked once more, with all the time that their clients allow, until
        the poll is answered. One that closed the connection is not, because its call was repeated at once already: it
        serves nobody now, and who waits asks it again after a pause.
        """
        now = monotonic()
        later = [server for server in servers if self._left_out.get(server, 0.0) > now]
        yield from self._ask_each([server for server in servers if server not in later], poll)
        if not poll.suffices():
            yield from self._ask_each(later, poll)
        if not poll.is_answered():
            silent = [server for server, error in poll.errors.items() if isinstance(error.__cause__, TimeoutError)]
            yield from self._ask_each(silent, poll, last=True)

    def _ask_each(self, servers: list[Server], poll: Poll, last: bool = False) -> Operation[None]:
        failed: list[Server] = []

        def ask(server: Server) -> Operation[None]:
            if last and poll.is_answered():  # by those that a thread asked before
                return
            before = server.answered_in
            seconds = FIRST_ANSWER if before is None else 3 * before
            if last:  # a thread asks one after the other: all of them together get 1.33 times the time of one
                seconds = server.timeout / 4 ** len(failed)
            limit = min(server.timeout, max(SHORTEST_ANSWER, min(seconds, self.expire / 4)))
            sent = monotonic()
            try:
                poll.answers[server] = yield from poll.question(server, limit)
            except LockBackendError as error:
                failed.append(server)
                poll.errors[server] = without_frames(error)
                if isinstance(error.__cause__, TimeoutError):  # it may be farther away than it seemed
                    server.answered_in = max(before or 0.0, min(2 * limit, FIRST_ANSWER) / 3)
            else:
                poll.errors.pop(server, None)  # who is asked, and not waited for, has still the error of before
                took = monotonic() - sent
                server.answered_in = took if before is None else before + (took - before) / 8

        enough = poll.is_answered if last else poll.suffices
        yield RunAtEach(tuple(RunAt(server, ask(server)) for server in servers), enough)
        for server in servers:
            if server not in poll.answers and not (server in poll.errors and poll.errors[server].refused):
                self._left_out[server] = monotonic() + LEFT_OUT

    def _insist(self, servers: Collection[Server], poll: Poll) -> Operation[None]:
        """Ask until the answers suffice; errors that pass are tried again as those of any lock."""
        give_up = monotonic() + self._retry_for()
        while True:
            yield from self._ask([server for server in servers if server not in poll.answers], poll)
            if poll.suffices() or not poll.errors or self._is_final(poll, give_up):
                return
            yield Sleep(chance.random() * LONGEST_PAUSE)

    def _retry_for(self) -> float:
        return max(server.retry_for for server in self._servers)

    def _is_final(self, poll: Poll, give_up: float) -> bool:
        """Whether the servers' errors are the answer: they do not pass, or have lasted until then."""
        return monotonic() >= give_up or not is_temporary(next(iter(poll.errors.values())).__cause__)

    def _raise_silence(self, poll: Poll) -> NoReturn:
        """Raise LockBackendError, because too few of the servers have answered."""
        error = next(iter(poll.errors.values()))
        cause = f"{len(poll.errors)} of {len(self._servers)} servers: {error.cause}"
        raise LockBackendError(self.name, cause, error.refused) from error

    # To acquire

    def _acquire_after_release(self, lease: Lease, acquirer: Any, timeout: float | None) -> Operation[bool]:
        """Acquire the lock anew; what is left of the former acquisition is given back meanwhile."""
        lease.give_back()  # type: ignore[attr-defined]
        self._forget(lease)
        return self._acquire_anew(acquirer, timeout)

    def _acquire_alone(self, key: tuple[int, Any], acquirer: Any, timeout: float | None) -> Operation[bool]:
        whole = self._new_lease(acquirer, "")
        try:
            self._raise_if_held(acquirer)
            acquired = yield from self._acquire_most(whole, timeout)
            if acquired:
                self._leases[acquirer] = whole
                self._report("acquired", whole)
            self._acquiring.pop(key, None)
            return acquired
        except BaseException:
            whole.give_back()
            self._forget(whole)
            self._acquiring.pop(key, None)
            raise

    def _new_lease(self, acquirer: Any, id: str) -> QuorumLease:
        args = (self._server, self.name, self._keys, id, self.renewal, acquirer, weakref.ref(self))
        return QuorumLease(self._needed, *args)

    def _acquire_most(self, whole: QuorumLease, timeout: float | None) -> Operation[bool]:
        began, waited, heard, pause = monotonic(), 0.0, -math.inf, SHORTEST_PAUSE
        until = math.inf if timeout is None else began + timeout
        while True:
            asked = monotonic()
            question = partial(self._acquire_part, whole)
            poll = Poll(question, self._is_decided, lambda poll: len(poll.answers) >= self._needed)
            yield from self._ask(self._servers, poll)
            if whole.has_most():
                whole.give_up_unanswered()
                whole.acquired = monotonic()
                operations.report_wait(self.name, waited, acquired=True)
                return True
            whole.give_back()
            whole.ended = False  # it goes on
            over = monotonic() >= until
            if poll.is_answered():
                heard = asked
            elif asked - HEARD > heard if over else self._is_final(poll, max(heard, began) + self._retry_for() - pause):
                self._raise_silence(poll)
            if over:
                operations.report_wait(self.name, waited, acquired=False)
                return False
            if not waited:
                waited = began
                yield from self._see_self_wait(whole.acquirer, timeout)
            yield Sleep(min(chance.random() * pause, max(0.0, until - monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _acquire_part(self, whole: QuorumLease, server: Server, limit: float) -> Operation[bool]:
        attempt = whole.unanswered.get(server)
        if attempt is None:
            # Each has an id of its own, so that the undo of one whose reply got lost cannot undo a later one.
            args = (server, self.name, self._keys, new_id(), self.renewal, whole.acquirer, weakref.ref(whole))
            part = PartLease(*args)
            part.end_of_acquirer = whole.end_of_acquirer
            attempt = Attempt(part)
        else:
            part = attempt.lease  # type: ignore[assignment]
            attempt.repeated = True  # its first call may still arrive
        part.answer_within = limit
        with attempt:
            whole.unanswered.pop(server, None)
            request = AcquireRequest(attempt, self._record(), 0.0, given_id=False)
            try:
                granted = yield from operations.acquire(request)
            except LockBackendError as error:
                if isinstance(error.__cause__, TimeoutError) and not whole.ended:
                    whole.unanswered[server] = attempt  # first: what was interrupted later is given up
                    attempt.pending = False
                raise
            if granted and not whole.ended:  # else the caller was interrupted meanwhile
                whole.parts[server] = part  # first: what was interrupted later is stopped
                watchdog.add(part, self.renewal.auto_renewal)
                holders.add(part)
                attempt.pending = False  # the last line, as for every lock
        return granted

    def _is_decided(self, poll: Poll) -> bool:
        """Whether most of the servers granted the lock, or so many refused it that most cannot."""
        return poll.count(True) >= self._needed or poll.count(False) > len(self._servers) - self._needed

    def _see_self_wait(self, acquirer: Any, timeout: float | None) -> Operation[None]:
        """Raise AlreadyAcquired if the acquirer, who waits, holds most of the locks itself; warn if that will end."""
        if not holders or not self._is_kept_waiting(acquirer):
            return
        held: list[bool] = []
        """Of each server where the acquirer has the lock: whether it ends only by the acquirer."""
        for server in self._servers:
            leases = yield from waits_for_itself(server, self._keys, acquirer)
            own = [lease for lease in leases if lease.loss is None]
            if own:
                held.append(any(lease.renewing and lease.renewal.max_hold is None for lease in own))
        if timeout is None and sum(held) >= self._needed:
            raise AlreadyAcquired(self.name)
        if len(held) >= self._needed:
            events.log.warning(SELF_WAIT, self.name, 0)

    # What the holder does

    def _extend(self, acquirer: Any, expire: Seconds | None) -> Operation[Literal[True]]:
        seconds = None if expire is None else check_expire(expire)
        whole: Any = self._require_lease(acquirer)
        self._raise_unless_held(whole)
        held = {part.server: part for part in whole.held()}
        if seconds is not None:
            whole.expire = seconds
            for part in held.values():
                part.change(seconds)
                watchdog.reschedule(part)
        # Not when most have answered: one that has lost its data has answered, too, and then the third one, which was
        # slow, was never asked with all its time: the extension raised, though both others would have extended it.
        poll = Poll(
            partial(self._extend_part, held),
            lambda poll: poll.count(True) >= self._needed,
            lambda poll: poll.count(False) > len(held) - self._needed,
        )
        yield from self._insist(held, poll)
        self._raise_loss(whole)
        if not poll.suffices():
            self._raise_silence(poll)
        return True

    def _extend_part(self, parts: dict[Server, PartLease], server: Server, limit: float) -> Operation[bool]:
        parts[server].answer_within = limit
        yield from self._renew(parts[server])
        return parts[server].noted_loss is None

    def _release_last(self, lease: Any) -> Operation[None]:
        whole: QuorumLease = lease
        if whole.loss is None:
            whole.ended = True
            held = {part.server: part for part in whole.held()}
            for part in held.values():
                part.ended = True  # a lock that was released is not lost at its deadline, if that is not answered
            enough = len(held) - (len(self._servers) - self._needed)  # the others are no majority any more
            poll = Poll(partial(self._release_part, whole, held), lambda poll: len(poll.answers) >= enough)
            try:
                whole.stop()
                yield from self._insist(held, poll)
            except BaseException:
                whole.give_back()
                raise
            if sum(part.noted_loss is None for part in whole.parts.values()) + whole.released < self._needed:
                whole.lose(whole.ending)
            elif not poll.suffices():
                self._raise_silence(poll)
        # A renewal that arrived late may have kept a part that is over here, and one that was left out was not asked.
        whole.give_back()
        self._forget(whole)
        self._raise_loss(whole)
        self._report("released", whole)

    def _release_part(
        self, whole: QuorumLease, parts: dict[Server, PartLease], server: Server, limit: float
    ) -> Operation[bool]:
        part = parts[server]
        part.answer_within = limit
        if (yield from operations.release(part)):
            whole.released += 1
            whole.parts.pop(server, None)
        elif part.noted_loss is None:
            part.lose((yield from find_cause(part)))
        return part.noted_loss is None

    def _exit_interrupted(self, acquirer: Any) -> None:
        """Leave a block whose end was interrupted; the lock is released without waiting for it."""
        whole: Any = self._lease_of(acquirer)
        if whole is not None:
            whole.give_back()
            self._forget(whole)

    def _raise_loss(self, lease: Lease) -> None:
        CallerView._raise_loss(self, lease)


class QuorumLock(Quorum, Lock):
    __doc__ = Quorum.__doc__


class AsyncQuorumLock(Quorum, AsyncLock):
    """A quorum lock for the tasks of asyncio; `QuorumLock`, its equivalent for threads, describes the arguments.

    The clients are `redis.asyncio.Redis` or `redis.Redis`. Holder and cancellation are as for `AsyncLock`.
    """
