"""The effects that an operation asks its driver for, the Lua scripts that most of them run, and the repetition of those
that failed: while a server cannot be reached or serves nobody, and when it does not know a script.

An algorithm is written once, without I/O, for threads and for asyncio: as an operation, a generator that yields
effects. Its driver carries out each effect (it runs a `ScriptCall`, sleeps for a `WaitForWakeup`, …) and sends the
result into the generator, or throws the error into it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from ...exceptions import LockBackendError
from .. import chance, events
from ..clock import monotonic
from .resp import PART, NotPrimary, encode_command, with_sizes

LOCK_SCRIPTS = files(__package__.rpartition(".")[0]) / "lua"


class Script:
    """One Lua script: the texts of the parts that it uses, followed by the text of its own file. Unless the parts name
    ``lib``, it and the clock come first.

    The files are in the folder ``lua`` of the package `home`, or of the lock. `granted` takes a reply and returns
    whether it grants or renews a lock; it is None for a script that does neither.
    """

    def __init__(self, name: str, *parts: str, home: str = "", granted: Callable[[Any], bool] | None = None) -> None:
        folders = [files(home) / "lua", LOCK_SCRIPTS] if home else [LOCK_SCRIPTS]
        self.name = name
        self.granted = granted
        first = () if "lib" in parts else ("clock", "lib")
        self.text = b"".join(_read(part, folders) for part in (*first, *parts, name))
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()

    def __repr__(self) -> str:
        return f"<Script {self.name}>"


def _read(part: str, folders: list[Traversable]) -> bytes:
    found = [path for folder in folders if (path := folder / f"{part}.lua").is_file()]
    return found[0].read_bytes()


class ScriptCall:
    """Run a script; the result is its reply."""

    __slots__ = ("args", "has_text", "keys", "request", "script")

    has_text: bool
    """Whether the request has the script's text; not set otherwise."""

    def __init__(self, script: Script, keys: tuple[bytes, ...], args: tuple[bytes, ...]) -> None:
        self.script = script
        self.keys = keys
        self.args = args
        self.request = _format(script.sha, len(keys), len(args)) % with_sizes((*keys, *args))
        """The encoded command. A waiter prepares it before it sleeps, so that after the wake-up it only sends."""

    def with_text(self) -> ScriptCall:
        """Return this call with the script's text, for a server that does not know the script (NOSCRIPT)."""
        # Not `copy`, which imports: a destructor may release a lock when the interpreter ends.
        call = ScriptCall(self.script, self.keys, self.args)
        call.has_text = True
        call.request = encode_command(b"EVAL", self.script.text, b"%d" % len(self.keys), *self.keys, *self.args)
        return call


def with_text_once(calls: Sequence[ScriptCall]) -> Sequence[ScriptCall]:
    """Return the calls that one connection sends in this order, the text of each script once: the server knows it then.

    A thousand missing values sent 26 MB to a server that had restarted.
    """
    sent: set[bytes] = set()
    shorter = []
    for call in calls:
        if not getattr(call, "has_text", False):
            shorter.append(call)
        elif call.script.sha in sent:
            shorter.append(ScriptCall(call.script, call.keys, call.args))
        else:
            sent.add(call.script.sha)
            shorter.append(call)
    return shorter


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


class Subscribe(NamedTuple):
    """Make sure that wake-ups arrive, and register a waiter for the lock; the result is the waiter."""

    lock: bytes
    id: bytes


class WaitForWakeup(NamedTuple):
    """Sleep until the waiter is woken or until `until` on the monotonic clock; the result is the message, or None.

    At `poll_at`, when the lock expires, the driver wakes the one waiter of each process that polls for the lock.
    """

    waiter: Any
    until: float
    poll_at: float


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


class RunAtEach(NamedTuple):
    """Run each operation at its server; there is no result.

    A thread runs one after the other. A task runs all at the same time, and once `enough` is true, cancels those that
    have not ended a moment later.
    """

    operations: tuple[RunAt, ...]
    enough: Callable[[], bool]


