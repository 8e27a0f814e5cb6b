"""A server of locks within one process, without Redis: for tests and development, and for ``ENABLED: False``."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

from . import scripts
from .clock import monotonic
from .driver import os_threads
from .driver.async_server import AsyncServer
from .driver.effects import Effect, Pipeline, ScriptBatch, ScriptCall, Subscribe, WaitForWakeup
from .driver.server import Endpoint, Server
from .records import RECALLED

GREENLET_PAUSE = 0.005
"""Seconds between two looks of a waiting greenlet."""
MARK = RECALLED.encode()
NOTES = 1024
"""Number of ended acquisitions of which the way they ended is remembered for their former holders."""


class _Held(NamedTuple):
    value: bytes
    """As in Redis: id, fence, time of the acquisition, record."""
    name: bytes
    ends: float


class MemoryServer(Server):
    """Answers the scripts of the lock from this process's memory; it has no connections.

    One thread at a time holds a lock. Waiters are woken by each release, in no order; tasks cannot wait. With
    `grants_all` every caller gets every lock at once, no lock is lost, and the server remembers none.
    """

    def __init__(self, *, grants_all: bool = False) -> None:
        super().__init__(Endpoint())
        self.grants_all = grants_all
        self.forget()

    def forget(self) -> None:
        """Start again without locks. A forked child does so, too, because a thread may have been within a call."""
        self._changed = threading.Condition()
        self._held: dict[bytes, _Held] = {}
        self._fence = 0
        self._releases = 0
        self._notes: dict[bytes, bytes] = {}
        """How acquisitions ended, by fence: with the user, the time and the reason of a forced release or a recall."""

    @property
    def ready(self) -> bool:
        """Whether a renewal finds an open connection: always, because it needs none."""
        return True

    def leave(self) -> None:
        """Do nothing: there are no connections to close."""

    def call(self, call: ScriptCall | ScriptBatch | Pipeline) -> Any:
        """Do the work of the script."""
        if isinstance(call, ScriptBatch):
            return [self.call(each) for each in call.calls]
        if isinstance(call, Pipeline):
            return [None] * len(call.commands)
        if self.grants_all:  # takes no lock, because a forked child may inherit it from a thread within a call
            return _grant(call)
        with self._changed:
            now = monotonic()
            self._held = {lock: held for lock, held in self._held.items() if held.ends > now}
            # One case for each script of the lock: a table of functions would be longer, and read twice.
            match call.script:
                case scripts.ACQUIRE:
                    return self._acquire(call.keys[0], call.args, now)
                case scripts.ACQUIRE_SLOT:
                    return self._acquire_slot(call.keys, call.args, now)
                case scripts.RELEASE:  # of a slot, the caller may not know which one
                    mark = _mark(call.args[0], call.args[3])
                    slots, only = (call.keys[0], *call.keys[4:]), b"".join(call.args[5:])
                    return max([self._free(lock, mark, b"released", only) for lock in slots])
                case scripts.UNDO:
                    slots, only = (call.keys[0], *call.keys[5:]), b"".join(call.args[5:])
                    return max([self._free(lock, _mark(call.args[0], b""), b"released", only) for lock in slots])
                case scripts.RESET:
                    return self._reset(call.keys[0], *call.args[1:])
                case scripts.CAUSE:
                    return [self._notes.get(fence, b"") for fence in call.args]
                case scripts.RENEW:
                    expiries = zip(call.keys[::2], call.args[1::3], call.args[2::3], strict=True)
                    return [
                        self._renew(lock, mark, int(expire_ms), call.args[0], now) for lock, mark, expire_ms in expiries
                    ]
                case scripts.READ:
                    return self._read(call.keys[::2], now)
                case scripts.NAMES:
                    names = [held.name for held in self._held.values()]
                    return [0, b"0", b" ".join(b"%d" % len(name) for name in names), b"".join(names)]
                case scripts.COUNT:
                    return b"%d" % len(self._held) + b" 0" * (len(call.keys) - 1)
            return 1

    def renew(self, call: ScriptCall | ScriptBatch, patience: float) -> Any:
        """Do as `call`."""
        return self.call(call)

    def _acquire(self, lock: bytes, args: tuple[bytes, ...], now: float) -> int | list[Any]:
        id, expire_ms, name, record = args[:4]
        found = self._held.get(lock)
        if found is not None:
            if not found.value.startswith(id + b"\n"):
                return [int((found.ends - now) * 1000), b"1", 0]
            self._held[lock] = found._replace(ends=max(found.ends, now + int(expire_ms) / 1000))
            return -int(_fence_of(found))
        self._fence = max(self._fence + 1, int(time.time() * 1_000_000))
        value = b"%s\n%d\n%d\n%s" % (id, self._fence, int(time.time() * 1000), record)
        self._held[lock] = _Held(value, name, now + int(expire_ms) / 1000)
        return self._fence

    def _acquire_slot(self, keys: tuple[bytes, ...], args: tuple[bytes, ...], now: float) -> bytes | list[Any]:
        slots = list(enumerate((keys[0], *keys[4 : 3 + int(args[7])]), 1))
        mine = args[0] + b"\n"
        slots.sort(key=lambda slot: slot[1] not in self._held or not self._held[slot[1]].value.startswith(mine))
        soonest = -1
        for number, lock in slots:
            found = self._acquire(lock, (*args[:2], args[2] + b"%d" % number, args[3]), now)
            if isinstance(found, int):
                return b"%d %d" % (found, number)
            soonest = found[0] if soonest < 0 else min(soonest, found[0])
        return [soonest, b"1", 0]

    def _reset(self, lock: bytes, wanted: bytes, _: bytes, by: bytes, *recalls: bytes) -> int:
        found = self._held.get(lock)
        if found is None or wanted not in (b"", _fence_of(found)):
            return 0 if found is None else -1
        note = b"%b\n%d\n%b" % (_fence_of(found), time.time() * 1000, by)
        if not recalls:
            return self._free(lock, b"", note)
        if found.value.startswith(MARK):
            return 2
        self._held[lock] = found._replace(value=MARK + found.value)
        self._note(found, note + b"\nrecalled")
        return 1

    def _free(self, lock: bytes, mark: bytes, note: bytes, only: bytes = b"") -> int:
        found = self._held.get(lock)
        if found is None or not found.value.removeprefix(MARK).startswith(mark) or only not in found.value:
            return 0
        del self._held[lock]
        if note != b"released" or not found.value.startswith(MARK):
            self._note(found, note)
        self._releases += 1
        self._changed.notify_all()
        return 1

    def _note(self, found: _Held, note: bytes) -> None:
        self._notes[_fence_of(found)] = note
        if len(self._notes) > NOTES:
            del self._notes[next(iter(self._notes))]

    def _renew(self, lock: bytes, mark: bytes, expire_ms: int, shorten: bytes, now: float) -> int:
        found = self._held.get(lock)
        if found is None or not found.value.startswith(mark + b"\n"):
            return -1 if found is not None and found.value.startswith(MARK + mark + b"\n") else 0
        ends = now + expire_ms / 1000
        self._held[lock] = found._replace(ends=ends if shorten == b"1" else max(found.ends, ends))
        self._changed.notify_all()  # waiters for its end must check again
        return 1

    def _read(self, locks: tuple[bytes, ...], now: float) -> list[Any]:
        found = [self._held.get(lock) for lock in locks]
        numbers = [f"{len(held.value)} {int((held.ends - now) * 1000)} 0" if held else "-1 -2 0" for held in found]
        return [int(time.time() * 1000), " ".join(numbers).encode(), b"".join(held.value for held in found if held)]

    def _do(self, effect: Effect) -> Any:
        match effect:
            case Subscribe():
                return SimpleNamespace(channel=b"local", seen=self._releases, leave=lambda: None)
            case WaitForWakeup(waiter, until, look):
                with self._changed:
                    while self._releases == waiter.seen and (left := min(until, look) - monotonic()) > 0:
                        if os_threads.hub() is not None:  # the holder may be a greenlet of this thread
                            self._changed.release()
                            try:
                                os_threads.sleep(min(left, GREENLET_PAUSE))
                            finally:
                                self._changed.acquire()
                        elif not self._changed.wait(min(left, threading.TIMEOUT_MAX)):
                            break
                    waiter.seen = self._releases
                return None
        return super()._do(effect)


def _grant(call: ScriptCall) -> Any:
    """Return the reply of a server that grants the call, and stores nothing."""
    match call.script:
        case scripts.ACQUIRE:
            return int(time.time() * 1_000_000)  # a fence that still grows
        case scripts.ACQUIRE_SLOT:
            return b"%d 1" % (time.time() * 1_000_000)
        case scripts.RENEW:
            return [1] * (len(call.keys) // 2)
        case scripts.READ:
            return [0, b"-1 -2 0 " * (len(call.keys) // 2), b""]
        case scripts.NAMES:
            return [0, b"0", b"", b""]
        case scripts.COUNT:
            return b" ".join([b"0"] * len(call.keys))
    return 1


def _fence_of(held: _Held) -> bytes:
    return held.value.split(b"\n", 2)[1]


def _mark(id: bytes, fence: bytes) -> bytes:
    """Return the beginning of the value of a lock of this id, and of this fence if there is one."""
    return b"%s\n%s\n" % (id, fence) if fence else id + b"\n"


class AsyncMemoryServer(AsyncServer):
    """The memory server as an event loop sees it."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self._memory = server

    async def call(self, call: ScriptCall | Pipeline) -> Any:
        """Do the work of the script."""
        return self._memory.call(call)


MemoryServer.view_kind = AsyncMemoryServer
GRANTS_ALL = MemoryServer(grants_all=True)
"""The server of all locks with ``ENABLED: False``."""
