"""Schedulers for ``celery beat`` of which one leads: every beat may run, and only the leader publishes.

``celery -A proj beat --scheduler django_redislock.celery.beat:PersistentScheduler``, or ``:DatabaseScheduler`` with
django-celery-beat, or `LeaderMixin` before a scheduler of your own.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery import beat
from celery.utils.log import get_logger
from celery.utils.time import maybe_make_aware

from .. import conf
from ..connections import ask
from ..core.clock import monotonic
from ..core.keys import milliseconds
from ..core.lock import Lock
from ..core.validation import Seconds
from ..exceptions import LockBackendError, LockError, TaskAlreadyRunning
from ..run_once.election import SLICE, leader, was_recalled

logger = get_logger(__name__)

KEEP = 90 * 86400.0
"""Seconds for which the last times are kept after the last publication of a beat."""
REMOVED, FORGET_EVERY = 86400.0, 3600.0
"""Seconds after its last run for which an entry that the schedule has no more is remembered; between two looks."""
LATER = 29 * 365 * 86400.0
"""Seconds. A task with a start time and without a run has its last one, for django-celery-beat, thirty years ago."""
LastRun = tuple[float, int]
"""The time of the last run of an entry, in seconds since 1970, and the number of its runs."""
BEAT_PAUSE = 1.0
"""Seconds after which a beat stands for election again when Redis did not answer."""


class LeaderMixin:
    """Makes a scheduler publish only while it is the leader: ``class Mine(LeaderMixin, Scheduler): ...``.

    The times of the last runs are shared through Redis, because a new leader would not know them: after a take-over no
    entry that was due is forgotten, and each is published twice at most once. Who waits follows these times, so that
    the newest that any beat remembers counts after Redis has lost its data. A beat that cannot be elected, because
    Redis does not answer, publishes nothing and logs that.
    """

    lock_name: str = ""
    """The name of the lock; empty: ``celery-beat:`` and the name of the app. Each schedule of a site needs a name of
    its own."""
    expire: Seconds | None = None
    """The expiry of a killed leader's term; None: as the settings say."""
    using: str | None = None
    """The cache alias of the lock's connection; None: as the settings say."""

    if TYPE_CHECKING:  # attributes of the scheduler
        app: Any
        schedule: Any
        old_schedulers: Any

    _term: Lock | None = None
    _reserved: Any = None
    _last_runs: dict[str, LastRun] = {}  # this one and the next are never changed in place before there is a term
    """The last run of each entry, as far as this beat knows."""
    _unshared: dict[str, LastRun] = {}
    """The runs that Redis has not got yet."""
    _quiet_until = 0.0
    """Until when a leader publishes nothing, because other beats may remember later runs than Redis: after Redis has
    lost runs, or was away while the former leader still published. 0: it may publish."""
    _stands_at = 0.0
    """When it stands for election again, after it was asked to step down."""
    _reported = ""
    _closed = False
    _forget_at = 0.0

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Publish the due entries if this beat leads, else stand for election. Return the seconds to the next tick.

        Raises SystemExit after `close`. Celery's handler of SIGTERM closes the scheduler and raises that, too, but in a
        destructor, such as that of kombu's client after each message, Python swallows it: the beat stood for election
        for ever.
        """
        if self._closed:
            raise SystemExit
        if self._term is not None and not self._term.lost:
            if self._unshared:
                self._share_quietly()
        elif not self._stand():
            return 0.0 if self._reported == "waits" else BEAT_PAUSE
        if self._quiet_until:
            if monotonic() < self._quiet_until:
                return min(BEAT_PAUSE, self._quiet_until - monotonic())
            try:
                self._load()
            except LockBackendError:  # the error is logged
                return BEAT_PAUSE
            self._quiet_until = 0.0
        if monotonic() > self._forget_at:
            self._forget_removed()
        wait: float = super().tick(*args, **kwargs)  # type: ignore[misc]
        return wait

    def reserve(self, entry: Any) -> Any:
        """Note when the entry runs."""
        self._reserved = super().reserve(entry)  # type: ignore[misc]
        return self._reserved

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Publish the entry, unless the term has been lost: then the next leader publishes it."""
        if self._term is None or self._term.lost:
            self._take_back(entry)
        else:
            super().apply_entry(entry, producer=producer)  # type: ignore[misc]

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        """Publish the entry and share its time. A publication that failed is not shared: the next leader repeats it.

        A duplicate did not fail, because its task waits or runs: with ``on_duplicate="raise"`` too, the entry has run.
        """
        try:
            result = super().apply_async(entry, *args, **kwargs)  # type: ignore[misc]
        except BaseException as error:  # Celery's SchedulingError, amid that of the task
            if not isinstance(error.__context__, TaskAlreadyRunning):
                self._take_back(entry)
                raise
            logger.info("The entry %s is not published: %s", entry.name, error.__context__)
            result = None
        self._last_runs[entry.name] = self._unshared[entry.name] = run_of(self._reserved)
        self._share_quietly()
        return result

    def close(self) -> None:
        """Close the scheduler, and hand over."""
        self._closed = True
        try:
            super().close()  # type: ignore[misc]
        finally:
            term, self._term = self._term, None
            if term is not None:
                with suppress(LockError):  # the error is logged, and the term ends by its expiry
                    term.release()

    def _stand(self) -> bool:
        """Return whether this beat has been elected now."""
        if self._term is not None:
            self._report(
                "lost", logger.error, "Beat has lost its term and publishes nothing until it is elected again."
            )
            with suppress(LockError):  # of a term that was recalled; of any other one nothing is left
                self._term.release()
            self._stands_at = monotonic() + self._term.expire if was_recalled(self._term) else 0.0
        self._term = None
        if monotonic() < self._stands_at:
            return False
        self._name = name = self.lock_name or f"celery-beat:{self.app.main or 'app'}"
        self._key = f"{{{conf.get().key_prefix}:beat}}:times:{name}".encode()
        term = leader(name, expire=self.expire, using=self.using, on_lost=self._on_lost).new_term()
        try:
            if not term.acquire(timeout=SLICE):
                self._report("waits", logger.info, f"Beat waits: lock {name!r} of the leader is held by another beat.")
                self._follow()
                return False
            # What Redis has lost or missed, the former leader gives back as soon as it notices that.
            missed = self._load() or self._reported == "away"
            self._quiet_until = monotonic() + term.expire / 3 + BEAT_PAUSE if missed else 0.0
            self._term = term
        except LockBackendError as error:
            self._report("away", logger.error, f"Beat publishes nothing, because it cannot be elected: {error}")
            return False
        finally:
            if self._term is not term:  # also when it was stopped, or could not read its entries
                with suppress(LockError):
                    term.release()
        self._report("leads", logger.info, f"Beat leads (lock {name!r}, fence {term.fence}).")
        return True

    def _report(self, state: str, log: Any, text: str) -> None:
        if self._reported != state:
            self._reported = state
            log(text)

    # The times of the last runs

    def _load(self) -> bool:
        """Continue each entry from its last run, whoever published it; return whether Redis has forgotten a run."""
        shared = self._read()
        forgotten = bool(self._last_runs.keys() - shared.keys())
        self._last_runs = newest(self._last_runs, shared)
        self._refresh()
        for entry in self.schedule.values():
            if entry.name in self._last_runs:
                self._continue(entry, *self._last_runs[entry.name])
            else:
                self._last_runs[entry.name] = run_of(entry)
        self._unshared = {name: run for name, run in self._last_runs.items() if shared.get(name) != run}
        self._share()
        # The next tick makes the heap from these entries, once: it asks for a comparison only if there is a heap.
        self.populate_heap()  # type: ignore[attr-defined]
        self.old_schedulers = None
        return forgotten

    def _refresh(self) -> None:
        """Read the entries anew where they may have changed while this beat did not lead."""

    def _forget_removed(self) -> None:
        """Forget the entries that were removed, as Celery does: one that came back after weeks was published at once.

        Not those of today, because the schedules of two versions of a site may differ, and django-celery-beat's leaves
        out what is due in some hours.
        """
        self._forget_at = monotonic() + FORGET_EVERY
        before, schedule = time.time() - REMOVED, self.schedule
        removed = [name for name, (last, _) in self._last_runs.items() if last < before and name not in schedule]
        if removed:
            for runs in (self._last_runs, self._unshared):
                for name in removed:
                    runs.pop(name, None)
            with suppress(LockBackendError):  # the error is logged, and the next leader does it
                self._ask((b"HDEL", self._key, *(name.encode() for name in removed)))

    def _continue(self, entry: Any, last: float, count: int) -> None:
        last = min(last, time.time())  # a former leader's clock was ahead: until then nothing would be published
        zone = entry.last_run_at.tzinfo
        entry.last_run_at = datetime.fromtimestamp(last, zone or UTC).replace(tzinfo=zone)
        entry.total_run_count = count

    def _follow(self) -> None:
        """Remember the last runs while another beat leads, and give back those that it does not know."""
        shared = self._read()
        self._last_runs = newest(self._last_runs, shared)
        if shared:  # else the leader is about to share what it knows, and must notice that Redis has lost something
            recent = time.time() - REMOVED  # an older entry may have been removed, and the leader knows the others
            self._unshared = {
                name: run for name, run in self._last_runs.items() if shared.get(name) != run and run[0] > recent
            }
            self._share()

    def _on_lost(self, term: Lock) -> None:
        """Give back the last runs at once, perhaps long before the next tick: Redis may have lost its data."""
        with suppress(LockBackendError):  # the error is logged, and the next tick does it
            known, shared = dict(self._last_runs), self._read()
            self._unshared |= {name: run for name, run in newest(known, shared).items() if shared.get(name) != run}
            self._share()

    def _take_back(self, entry: Any) -> None:
        """Forget that the entry was to run."""

    def _share_quietly(self) -> None:
        with suppress(LockBackendError):  # the error is logged, and the next tick tries again
            self._share()

    def _share(self) -> None:
        unshared = dict(self._unshared)
        if not unshared:
            return
        fields: list[bytes] = []
        for name, (last, count) in unshared.items():
            fields += (name.encode(), f"{last!r} {count}".encode())
        self._ask((b"HSET", self._key, *fields), (b"PEXPIRE", self._key, milliseconds(KEEP)))
        self._unshared = {name: run for name, run in self._unshared.items() if unshared.get(name) != run}

    def _read(self) -> dict[str, LastRun]:
        (reply,) = self._ask((b"HGETALL", self._key))
        pairs = ((name.decode(), run.split()) for name, run in zip(reply[::2], reply[1::2], strict=True))
        return {name: (float(run[0]), int(run[1])) for name, run in pairs}

    def _ask(self, *commands: tuple[bytes, ...]) -> list[Any]:
        if not conf.get().enabled:
            return [()] * len(commands)
        return ask(self.using, self._name, *commands)


