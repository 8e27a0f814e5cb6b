"""``manage.py redislock run``: the lock is lost, and Redis goes away."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from django_redislock import held_locks, lock
from tests.support import RedisServer, wait_until
from tests.support.managed import Managed

UNTIL_TERM = "trap 'echo terminated; exit 0' TERM; echo on; while :; do sleep 0.05; done"
UNTIL_KILL = "trap '' TERM; echo on; while :; do sleep 0.05; done"
UNTIL_INPUT = "echo on; cat; echo done"


def start(manage: Callable[..., Managed], script: str, *options: str, **settings: object) -> Managed:
    process = manage("redislock", "run", "x", *options, "--", "sh", "-c", script, **settings)
    process.wait_for("on")
    return process


@pytest.mark.usefixtures("locks_by_url")
def test_a_lost_lock_ends_the_command_with_sigterm(manage: Callable[..., Managed]) -> None:
    process = start(manage, UNTIL_TERM, "--expire", "1s", "--once", "v1")
    assert lock("x").reset(by="anna", reason="it hangs")
    assert process.wait() == 74
    assert process.out == "on\nterminated\n"
    assert "Lock 'x' was lost (anna force-released it at " in process.err
    again = manage("redislock", "run", "x", "--once", "v1", "--", "echo", "ran")
    assert again.wait() == 0
    assert again.out == "ran\n"  # the terminated run is not remembered, although it ended with 0


@pytest.mark.usefixtures("locks_by_url")
def test_a_command_that_ignores_sigterm_is_killed_when_the_grace_is_over(manage: Callable[..., Managed]) -> None:
    process = start(manage, UNTIL_KILL, "--expire", "1s", "--grace", "0.3s")
    lock("x").reset()
    assert process.wait() == 74


@pytest.mark.usefixtures("locks_by_url")
def test_with_warn_the_command_runs_on_and_its_status_counts(manage: Callable[..., Managed]) -> None:
    process = start(manage, UNTIL_INPUT, "--expire", "1s", "--on-loss", "warn")
    lock("x").reset()
    process.wait_for("runs on without it")
    process.end_input()
    assert process.wait() == 0
    assert process.out == "on\ndone\n"


@pytest.mark.usefixtures("locks_by_url")
def test_a_lock_is_renewed_for_max_hold_only(manage: Callable[..., Managed]) -> None:
    process = start(manage, UNTIL_TERM, "--expire", "1s", "--max-hold", "0.5s")
    assert process.wait() == 74
    assert process.out == "on\nterminated\n"


@pytest.mark.usefixtures("locks_by_url")
def test_a_frozen_run_that_lost_its_lock_ends_the_command_when_it_goes_on(manage: Callable[..., Managed]) -> None:
    process = start(manage, UNTIL_TERM, "--expire", "0.5s")
    process.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: not list(held_locks()))
    process.process.send_signal(signal.SIGCONT)
    assert process.wait() == 74


def test_redis_goes_away_while_the_command_runs(manage: Callable[..., Managed], own_server: RedisServer) -> None:
    process = start(manage, UNTIL_TERM, "--expire", "1s", DJANGO_REDISLOCK={"URL": own_server.url, "RETRY_FOR": 0.2})
    own_server.kill()
    assert process.wait() == 74
    assert process.out == "on\nterminated\n"
    assert "Redis confirmed no renewal until its expiry of 1 s ended" in process.err


def test_redis_is_away_when_the_command_ends(manage: Callable[..., Managed], own_server: RedisServer) -> None:
    options = {"DJANGO_REDISLOCK": {"URL": own_server.url, "RETRY_FOR": 0.2}}
    plain = start(manage, UNTIL_INPUT, **options)
    once = manage("redislock", "run", "y", "--once", "v1", "--", "sh", "-c", UNTIL_INPUT, **options)
    once.wait_for("on")
    own_server.kill()
    for process in (plain, once):
        process.end_input()
    assert plain.wait() == 0
    assert "The lock could not be released and ends by its expiry of 30 s" in plain.err
    assert once.wait() == 74
    assert "could not be remembered" in once.err
    assert plain.out == once.out == "on\ndone\n"


def test_redis_goes_away_while_the_command_waits_for_the_lock(
    manage: Callable[..., Managed], own_server: RedisServer
) -> None:
    options = {"DJANGO_REDISLOCK": {"URL": own_server.url, "RETRY_FOR": 0.2}}
    start(manage, UNTIL_INPUT, **options)
    waiter = manage("redislock", "run", "x", "--", "echo", "ran", **options)
    waiter.wait_for("Waiting")
    own_server.kill()
    assert waiter.wait() == 69
    assert waiter.out == ""
    assert "The command was not run." in waiter.err
