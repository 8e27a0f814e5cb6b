"""One acquisition of a lock: its id, its fence, its deadline, whether it is still believed to be held, and the cause of
its loss.

The server is asked for the cause once the loss is known; a forced release leaves a note there.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from threading import _DummyThread
from typing import TYPE_CHECKING, Any, NamedTuple

from ..exceptions import LockBackendError, LossCode, LossRecord
from . import chance, events, scripts
from .clock import monotonic
from .driver import os_threads, process
from .driver.effects import Operation, Patient, ScriptCall, with_retries
from .driver.process import HOST, notice_fork
from .keys import LockKeys
from .options import Renewal

if TYPE_CHECKING:
    from .driver.server import Server


class Cause(NamedTuple):
    """Why a lock was lost."""

    code: LossCode
    reason: str


class _ThreadMarker:
    """An object that is deleted when its thread ends, because only the thread's local data refers to it."""

    dead = False


_thread_local = threading.local()


def calling_thread() -> Any:
    """Return the calling thread, also one that Python did not start, or the greenlet that is taken for a part of it.

    A forked child notices its fork here.

    Before 3.13, Python takes such a thread for the one that had the same number and died, perhaps while it held a lock.
    """
    notice_fork()
    greenlet = os_threads.greenlet()
    if greenlet is not None:
        return greenlet
    thread = threading.current_thread()
    if type(thread) is _DummyThread and vars(_thread_local).get("thread") is not thread:
        thread = _thread_local.thread = _DummyThread()  # Python returns this one from now on
    return thread


def _end_of_thread() -> weakref.ref[Any]:
    """Return a reference to an object that is gone, or `dead`, as soon as the calling thread or greenlet has ended.

    For Python, a thread that it did not start never ends, and the next such thread may get the same number.
    """
    greenlets = sys.modules.get("greenlet")
    current = None if greenlets is None else greenlets.getcurrent()
    if current is not None and current.parent is not None:
        return weakref.ref(current)
    try:
        marker = _thread_local.marker
    except AttributeError:
        marker = _thread_local.marker = _ThreadMarker()
    return weakref.ref(marker)


def end_of(acquirer: object) -> weakref.ref[Any] | None:
    """Return a reference that shows the end of the calling thread, which acquires; None where Python itself does."""
    # Python knows the end of a thread that it started, and a task knows its own end.
    if acquirer is None or (
        isinstance(acquirer, (threading.Thread, asyncio.Task)) and not isinstance(acquirer, _DummyThread)
    ):
        return None
    return _end_of_thread()


