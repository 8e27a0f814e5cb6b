"""One acquisition of a quorum lock: an ordinary lock on each of the servers, held while most of them hold it.

The algorithm is Redlock of Redis' documentation ("Distributed Locks with Redis"): all servers are asked at the same
time, most of them suffice within the time for which they are valid, and otherwise everything is given back, and asked
for again after a random pause. The allowance for the drift of clocks is taken from each expiry.

All of it runs in one event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..exceptions import LockBackendError, LossCode, LossRecord
from . import chance, events, operations
from .acquirers import holders
from .attempt import Attempt
from .base import BaseLock
from .clock import monotonic
from .driver import os_threads, process
from .driver.async_server import async_server_of
from .driver.effects import Operation, is_temporary, without_frames
from .driver.os_threads import Slot
from .driver.server import Server
from .driver.side_by_side import GRACE, LEFT_OUT, in_background, left_out, on_servers
from .keys import new_id
from .lease import Lease, end_of, find_cause
from .operations import AcquireRequest
from .watchdog import watchdog

DRIFT, SHORTEST_DRIFT = 0.01, 0.002
"""The share of the expiry, and the seconds, by which clocks may differ until then: as in Redlock."""
PATIENCE = 1.0
"""Seconds for which a server that does not answer is waited for, where the others do not suffice; a quarter of the
expiry if that is less."""
ANSWER = 0.15
"""Seconds for which a call that cannot wait waits for the answers."""
SPLIT = 0.05
"""Seconds, and up to as many more, for which an attempt keeps too few locks: others may have the rest. If each kept
them until its end, none of three acquisitions would ever hold most of five servers."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.1
"""Seconds until the next attempt, at most; random, so that two acquisitions do not meet again. It doubles each time."""
GIVE_BACK = 0.1
"""Seconds for which the replies are waited for when locks are given back."""


class PartAttempt(Attempt):
    """The attempt on one server, which is not tried again: the others may suffice."""

    __slots__ = ()
    retry_for = 0.0


class PartLease(Lease):
    """The lease on one server. Its loss is not yet the loss of the quorum lock."""

    __slots__ = ()
    reports_waits = False

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


