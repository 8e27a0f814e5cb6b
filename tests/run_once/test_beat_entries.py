"""What a new leader of beat knows of the entries, and what it publishes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.beat import PersistentScheduler as CeleryScheduler
from celery.schedules import crontab

from django_redislock import LockLost, held_locks, lock
from django_redislock.celery import beat, single_instance
from django_redislock.celery.beat import BEAT_PAUSE, LeaderMixin, PersistentScheduler
from tests.support import Proxy, in_thread

pytestmark = pytest.mark.usefixtures("locks_by_url")

FIVE_MINUTES = timedelta(minutes=5)


class Recording(LeaderMixin, CeleryScheduler):
    """Notes what it publishes."""

    fails = False

    def send_task(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self.fails:
            raise ConnectionError("the broker is away")
        self.sent.append(name)

    def setup_schedule(self) -> None:
        self.sent: list[str] = []
        super().setup_schedule()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Recording]]:
    """``start(age)`` starts a beat in a folder of its own; its entry, of five minutes ago, ran last that long ago."""
    with ExitStack() as stack:

        def start(age: timedelta = timedelta(0), kind: type[Recording] = Recording) -> Recording:
            app = Celery("shop", broker="memory://", set_as_current=False)
            due = app.now() - FIVE_MINUTES
            schedule = crontab(minute=due.minute, hour=due.hour)
            app.conf.beat_schedule = {"nightly": {"task": "report", "schedule": schedule}}
            started = kind(app=app, schedule_filename=str(tmp_path / f"schedule-{len(folders)}"))
            folders.append(started)
            stack.callback(started.close)
            started.schedule["nightly"].last_run_at -= age
            return started

        folders: list[Recording] = []
        yield start


HOUR = timedelta(hours=1)
TIMES = "{redislock:beat}:times:celery-beat:shop"


def tick(scheduler: Recording) -> list[str]:
    scheduler.tick()
    scheduler.tick()
    return scheduler.sent


def stand_in_a_thread(scheduler: Recording) -> bool:
    """Let it stand for election in a thread of its own, because one would not wait for itself."""
    return in_thread(scheduler._stand)  # type: ignore[no-any-return]


def test_an_entry_that_became_due_while_nobody_led_is_published_by_the_next_leader_though_it_started_later(
    start: Callable[..., Recording],
) -> None:
    first = start(HOUR)
    assert first._stand()
    first.close()  # before it has published anything
    second = start()
    assert second.schedule["nightly"].last_run_at > first.app.now() - FIVE_MINUTES
    assert tick(second) == ["report"]
    assert tick(second) == ["report"]


def test_what_the_former_leader_has_published_is_not_published_again(start: Callable[..., Recording]) -> None:
    first = start(HOUR)
    assert tick(first) == ["report"]
    first.close()
    second = start(HOUR)  # its own file knows of no run
    assert tick(second) == []
    ours, theirs = second.schedule["nightly"], first._reserved
    assert ours.last_run_at == theirs.last_run_at
    assert ours.last_run_at.tzinfo is not None
    assert ours.total_run_count == 1


def test_an_entry_that_could_not_be_published_is_published_by_the_next_leader(start: Callable[..., Recording]) -> None:
    first = start(HOUR)
    first.fails = True
    assert tick(first) == []
    first.close()
    assert tick(start()) == ["report"]


def test_a_duplicate_that_raises_has_run_and_is_not_published_by_the_next_leader(
    start: Callable[..., Recording], caplog: pytest.LogCaptureFixture
) -> None:
    """It passed for a failed publication: the next leader published an entry that had run, an hour off its schedule."""
    tasks = []
    for _ in range(2):
        scheduler = start(HOUR)

        @scheduler.app.task(name="report", shared=False, lazy=False)
        @single_instance(scope="job", on_duplicate="raise")
        def report() -> None:
            pass

        tasks.append(report)
        if len(tasks) == 1:
            report.delay()
            assert tick(scheduler) == []
            assert report.unlock()
        else:
            assert tick(scheduler) == []
            assert report.lock_info() is None, "nothing was published"
        assert (scheduler.schedule["nightly"].total_run_count, "Message Error" in caplog.text) == (1, False)
        scheduler.close()


def test_a_beat_that_is_asked_steps_down_and_another_one_leads(
    start: Callable[..., Recording], client: redis.Redis
) -> None:
    first, second = start(), start()
    first.expire = second.expire = 30
    first.tick()
    assert lock("celery-beat:shop").recall()
    with suppress(LockLost):
        first._term.extend()  # type: ignore[union-attr]
    assert first.tick() == BEAT_PAUSE
    assert list(held_locks()) == []
    first.tick()
    assert first._term is None
    second.tick()
    assert second._term is not None
    first._stands_at = 0.0
    second.close()
    first.tick()
    assert first._term is not None


def test_a_beat_whose_term_is_lost_between_two_steps_publishes_nothing(
    start: Callable[..., Recording], client: redis.Redis
) -> None:
    class Losing(Recording):
        def reserve(self, entry: Any) -> Any:
            assert self._term is not None
            lock("celery-beat:shop").reset()
            with suppress(LockLost):
                self._term.extend()
            return super().reserve(entry)

    first = start(HOUR, Losing)
    first.tick()
    assert first.sent == []
    assert tick(start()) == ["report"]


def test_times_that_redis_did_not_get_are_sent_with_a_later_tick(
    start: Callable[..., Recording], settings: Any, own_server: Any
) -> None:
    settings.DJANGO_REDISLOCK = {"URL": own_server.url, "RETRY_FOR": 0}

    class Away(Recording):
        def send_task(self, *args: Any, **kwargs: Any) -> None:
            super().send_task(*args, **kwargs)
            own_server.kill()

    first = start(HOUR, Away)
    first.tick()
    assert first.sent == ["report"]
    assert list(first._unshared) == ["nightly"]
    own_server.start()
    first.tick()
    assert first._unshared == {}
    with own_server.client() as client:
        assert b"nightly" in client.hkeys("{redislock:beat}:times:celery-beat:shop")


@pytest.mark.slow
def test_a_candidate_publishes_nothing_and_follows_a_closed_leader_at_once(start: Callable[..., Recording]) -> None:
    first, second = start(), start(HOUR)
    first.tick()
    [held] = held_locks()
    assert (held.name, held.kind) == ("celery-beat:shop", "leader")

    class Another(Recording):
        lock_name = "other schedule"

    assert tick(start(HOUR, Another)) == ["report"]
    assert not stand_in_a_thread(second)
    first.close()
    assert second._stand()


def assert_takes_over(first: Recording, second: Recording) -> None:
    """Assert that the new leader waits for what the former one gives back when it learns that its term is lost."""
    assert second._stand()
    assert second.tick() == pytest.approx(BEAT_PAUSE)
    assert second.sent == []
    with pytest.raises(LockLost):
        first._term.extend()  # type: ignore[union-attr]
    second._quiet_until = 1
    assert tick(second) == []


@pytest.mark.slow
def test_a_candidate_follows_the_last_runs_and_knows_them_when_redis_has_lost_its_data(
    start: Callable[..., Recording], client: redis.Redis
) -> None:
    first, second = start(HOUR), start(HOUR)  # the file of the second one says that the entry is due
    assert tick(first) == ["report"]
    stand_in_a_thread(second)
    client.flushall()
    assert second._stand()
    assert second._quiet_until
    second._quiet_until = 1  # the time is over
    assert tick(second) == []
    assert b"nightly" in client.hkeys("{redislock:beat}:times:celery-beat:shop")


@pytest.mark.slow
def test_a_new_leader_takes_over_what_the_former_one_gives_back_after_a_loss_of_data(
    start: Callable[..., Recording], client: redis.Redis
) -> None:
    first, second = start(HOUR), start(HOUR)
    assert first._stand()
    stand_in_a_thread(second)
    assert tick(first) == ["report"]  # the second one has not seen that
    client.flushall()
    assert_takes_over(first, second)


@pytest.mark.slow
def test_a_new_leader_takes_over_what_the_former_one_published_while_redis_was_away(
    start: Callable[..., Recording], proxy: Proxy, settings: Any
) -> None:
    settings.DJANGO_REDISLOCK = {"URL": f"{proxy.url}?socket_timeout=0.5", "RETRY_FOR": 0}
    first, second = start(HOUR), start(HOUR)
    assert first._stand()
    stand_in_a_thread(second)
    proxy.black_hole()
    assert tick(first) == ["report"]
    stand_in_a_thread(second)
    proxy.heal()
    lock("celery-beat:shop").reset()  # its expiry is over
    assert_takes_over(first, second)


def test_a_closed_beat_ends_though_the_exit_of_its_signal_handler_was_swallowed(
    start: Callable[..., Recording],
) -> None:
    """Python swallows it in a destructor, as kombu's client has one: the beat stood for election for ever."""
    leader, candidate = start(HOUR), start(HOUR)
    leader.tick()
    for stopped in candidate, leader:
        stopped.close()
        with pytest.raises(SystemExit):
            stopped.tick()
    assert list(held_locks()) == []