class Within(NamedTuple):
    """Run a script or commands, and wait for so many seconds for the reply, and as many for a connection."""

    call: ScriptCall | Pipeline
    seconds: float


class At(NamedTuple):
    """Carry out the effect at this node of a Cluster.

    With `patience` it is a call for a renewal: the reply is waited for so many seconds, on a connection of its own.
    """

    node: Any
    effect: ScriptCall | ScriptBatch | Pipeline | Subscribe
    patience: float | None = None


class AtEach(NamedTuple):
    """Carry out each effect at its node; the result is the list of their results, an error in place of each failure."""

    effects: tuple[At, ...]


Call = ScriptCall | ScriptBatch | Pipeline
Wait = Subscribe | WaitForWakeup | Sleep | WaitForFuture
Effect = Call | Within | Wait | Invoke | CallAside | RunAt | RunAtEach | At | AtEach
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
Operation = Generator[Effect, Any, T]


RETRY_FOR = 5.0
retry_for: float | None = None
"""Seconds for which calls to any unreachable server are repeated, from the settings; None: by the server's kind."""
WRONG_SETTINGS = {
    "CERTIFICATE_VERIFY_FAILED": (
        "Give the CA that signed the server's certificate as ssl_ca_certs, and connect by a name in the certificate."
    ),
    "CERTIFICATE_REQUIRED": "The server wants a certificate of its clients: give ssl_certfile and ssl_keyfile.",
    "HANDSHAKE_FAILURE": "The server may want a certificate of its clients: give ssl_certfile and ssl_keyfile.",
    # "Protocol error: unauthenticated multibulk length" is Redis's reply to a script from a client without a password.
    **dict.fromkeys(
        ("unauthenticated", "Authentication required"),
        "The server wants a password: give it, and the user, in the settings of this connection.",
    ),
    "invalid username-password pair": "Correct the user and the password in the settings of this connection.",
    "unknown command 'EVAL": (  # and EVALSHA; in Valkey 9.1 Lua is a module
        "The server runs no Lua scripts, which locks need: load its Lua module, or bypass the proxy that refuses EVAL."
    ),
    "unknown command 'evalsha'": "fakeredis runs the lock scripts with Lua only: pip install 'fakeredis[lua]'.",
    # What ElastiCache Serverless says of TIME, by public reports (symfony/symfony#54252).
    "command is not allowed from script": (
        "The server refuses a command in scripts, as some serverless services refuse TIME; locks need it: use a server "
        "that allows it, such as one of the same provider that is not serverless."
    ),
    "commands not allowed after non deterministic": (
        "Redis 6.2 replicates whole scripts: set lua-replicate-commands to yes, its default, or use Redis 7 or newer."
    ),
}
"""What to do about errors that another try would only repeat, by a part of their texts."""
ONE_NODE = "the server is one node of a Cluster: use a redis.RedisCluster, or a URL redis+cluster://host:port"
LONGEST_PAUSE = 0.5
"""Seconds between two tries; the pause is random, and up to twice as long each time."""


def _pause(tries: int) -> float:
    """Return the seconds until the next try; none after the first one. Not redis-py's class, because of `chance`."""
    return chance.uniform(0, min(LONGEST_PAUSE, 0.01 * 2**tries)) if tries else 0.0


class Patient:
    """Who makes a call: for how long it is repeated, and what becomes of a repeated one that still arrives."""

    __slots__ = ()
    repeated = False
    """Whether a call was repeated, and the first one may still arrive."""

    @property
    def answer_within(self) -> float | None:
        """Seconds for which the reply to a script is waited for; None: the client's timeout."""
        return None

    @property
    def retry_for(self) -> float:
        """Seconds for which calls are repeated while the server cannot be reached."""
        return RETRY_FOR if retry_for is None else retry_for

    @property
    def closing(self) -> Pipeline | None:
        """What is sent after a grant if a call was repeated: the other one gets nothing, whenever it arrives."""
        return None

    def note_repeated(self) -> None:
        """Note that a call is repeated, and that the first one may still arrive."""


ANYONE = Patient()


