"""Effects that are repeated: while a server cannot be reached, and when it does not know a script."""

from __future__ import annotations

from copy import copy
from typing import Any, Protocol

from redis.backoff import FullJitterBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from ...exceptions import LockBackendError
from .. import events
from ..clock import monotonic
from .effects import At, Operation, Pipeline, ScriptBatch, ScriptCall, Sleep, Subscribe

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
}
"""What to do about errors that another try would only repeat, by a part of their texts."""
_backoff = FullJitterBackoff(cap=0.5, base=0.01)


class Patient(Protocol):
    """An object that knows for how many seconds calls to its server are repeated."""

    @property
    def retry_for(self) -> float: ...


def with_retries(
    name: str,
    effect: ScriptCall | ScriptBatch | Pipeline | Subscribe | At,
    until: float,
    patient: Patient | None = None,
    level: int | None = None,
) -> Operation[tuple[float, Any]]:
    """Yield the effect, repeat it while the server cannot be reached, and return when it was last sent, and its result.

    Every script may be repeated safely. After a temporary error the effect is repeated at once, at least one time, and
    then until the seconds of `patient` or the time `until` are over. A script that the server does not know is sent
    with its text.

    Raises LockBackendError then; without another try when the server stays silent for the client's own socket timeout,
    and after any other error. It is logged at `level` (None: as a warning).
    """
    tries, give_up, has_text = 0, until, False
    while True:
        sent = monotonic()
        try:
            return sent, (yield effect)
        except RedisError as error:
            if isinstance(error, NoScriptError) and isinstance(effect, ScriptCall) and not has_text:
                effect, has_text = effect.with_text(), True
                continue
            if not tries:
                patience = (RETRY_FOR if retry_for is None else retry_for) if patient is None else patient.retry_for
                give_up = min(until, sent + patience)
            pause = _backoff.compute(tries) if tries else 0.0
            if not is_temporary(error) or (tries and monotonic() + pause >= give_up):
                raise _backend_error(name, error, effect, level) from error
        tries += 1
        yield Sleep(pause)


def with_retries_each(name: str, calls: list[ScriptCall], until: float, patient: Patient) -> Operation[list[Any]]:
    """Yield many calls at once, repeat those that cannot be answered as `with_retries` does, and return the replies.

    The result has a LockBackendError in place of each reply that did not come.
    """
    replies: list[Any] = [None] * len(calls)
    waiting, tries, give_up = list(range(len(calls))), 0, min(until, monotonic() + patient.retry_for)
    unknown: set[int] = set()
    while True:
        try:
            answers = yield ScriptBatch(tuple(calls[number] for number in waiting))
        except RedisError as error:
            answers = [copy(error)] * len(waiting)  # the error itself refers to this frame
        again, known = [], len(unknown)
        for number, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, NoScriptError) and number not in unknown:
                unknown.add(number)
                calls[number] = calls[number].with_text()
                again.append(number)
            elif is_temporary(answer):
                again.append(number)
            replies[number] = answer
        pause = _backoff.compute(tries) if tries else 0.0
        if not again or (tries and len(unknown) == known and monotonic() + pause >= give_up):
            break
        waiting, tries = again, tries + 1
        yield Sleep(pause)
    failures: dict[str, LockBackendError] = {}  # each is reported once, not for each call
    for number, reply in enumerate(replies):
        if isinstance(reply, RedisError):
            text = str(reply)
            if text not in failures:
                failures[text] = _backend_error(name, reply, calls[number], None)
            replies[number] = failures[text]
    return replies


def is_temporary(reply: Any) -> bool:
    """Whether this is an error after which another try may succeed."""
    # A plain client of a server in cluster mode gets the last two while a failover is under way, or a slot moves.
    passing = isinstance(reply, (ConnectionError, ClusterDownError, TryAgainError))
    return passing and not isinstance(reply, AuthenticationError) and not advice_for(reply)


def advice_for(error: Exception) -> str:
    """Return what to change in the settings after this error, or nothing when another try may succeed."""
    text = str(error)
    return next((advice for part, advice in WRONG_SETTINGS.items() if part in text), "")


def _backend_error(
    name: str, error: RedisError, effect: ScriptCall | ScriptBatch | Pipeline | Subscribe | At, level: int | None
) -> LockBackendError:
    cause = f"{type(error).__name__}: {error}"
    if advice := advice_for(error):
        cause += f" {advice}"
    if isinstance(effect, ScriptCall) and "WRONGTYPE" in cause:  # another program wrote one of them
        cause += f"; the keys are {b', '.join(effect.keys).decode(errors='replace')}"
    if isinstance(error, AskError):  # or MovedError, by a client of one server
        cause += "; the server is one node of a Cluster: use a redis.RedisCluster, or a URL redis+cluster://host:port"
    failure = LockBackendError(name, cause, refused=isinstance(error, (ResponseError, AuthenticationError)))
    # Commands are about values, not about locks; and after CROSSSLOT the caller tries other keys.
    if not isinstance(effect, (Pipeline, At)) and not isinstance(error, ClusterCrossSlotError):
        events.emit("backend_error", "%s", failure, name=name, cause=cause, level=level)
    return failure
