"""`leader()` and `Leader`: one of all processes leads."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from django_redislock import AlreadyAcquired, Leader, LockBackendError, LockLost, alock, held_locks, leader, lock
from django_redislock.run_once import election
from tests.run_once.programs import stand_for_election, stand_in_a_loop
from tests.support import BUSY, Proxy, PythonProcess, RedisServer, begin, command_counts, in_thread, wait_until

pytestmark = pytest.mark.usefixtures("locks_by_url")


def test_a_term_is_a_held_lock_of_its_kind_whose_fence_grows() -> None:
    with leader("scheduler", expire=20, label="main") as first:
        [held] = held_locks()
        assert (held.name, held.kind, held.label, held.expire) == ("scheduler", "leader", "main", 20)
        assert first.lost is None
        first.raise_if_lost()
        fence = first.fence
    with leader("scheduler") as second:
        assert second.fence > fence
    assert list(held_locks()) == []


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [False, True], ids=["thread", "task"])
def test_a_lost_term_that_an_unanswered_extension_kept_is_handed_over(
    settings: Any, proxy: Proxy, client: Any, tasks: bool
) -> None:
    settings.DJANGO_REDISLOCK = {"URL": f"{proxy.url}?socket_timeout=0.5"}
    lost = []
    # Long after the time-out: a thread that a busy machine wakes late finds no reply either.

    def on_elected(term: Any) -> None:
        proxy.delay_replies(5)
        with pytest.raises(LockBackendError):
            term.extend(60)

    async def on_elected_async(term: Any) -> None:
        proxy.delay_replies(5)
        with pytest.raises(LockBackendError):
            await term.extend(60)

    def on_lost(term: Any) -> None:
        lost.append(term.lost)
        proxy.delay_replies(0)
        candidate.stop()

    candidate = Leader("scheduler", on_elected=on_elected_async if tasks else on_elected, on_lost=on_lost, expire=2)
    asyncio.run(candidate.arun()) if tasks else candidate.run()
    assert lost[0]
    assert lock("scheduler").acquire(blocking=False)


@pytest.mark.slow
def test_a_term_is_renewed_whatever_the_settings_say_of_locks(settings: Any, redis_url: str) -> None:
    settings.DJANGO_REDISLOCK = {
        "URL": redis_url,
        "MAX_HOLD": 0.2,
        "AUTO_RENEWAL": False,
        "TIMEOUT": 0.1,
        "EXPIRE": 0.6,
    }
    with leader("scheduler") as term:
        began = time.monotonic()
        wait_until(lambda: time.monotonic() > began + 1)
        term.raise_if_lost()


def test_the_wait_for_a_term_has_no_timeout_of_the_settings(settings: Any, redis_url: str) -> None:
    settings.DJANGO_REDISLOCK = {"URL": redis_url, "TIMEOUT": 0.05}
    elected = threading.Event()

    def stand() -> None:
        with leader("scheduler"):
            elected.set()

    with lock("scheduler"):
        candidate = threading.Thread(target=stand)
        candidate.start()
        wait_until(lambda: [held.waiting for held in held_locks()] == [1])
        assert not elected.wait(0.3)
    assert elected.wait(30)
    candidate.join()


def test_the_block_of_a_lost_term_ends_with_an_error_that_says_why() -> None:
    told = []
    with pytest.raises(LockLost, match="deposed"), leader("scheduler", on_lost=told.append) as term:
        lock("scheduler").reset(reason="deposed")
        with pytest.raises(LockLost):
            term.extend()
        assert term.lost
    assert told == [term]


def test_a_leader_that_stands_for_election_again_is_told_that_it_would_wait_for_itself() -> None:
    with leader("a"), pytest.raises(AlreadyAcquired), leader("a"):
        raise AssertionError("it leads twice")

    async def stand_twice() -> None:
        async with leader("a"):
            with pytest.raises(AlreadyAcquired):
                async with leader("a"):
                    raise AssertionError("it leads twice")

    asyncio.run(stand_twice())


def test_two_threads_that_use_one_leader_object_leave_their_own_terms(client: Any) -> None:
    election = leader("scheduler", expire=60)
    lost, followed, errors = threading.Event(), threading.Event(), []

    def lead_first() -> None:
        try:
            with election as term:
                lock("scheduler").reset(reason="deposed")
                lost.set()
                followed.wait(30)
                term.extend()
        except LockLost as error:
            errors.append(error)

    first = threading.Thread(target=lead_first)
    first.start()
    lost.wait(30)
    with election as term:
        followed.set()
        first.join(30)
        assert term.owned()
        assert [error.record.reason for error in errors if "deposed" in str(error)]
    assert list(held_locks()) == []


def test_two_tasks_that_use_one_leader_object_leave_their_own_terms(client: Any) -> None:
    async def main() -> None:
        election = leader("scheduler", expire=60)
        lost, followed = asyncio.Event(), asyncio.Event()

        async def lead_first() -> None:
            async with election:
                await alock("scheduler").reset(reason="deposed")
                lost.set()
                await followed.wait()

        first = asyncio.create_task(lead_first())
        await lost.wait()
        async with election as term:
            followed.set()
            with pytest.raises(LockLost, match="deposed"):
                await first
            assert await term.owned()

    asyncio.run(main())
    assert list(held_locks()) == []


def test_stop_ends_all_threads_that_run_one_leader_object() -> None:
    elected = []
    candidate = Leader("scheduler", on_elected=elected.append)
    threads = [threading.Thread(target=candidate.run) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: elected and [held.waiting for held in held_locks()] == [1])
    candidate.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert list(held_locks()) == []


@pytest.mark.parametrize("loop_ends", [False, True], ids=["generator is dropped", "loop ends"])
def test_leader_in_an_async_generator_that_another_task_closes_hands_over(loop_ends: bool) -> None:
    async def feed() -> AsyncIterator[int]:
        async with election as term:
            yield term.fence

    async def main() -> None:
        messages = feed()
        async for _ in messages:
            break
        if loop_ends:
            kept.append(messages)
        else:
            del messages  # the loop closes it in a task of its own
            while list(held_locks()):
                await asyncio.sleep(0.01)

    election, kept = leader("scheduler"), list[Any]()
    asyncio.run(asyncio.wait_for(main(), 10))
    assert list(held_locks()) == []


def test_leader_in_a_generator_that_another_thread_closes_hands_over() -> None:
    def feed() -> Iterator[int]:
        with election as term:
            yield term.fence

    election = leader("scheduler")
    first, second = feed(), feed()
    own = next(first)
    waiting = begin(lambda: next(second))
    in_thread(first.close)
    assert waiting.result(30) > own
    second.close()
    assert list(held_locks()) == []


def test_a_candidate_outlasts_a_server_that_is_away(settings: Any, own_server: RedisServer) -> None:
    settings.DJANGO_REDISLOCK = {"URL": own_server.url, "RETRY_FOR": 0}
    own_server.stop()
    elected: list[int] = []

    def stand() -> None:
        with leader("scheduler") as term:
            elected.append(term.fence)

    candidate = threading.Thread(target=stand)
    candidate.start()
    own_server.start()
    candidate.join(30)
    assert len(elected) == 1


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: leader(""), ValueError),
        (lambda: leader(7), TypeError),  # type: ignore[arg-type]
        (lambda: leader("x", expire=0), ValueError),
        (lambda: leader("x", on_lost=7), TypeError),  # type: ignore[arg-type]
        (lambda: Leader("", on_elected=print), ValueError),
        (lambda: Leader("x", on_elected=7), TypeError),  # type: ignore[arg-type]
        (lambda: Leader("x", on_elected=print, on_lost=7), TypeError),  # type: ignore[arg-type]
        (lambda: Leader("x", on_elected=asyncio.sleep).run(), TypeError),
    ],
)
def test_bad_arguments_are_said_at_once(make: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_what_the_functions_raise_ends_the_candidacy_and_hands_over() -> None:
    events: list[str] = []

    def fail(term: Any) -> None:
        events.append("elected")
        raise KeyError("mine")

    candidate = Leader("scheduler", on_elected=fail, on_lost=lambda term: events.append("ended"))
    with pytest.raises(KeyError, match="mine"):
        candidate.run()
    with pytest.raises(KeyError, match="mine"):
        asyncio.run(candidate.arun())
    assert events == ["elected", "ended"] * 2
    assert list(held_locks()) == []


def test_a_cancelled_candidate_hands_over() -> None:
    events: list[str] = []

    async def main() -> None:
        elected = asyncio.Event()
        candidate = Leader("s", on_elected=lambda term: elected.set(), on_lost=lambda term: events.append("ended"))
        task = asyncio.create_task(candidate.arun())
        await elected.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert events == ["ended"]
    assert list(held_locks()) == []


@pytest.mark.parametrize("tasks", [False, True], ids=["thread", "task"])
def test_a_candidate_that_waits_keeps_its_place_in_the_queue(client: Any, monkeypatch: Any, tasks: bool) -> None:
    monkeypatch.setattr(election, "SLICE", 0.05)
    candidate = Leader("scheduler", on_elected=lambda term: pytest.fail("elected"))
    with lock("scheduler") as held:
        thread = threading.Thread(target=lambda: asyncio.run(candidate.arun()) if tasks else candidate.run())
        thread.start()

        def entries() -> list[Any]:
            return client.zrange(held._keys.queue, 0, -1, withscores=True)  # type: ignore[no-any-return]

        first = wait_until(entries)
        calls = command_counts(client)["evalsha"]
        wait_until(lambda: command_counts(client)["evalsha"] >= calls + 2, message="it tries again")
        assert entries() == first, "the same owner id, and the same ticket"
        candidate.stop()
        thread.join(30)
        assert not thread.is_alive()
        wait_until(lambda: not entries(), message="it gives its place back")


EXPIRE = 2.0
SECONDS = float(os.environ.get("REDISLOCK_LEADER_SECONDS", "0"))
"""How long the faults go on; each comes once at least."""


def term_of(process: PythonProcess) -> dict[str, Any]:
    return process.wait_for(event="elected")


def follower(processes: list[PythonProcess]) -> tuple[PythonProcess, dict[str, Any]]:
    """Return the process that is elected next, and what it said."""

    def elected() -> list[tuple[PythonProcess, dict[str, Any]]]:
        return [
            (process, line)
            for process in processes
            for line in process.lines[process._seen :]
            if line.get("event") == "elected"
        ]

    found = wait_until(elected)
    assert len(found) == 1, "one leads"
    process, _ = found[0]
    return process, process.wait_for(event="elected")


@pytest.mark.parametrize("program", [stand_for_election, stand_in_a_loop])
def test_a_clean_stop_hands_over_at_once(
    program: Callable[..., None], run_python: Callable[..., PythonProcess], redis_url: str
) -> None:
    processes = [run_python(program, redis_url, 60) for _ in range(2)]
    first, term = follower(processes)
    [other] = [process for process in processes if process is not first]
    other.wait_for(stands=True)
    sent = time.monotonic()
    first._process.send_signal(signal.SIGTERM)
    next_term = term_of(other)
    ended = first.wait_for(event="ended")
    assert ended["lost"] is None
    assert ended["at"] <= next_term["at"] <= sent + 0.5 + BUSY  # and not the 60 s that a killed one's term lasts
    assert next_term["fence"] > term["fence"]
    assert first.wait() == 0


def test_a_killed_a_frozen_and_a_cut_off_leader_have_one_follower_each_and_no_terms_overlap(
    run_python: Callable[..., PythonProcess], redis_url: str
) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(redis_url)) for _ in range(3)]

        def start(number: int) -> PythonProcess:
            process = run_python(stand_for_election, proxies[number].url, EXPIRE)
            process.wait_for(stands=True) if not process.lines else None
            return process

        processes = [start(number) for number in range(3)]
        leading, term = follower(processes)
        fences, began, gaps = [term["fence"]], time.monotonic(), [0.0]
        while len(fences) < 4 or time.monotonic() < began + SECONDS:
            fault = ("freeze", "cut off", "kill")[(len(fences) - 1) % 3]
            struck, number, since = leading, processes.index(leading), time.monotonic()
            if fault == "freeze":
                struck.pause()
            elif fault == "cut off":
                proxies[number].black_hole()
            else:
                struck.kill()
            leading, term = follower([each for each in processes if each is not struck])
            assert term["at"] <= since + EXPIRE + 1 + BUSY
            fences.append(term["fence"])
            gaps.append(term["at"] - since)
            if fault == "freeze":
                struck.resume()
                assert struck.wait_for(event="ended")["lost"]  # it is told before it is elected again
            elif fault == "cut off":
                ended = struck.wait_for(event="ended")
                assert ended["lost"] == "no_answer"
                assert ended["at"] <= term["at"] + BUSY  # its own clock ends the term first; the report may be late
                proxies[number].heal()
            else:
                processes[number] = start(number)
        assert fences == sorted(set(fences))
        print(f"{len(fences) - 1} faults, {len(fences)} terms, longest gap {max(gaps):.2f} s")