class Lease(Patient):
    """One acquisition, from the first attempt to the release.

    It is held until `deadline` on the monotonic clock, counted from when the last successful command was *sent*, so
    that the local belief always ends before the key does in Redis. The thread or task that acquires makes it.
    """

    __slots__ = (
        *("__weakref__", "server", "name", "keys", "id", "expire", "renewal", "acquirer", "lock_ref", "pid", "fence"),
        *("hold_count", "reentrant", "ended", "acquired", "deadline", "next_renewal", "failures"),
        *("renewing", "renewal_pending", "shared", "mark", "may_outlive", "shortens", "end_of_acquirer", "_losses"),
    )  # a thousand locks may be held at once
    answer_within: float | None = None

    def __init__(
        self,
        server: Server,
        name: str,
        keys: LockKeys,
        id: str,
        renewal: Renewal,
        acquirer: threading.Thread | asyncio.Task[Any] | None,
        lock_ref: Callable[[], Any] = lambda: None,
    ) -> None:
        self.server = server
        self.name = name
        self.keys = keys
        self.id = id
        self.expire = renewal.expire
        self.renewal = renewal
        self.acquirer: Any = acquirer
        """Who acquires; None: it outlives the thread that acquired it."""
        self.lock_ref = lock_ref
        """Returns the lock object, None if there is none any more."""
        self.pid = process.pid
        self.fence = 0
        self.hold_count = 1
        """How often its acquirer has entered it; more than once only if the lock is re-entrant."""
        self.reentrant = False
        """Whether its acquirer may enter it again, through any lock object; each object keeps the lease alive."""
        self.ended = False
        """Whether its release was begun, and perhaps not answered: it may arrive at any time, so only the release may
        be repeated."""
        self.acquired = 0.0
        self.deadline = 0.0
        self.next_renewal = 0.0
        self.failures = 0
        self.shared = False
        """Whether its id held the lock before, so that another holder may rely on the expiry."""
        self.mark = b""
        """What distinguishes its release from that of another holder by the same given id."""
        self.may_outlive = False
        """Whether Redis may keep the lock for longer than its holder believes, because an extension was not answered,
        because an answer came after the loss, or because the lock was recalled."""
        self.shortens = False
        """Whether the next extension may set an earlier expiry in Redis. Only if the caller asked for one: an extension
        that arrives late, after its repetition, must not cut a later one short."""
        self.renewing = False
        """Whether the watchdog renews it; otherwise the watchdog only reports its end."""
        self.renewal_pending = False
        """Whether a renewal was sent, or is about to be, and has no reply yet."""
        self.end_of_acquirer = end_of(acquirer)
        # The first loss counts. No lock guards it, because code that a signal handler interrupts might hold that lock.
        self._losses: list[LossRecord] = []

    def note_acquired(self, fence: int, sent: float) -> None:
        """Note that the lock was acquired by a command sent at `sent`."""
        self.fence = fence
        self.acquired = sent
        self.renewed(sent, self.expire)

    def renewed(self, sent: float, expire: float, share: float | None = None) -> None:
        """Note that the lock got a new expiry by a command sent at `sent`. For `share` see `pause`."""
        expire = min(expire, self.expire)  # which may have been shortened meanwhile
        self.failures = 0
        if sent + expire > self.deadline:  # else the answer to a later command came first
            self.deadline = sent + expire
            self.next_renewal = sent + self.pause(expire, share)
        if self.expire < expire:  # shortened in another thread just now
            self.deadline = sent + self.expire
            self.next_renewal = sent + self.pause(self.expire)

    def refused(self, reply: int) -> None:
        """Note that a renewal was refused: by a negative reply, because the lock was recalled, and its release has to
        give it back."""
        self.may_outlive |= reply < 0

    def change(self, expire: float) -> None:
        """Note that a command with another expiry will be sent: without an answer, the earlier of the two counts."""
        now = monotonic()
        self.shortens = now + expire < self.deadline or self.may_outlive
        self.expire = expire
        self.deadline = min(self.deadline, now + expire)
        self.next_renewal = min(self.next_renewal, now + self.pause(expire))

    def pause(self, expire: float, share: float | None = None) -> float:
        """Return the seconds until the next renewal: a third of the expiry, or less by this share of the jitter, by
        default a random one."""
        return expire / 3 * (1 - self.renewal.renewal_jitter * (chance.random() if share is None else share))

    @property
    def value_prefix(self) -> bytes:
        """The beginning of the lock's value in Redis while this acquisition, or the given id, holds the lock."""
        return f"{self.id}\n{self.fence}".encode() if self.fence else self.id.encode()

    @property
    def retry_for(self) -> float:
        """Seconds for which its server is tried again when the server cannot be reached."""
        return self.server.retry_for

    @property
    def inherited_by_fork(self) -> bool:
        """Whether the acquisition belongs to the process that this one was forked from."""
        return self.pid != process.pid

    @property
    def acquirer_ended(self) -> bool:
        """Whether the thread or task that acquired the lock ended without releasing it.

        Raises the acquirer's own errors, and TypeError for an acquirer that is neither.
        """
        acquirer = self.acquirer
        if acquirer is None:
            return False
        if hasattr(acquirer, "get_loop"):  # a task of asyncio's, or of another library's task factory
            return bool(acquirer.done() or acquirer.get_loop().is_closed())
        if hasattr(acquirer, "gr_frame"):  # a greenlet
            return bool(acquirer.dead)
        if not hasattr(acquirer, "is_alive"):
            raise TypeError(f"{type(acquirer).__module__}.{type(acquirer).__qualname__} is neither a thread nor a task")
        if self.end_of_acquirer is not None and getattr(self.end_of_acquirer(), "dead", True):
            return True
        return not acquirer.is_alive()

    @property
    def next_check(self) -> float:
        """When the watchdog has to check it next."""
        return self.next_renewal if self.renewing and not self.renewal_pending else self.deadline

    @property
    def noted_loss(self) -> LossRecord | None:
        """The loss that was noted, if any; a released lock is not lost at its deadline."""
        return self._losses[0] if self._losses else None

    @property
    def loss(self) -> LossRecord | None:
        """Why and when the lock was lost, or None while it is held; sends no command."""
        if (
            not (self._losses or self.ended)
            and monotonic() >= self.deadline
            and not self.inherited_by_fork
            and not self.server.grants_all
        ):
            self.lose(self.ending)
        return self.noted_loss

    @property
    def ending(self) -> Cause:
        """The cause of the loss if no answer comes before its expiry."""
        # After an extension without an answer it may have been the former expiry that ended.
        expiry = "its expiry" if self.may_outlive else f"its expiry of {self.expire:g} s"
        if self.renewal_pending or self.failures:
            return Cause("no_answer", f"Redis confirmed no renewal until {expiry} ended")
        # A renewal that was due and did not begin means that the watchdog did not run, because the process or its
        # machine stood still.
        due = f", which was due {monotonic() - self.next_renewal:.1f} s earlier" if self.renewing else ""
        return Cause("expired", f"{expiry} ended without a renewal{due}")

    def lose(self, cause: Cause) -> None:
        """Note that the lock was lost, and report it once, if this process acquired it."""
        if self.note_loss(cause) and self.fence:
            self.report_loss()

    def note_loss(self, cause: Cause) -> bool:
        """Note that the lock was lost; False when that was noted before."""
        if self._losses:
            return False
        record = LossRecord(self.name, self.id, self.fence, cause.reason, time.time(), cause.code)
        self._losses.append(record)
        return self._losses[0] is record

    def ends_quietly(self) -> bool:
        """Return whether nobody is told that the lock has ended; called when Redis no longer has it for this holder."""
        return False

    def report_loss(self) -> None:
        """Report the loss to the log, to listeners and to `on_lost`, which may take any time."""
        loss = self.noted_loss
        if loss is None:
            return
        message = "Lock %r (fence %d) was lost: %s."
        events.emit("lost", message, self.name, self.fence, loss.reason, name=self.name, fence=self.fence, record=loss)
        lock = self.lock_ref()
        if lock is not None and lock.on_lost is not None:
            lock._call_on_lost(self)


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
    """Raise TypeError when the reason of a forced release or a recall is not a str."""
    if not isinstance(reason, str):
        raise TypeError(f"reason must be a str, not {type(reason).__name__}")


