"""The acquisition of a quorum lock.

The algorithm is Redlock of Redis' documentation ("Distributed Locks with Redis"): the parts are asked for at the same
time, most of them suffice, and an allowance for the drift of clocks is taken from each expiry. Two things replace its
random pauses. An acquisition waits in the queues of the servers that refuse it, everywhere with the first ticket that
it drew. And one that holds too few parts gives them to earlier waiters, so that no acquisitions wait in a circle: the
earliest one gives nothing to others, and gets the parts of all.

All of this runs in one event loop.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from itertools import count
from typing import Any

from ..exceptions import LockBackendError
from . import operations, scripts
from .acquirers import holders
from .base import BaseLock
from .clock import monotonic
from .driver.async_server import async_server_of
from .driver.effects import Operation, ScriptCall
from .driver.retry import with_retries
from .driver.server import Server
from .driver.side_by_side import GRACE, LEFT_OUT, in_background, on_servers
from .keys import new_id
from .lease import Lease, end_of
from .operations import AcquireRequest
from .quorum_parts import Part, PartLease
from .watchdog import watchdog

SPLIT = 0.02
"""Seconds after which an acquisition with too few parts looks for earlier waiters; the time doubles with each look."""
KEEP = 0.5
"""Seconds for which an acquisition keeps too few parts: then another one seems to hold most of them. A third of the
expiry if that is less, because parts are not renewed before the lock is held."""
REST = 5.0
"""Seconds until a part that was given back is asked for again, unless another part is granted."""
GIVE_BACK = 0.1
"""Seconds for which the replies are waited for when parts are given back."""


class PartRequest(AcquireRequest):
    """A request for one part: it stands in the queue with the ticket of the whole acquisition."""

    whole: QuorumAttempt
    part: Part

    def call(self, channel: bytes, join: bool, ticket: bytes) -> ScriptCall:
        if ticket:
            self.part.answered, self.part.error, self.part.server.left_out_until = True, None, 0.0
            ticket = self.whole.ticket = self.whole.ticket or ticket
        return AcquireRequest.call(self, channel, join, ticket)


class QuorumAttempt(ABC):
    """One acquisition until most of the parts are held. It is made by the thread or task that acquires.

    `template` is a lock with the arguments of the lock on each server.
    """

    def __init__(self, servers: list[Server], template: BaseLock, acquirer: Any) -> None:
        self.name = template.name
        self.id = new_id()
        self.expire = template.expire
        self.acquirer = acquirer
        self.end_of_acquirer = end_of(acquirer)
        self.ticket = b""
        self.waited = 0.0
        """Seconds for which the acquisition waited, if a server refused it at first."""
        self.parts = [Part(server) for server in servers]
        self.loop: asyncio.AbstractEventLoop | None = None
        self._template = template
        self._record = template._record()
        self._needed = len(servers) // 2 + 1
        self._tries = count()
        self._granted_at = 0.0
        self._complete = False
        """Whether most of the parts were acquired."""
        self._ended = False
        """Whether nothing is asked for any more."""

    @abstractmethod
    def _hold(self, part: Part) -> None:
        """Note that the part belongs to the lock that is held."""

    async def acquire(self, until: float) -> bool:
        """Acquire most of the parts until this time; a call that cannot wait tries once.

        Raises LockBackendError when too many servers cannot answer.
        """
        self.loop = asyncio.get_running_loop()
        began = monotonic()
        try:
            won = await self._gain(until)
            if not won and until <= began and self._held():
                # Of several acquisitions at this moment, the one with the earliest ticket must get the lock.
                won = await self._gain(monotonic() + GIVE_BACK)
            unanswered = [part.task for part in self.parts if part.task is not None and not part.answered]
            if won and unanswered:
                await asyncio.wait(unanswered, timeout=GRACE)
            self._complete = won and not self._ended and len(self._held()) >= self._needed
        finally:
            self.waited = monotonic() - began if self.ticket else 0.0
            if not self._complete:
                await self._give_back()
        if not self._complete:
            return False
        for part in self.parts:
            if part.held:
                self._hold(part)
            elif part.task is not None and part.answered:  # it waits in a queue
                part.task.cancel()
            elif part.task is not None:
                part.server.left_out_until = monotonic() + LEFT_OUT
        return True

    async def _gain(self, until: float) -> bool:
        """Ask for the parts until most are held; False when too few are at this time, although servers answer."""
        for part in self.parts:
            part.retry_at = part.server.left_out_until
        self._ask(until, monotonic())
        check_at, conclude_at, spare_at = 0.0, math.inf, math.inf
        while not self._ended:
            held, running = self._held(), [part for part in self.parts if part.task is not None]
            if len(held) >= self._needed:
                return True
            failed = [part.error for part in self.parts if part.error is not None]
            if len(failed) > len(self.parts) - self._needed:
                cause = f"{len(failed)} of {len(self.parts)} servers: {failed[0].cause}"
                raise LockBackendError(self.name, cause, failed[0].refused)
            now = monotonic()
            if now < until:
                wake_at = min(until, self._ask(until, now))
                if held:
                    check_at = max(check_at, self._granted_at + SPLIT)
                    rest_at = self._granted_at + min(KEEP, self.expire / 3)
                    if now >= rest_at:
                        await self._rest(held)
                    elif now >= check_at:
                        await self._give_to_earlier(held)
                        check_at = now + max(SPLIT, now - self._granted_at)
                    wake_at = min(wake_at, check_at, rest_at)
            else:
                answered = sum(part.answered for part in self.parts)
                left_out = [part for part in self.parts if not (part.task or part.answered or part.error)]
                possible = len(held) + len(running)
                if answered:
                    spare_at = min(spare_at, now + GRACE)
                few = possible < self._needed <= possible + len(left_out) or answered + len(running) < self._needed
                if few or (left_out and now >= spare_at):
                    for part in left_out:  # the others do not suffice, or one of them does not answer
                        self._start(part, 0.0)
                    if left_out:
                        continue
                    if not running:
                        cause = failed[0].cause if failed else "no answer"
                        raise LockBackendError(self.name, f"{answered} of {len(self.parts)} servers answered: {cause}")
                if now >= conclude_at or (answered >= self._needed and possible < self._needed):
                    return False
                if conclude_at == math.inf and answered >= self._needed:
                    conclude_at = now + GRACE
                wake_at = min(conclude_at, spare_at) if left_out else conclude_at
            tasks = [part.task for part in self.parts if part.task is not None]
            seconds = None if wake_at == math.inf else max(0.0, wake_at - monotonic())
            if tasks:
                await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(seconds or 0.0)
        return False

    def _ask(self, until: float, now: float) -> float:
        """Ask for the parts that are due, and return when the next one is. Servers may be left out."""
        if sum(part.error is None and part.retry_at <= now for part in self.parts) < self._needed:
            for part in self.parts:
                if part.error is None:
                    part.retry_at = 0.0
        idle = [part for part in self.parts if part.task is None and not part.held]
        for part in idle:
            if part.retry_at <= now:
                self._start(part, None if until == math.inf else max(0.0, until - now))
        return min((part.retry_at for part in idle if part.retry_at > now), default=math.inf)

    def _start(self, part: Part, seconds: float | None) -> None:
        part.answered = False
        part.task = asyncio.create_task(self._ask_for(part, seconds))
        in_background(part.task)

    async def _ask_for(self, part: Part, seconds: float | None) -> None:
        # Each try has an id of its own, so that the undo of one whose reply got lost cannot undo a later one.
        lease = self._new_lease(part.server)
        request = PartRequest(lease, self._record, seconds, given_id=False)
        request.whole, request.part = self, part
        try:
            granted = await async_server_of(part.server).run(operations.acquire(request))
            part.answered, part.error, part.server.left_out_until = True, None, 0.0
        except LockBackendError as error:
            part.error, part.retry_at = error, monotonic() + LEFT_OUT
            if not error.refused:
                part.server.left_out_until = part.retry_at
            if lease.fence:  # granted, but too few replicas confirmed it
                with suppress(LockBackendError):
                    await async_server_of(part.server).run(operations.release(lease))
            return
        except Exception as error:  # of a function that provides the address or the password
            part.error = LockBackendError(self.name, f"{type(error).__name__}: {error}")
            part.retry_at = monotonic() + LEFT_OUT
            return
        finally:
            if part.task is asyncio.current_task():
                part.task = None
        if granted and self._ended:
            await async_server_of(part.server).run(operations.release(lease))
        elif granted:
            part.lease, self._granted_at = lease, monotonic()
            if self._complete:
                self._hold(part)
            for other in self.parts:  # with this one they may suffice
                if other.error is None:
                    other.retry_at = other.server.left_out_until

    async def _give_to_earlier(self, held: list[Part]) -> None:
        """Release each part for which an earlier acquisition waits."""
        asked = {part.server: self._yield_to_earlier(part.lease) for part in held if part.lease is not None}
        gave, _ = await on_servers(asked, lambda *_: True, GIVE_BACK)
        for part in held:
            if gave.get(part.server, True):
                part.lease = None

    def _yield_to_earlier(self, lease: Lease) -> Operation[bool]:
        call = ScriptCall(scripts.QUEUE, (lease.keys.queue,), (b"1",))
        _, (_, first) = yield from with_retries(self.name, call, monotonic(), lease)
        if not first or not self.ticket or float(first[1]) >= float(self.ticket):
            return False
        yield from operations.release(lease)
        return True

    async def _rest(self, held: list[Part]) -> None:
        """Give the parts back, and do not ask for them until another part is granted."""
        for part in held:
            part.retry_at = monotonic() + REST
        await self._release_parts(held)

    async def _give_back(self) -> None:
        """End the attempt: release the parts that are held, and stop asking for the others."""
        self._stop()
        await self._release_parts([part for part in self.parts if part.lease is not None])

    async def _release_parts(self, parts: list[Part]) -> None:
        leases = [part.lease for part in parts if part.lease is not None]
        for part in parts:
            part.lease = None
        await self._release_leases(leases)

    async def _release_leases(self, leases: list[PartLease]) -> None:
        await on_servers({lease.server: operations.release(lease) for lease in leases}, lambda *_: True, GIVE_BACK)

    def _new_lease(self, server: Server) -> PartLease:
        id, template = f"{self.id}.{next(self._tries)}", self._template
        whole = weakref.ref(self)
        return PartLease(server, self.name, template._keys, id, self.expire, self.acquirer, template.max_hold, whole)

    def _held(self) -> list[Part]:
        return [part for part in self.parts if part.held]

    def _stop(self) -> None:
        """Renew nothing and ask for nothing any more."""
        self._ended = True
        self._stop_renewing()
        for part in self.parts:
            if part.task is not None:
                part.task.cancel()

    def _stop_renewing(self) -> None:
        for part in self.parts:
            lease = part.lease
            if lease is not None:
                watchdog.remove(lease)
                holders.remove(lease)