def run_of(entry: Any) -> LastRun:
    """Return the last run of the entry."""
    return maybe_make_aware(entry.last_run_at).timestamp(), entry.total_run_count


def newest(own: dict[str, LastRun], shared: dict[str, LastRun]) -> dict[str, LastRun]:
    """Return the last run of each entry: the shared one, unless this beat knows one that is later by time and by count.

    By the time alone, a former leader whose clock was ahead would be right; by the count alone, one who did not know
    that an operator has set the count to 0.
    """
    later = {
        name: run
        for name, run in own.items()
        if name not in shared or (run[0] > shared[name][0] and run[1] > shared[name][1])
    }
    return shared | later


class PersistentScheduler(LeaderMixin, beat.PersistentScheduler):
    """Celery's own scheduler, of which one leads. Beats on one host need a ``--schedule`` file each."""


def __getattr__(name: str) -> Any:
    """Return `DatabaseScheduler`: it needs django-celery-beat and its models."""
    if name != "DatabaseScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    scheduler = globals()[name] = _database_scheduler()
    return scheduler


def _database_scheduler() -> type[Any]:
    try:
        from django_celery_beat import schedulers
    except ImportError as error:
        raise ImportError(
            f"{__name__}:DatabaseScheduler needs django-celery-beat ({error}): pip install 'django-redislock[beat]', "
            "and add 'django_celery_beat' to INSTALLED_APPS."
        ) from error

    class DatabaseScheduler(LeaderMixin, schedulers.DatabaseScheduler):  # type: ignore[misc]
        """The scheduler of django-celery-beat, of which one leads."""

        def _refresh(self) -> None:
            self.schedule.update(self.all_as_schedule())  # the entries are as old as the candidacy

        def _continue(self, entry: Any, last: float, count: int) -> None:
            # A task with a start time that has not run since it was changed forgets its runs of before: a reminder with
            # the name of an earlier one was switched off, because that one had run.
            changed = maybe_make_aware(entry.model.date_changed).timestamp() if entry.model.start_time else 0.0
            if last < changed and run_of(entry)[0] < changed - LATER:
                return
            # The database may have a later time: a task that was disabled and enabled again continues from there. But
            # before the first run is stored, the time of an entry of beat_schedule is that of the last start of any
            # beat, because each start stores the entry anew.
            unknown = not entry.total_run_count and entry.name in self.app.conf.beat_schedule
            if unknown or last > run_of(entry)[0]:
                super()._continue(entry, last, count)
                entry.model.last_run_at, entry.model.total_run_count = entry.last_run_at, count
                # It is stored: the entries are read anew every five minutes, and whenever one is changed.
                entry.model.no_changes = True
                getattr(self, "_dirty", set()).add(entry.name)

        def sync(self) -> None:
            """Store the last runs if this beat leads: otherwise another leader may have stored later ones."""
            if self._term is None or self._term.lost:
                return
            entry = self._unpublished
            if entry is None:
                super().sync()
                return
            model = entry.model
            reserved = model.last_run_at, model.total_run_count
            model.last_run_at, model.total_run_count = entry.last_run_at, entry.total_run_count
            super().sync()
            model.last_run_at, model.total_run_count = reserved
            self._dirty.add(entry.name)

        # The database stores no run before it happened: a beat that was stopped while the broker was away, or whose
        # publication failed as the times were stored, left one there, and no other beat published the entry. The
        # earlier runs of the entry are stored all the same: at a SIGTERM amid a publication none of them was.

        _unpublished: Any = None
        """The entry that is being published, as it was before."""

        def reserve(self, entry: Any) -> Any:
            self._unpublished = entry
            return super().reserve(entry)

        def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().apply_async(entry, *args, **kwargs)
            self._unpublished = None
            return result

        def _take_back(self, entry: Any) -> None:
            self._unpublished = None
            entry.model.last_run_at, entry.model.total_run_count = entry.last_run_at, entry.total_run_count
            getattr(self, "_dirty", set()).add(entry.name)

    return DatabaseScheduler