class QuorumLease:
    """One acquisition, from the first attempt to the release. The loss is reported to `lock`, the quorum lock.

    It is made by the thread or task that acquires. `template` is a lock with the arguments of the lock on each server.
    """

    def __init__(self, servers: list[Server], template: BaseLock, acquirer: Any, lock: Any) -> None:
        self.name = template.name
        self.expire = template.expire
        self.acquirer = acquirer
        self._end_of_acquirer = end_of(acquirer)
        self.waited = 0.0
        """Seconds for which the acquisition waited in a queue, and between its attempts."""
        self._waited = False
        """Whether a request stood in a queue."""
        self.servers = servers
        self.needed = len(servers) // 2 + 1
        self._template = template
        self._record = template._record()
        self._lock = weakref.ref(lock)
        self._pid = process.pid
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leases: dict[Server, Lease] = {}
        """The locks that were granted, and neither released nor given back."""
        self._released = 0
        self._complete = self.ended = self._over = False
        """Whether most of the locks were acquired, it has ended, and its time was over at the end of an attempt."""
        self.began = monotonic()
        self.heard = -math.inf
        """When most of the servers had answered, the last time."""
        self._attempts: list[Round] = []
        """The attempt that is under way."""
        self._loss: Slot[LossRecord] = Slot()

    @property
    def inherited_by_fork(self) -> bool:
        """Whether the acquisition belongs to the process that this one was forked from."""
        return self._pid != process.pid

    # The acquisition

    async def acquire(self, until: float) -> bool:
        """Acquire most of the locks until this time; a call that cannot wait tries once.

        Raises LockBackendError when too many servers cannot answer, and do not within RETRY_FOR where the errors pass.
        """
        self._loop = asyncio.get_running_loop()
        pause = SHORTEST_PAUSE
        patience = max(server.retry_for for server in self.servers)
        try:
            while True:
                try:
                    if await self._attempt(until):
                        break
                except LockBackendError as error:
                    give_up = min(until, max(self.heard, self.began) + patience)
                    if monotonic() + pause >= give_up or not _passes(error):
                        raise
                    await self._give_back()
                if self._over or self.ended:
                    return False
                await asyncio.sleep(min(chance.random() * pause, max(0.0, until - monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE)
            self._complete = not self.ended
            for lease in self.held():
                self._hold(lease)
            return self._complete
        finally:
            self.waited = monotonic() - self.began if self._waited else 0.0
            if not self._complete:
                self.ended = True
                await self._give_back()

    def _hold(self, lease: Lease) -> None:
        watchdog.add(lease, self._template.renewal.auto_renewal)
        holders.add(lease)

    async def _attempt(self, until: float) -> bool:
        """Ask the servers once, and return whether most grant their lock; otherwise give back those that do."""
        attempt = Round(self, until)
        self._attempts.append(attempt)
        try:
            won = await attempt.run()
            self._over = attempt.ended_at >= until
        finally:
            self._attempts.remove(attempt)
            self._waited = self._waited or any(request.waited for request in attempt.requests.values())
            attempt.end()
        if not won:
            await self._give_back()
        return won

    def request(self, server: Server, seconds: float) -> AcquireRequest:
        """Return a request for the lock on the server, which waits for so many seconds."""
        # Each try has an id of its own, so that the undo of one whose reply got lost cannot undo a later one.
        template, whole = self._template, weakref.ref(self)
        lease = PartLease(server, self.name, template._keys, new_id(), template.renewal, self.acquirer, whole)
        lease.expire = self.expire
        lease.end_of_acquirer = self._end_of_acquirer
        return AcquireRequest(
            PartAttempt(lease), self._record, None if seconds == math.inf else seconds, given_id=False
        )

    async def ask(self, request: AcquireRequest) -> bool:
        """Ask the request's server, and return whether it granted the lock, which is noted then."""
        lease, server = request.lease, request.lease.server
        with request.attempt as attempt:
            try:
                granted = await async_server_of(server).run(operations.acquire(request))
            except LockBackendError as error:
                if not error.refused:
                    left_out.note(server)
                raise
            if granted and not self.ended:
                attempt.pending = False
        if granted and not self.ended:
            outdated = lease.expire != self.expire  # `extend` came before this late grant
            if outdated:
                lease.change(self.expire)
            self._leases[server] = lease
            if self._complete:
                self._hold(lease)
            if outdated:
                await async_server_of(server).run(self._renew(lease))
        return granted

    async def _give_back(self) -> None:
        await self._release_all(self._take_out())

    def _take_out(self) -> list[Lease]:
        """Hold none of the locks any more, and return them."""
        leases, self._leases = self._leases, {}
        for lease in leases.values():
            watchdog.remove(lease)
            holders.remove(lease)
        return list(leases.values())

    async def _release_all(self, leases: Iterable[Lease]) -> None:
        await on_servers({lease.server: operations.release(lease) for lease in leases}, lambda *_: True, GIVE_BACK)

    # What the holder does

    async def extend(self, seconds: float | None) -> None:
        """Set the expiry of every lock.

        Raises LockBackendError when too many servers cannot answer, and the lock was not lost.
        """
        leases = {lease.server: lease for lease in self.held()}
        if seconds is not None:
            self.expire = seconds
            for lease in leases.values():
                lease.change(seconds)
                watchdog.reschedule(lease)
        await self._by_most({server: self._renew(lease) for server, lease in leases.items()})

    def _renew(self, lease: Lease) -> Operation[bool]:
        renewed = yield from operations.renew(lease)
        if not renewed:
            watchdog.remove(lease)
            lease.lose((yield from find_cause(lease)))
        return renewed

    async def release(self) -> None:
        """Release every lock; one whose server does not answer stays, so that the release may be repeated.

        Raises LockBackendError when too many servers cannot answer, and the lock was not lost.
        """
        if self.loss is not None:
            await self._give_back()
            return
        self.ended = True
        for lease in self._leases.values():
            watchdog.remove(lease)
            holders.remove(lease)
        held = self.held()
        for lease in held:
            lease.ended = True  # a lock that was released is not lost at its deadline, if the release is not answered
        # A renewal that arrived late may have kept a lock whose expiry is over here; its server is not waited for.
        over = [lease for lease in self._leases.values() if lease not in held]
        in_background(asyncio.ensure_future(self._release_all(over)))
        await self._by_most({lease.server: self._release(lease) for lease in held})

    def _release(self, lease: Lease) -> Operation[bool]:
        released = yield from operations.release(lease)
        if released:
            # First, so that a thread that reads the loss meanwhile counts the lock at least once.
            self._released += 1
            self._leases.pop(lease.server, None)
        elif lease.loss is None:
            lease.lose((yield from find_cause(lease)))
        return released

    async def _by_most(self, todo: dict[Server, Operation[bool]]) -> None:
        """Run the operations. Raises LockBackendError when most servers neither confirm nor refuse."""
        before = self._released
        done, cause = await on_servers(todo, lambda done, _: before + sum(done.values()) >= self.needed)
        if cause and self.loss is None and before + sum(done.values()) < self.needed:
            raise LockBackendError(self.name, cause)

    def abandon(self) -> None:
        """Stop asking, and give everything back, without waiting for it. Any thread may call this."""
        self.ended = True
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._abandon)
        except RuntimeError:  # the loop is closed
            for lease in self._take_out():
                operations.send_release(lease)

    def _abandon(self) -> None:
        for attempt in self._attempts:  # else a thread that was interrupted stood in the queues until its turn
            attempt.end()
        in_background(asyncio.ensure_future(self._give_back()))

    # The loss: any thread may ask

    def held(self) -> list[Lease]:
        return [lease for lease in list(self._leases.values()) if lease.loss is None]

    @property
    def loss(self) -> LossRecord | None:
        """Why and when the quorum lock was lost, or None while it is held; sends no command."""
        # `_held` before `_released`, so that one of the two counts a lock that is released meanwhile.
        if self._loss.value is None and self._complete and not self.inherited_by_fork:
            leases = list(self._leases.values())
            if len(self.held()) + self._released < self.needed:
                self._lose([loss for loss in [lease.loss for lease in leases] if loss is not None])
        return self._loss.value

    def _lose(self, losses: list[LossRecord]) -> None:
        """Note the loss, give everything back, and report it once."""
        reason = f"fewer than {self.needed} of its servers still hold it"
        code: LossCode = "too_few_servers"
        if len({loss.code for loss in losses}) == 1:  # all for the same cause
            code, reason = losses[0].code, f"{reason}: {losses[0].reason}"
        record = LossRecord(self.name, "", 0, reason, time.time(), code)
        if self._loss.put_if_empty(record) is not record:
            return
        self.abandon()
        if asyncio._get_running_loop() is None:
            self._report(record)
        else:  # listeners may take long, and may use a quorum lock, which must not wait for this loop
            os_threads.start(partial(self._report, record), "redislock-loss")

    def _report(self, record: LossRecord) -> None:
        message = "Quorum lock %r was lost: %s."
        events.emit("lost", message, self.name, record.reason, name=self.name, fence=0, record=record)
        lock = self._lock()
        if lock is not None:
            lock._call_on_lost(self)


def _passes(error: LockBackendError) -> bool:
    """Whether the error of a server, or the silence of servers, passes."""
    of_server = error.__cause__
    return of_server is None or is_temporary(of_server.__cause__)


class Round:
    """One round of requests, one for each server. A server that did not answer lately is asked only where the others
    do not suffice."""

    def __init__(self, lease: QuorumLease, until: float) -> None:
        self.lease = lease
        self.until = until
        self.began = monotonic()
        self.spare = [server for server in lease.servers if left_out.get(server, 0.0) > self.began]
        self.requests: dict[asyncio.Task[bool], AcquireRequest] = {}
        self.pending: set[asyncio.Task[bool]] = set()
        self.errors: dict[Server, tuple[float, LockBackendError]] = {}
        """The errors of servers, each with its time."""
        self.won = False
        self.ended_at = math.inf
        self._ask([server for server in lease.servers if server not in self.spare])

    @property
    def silent(self) -> list[asyncio.Task[bool]]:
        """The tasks whose servers have not answered yet; a request that stands in a queue was answered."""
        return [task for task in self.pending if not task.done() and not self.requests[task].waited]

    @property
    def answered(self) -> int:
        """The number of servers that have answered."""
        return len(self.lease.servers) - len(self.spare) - len(self.silent) - len(self.errors)

    def _ask(self, servers: list[Server]) -> None:
        for server in servers:
            request = self.lease.request(server, max(0.0, self.until - monotonic()))
            task = asyncio.create_task(self.lease.ask(request))
            self.requests[task] = request
            self.pending.add(task)

    async def run(self) -> bool:
        """Wait for the replies, and return whether most of the locks were granted.

        Raises LockBackendError when too many servers cannot answer.
        """
        needed, servers = self.lease.needed, len(self.lease.servers)
        while True:
            held = len(self.lease.held())
            if held >= needed:
                if self.silent:
                    await asyncio.wait(self.silent, timeout=GRACE)
                self.won = True
                return True
            if len(self.errors) > servers - needed and not self._ask_again():
                cause = f"{len(self.errors)} of {servers} servers: {self._error.cause}"
                raise LockBackendError(self.lease.name, cause, self._error.refused) from without_frames(self._error)
            late = monotonic() >= self.began + SPLIT and self.silent
            if self.spare and (late or len(self.pending) + held < needed):
                spare, self.spare = self.spare, []
                self._ask(spare)
            now, give_up, answered = monotonic(), self._give_up_at(), self.answered
            if answered >= needed:
                self.lease.heard = now
            refused = len(self.pending) + held < needed <= answered
            if now >= give_up or refused or not self.pending:
                break
            await self._wait_until(min(give_up, now + SPLIT) if self.silent else give_up)
        self.ended_at = now
        if answered < needed <= servers - answered + held and self._is_unknown(now):  # more answers might suffice
            cause = self._error.cause if self.errors else "no answer"
            raise LockBackendError(self.lease.name, f"{answered} of {servers} servers answered: {cause}")
        return False

    def _is_unknown(self, now: float) -> bool:
        """Whether too few servers have answered for so long that it is unknown whether the lock is free.

        At the end of the time the answers of a moment ago count. An attempt that began, or asked another server, just
        before the end got an error in place of False (seed 47558982 of the simulation). Before the end, a silence that
        is longer than a thread waits for a reply is an error: without it, a waiter tried again without an end.
        """
        heard = self.lease.heard
        if now >= self.until:
            return heard <= self.until - PATIENCE
        return bool(now - max(heard, self.lease.began) > max(server.timeout for server in self.lease.servers))

    def _give_up_at(self) -> float:
        """Return when to give back what is held: later while a server is silent, because it may grant the rest."""
        give_up = max(self.until, self.began + ANSWER) + GRACE
        held = self.lease.held()
        if not held:
            return give_up
        patience = min(PATIENCE, self.lease.expire / 4) if self.silent else SPLIT * (1 + chance.random())
        return min(give_up, max(lease.acquired for lease in held) + patience)

    async def _wait_until(self, when: float) -> None:
        """Wait for a task to end. A request that begins to wait in a queue ends none, so look now and then."""
        timeout = None if when == math.inf else when - monotonic()
        done, self.pending = await asyncio.wait(self.pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            error = task.exception()
            if isinstance(error, LockBackendError):
                self.errors[self.requests[task].lease.server] = monotonic(), error
            elif error is not None:
                raise error

    @property
    def _error(self) -> LockBackendError:
        return next(error for _, error in self.errors.values())

    def _ask_again(self) -> bool:
        """Ask the servers that failed some time ago; return whether there are any.

        They are back, as a rule: a waiter in the queues of all servers got an error, because each of two was restarted.
        """
        now = monotonic()
        back = [server for server, (when, _) in self.errors.items() if when < now - LEFT_OUT]
        for server in back:
            del self.errors[server]
        self._ask(back)
        return bool(back)

    def end(self) -> None:
        """Stop asking. A server that has not answered is left out for a while, and its grant joins a lock that is held
        if it comes within the time of a reply: without that end, the request went on to wait in the server's queue."""
        silent = self.silent
        for task in self.pending:
            server = self.requests[task].lease.server
            if task in silent:
                left_out.note(server)
            if self.won and task in silent:
                task.get_loop().call_later(server.timeout, task.cancel)
            else:
                task.cancel()
            in_background(task)
