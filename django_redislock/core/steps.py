"""What an algorithm asks for, and how it goes on: each is written once, without I/O, for threads and for asyncio.

An algorithm is a generator: it yields what it wants done (`Call` a script, `Join` the waiting room, `Await` a wake-up, `Pause`,
`Leave`, …) and is sent the result, or has the error thrown into it. A driver, synchronous or asyncio, does the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

from redis.exceptions import AuthenticationError, ClusterCrossSlotError, ConnectionError, RedisError, ResponseError

from ..exceptions import LockBackendError
from . import events, scripts
from .clock import monotonic
from .wire import PART, pack, sized


class Call:
    """Run a script; the result is its reply.

    When there is no answer, `undo` is sent after it, so that it leaves nothing behind should the server come to it later.
    That is only for what nobody will repeat: else the undo of the first try could arrive after the second one.
    """

    __slots__ = ("args", "keys", "request", "script", "undo")

    def __init__(
        self,
        script: scripts.Script,
        keys: tuple[bytes, ...],
        args: tuple[bytes, ...],
        undo: Callable[[], Call] | None = None,
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


class Patient(Protocol):
    """An object that knows how long its server is tried again."""

    @property
    def retry_for(self) -> float: ...


class Commands(NamedTuple):
    """Send plain commands, all at once; the result is a list of their replies."""

    commands: tuple[tuple[bytes, ...], ...]


class Calls(NamedTuple):
    """Run many scripts, all at once; the result is a list of their replies, an error in place of what the server refused."""

    calls: tuple[Call, ...]


class Join(NamedTuple):
    """Make sure that wake-ups arrive, and enter the waiting room; the result is a waiter with a `channel`.

    `along` gets the channel. The call that it returns is sent in the same breath with the subscription, if there is none yet:
    then the waiter's `said` is the reply.
    """

    lock: bytes
    id: bytes
    along: Callable[[bytes], Call] | None = None


class Await(NamedTuple):
    """Sleep until the waiter is woken or until this time on the monotonic clock; the result is what it was told, or None.

    `look` is when what holds the lock ends: then the first waiter of each process is up.
    """

    waiter: Any
    until: float
    look: float


class Leave(NamedTuple):
    """Leave the waiting room."""

    waiter: Any


class Pause(NamedTuple):
    """Sleep for so many seconds."""

    seconds: float


class Compute(NamedTuple):
    """Call the function; the result is what it returned and None, or None and what it raised."""

    function: Callable[[], Any]


class Follow(NamedTuple):
    """Wait for what another thread or task of this process makes, until this time on the monotonic clock; the result is
    that, or None when the time is over."""

    made: Future[Any]
    until: float


Effect = Call | Calls | Commands | Join | Await | Leave | Pause | Compute | Follow
T = TypeVar("T")
Steps = Generator[Effect, Any, T]


RETRY_FOR = 5.0
retry_for: float | None = None
"""Seconds for which every server that cannot be reached is tried again, where the settings say so; None: by its kind."""


def attempt(
    name: str,
    effect: Call | Calls | Commands | Join,
    until: float,
    patient: Patient | None = None,
    level: int | None = None,
) -> Steps[tuple[float, Any]]:
    """Have the effect done, again while the server cannot be reached; return when the last try was sent, and its result.

    Every script may be repeated safely. A connection that broke is tried again at once, at least once; a server that
    stays away for longer than `patient` says, or past `until`, raises LockBackendError. So does, without another try, one that
    stays silent for as long as the client's own socket timeout, and any other error. That is logged at the `level` (None: as a
    warning).
    """
    tries, give_up = 0, until
    while True:
        sent = monotonic()
        try:
            return sent, (yield effect)
        except RedisError as error:
            if not tries:
                patience = (RETRY_FOR if retry_for is None else retry_for) if patient is None else patient.retry_for
                give_up = min(until, sent + patience)
            pause = random.uniform(0, min(0.5, 0.01 * 2**tries)) if tries else 0.0  # noqa: S311
            broken = isinstance(error, ConnectionError) and not isinstance(error, AuthenticationError)
            if not broken or (tries and monotonic() + pause >= give_up):
                raise _backend_error(name, error, effect, level) from error
        tries += 1
        yield Pause(pause)


def _backend_error(
    name: str, error: RedisError, effect: Call | Calls | Commands | Join, level: int | None
) -> LockBackendError:
    cause = f"{type(error).__name__}: {error}"
    if isinstance(effect, Call) and "WRONGTYPE" in cause:  # something else wrote one of them
        cause += f"; the keys are {b', '.join(effect.keys).decode(errors='replace')}"
    failure = LockBackendError(name, cause, refused=isinstance(error, ResponseError))
    # Commands are about values, not about locks; and after CROSSSLOT the caller asks again with other keys.
    if not isinstance(effect, Commands) and not isinstance(error, ClusterCrossSlotError):
        events.emit("backend_error", "%s", failure, name=name, cause=cause, level=level)
    return failure
