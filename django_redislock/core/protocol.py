"""The algorithm of the lock, written once and without I/O.

Each function is a generator: it yields what it wants done (`Call` a script, `Join` the waiting room, `Await` a wake-up,
`Pause`, `Leave`, …) and is sent the result, or has the error thrown into it. A driver, synchronous or asyncio, does the rest.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import AuthenticationError, ConnectionError, RedisError

from ..exceptions import LockBackendError
from . import events, scripts
from .keys import LockKeys, held_keys, milliseconds
from .lease import RETRY_FOR, Lease
from .owner import Held, new_id, parse
from .wire import pack

MAX_SLEEP = 30.0
"""Seconds after which a waiter looks again in any case; a queue lives four times as long."""


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
        self.request = pack(b"EVALSHA", script.sha, b"%d" % len(keys), *keys, *args)
        """The command that runs the script; packed here, so that who is woken sends what was packed before the sleep."""

    @property
    def whole(self) -> bytes:
        """The command for a server that does not know the script."""
        return pack(b"EVAL", self.script.text, b"%d" % len(self.keys), *self.keys, *self.args)


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


def attempt(
    name: str, effect: Call | Commands | Join, until: float, retry_for: float = RETRY_FOR
) -> Steps[tuple[float, Any]]:
    """Have the effect done, again while the server cannot be reached; return when the last try was sent, and its result.

    Every script may be repeated safely. A connection that broke is tried again at once, at least once; a server that
    stays away for longer than `retry_for`, or past `until`, raises LockBackendError. So does, without another try, one that
    stays silent for as long as the client's own socket timeout, and any other error.
    """
    give_up = min(until, time.monotonic() + retry_for)
    tries = 0
    while True:
        sent = time.monotonic()
        try:
            return sent, (yield effect)
        except RedisError as error:
            pause = random.uniform(0, min(0.5, 0.01 * 2**tries)) if tries else 0.0  # noqa: S311
            broken = isinstance(error, ConnectionError) and not isinstance(error, AuthenticationError)
            if not broken or (tries and time.monotonic() + pause >= give_up):
                raise _backend_error(name, error, effect) from error
        tries += 1
        yield Pause(pause)


def together(many: Sequence[Steps[T]], ended: dict[int, T]) -> Steps[None]:
    """Go through many steps side by side, so that their calls take one round trip; `ended` is given what each returned.

    Raises the first error of one of them, when all have ended.
    """
    failure: BaseException | None = None
    wanted: dict[int, Effect] = {}

    def proceed(number: int, result: Any = None, error: BaseException | None = None) -> None:
        nonlocal failure
        steps = many[number]
        wanted.pop(number, None)
        try:
            wanted[number] = steps.send(result) if error is None else steps.throw(error)
        except StopIteration as stop:
            ended[number] = stop.value
        except BaseException as raised:
            failure = failure or raised

    for number in range(len(many)):
        proceed(number)
    while wanted:
        calls = {number: effect for number, effect in wanted.items() if isinstance(effect, Call)}
        pauses = {number: effect for number, effect in wanted.items() if isinstance(effect, Pause)}
        others = [number for number in wanted if number not in calls and number not in pauses]
        replies: list[Any] = []
        error: BaseException | None = None
        try:
            if others:
                some = others[:1]
                replies = [(yield wanted[some[0]])]
            elif pauses:
                some = list(pauses)
                yield Pause(max(pause.seconds for pause in pauses.values()))
            else:
                some = list(calls)
                replies = yield Calls(tuple(calls.values()))
        except BaseException as raised:
            error = raised
        interrupted = error is not None and not isinstance(error, RedisError)
        for number, reply in zip_longest(list(wanted if interrupted else some), replies):
            refused = reply if isinstance(reply, RedisError) else None
            proceed(number, reply, error or refused)
    if failure is not None:
        raise failure


def _backend_error(name: str, error: RedisError, effect: Call | Commands | Join) -> LockBackendError:
    cause = f"{type(error).__name__}: {error}"
    if isinstance(effect, Call) and "WRONGTYPE" in cause:  # something else wrote one of them
        cause += f"; the keys are {b', '.join(effect.keys).decode(errors='replace')}"
    if not isinstance(effect, Commands):  # those are about values, not about locks
        events.emit("backend_error", "Redis could not answer for lock %r: %s", name, cause, name=name, cause=cause)
    return LockBackendError(name, cause)


@dataclass(slots=True)
class Claim:
    """What an acquisition asks for."""

    lease: Lease
    record: bytes
    timeout: float | None
    given_id: bool
    """The id may be used again, by whoever knows it."""
    script: scripts.Script = scripts.ACQUIRE
    """What acquires, given what ACQUIRE is given, and `more_keys` and `more_args` after it."""
    more_keys: tuple[bytes, ...] = ()
    more_args: tuple[bytes, ...] = ()

    def call(self, channel: bytes, join: bool, ticket: bytes) -> Call:
        lease = self.lease
        args = (
            lease.id.encode(),
            milliseconds(lease.expire),
            lease.name.encode(),
            self.record,
            channel,
            b"1" if join else b"0",
            ticket,
            *self.more_args,
        )
        undo = None if self.given_id else partial(give_back, lease, channel)
        return Call(self.script, (*lease.keys[:4], *self.more_keys), args, undo)


def acquire(claim: Claim, waiting: bool) -> Steps[bool]:
    """Acquire the lock within the claim's timeout; the lease begins when it is acquired.

    `waiting`: wake-ups arrive already, so that joining the queue with the first call costs nothing. Otherwise the first
    call only tries, and an uncontended lock needs no waiting room.
    """
    lease = claim.lease
    id = lease.id.encode()
    until = math.inf if claim.timeout is None else time.monotonic() + claim.timeout
    waiter: Any = None
    ticket = b""
    began = 0.0
    try:
        if waiting and claim.timeout != 0:
            waiter = yield Join(lease.keys.lock, id)
        call = claim.call(waiter.channel if waiter is not None else b"", waiter is not None, ticket)
        while True:
            last = time.monotonic() >= until
            if last and waiter is not None:
                call = claim.call(waiter.channel, False, ticket)
            sent, reply = yield from attempt(lease.name, call, until, lease.retry_for)
            if isinstance(reply, int):
                lease.begin(reply, sent)
                _tell_wait(lease, began, acquired=True)
                return True
            if last:
                _tell_wait(lease, began, acquired=False)
                return False
            if waiter is None:
                _, waiter = yield from attempt(lease.name, Join(lease.keys.lock, id), until, lease.retry_for)
                call = claim.call(waiter.channel, True, ticket)
                continue
            left_ms, ticket = reply
            began = began or time.monotonic()
            # Packed now: whoever is woken is in a hurry, and so is who waits for the release.
            call = claim.call(waiter.channel, True, ticket)
            if not claim.given_id:
                lease.farewell = lease.farewell or give_back(lease)
            yield sleep(waiter, until, left_ms)
    except (LockBackendError, GeneratorExit):
        raise
    except BaseException:
        # Interrupted: whatever the server gave us so far (the lock, a reservation, a place in the queue) goes back.
        with suppress(RedisError):
            yield give_back(lease, waiter.channel if waiter is not None else b"")
        raise
    finally:
        if waiter is not None:
            yield Leave(waiter)


def _tell_wait(lease: Lease, began: float, acquired: bool) -> None:
    """Tell how long was waited, if there was a wait at all."""
    if began:
        seconds = time.monotonic() - began
        message = "Lock %r was waited for %.3f s (acquired: %s)."
        events.emit(
            "waited", message, lease.name, seconds, acquired, name=lease.name, seconds=seconds, acquired=acquired
        )


def sleep(waiter: Any, until: float, left_ms: int) -> Await:
    """Return the sleep of a waiter whose lock has so many milliseconds left (negative: nobody knows)."""
    now = time.monotonic()
    look = now + (left_ms + 1) / 1000 if left_ms >= 0 else math.inf
    return Await(waiter, min(until, now + MAX_SLEEP), look)


def give_back(lease: Lease, channel: bytes = b"") -> Call:
    """Return the call that releases the lease, or drops its claim on the queue of that channel."""
    id = lease.id.encode()
    keys = lease.keys
    fence = b"%d" % lease.fence if lease.fence else b""
    return Call(
        scripts.RELEASE,
        (keys.lock, keys.held, keys.queue, keys.receipt + id),
        (id, lease.name.encode(), channel, fence),
    )


def release(lease: Lease) -> Steps[bool]:
    """Release the lock; False when it was not the lease's any more."""
    # After the deadline the lock has ended by itself, so there is no sense in trying for longer.
    until = max(lease.deadline, time.monotonic())
    _, reply = yield from attempt(lease.name, lease.farewell or give_back(lease), until, lease.retry_for)
    return bool(reply)


