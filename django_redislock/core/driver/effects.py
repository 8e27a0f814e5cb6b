"""What an algorithm asks for, and how it goes on: each is written once, without I/O, for threads and for asyncio.

An algorithm is a generator: it yields what it wants done (`ScriptCall` a script, `Subscribe` the waiting room, `WaitForWakeup` a wake-up, `Sleep`,
`Unsubscribe`, …) and is sent the result, or has the error thrown into it. A driver, synchronous or asyncio, does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from .resp import PART, pack, sized
from .script import Script


class ScriptCall:
    """Run a script; the result is its reply.

    When there is no answer, `undo` is sent after it, so that it leaves nothing behind should the server come to it later.
    That is only for what nobody will repeat: else the undo of the first try could arrive after the second one.
    """

    __slots__ = ("args", "keys", "request", "script", "undo")

    def __init__(
        self,
        script: Script,
        keys: tuple[bytes, ...],
        args: tuple[bytes, ...],
        undo: Callable[[], ScriptCall] | None = None,
    ) -> None:
        self.script = script
        self.keys = keys
        self.args = args
        self.undo = undo
        self.request = _format(script.sha, len(keys), len(args)) % sized((*keys, *args))
        """The command that runs the script; packed here, so that who is woken sends what was packed before the sleep."""

    @property
    def whole(self) -> bytes:
        """The command for a server that does not know the script."""
        return pack(b"EVAL", self.script.text, b"%d" % len(self.keys), *self.keys, *self.args)


@lru_cache(maxsize=64)
def _format(sha: bytes, keys: int, args: int) -> bytes:
    """Return the format of a call of a script; its values are each key and argument, after its size."""
    head = pack(b"EVALSHA", sha, b"%d" % keys).partition(b"\r\n")[2]
    return b"*%d\r\n" % (3 + keys + args) + head + PART * (keys + args)


class Pipeline(NamedTuple):
    """Send plain commands, all at once; the result is a list of their replies."""

    commands: tuple[tuple[bytes, ...], ...]


class ScriptBatch(NamedTuple):
    """Run many scripts, all at once; the result is a list of their replies, an error in place of what the server refused."""

    calls: tuple[ScriptCall, ...]


class Subscribe(NamedTuple):
    """Make sure that wake-ups arrive, and register a waiter for the lock; the result is the waiter, with a `channel`."""

    lock: bytes
    id: bytes


class WaitForWakeup(NamedTuple):
    """Sleep until the waiter is woken or until this time on the monotonic clock; the result is what it was told, or None.

    `look` is when what holds the lock ends: then the first waiter of each process is up.
    """

    waiter: Any
    until: float
    look: float


class Unsubscribe(NamedTuple):
    """Leave the waiting room."""

    waiter: Any


class Sleep(NamedTuple):
    """Sleep for so many seconds."""

    seconds: float


class Invoke(NamedTuple):
    """Call the function; the result is what it returned and None, or None and what it raised."""

    function: Callable[[], Any]


class WaitForFuture(NamedTuple):
    """Wait for what another thread or task of this process makes, until this time on the monotonic clock; the result is
    that, or None when the time is over."""

    made: Future[Any]
    until: float


Effect = ScriptCall | ScriptBatch | Pipeline | Subscribe | WaitForWakeup | Unsubscribe | Sleep | Invoke | WaitForFuture
T = TypeVar("T")
Operation = Generator[Effect, Any, T]
