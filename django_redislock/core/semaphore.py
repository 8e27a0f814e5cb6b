"""The semaphore: at most so many holders at a time. Each of its slots is a lock, and all slots share one queue."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from . import operations, scripts
from .acquirers import waits_for_itself
from .async_lock import AsyncLock
from .base import BaseLock
from .driver.effects import Operation
from .keys import LockKeys, id_with_limit, record, slots_keys, with_slot
from .lease import Lease, check_reason
from .lock import Lock
from .operations import AcquireRequest
from .records import LockInfo
from .validation import check_limit


class Slots(BaseLock):
    """Makes a semaphore of a lock: an acquisition takes one of `limit` slots.

    A caller looks at its own slots only. So if callers give different limits, the largest one counts while it is in
    use, and the slots above a lowered limit end with their holders.
    """

    limit = 0
    """How many may hold it at a time; 0: it is an ordinary lock, as that of most tasks of Celery is."""

    _without = ("reentrant",)

    def __init__(self, client: Any, name: str, limit: int, **options: Any) -> None:
        super().__init__(client, name, **{"kind": "semaphore", **options})
        self.limit = check_limit(limit)
        self._keys = self._keys_of(name)

    def _keys_of(self, name: str) -> LockKeys:
        return slots_keys(self._prefix, name, self.limit) if self.limit else super()._keys_of(name)

    def _new_request(self, acquirer: Any, timeout: float | None) -> AcquireRequest:
        request = super()._new_request(acquirer, timeout)
        if not self.limit:
            return request
        if not request.given_id:
            request.lease.id = id_with_limit(request.lease.id, self.limit)
        request.script = scripts.ACQUIRE_SLOT
        request.more_keys, request.more_args = self._keys.others, (b"%d" % self.limit,)
        return request

    def _waits_for_itself(self, acquirer: Any) -> Operation[list[Lease]]:
        if not self.limit:
            return (yield from super()._waits_for_itself(acquirer))
        held: list[Lease] = []
        for number in range(1, self.limit + 1):
            keys = self._keys.slot(number) if number > 1 else self._keys  # these have slot 1 as their lock
            of_slot = yield from waits_for_itself(self._server, keys, acquirer)
            if not of_slot or all(lease.loss is not None for lease in of_slot):
                return []  # somebody else may free this slot
            if not any(lease.renewing and lease.renewal.max_hold is None for lease in of_slot):
                return of_slot  # this slot becomes free by itself
            held += of_slot
        return held

    def _record(self) -> bytes:
        return record(self.kind, self.label, self.expire, self.renewal.auto_renewal, self.limit)

    def _renew(self, lease: Lease, until: float = math.inf) -> Operation[None]:
        # The id was given, and this object did not acquire the slot.
        if self.limit and lease.keys.name == self._keys.name:
            held = yield from self._holders()
            number = next((number for number, info in held.items() if info.id == lease.id), 1)
            lease.keys = self._keys.slot(number)
        yield from super()._renew(lease, until)

    def _holders(self) -> Operation[dict[int, LockInfo]]:
        """Read the holders of all slots, by the slot's number."""
        if self._server.grants_all:  # it remembers none: the caller's own acquisition, as a lock tells of
            own = self._granted_info(self._visible_lease())
            return {} if own is None else {1: replace(own, slot=1, limit=self.limit)}
        slots = range(1, self.limit + 1)
        stored = yield from operations.read(self._server, self.name, list(map(self._keys.slot, slots)))
        held = {number: each for number, each in zip(slots, stored, strict=True) if each is not None}
        for number, each in held.items():
            each.name = with_slot(self.name, number)
        return {number: each.info for number, each in held.items()}

    def _owner(self) -> Operation[LockInfo | None]:
        """Read the holder of the caller's own slot."""
        held, id = (yield from self._holders()), self._owner_id(self._acquirer())
        return next((info for info in held.values() if info.id == id), None)

    def _reset(self, fence: int | None, by: object, reason: str, recalls: bool = False) -> Operation[bool]:
        if not self.limit:
            return (yield from super()._reset(fence, by, reason, recalls))
        check_reason(reason)
        done = False
        for number, info in (yield from self._holders()).items():
            if fence not in (None, info.fence):
                continue
            keys, what = self._keys.slot(number), f"Slot {number} of semaphore {self.name!r} (fence {info.fence})"
            of_slot = operations.reset(what, self._server, self.name, keys, info.fence, by, reason, recalls)
            done = (yield from of_slot) or done
        return done


class Semaphore(Slots, Lock):
    """A semaphore for threads: at most `limit` holders of a name at a time, from all processes.

    The options, the errors and the losses are those of `Lock`, and so is the order: first come, first served, over all
    slots. A killed holder's slot is free after its expiry. `owner`, `owned`, `ttl` and `extend` are about the caller's
    own slot; `locked` says whether no slot is free; `reset` ends, and `recall` asks for, the acquisition of that fence,
    or each one.

    It is not re-entrant: a thread that holds a slot gets another one through another object. A semaphore of 1 does not
    exclude a lock of the same name.
    """

    def holders(self) -> list[LockInfo]:
        """Return the holders of the slots from 1 to `limit`. Raises LockBackendError when Redis cannot answer."""
        return list(self._server.run(self._holders()).values())

    def locked(self) -> bool:
        """Return whether all slots are held now. Raises LockBackendError when Redis cannot answer."""
        return len(self.holders()) == self.limit


class AsyncSemaphore(Slots, AsyncLock):
    """A semaphore for the tasks of asyncio; `Semaphore`, its equivalent for threads, describes it."""

    async def holders(self) -> list[LockInfo]:
        """Return the holders of the slots from 1 to `limit`. Raises LockBackendError when Redis cannot answer."""
        return list((await self._run(lambda _: self._holders())).values())

    async def locked(self) -> bool:
        """Return whether all slots are held now. Raises LockBackendError when Redis cannot answer."""
        return len(await self.holders()) == self.limit
