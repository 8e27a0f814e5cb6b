"""Effects that are tried again while a server cannot be reached."""

from __future__ import annotations

import random
from typing import Any, Protocol

from redis.exceptions import AuthenticationError, ClusterCrossSlotError, ConnectionError, RedisError, ResponseError

from ...exceptions import LockBackendError
from .. import events
from ..clock import monotonic
from .effects import Operation, Pipeline, ScriptBatch, ScriptCall, Sleep, Subscribe

RETRY_FOR = 5.0
retry_for: float | None = None
"""Seconds for which every server that cannot be reached is tried again, where the settings say so; None: by its kind."""


class Patient(Protocol):
    """An object that knows how long its server is tried again."""

    @property
    def retry_for(self) -> float: ...


def with_retries(
    name: str,
    effect: ScriptCall | ScriptBatch | Pipeline | Subscribe,
    until: float,
    patient: Patient | None = None,
    level: int | None = None,
) -> Operation[tuple[float, Any]]:
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
        yield Sleep(pause)


def _backend_error(
    name: str, error: RedisError, effect: ScriptCall | ScriptBatch | Pipeline | Subscribe, level: int | None
) -> LockBackendError:
    cause = f"{type(error).__name__}: {error}"
    if isinstance(effect, ScriptCall) and "WRONGTYPE" in cause:  # something else wrote one of them
        cause += f"; the keys are {b', '.join(effect.keys).decode(errors='replace')}"
    failure = LockBackendError(name, cause, refused=isinstance(error, ResponseError))
    # Commands are about values, not about locks; and after CROSSSLOT the caller asks again with other keys.
    if not isinstance(effect, Pipeline) and not isinstance(error, ClusterCrossSlotError):
        events.emit("backend_error", "%s", failure, name=name, cause=cause, level=level)
    return failure