def with_retries(
    name: str,
    effect: ScriptCall | ScriptBatch | Pipeline | Subscribe | At,
    until: float,
    patient: Patient = ANYONE,
    level: int | None = None,
    within: float = math.inf,
    for_value: bool = False,
) -> Operation[tuple[float, Any]]:
    """Yield the effect, repeat it after errors that pass, and return when it was last sent, and its result.

    A grant that comes later than `within` seconds after the call was sent is asked for once more, because it is over
    then. Once only, because every reply of a server may be that slow.

    Every script may be repeated safely. After an error that passes (`is_temporary`) the effect is repeated at once, at
    least one time, and then until the seconds of `patient` or the time `until` are over. After a silence it is repeated
    only before that, because each further one may take as long. A script that the server does not know is sent with its
    text.

    A call `for_value` is repeated only while the server cannot be reached, and once after a refused write: a page with
    ten misses held its thread for 50 seconds beside a server without replicas, where the base class raises at once.

    Raises LockBackendError then, and after any other error at once. It is logged at `level` (None: as a warning).
    """
    tries, give_up, texts, late = 0, until, 0, False
    limit = patient.answer_within
    while True:
        sent = monotonic()
        try:
            result = yield effect if limit is None else _within(effect, limit)
            if late or monotonic() < sent + within or not _is_grant(effect, result):
                if patient.repeated and _is_grant(effect, result) and (closing := patient.closing) is not None:
                    # In the time of the call: a quorum lock waited five seconds for this note beside a slow server.
                    with suppress(RedisError):
                        yield closing if limit is None else Within(closing, limit)
                return sent, result
            late = True  # a silent server answered after four seconds: the lock, which lasts three, was over
            continue
        except RedisError as error:
            if isinstance(error, NoScriptError) and isinstance(effect, ScriptCall) and texts < 2:
                effect, texts = effect.with_text(), texts + 1  # twice, because another call of a batch had the text
                continue
            if not tries:
                give_up = min(until, sent + patient.retry_for)
            if for_value and isinstance(error, NotPrimary):
                give_up = sent
            pause = _pause(tries)
            over = monotonic() + pause >= give_up and (tries or isinstance(error, TimeoutError))
            if over or not (is_unreachable if for_value else is_temporary)(error):
                raise _backend_error(name, error, effect, level) from error
        tries += 1
        patient.note_repeated()
        yield Sleep(pause)


def _within(effect: Effect, limit: float) -> Effect:
    return Within(effect, limit) if isinstance(effect, ScriptCall) else effect


def _is_grant(effect: Effect, reply: Any) -> bool:
    granted = effect.script.granted if isinstance(effect, ScriptCall) else None
    return granted is not None and granted(reply)


def with_retries_each(
    name: str,
    calls: list[ScriptCall],
    until: float,
    patients: Sequence[Patient],
    level: int | None = None,
    for_value: bool = False,
) -> Operation[list[Any]]:
    """Yield many calls at once, repeat those that cannot be answered as `with_retries` does, and return the replies.

    There is one patient for each call; the first one says for how long. The result has a LockBackendError in place of
    each reply that did not come.
    """
    if len(calls) == 1:  # the most frequent case
        try:
            _, reply = yield from with_retries(name, calls[0], until, patients[0], level, for_value=for_value)
        except LockBackendError as failure:
            return [failure]
        return [reply]
    passes = is_unreachable if for_value else is_temporary
    replies: list[Any] = [None] * len(calls)
    waiting, tries, give_up = list(range(len(calls))), 0, min(until, monotonic() + patients[0].retry_for)
    unknown: set[int] = set()
    while True:
        try:
            answers = yield ScriptBatch(tuple(calls[number] for number in waiting))
        except RedisError as error:
            answers = [copy(error)] * len(waiting)  # the error itself refers to this frame
        again, known = [], len(unknown)
        pause = _pause(tries)
        over = monotonic() + pause >= give_up
        for number, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, NoScriptError) and number not in unknown:
                unknown.add(number)
                calls[number] = calls[number].with_text()
                again.append(number)
            elif passes(answer) and not (over and isinstance(answer, TimeoutError)):
                again.append(number)
                patients[number].note_repeated()
                if for_value and isinstance(answer, NotPrimary):
                    give_up = -math.inf
            replies[number] = answer
        if not again or (tries and len(unknown) == known and over):
            break
        waiting, tries = again, tries + 1
        yield Sleep(pause)
    failures: dict[str, LockBackendError] = {}  # each is reported once, not for each call
    for number, reply in enumerate(replies):
        if isinstance(reply, RedisError):
            text = str(reply)
            if text not in failures:
                failures[text] = _backend_error(name, reply, calls[number], level)
                failures[text].__cause__ = reply
            replies[number] = failures[text]
    closings = [
        closing
        for call, reply, patient in zip(calls, replies, patients, strict=True)
        if patient.repeated and not isinstance(reply, LockBackendError) and _is_grant(call, reply)
        if (closing := patient.closing) is not None
    ]
    if closings:
        with suppress(RedisError):
            yield Pipeline(tuple(command for closing in closings for command in closing.commands))
    return replies