@pytest.mark.parametrize("error", [SystemExit, OSError])
def test_a_beat_that_is_stopped_or_fails_while_it_becomes_the_leader_hands_over(
    start: Callable[..., Recording], error: type[BaseException]
) -> None:
    class Failing(Recording):
        def _refresh(self) -> None:
            raise error

    with pytest.raises(error):
        start(HOUR, Failing).tick()
    assert list(held_locks()) == []


def test_the_times_are_kept_for_months_and_not_for_ever(start: Callable[..., Recording], client: redis.Redis) -> None:
    tick(start(HOUR))
    life = client.pttl(TIMES)
    assert 89 * 86_400_000 < life <= 90 * 86_400_000


@pytest.mark.slow
def test_an_entry_that_was_removed_long_ago_is_new_when_it_comes_back(
    start: Callable[..., Recording], client: redis.Redis
) -> None:
    """It was published at once, at any time of the day. And the names of tasks that run once stayed for ever."""
    for name in ("nightly", "once", "of today"):
        client.hset(TIMES, name, f"{time.time() - (60 if name == 'of today' else 100_000)} 3")

    def known() -> set[bytes]:
        return set(client.hkeys(TIMES)) - {b"celery.backend_cleanup"}

    waits, leads = start(), start()
    del leads.schedule["nightly"]
    assert leads._stand()
    assert not stand_in_a_thread(waits)
    assert tick(leads) == []
    assert known() == {b"of today"}
    assert not stand_in_a_thread(waits)
    assert known() == {b"of today"}, "who waits does not give them back"
    client.hset(TIMES, "of today", f"{time.time() - 100_000} 3")
    leads.close()
    assert tick(start()) == []
    assert known() == {b"nightly"}


def test_a_time_in_the_future_is_that_of_a_clock_that_was_ahead(
    start: Callable[..., Recording], client: redis.Redis
) -> None:
    client.hset(TIMES, "nightly", f"{time.time() + 3600} 3")
    leads = start()
    leads.tick()
    assert leads.schedule["nightly"].last_run_at <= leads.app.now()


def test_with_locks_switched_off_every_beat_publishes(start: Callable[..., Recording], settings: Any) -> None:
    settings.DJANGO_REDISLOCK = {"ENABLED": False}
    assert [tick(start(HOUR)), tick(start(HOUR))] == [["report"], ["report"]]


def test_the_scheduler_of_celery_has_the_leader_before_it() -> None:
    assert PersistentScheduler.__mro__[1:3] == (LeaderMixin, CeleryScheduler)


def test_without_django_celery_beat_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(beat), "DatabaseScheduler", raising=False)  # another test has made it
    monkeypatch.setitem(sys.modules, "django_celery_beat", None)
    with pytest.raises(ImportError, match=r"pip install 'django-redislock\[beat\]'"):
        beat.DatabaseScheduler  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        beat.Nothing  # noqa: B018
