"""The cause of a loss: the server is asked for it once the loss is known; a forced release leaves a note there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from ..exceptions import LockBackendError
from . import events, scripts
from .clock import monotonic
from .driver.effects import Operation, ScriptCall
from .driver.process import HOST
from .driver.retry import with_retries
from .keys import LockKeys
from .lease import Cause, Lease

MAX_USER, MAX_REASON = 100, 300
"""Characters in a note."""
UNKNOWN = Cause("unknown", "the server no longer has it for this holder, and could not be asked for the cause")
RELEASED = Cause("released", "another lock object released it by its id")
NO_DATA = Cause(
    "server_lost_data",
    "the server lost it before its expiry: the key was deleted or evicted, or was missing after a restart or a "
    "failover",
)


def check_reason(reason: object) -> None:
    """Raise TypeError when the reason of a forced release is not a str."""
    if not isinstance(reason, str):
        raise TypeError(f"reason must be a str, not {type(reason).__name__}")


def note(by: object, reason: str) -> bytes:
    """Return the note about a forced release for the former holder: the user and the reason."""
    user = _one_line(str(by or f"a program on {HOST} (pid {os.getpid()})"), MAX_USER)
    return f"{user}\n{_one_line(reason, MAX_REASON)}".encode(errors="replace")


def notes_key(keys: LockKeys) -> bytes:
    """Return the key of the notes about forced releases of the lock."""
    return keys.held.removesuffix(b"held") + b"forced:" + keys.name


def report_reset(what: str, name: str, fence: int | None, by: object, reason: str) -> None:
    """Report a forced release: in the log, and to listeners."""
    why = f" ({_one_line(reason, MAX_REASON)})" if reason else ""
    user = _one_line(str(by or "this program"), MAX_USER)
    message = "%s was force-released by %s%s."
    events.emit("force_released", message, what, user, why, name=name, fence=fence, user=by, reason=reason)


def find_cause(lease: Lease) -> Operation[Cause]:
    """Ask the server why this acquisition lost its lock; once, because an explanation is not worth a wait."""
    in_time = monotonic() < lease.deadline
    replies = None
    if lease.fence:  # else this process did not acquire the lock, and there is no loss to report
        with suppress(LockBackendError):
            _, replies = yield from with_retries(lease.name, cause_call([lease]), monotonic())
    return causes_of([lease], [in_time], replies)[0]


def cause_call(leases: Sequence[Lease]) -> ScriptCall:
    """Return one call that asks for the causes of the losses of all these leases."""
    keys = [key for lease in leases for key in (lease.keys.receipts, notes_key(lease.keys))]
    return ScriptCall(scripts.CAUSE, tuple(keys), tuple(b"%d" % lease.fence for lease in leases))


def causes_of(leases: Sequence[Lease], in_time: Sequence[bool], replies: Sequence[bytes | None] | None) -> list[Cause]:
    """Return the causes by the server's replies (None: it did not answer).

    `in_time`: whether the loss was found before the lock's deadline by this process's clock. On the server the lock
    expires later.
    """
    notes: Sequence[bytes | None] = [None] * len(leases) if replies is None else replies
    return [_cause(*args) for args in zip(leases, in_time, notes, strict=True)]


def _cause(lease: Lease, in_time: bool, reply: bytes | None) -> Cause:
    if reply == b"released":
        return RELEASED
    if reply:
        _, ms, user, why = reply.decode(errors="replace").split("\n", 3)
        when = datetime.fromtimestamp(int(ms) / 1000, UTC)
        why = f": {why.rstrip('.')}" if why else ""
        return Cause("force_released", f"{user} force-released it at {when:%Y-%m-%d %H:%M:%S} UTC{why}")
    if not in_time:
        return lease.ending
    return UNKNOWN if reply is None else NO_DATA


def _one_line(text: str, longest: int) -> str:
    """Return the text as one line of the log, without control characters and of at most this length."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