def renew(lease: Lease) -> Steps[bool]:
    """Give the lease its life, a shorter one, too; False when it is not held any more."""
    life = lease.expire
    until = max(lease.deadline, time.monotonic())
    sent, reply = yield from attempt(lease.name, renewal([lease], shorten=True), until, lease.retry_for)
    if reply[0]:
        lease.renewed(sent, life)
    return bool(reply[0])


def renewal(leases: list[Lease], shorten: bool = False) -> Call:
    """Return the one call that renews all the leases; `shorten`: also one whose life in Redis is longer than it should be."""
    keys = [key for lease in leases for key in (lease.keys.lock, lease.keys.held)]
    args = [b"1" if shorten else b"0"]
    for lease in leases:
        args += (lease.mark, milliseconds(lease.expire), lease.name.encode())
    return Call(scripts.RENEW, tuple(keys), tuple(args))


def reset(name: str, keys: LockKeys, fence: int | None, until: float = math.inf) -> Steps[int]:
    """Take the lock from its holder: 1 when freed, 0 when nobody held it, -1 when another acquisition than `fence` did."""
    receipt = keys.receipt + new_id().encode()
    args = (name.encode(), b"" if fence is None else b"%d" % fence)
    call = Call(scripts.RESET, (keys.lock, keys.held, keys.queue, receipt), args)
    _, reply = yield from attempt(name, call, until)
    return int(reply)


