"""The effects that an operation asks its driver for, and the Lua scripts that most of them run.

An algorithm is written once, without I/O, for threads and for asyncio: as an operation, a generator that yields
effects. Its driver carries out each effect (it runs a `ScriptCall`, sleeps for a `WaitForWakeup`, …) and sends the
result into the generator, or throws the error into it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import ConnectionError, ResponseError

from .resp import PART, encode_command, with_sizes

LOCK_SCRIPTS = files(__package__.rpartition(".")[0]) / "lua"


class Script:
    """One Lua script: the texts of the parts that it uses, followed by the text of its own file.

    The files are in the folder ``lua`` of the package `home`, or of the lock. `granted` takes a reply and returns
    whether it grants or renews a lock; it is None for a script that does neither.
    """

    def __init__(self, name: str, *parts: str, home: str = "", granted: Callable[[Any], bool] | None = None) -> None:
        folders = [files(home) / "lua", LOCK_SCRIPTS] if home else [LOCK_SCRIPTS]
        self.name = name
        self.granted = granted
        self.text = b"".join(_read(part, folders) for part in ("lib", *parts, name))
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()

    def __repr__(self) -> str:
        return f"<Script {self.name}>"


def _read(part: str, folders: list[Traversable]) -> bytes:
    found = [path for folder in folders if (path := folder / f"{part}.lua").is_file()]
    return found[0].read_bytes()


class ScriptCall:
    """Run a script; the result is its reply.

    `undo` makes the call that undoes this one; `undo_after` says when the driver sends it. Only a call that is not
    repeated may have one, because the undo of the first try could arrive after the second try.
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
        self.request = _format(script.sha, len(keys), len(args)) % with_sizes((*keys, *args))
        """The encoded command. A waiter prepares it before it sleeps, so that after the wake-up it only sends."""

    def with_text(self) -> ScriptCall:
        """Return this call with the script's text, for a server that does not know the script (NOSCRIPT)."""
        # Not `copy`, which imports: a destructor may release a lock when the interpreter ends.
        call = ScriptCall(self.script, self.keys, self.args, self.undo)
        call.request = encode_command(b"EVAL", self.script.text, b"%d" % len(self.keys), *self.keys, *self.args)
        return call


@lru_cache(maxsize=64)
def _format(sha: bytes, keys: int, args: int) -> bytes:
    """Return the format of a call of a script; its values are each key and argument, after its size."""
    head = encode_command(b"EVALSHA", sha, b"%d" % keys).partition(b"\r\n")[2]
    return b"*%d\r\n" % (3 + keys + args) + head + PART * (keys + args)


class ScriptBatch(NamedTuple):
    """Run several scripts at once; the result is the list of their replies, an error in place of each refused reply."""

    calls: tuple[ScriptCall, ...]


class Pipeline(NamedTuple):
    """Send plain commands at once; the result is the list of their replies."""

    commands: tuple[tuple[bytes, ...], ...]


def undo_after(error: BaseException, call: ScriptCall | ScriptBatch | Pipeline) -> list[bytes]:
    """Return the requests that undo a call whose reply got lost by this error; none when none is to be sent.

    This is the rule of both drivers. They send the undo on the same connection: so the server executes it after the
    call, however late. After an error reply there is nothing to undo. After a ConnectionError `with_retries` repeats
    the call, and an undo that arrived late would undo the repeated call. At a GeneratorExit the driver undoes the whole
    operation.
    """
    if isinstance(error, (ResponseError, ConnectionError, GeneratorExit)) or isinstance(call, Pipeline):
        return []
    calls = call.calls if isinstance(call, ScriptBatch) else (call,)
    undos = [each.undo() for each in calls if each.undo is not None]
    # The text once for each script, because the server knows the script then.
    known: set[bytes] = set()
    requests = []
    for undo in undos:
        requests.append((undo if undo.script.sha in known else undo.with_text()).request)
        known.add(undo.script.sha)
    return requests


class Subscribe(NamedTuple):
    """Make sure that wake-ups arrive, and register a waiter for the lock; the result is the waiter."""

    lock: bytes
    id: bytes
    of: bytes | None = None
    """The lock whose wake-ups the waiter gets, where `lock` is another one."""


class WaitForWakeup(NamedTuple):
    """Sleep until the waiter is woken or until `until` on the monotonic clock; the result is the message, or None.

    At `poll_at`, when the lock expires, the driver wakes the one waiter of each process that polls for the lock.
    """

    waiter: Any
    until: float
    poll_at: float


class Unsubscribe(NamedTuple):
    """Remove the waiter."""

    waiter: Any


class Sleep(NamedTuple):
    """Sleep for so many seconds."""

    seconds: float


class Invoke(NamedTuple):
    """Call the function; the result is its return value and None, or None and its error."""

    function: Callable[[], Any]


class CallAside(NamedTuple):
    """Call a function that computes for long; the result is its. The loop of a task goes on meanwhile."""

    function: Callable[[], Any]


class WaitForFuture(NamedTuple):
    """Wait for a future of another thread or task; the result is the future's, or None after `until`."""

    future: Future[Any]
    until: float


class RunAt(NamedTuple):
    """Run an operation at another server; the result is the operation's."""

    server: Any
    operation: Any


class At(NamedTuple):
    """Carry out the effect at this node of a Cluster.

    With `patience` it is a call for a renewal: the reply is waited for so many seconds, on a connection of its own.
    """

    node: Any
    effect: ScriptCall | ScriptBatch | Pipeline | Subscribe | Unsubscribe
    patience: float | None = None


class AtEach(NamedTuple):
    """Carry out each effect at its node; the result is the list of their results, an error in place of each failure."""

    effects: tuple[At, ...]


Call = ScriptCall | ScriptBatch | Pipeline
Effect = (
    Call | Subscribe | WaitForWakeup | Unsubscribe | Sleep | Invoke | CallAside | WaitForFuture | RunAt | At | AtEach
)
T = TypeVar("T")
Operation = Generator[Effect, Any, T]