def note(by: object, reason: str) -> bytes:
    """Return the note about a forced release or a recall for the holder: the user and the reason."""
    user = _one_line(str(by or f"a program on {HOST} (pid {os.getpid()})"), MAX_USER)
    return f"{user}\n{_one_line(reason, MAX_REASON)}".encode(errors="replace")


def notes_key(keys: LockKeys) -> bytes:
    """Return the key of the notes about forced releases and recalls of the lock."""
    return keys.held.removesuffix(b"held") + b"forced:" + keys.name


def report_reset(what: str, name: str, fence: int | None, by: object, reason: str, recalls: bool = False) -> None:
    """Report a forced release, or a recall: in the log, and to listeners."""
    why = f" ({_one_line(reason, MAX_REASON)})" if reason else ""
    user = _one_line(str(by or "this program"), MAX_USER)
    event, done = ("recalled", "recalled") if recalls else ("force_released", "force-released")
    message = f"%s was {done} by %s%s."
    events.emit(event, message, what, user, why, name=name, fence=fence, user=by, reason=reason)


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
        _, ms, user, why, *recalled = reply.decode(errors="replace").split("\n", 4)
        when = datetime.fromtimestamp(int(ms) / 1000, UTC)
        why = f": {why.rstrip('.')}" if why else ""
        told = f"at {when:%Y-%m-%d %H:%M:%S} UTC{why}"
        if recalled:
            return Cause("recalled", f"{user} asked for it back {told}")
        return Cause("force_released", f"{user} force-released it {told}")
    if not in_time:
        return lease.ending
    return UNKNOWN if reply is None else NO_DATA


def _one_line(text: str, longest: int) -> str:
    """Return the text as one line of the log, without control characters and of at most this length."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
