"""``celery beat`` with a leader: several beats run, and each due entry is published once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import celery.beat
import pytest
import redis
from django.db import connection

from tests.run_once.beats import DATABASE, PERSISTENT, Beat, Published, leader_of, migrate
from tests.support import BUSY, PostgresServer, Proxy, RedisServer, Server, freeze, using_databases, wait_until

pytestmark = pytest.mark.processes

EXPIRE = 1.0
SECONDS = float(os.environ.get("REDISLOCK_BEAT_SECONDS", "0"))
"""How long the faults go on; each comes once at least."""


@pytest.fixture(params=[PERSISTENT, DATABASE])
def scheduler(request: pytest.FixtureRequest) -> str:
    """The scheduler that the beats run: with a file on each host, or with the tables of django-celery-beat."""
    if request.param == DATABASE:
        pytest.importorskip("django_celery_beat", reason="django-celery-beat has no release for this Django")
    name: str = request.param
    return name


@pytest.fixture
def site(scheduler: str, server: Server, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the beats of a scheduler have in common."""
    common: dict[str, Any] = {"broker": server.url_of_db(1), "expire": EXPIRE}
    if scheduler == DATABASE:
        postgres: PostgresServer = request.getfixturevalue("postgres")
        common["database"] = postgres.new_database()
        migrate(locks=server.url, **common)
    return common


@pytest.fixture
def broker(server: Server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url_of_db(1)) as broker:
        broker.flushdb()
        yield broker
        broker.flushdb()


@pytest.fixture
def stack(broker: redis.Redis) -> Iterator[ExitStack]:
    """What a test has opened: it is closed before the broker's client, with which a thread looks for messages."""
    with ExitStack() as stack:
        yield stack


def start_beats(number: int, stack: ExitStack, folder: Path, scheduler: str = PERSISTENT, **site: Any) -> list[Beat]:
    beats = [Beat(folder / str(each), scheduler, **site) for each in range(number)]
    for beat in beats:
        stack.callback(beat.close)
    return beats


def check(times: list[float], take_overs: int) -> None:
    """Assert that an entry of every second was published once each time, and at most once more for each take-over."""
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert sum(gap < 0.9 for gap in gaps) <= take_overs, [round(gap, 2) for gap in gaps]
    assert max(gaps) <= EXPIRE + 1 + 1 + 2 * BUSY, gaps


