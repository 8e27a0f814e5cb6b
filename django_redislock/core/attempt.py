"""What one attempt may have got from the server, given back unless it is kept.

Only the last line of a successful attempt keeps it. So whatever ends the attempt (an error, a time-out, a signal
handler that raises, a cancellation, a generator that is destroyed, a loop that is closed) gives back what the server
granted, or grants later: no code has to know which of these it was, or how far the attempt came.
"""

from __future__ import annotations

from typing import Self

from . import scripts
from .driver.effects import Patient, Pipeline, ScriptCall
from .driver.process import notice_fork
from .keys import undone_key
from .lease import Lease

NOTE_LIFE_MS = 300_000
"""Milliseconds for which Redis keeps the note of an attempt, as in undone.lua, which says why."""


class Attempt(Patient):
    """The calls of one attempt to acquire: the server may grant them a lock, a reservation, or a place in a queue.

    It does no I/O, so it may end at any point, also within a destructor.
    """

    __slots__ = ("channel", "goes_on", "is_new", "lease", "mark", "pending", "repeated", "waited")

    def __init__(self, lease: Lease, mark: bytes = b"", is_new: bool = True) -> None:
        self.pending = False
        """Whether something is to be given back: a call was sent, or is about to be."""
        self.lease = lease
        self.is_new = is_new
        """Whether the id does not hold the lock by right already: then nothing is given back."""
        self.mark = mark
        """Random text in the record, which shows that this attempt wrote it. Only where others may use the same id:
        what they acquired by it stays."""
        self.channel = b""
        """The channel of its waiter."""
        self.repeated = False
        self.waited = False
        """Whether it has waited for the lock."""
        self.goes_on = False
        """Whether another attempt with the same note may follow a grant that is not accepted: of a token."""

    @property
    def retry_for(self) -> float:
        """Seconds for which its calls are repeated when the server cannot be reached.

        Who has waited asks a silent server twice: four of four waiters of an hour ended with the first silence of five
        seconds.
        """
        lease = self.lease
        return max(lease.retry_for, 1.5 * lease.server.timeout) if self.waited else lease.retry_for

    @property
    def answer_within(self) -> float | None:
        """That of its lease."""
        return self.lease.answer_within

    def note_repeated(self) -> None:
        self.repeated = True

    @property
    def note(self) -> bytes:
        """The key of the note that it was given up."""
        lease, mark = self.lease, self.mark
        return undone_key(lease.keys, mark[len(b',"by":"') : -1] if mark else lease.id.encode())

    @property
    def closing(self) -> Pipeline | None:
        """The note, as if the attempt had been given up.

        A request of a connection that was closed arrived when its lock had been released, and locked it for its expiry,
        whatever kind of lock it was.
        """
        if self.goes_on:
            return None
        return Pipeline(((b"SET", self.note, b"1", b"PX", b"%d" % NOTE_LIFE_MS),))

    def give_up(self) -> None:
        """Have everything given back that the calls got, or will get."""
        if self.pending and self.is_new:
            notice_fork()  # a destructor may be the first that runs in the child
            if not self.lease.inherited_by_fork:  # what its parent got is not the child's to give back
                self.lease.server.send_in_any_case(self._undo())
        self.pending = self.repeated = False

    def _undo(self) -> ScriptCall:
        lease, keys = self.lease, self.lease.keys
        id = lease.id.encode()
        return ScriptCall(
            scripts.UNDO,
            (keys.lock, keys.held, keys.queue, keys.receipts, self.note, *keys.others),
            (id, keys.name, self.channel, b"", b"id " + id, *filter(None, [self.mark])),
        )

    def __enter__(self) -> Self:
        self.pending = True
        return self

    def __exit__(self, *error: object) -> None:
        self.give_up()


class DroppableAttempt(Attempt):
    """An attempt that is given up, too, when nothing refers to it any more. Not each one: what a signal handler raises
    within a destructor is lost."""

    __slots__ = ()

    def __del__(self) -> None:
        if getattr(self, "pending", False):  # else perhaps not even made
            self.give_up()