# By its first word: the server runs a script, cannot save, or is full (the scripts have written nothing then); others
# have a class of their own. From a script, Redis 6.2 puts its own words before the error.
_PASSING = re.compile("(?:Error running script .*: -)?(?:BUSY|MISCONF|OOM|CLUSTERDOWN|TRYAGAIN) ", re.DOTALL)


def is_temporary(reply: Any) -> bool:
    """Whether this is an error that passes: another try may succeed, though nobody changes the settings.

    This is the one list of them. READONLY, MASTERDOWN, NOREPLICAS and LOADING are a ConnectionError (`NotPrimary`). A
    silence of the server is one of them, too.
    """
    if isinstance(reply, (TimeoutError, OutOfMemoryError)) or is_unreachable(reply):
        return True
    return isinstance(reply, ResponseError) and _PASSING.match(str(reply)) is not None


def is_unreachable(reply: Any) -> bool:
    """Whether this is an error after which another try may reach the server, or another one that has the data.

    A cache repeats nothing else, because the base class has no patience with a server that is full or silent.
    """
    # A plain client of a server in cluster mode gets the last two while a failover is under way, or a slot moves.
    passing = isinstance(reply, (ConnectionError, ClusterDownError, TryAgainError))
    # A script of a moving slot removed the last entry of a key, and then looked at it: again, after the move.
    passing = passing or "access a non local key in a cluster node" in str(reply)
    return passing and not isinstance(reply, AuthenticationError) and not advice_for(str(reply))


def advice_for(text: str) -> str:
    """Return what to change in the settings after an error of this text, or nothing when another try may succeed."""
    return next((advice for part, advice in WRONG_SETTINGS.items() if part in text), "")


def _backend_error(
    name: str, error: RedisError, effect: ScriptCall | ScriptBatch | Pipeline | Subscribe | At, level: int | None
) -> LockBackendError:
    cause = f"{type(error).__name__}: {error}"
    if advice := advice_for(cause):
        cause += f" {advice}"
    if isinstance(effect, ScriptCall) and "WRONGTYPE" in cause:  # another program wrote one of them
        cause += f"; the keys are {b', '.join(effect.keys).decode(errors='replace')}"
    if isinstance(error, AskError):  # or MovedError, by a client of one server
        cause += f"; {ONE_NODE}"
    failure = LockBackendError(name, cause, refused=isinstance(error, (ResponseError, AuthenticationError)))
    # Commands are about values, not about locks; and after CROSSSLOT the caller tries other keys.
    if not isinstance(effect, (Pipeline, At)) and not isinstance(error, ClusterCrossSlotError):
        # Its text, because a handler that keeps its records would keep the error, and with it all callers.
        events.emit("backend_error", "%s", str(failure), name=name, cause=cause, level=level)
    return failure


def without_frames(error: E) -> E:
    """Return the error without its traceback, and those of its causes: it is a result now, and is not raised.

    They lead to the frames of all callers, one of which has a list with this result: in such a cycle, a lock that was
    dropped was renewed until the garbage collector ran, because a node had been silent for a moment.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error
