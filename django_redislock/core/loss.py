"""Why a lock was lost: asked of the server once the loss is known, and the note that a forced release leaves for it."""

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

LONGEST_WHO, LONGEST_WHY = 100, 300
"""Characters of a note."""
UNKNOWN = Cause("unknown", "the holder no longer has it on the server, and the server could not be asked for the cause")
RELEASED = Cause("released", "another object released it by its id")
NO_DATA = Cause(
    "server_lost_data",
    "the server lost it before the end of its life: the key was deleted or evicted, or was missing after a restart or a failover",
)


def check_reason(reason: object) -> None:
    """Raise TypeError when the reason of a forced release is anything but a str."""
    if not isinstance(reason, str):
        raise TypeError(f"reason must be a str, not {type(reason).__name__}")


def note(by: object, reason: str) -> bytes:
    """Return the note about a forced release for the former holder: who did it, and why."""
    who = _one_line(str(by or f"a program on {HOST} (pid {os.getpid()})"), LONGEST_WHO)
    return f"{who}\n{_one_line(reason, LONGEST_WHY)}".encode(errors="replace")


def notes_key(keys: LockKeys, name: str) -> bytes:
    """Return the key of the notes about forced releases of the lock."""
    return keys.held.removesuffix(b"held") + b"forced:" + name.encode()


def report_reset(what: str, name: str, fence: int | None, by: object, reason: str) -> None:
    """Report a forced release: in the log, and to listeners."""
    why = f" ({_one_line(reason, LONGEST_WHY)})" if reason else ""
    who = _one_line(str(by or "this program"), LONGEST_WHO)
    message = "%s was force-released by %s%s."
    events.emit("force_released", message, what, who, why, name=name, fence=fence, user=by, reason=reason)


def find_cause(lease: Lease) -> Operation[Cause]:
    """Ask the server why this acquisition lost its lock. It is asked once, because an explanation is worth no wait."""
    in_time = monotonic() < lease.deadline
    replies = None
    if lease.fence:  # else this process did not acquire the lock, and there is no loss to report
        with suppress(LockBackendError):
            _, replies = yield from with_retries(lease.name, cause_call([lease]), monotonic())
    return causes_of([lease], [in_time], replies)[0]


def cause_call(leases: Sequence[Lease]) -> ScriptCall:
    """Return one call that asks for the causes of all these losses."""
    keys = [key for lease in leases for key in (lease.keys.receipts, notes_key(lease.keys, lease.name))]
    return ScriptCall(scripts.CAUSE, tuple(keys), tuple(b"%d" % lease.fence for lease in leases))


def causes_of(leases: Sequence[Lease], in_time: Sequence[bool], replies: list[bytes] | None) -> list[Cause]:
    """Return the causes by the replies of the server, None when there are none.

    `in_time`: whether the loss was found before the end of the lock's life by this process's clock. On the server the
    life ends later.
    """
    said: Sequence[bytes | None] = [None] * len(leases) if replies is None else replies
    return [_cause(*each) for each in zip(leases, in_time, said, strict=True)]


def _cause(lease: Lease, in_time: bool, said: bytes | None) -> Cause:
    if said == b"released":
        return RELEASED
    if said:
        _, ms, who, why = said.decode(errors="replace").split("\n", 3)
        when = datetime.fromtimestamp(int(ms) / 1000, UTC)
        why = f": {why.rstrip('.')}" if why else ""
        return Cause("force_released", f"{who} force-released it at {when:%Y-%m-%d %H:%M:%S} UTC{why}")
    if not in_time:
        return lease.ending
    return UNKNOWN if said is None else NO_DATA


def _one_line(text: str, longest: int) -> str:
    """Return the text as one line of a log, without invisible characters."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