def read(names: list[str], locks: list[LockKeys], until: float = math.inf) -> Steps[list[Held | None]]:
    """Read who holds the locks: None for each that nobody holds."""
    call = Call(scripts.READ, tuple(key for keys in locks for key in (keys.lock, keys.queue)), ())
    _, reply = yield from attempt(names[0], call, until)
    now, packed, blob = reply
    numbers = list(map(int, packed.split()))
    each = zip(names, unpack(numbers[::3], blob), numbers[1::3], numbers[2::3], strict=True)
    return [parse(name, value, ttl_ms, waiting, now) for name, value, ttl_ms, waiting in each]


def names(prefix: str, until: float = math.inf) -> Steps[list[str]]:
    """Read the names of the locks held now."""
    _, reply = yield from attempt(prefix, Call(scripts.NAMES, tuple(held_keys(prefix)), ()), until)
    return [name.decode() for name in unpack(map(int, reply[0].split()), reply[1]) if name is not None]


def unpack(lengths: Iterable[int], blob: bytes) -> list[bytes | None]:
    """Return the strings of these lengths that follow each other; None for a negative length."""
    values: list[bytes | None] = []
    at = 0
    for length in lengths:
        end = at + length
        values.append(blob[at:end] if length >= 0 else None)
        at = max(at, end)
    return values