@pytest.mark.long
def test_the_leader_is_killed_frozen_cut_off_and_stopped_and_no_entry_is_lost_or_published_twice(
    stack: ExitStack,
    server: Server,
    client: redis.Redis,
    broker: redis.Redis,
    tmp_path: Path,
    scheduler: str,
    site: dict[str, Any],
) -> None:
    proxies = [stack.enter_context(Proxy(server.url)) for _ in range(3)]
    started: list[Beat] = []

    def start(number: int, life: int) -> Beat:
        entries = {"second": 1.0} | ({"minute": "crontab"} if SECONDS else {})
        beat = Beat(tmp_path / f"{number}-{life}", scheduler, entries=entries, locks=proxies[number].url, **site)
        stack.callback(beat.close)
        started.append(beat)
        return beat

    beats = [start(number, 0) for number in range(3)]
    published = stack.enter_context(Published(broker))
    published.wait_for_more("second", 2)
    began, take_overs = time.monotonic(), 0
    while take_overs < 4 or time.monotonic() < began + SECONDS:
        fault = ("freeze", "cut off", "stop", "kill")[take_overs % 4]
        leading = leader_of(client, beats)
        number = beats.index(leading)
        if fault == "kill":
            leading.process.kill()
        elif fault == "stop":
            leading.process.send_signal(signal.SIGTERM)
            assert leading.process.wait(60) == 0
        elif fault == "freeze":
            freeze(leading.process.pid)
        else:
            proxies[number].black_hole()
        leader_of(client, beats, leading)
        published.wait_for_more("second", 2)
        if fault == "freeze":
            leading.process.send_signal(signal.SIGCONT)
            leading.wait_for("has lost its term")  # and stands again
        elif fault == "cut off":
            proxies[number].heal()
            leading.wait_for("has lost its term")
        else:
            beats[number] = start(number, take_overs + 1)
            beats[number].wait_for("Beat waits")
        take_overs += 1
    # A beat that stood still for a second was followed by another one, too.
    take_overs = sum(beat.said().count("Beat leads") for beat in started) - 1
    check(published.times("second"), take_overs)
    minutes = [int(at // 60) for at in published.times("minute")]
    assert len(set(minutes)) >= SECONDS // 60 - 1
    assert sorted(set(minutes)) == list(range(minutes[0], minutes[-1] + 1)) if minutes else not SECONDS
    assert len(minutes) - len(set(minutes)) <= take_overs
    gaps = [later - earlier for earlier, later in pairwise(published.times("second"))]
    print(f"{take_overs} take-overs, {len(gaps) + 1} + {len(minutes)} messages, longest gap {max(gaps):.2f} s")


def test_without_redis_no_beat_publishes_and_each_says_so_and_one_goes_on_afterwards(
    stack: ExitStack, server: Server, own_server: RedisServer, broker: redis.Redis, tmp_path: Path
) -> None:
    site = {"locks": own_server.url, "broker": server.url_of_db(1), "expire": 1.0, "entries": {"often": 0.2}}
    beats = start_beats(2, stack, tmp_path, **site)
    published = stack.enter_context(Published(broker))
    published.wait_for_more("often", 2)
    own_server.stop()
    for beat in beats:
        beat.wait_for("publishes nothing, because it cannot be elected")
    since = time.monotonic()
    before = published.count("often")
    wait_until(lambda: time.monotonic() > since + 1.5)
    assert published.count("often") == before
    assert [beat.said().count("cannot be elected") for beat in beats] == [1, 1]  # not again with each try
    own_server.start()
    published.wait_for_more("often", 2)
    with own_server.client() as client:
        leader_of(client, beats)


@pytest.mark.parametrize("leader", ["alive", "frozen"])
def test_three_beats_publish_no_entry_early_when_the_locks_redis_loses_its_data(
    stack: ExitStack, server: Server, own_server: RedisServer, broker: redis.Redis, tmp_path: Path, leader: str
) -> None:
    site = {"locks": own_server.url, "broker": server.url_of_db(1), "expire": EXPIRE, "entries": {"seldom": 4.0}}
    beats = start_beats(3, stack, tmp_path, **site)
    published = stack.enter_context(Published(broker))
    client = stack.enter_context(own_server.client())
    leading = leader_of(client, beats)
    published.wait_for_more("seldom", 1)
    if leader == "frozen":
        since = time.monotonic()
        wait_until(lambda: time.monotonic() > since + 1)  # the others have seen that run
        freeze(leading.process.pid)
    client.flushall()
    leader_of(client, beats, *([leading] if leader == "frozen" else []))
    published.wait_for_more("seldom", 1)
    first, second = published.times("seldom")
    assert second - first > 3.6  # and not as soon as the next leader was elected


@pytest.mark.skipif(not hasattr(celery.beat, "BeatPidbox"), reason="the setting is new in Celery 5.7")
def test_with_remote_control_the_beat_that_leads_and_the_one_that_waits_answer_a_ping(
    stack: ExitStack, server: Server, client: redis.Redis, broker: redis.Redis, tmp_path: Path
) -> None:
    site = {"locks": server.url, "broker": server.url_of_db(1), "expire": EXPIRE, "remote_control": True}
    beats = start_beats(2, stack, tmp_path, entries={"second": 1.0}, **site)
    published = stack.enter_context(Published(broker))
    app = stack.enter_context(celery.Celery("pings", broker=server.url_of_db(1), set_as_current=False))
    leading = leader_of(client, beats)
    wait_until(lambda: len(app.control.ping(timeout=2, limit=2)) == 2)
    leading.process.send_signal(signal.SIGTERM)
    assert leading.process.wait(60) == 0
    leader_of(client, beats, leading)
    published.wait_for_more("second", 1)
    wait_until(lambda: len(app.control.ping(timeout=2, limit=1)) == 1)


def test_a_beat_that_starts_without_redis_publishes_nothing(
    stack: ExitStack, server: Server, broker: redis.Redis, tmp_path: Path
) -> None:
    site = {"locks": "redis://127.0.0.1:1/0", "broker": server.url_of_db(1), "expire": 1.0, "entries": {"often": 0.05}}
    (beat,) = start_beats(1, stack, tmp_path, **site)
    beat.wait_for("publishes nothing, because it cannot be elected")
    assert broker.llen("celery") == 0
    beat.process.send_signal(signal.SIGTERM)
    assert beat.process.wait(60) == 0


def test_with_django_celery_beat_the_next_leader_continues_what_the_killed_one_published(
    stack: ExitStack,
    server: Server,
    client: redis.Redis,
    broker: redis.Redis,
    postgres: PostgresServer,
    tmp_path: Path,
    django_db_blocker: Any,
) -> None:
    pytest.importorskip("django_celery_beat", reason="django-celery-beat has no release for this Django")
    database = postgres.new_database()
    site = {"locks": server.url, "broker": server.url_of_db(1), "expire": EXPIRE, "database": database}
    migrate(**site)
    entries = {"second": 1.0, "seldom": 3600.0}
    leading = Beat(tmp_path / "first", DATABASE, entries=entries, **site)
    stack.callback(leading.close)
    published = stack.enter_context(Published(broker))
    published.wait_for_more("second", 3)
    leading.process.kill()
    # Its start stores the entries anew, later than the last run, of which the database does not know.
    following = Beat(tmp_path / "second", DATABASE, entries=entries, **site)
    stack.callback(following.close)
    leader_of(client, [following])
    published.wait_for_more("second", 2)
    assert published.count("seldom") == 0
    with django_db_blocker.unblock(), using_databases(default=database):
        following.process.send_signal(signal.SIGTERM)
        assert following.process.wait(60) == 0
        with connection.cursor() as cursor:
            cursor.execute("SELECT total_run_count FROM django_celery_beat_periodictask WHERE name = 'second'")
            [(count,)] = cursor.fetchall()
    sent = published.count("second")
    assert (
        sent - 1 <= count <= sent
    )  # the killed one never wrote its runs into the database; one may have been repeated
