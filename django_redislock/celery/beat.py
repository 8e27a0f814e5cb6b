"""Schedulers for ``celery beat`` of which one leads: every beat may run, and only the leader publishes.

``celery -A proj beat -S django_redislock.celery.beat:PersistentScheduler``, or ``:DatabaseScheduler`` with
django-celery-beat, or `LeaderMixin` before a scheduler of your own.
"""

from __future__ import annotations

import math
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery import beat
from celery.utils.log import get_logger
from celery.utils.time import maybe_make_aware

from .. import conf
from ..connections import get_client
from ..core.driver.effects import Pipeline
from ..core.driver.registry import server_of
from ..core.driver.retry import with_retries
from ..core.keys import milliseconds
from ..core.lock import Lock
from ..core.validation import Seconds
from ..election import SLICE, leader
from ..exceptions import LockBackendError, LockError

logger = get_logger(__name__)

KEEP = 90 * 86400.0
"""Seconds for which the last times are kept after the last publication of a beat."""
PAUSE = 1.0
"""Seconds after which a beat stands for election again when Redis did not answer."""


class LeaderMixin:
    """Makes a scheduler publish only while it is the leader: ``class Mine(LeaderMixin, Scheduler): ...``.

    The times of the last runs are shared through Redis, because a new leader would not know them: after a take-over no
    entry that was due is forgotten, and each is published twice at most once. A beat that cannot be elected, because
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
        _heap: Any

    _term: Lock | None = None
    _reserved: Any = None
    _unshared: dict[str, Any] = {}  # never changed in place before there is a term
    """The entries that were published, and whose times Redis has not got yet."""
    _reported = ""

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Publish the due entries if this beat leads, else stand for election. Return the seconds to the next tick."""
        if self._term is not None and not self._term.lost:
            if self._unshared:
                self._share_quietly()
        elif not self._stand():
            return 0.0 if self._reported == "waits" else PAUSE
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
        """Publish the entry and share its time. A publication that failed is not shared: the next leader repeats it."""
        try:
            result = super().apply_async(entry, *args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._take_back(entry)
            raise
        self._unshared[entry.name] = self._reserved
        self._share_quietly()
        return result

    def close(self) -> None:
        """Close the scheduler, and hand over."""
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
        self._term = None
        name = self.lock_name or f"celery-beat:{self.app.main or 'app'}"
        term = leader(name, expire=self.expire, using=self.using).new_term()
        try:
            if not term.acquire(timeout=SLICE):
                self._report("waits", logger.info, f"Beat waits: lock {name!r} of the leader is held by another beat.")
                return False
            self._load(name)
        except LockBackendError as error:
            self._report("away", logger.error, f"Beat publishes nothing, because it cannot be elected: {error}")
            with suppress(LockError):
                term.release()
            return False
        self._term = term
        self._report("leads", logger.info, f"Beat leads (lock {name!r}, fence {term.fence}).")
        return True

    def _report(self, state: str, log: Any, text: str) -> None:
        if self._reported != state:
            self._reported = state
            log(text)

    # The times of the last runs

    def _load(self, name: str) -> None:
        """Continue each entry from its last run, also if another beat published that run."""
        self._name = name
        self._times = f"{{{conf.get().key_prefix}:beat}}:times:{name}".encode()
        self._server = server_of(get_client(self.using)) if conf.get().enabled else None
        self._initial_read = True  # a DatabaseScheduler reads again: its entries are as old as its candidacy
        (reply,) = self._ask((b"HGETALL", self._times))
        pairs = zip(reply[::2], reply[1::2], strict=True)
        times = {key.decode(): value.split() for key, value in pairs}
        before = self._unshared
        new = {}
        for entry in self.schedule.values():
            if entry.name in before:
                new[entry.name] = before[entry.name]
            elif entry.name not in times:
                new[entry.name] = entry
            else:
                self._continue(entry, float(times[entry.name][0]), int(times[entry.name][1]))
        self._unshared = new
        self._share()
        # The next tick makes the heap from these entries. A DatabaseScheduler would make it once more, with the times
        # before that tick, because the schedule was read anew.
        self._heap, self._heap_invalidated = None, False

    def _continue(self, entry: Any, last: float, count: int) -> None:
        zone = entry.last_run_at.tzinfo
        entry.last_run_at = datetime.fromtimestamp(last, zone or UTC).replace(tzinfo=zone)
        entry.total_run_count = count

    def _take_back(self, entry: Any) -> None:
        """Forget that the entry was to run."""

    def _share_quietly(self) -> None:
        with suppress(LockBackendError):  # the error is logged, and the next tick tries again
            self._share()

    def _share(self) -> None:
        shared = dict(self._unshared)
        if not shared:
            return
        fields: list[bytes] = []
        for name, entry in shared.items():
            last = maybe_make_aware(entry.last_run_at).timestamp()
            fields += (name.encode(), f"{last!r} {entry.total_run_count}".encode())
        self._ask((b"HSET", self._times, *fields), (b"PEXPIRE", self._times, milliseconds(KEEP)))
        self._unshared = {}

    def _ask(self, *commands: tuple[bytes, ...]) -> list[Any]:
        if self._server is None:
            return [()] * len(commands)
        _, replies = self._server.run(with_retries(self._name, Pipeline(commands), math.inf, self._server))
        return replies  # type: ignore[no-any-return]


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

        def _continue(self, entry: Any, last: float, count: int) -> None:
            # The database may have a later time: a task that was disabled and enabled again continues from there.
            if last > maybe_make_aware(entry.last_run_at).timestamp():
                super()._continue(entry, last, count)
                entry.model.last_run_at, entry.model.total_run_count = entry.last_run_at, count

        def _take_back(self, entry: Any) -> None:
            self._dirty.discard(entry.name)  # so that the database stores no run that did not happen

    return DatabaseScheduler
