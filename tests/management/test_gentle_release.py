"""``redislock release --gently``: the holder is asked for its lock."""

from __future__ import annotations

import io

import pytest
import redis
from django.core.management import call_command

from django_redislock.exceptions import LockLost
from tests.management.test_command import answers, run
from tests.support.admin_pages import held, hold

__all__ = ["answers"]
pytestmark = pytest.mark.usefixtures("locks_by_url")


def test_the_holder_is_asked_and_nothing_is_freed(client: redis.Redis, request: pytest.FixtureRequest) -> None:
    lock = hold(client, "stuck")
    request.getfixturevalue("answers")("y\n")
    errors, output = io.StringIO(), io.StringIO()
    call_command("redislock", "release", "stuck", "--gently", "--reason", "deploy", stdout=output, stderr=errors)
    assert output.getvalue() == "Recalled stuck.\n"
    assert "Recall it? [y/N]" in errors.getvalue()
    assert "Nobody else gets the lock" in errors.getvalue()
    assert ", recalled" in run("list")
    assert held(client, "stuck")
    with pytest.raises(LockLost, match=r"command line .* asked for it back .*: deploy"):
        lock.extend()
    with pytest.raises(LockLost):
        lock.release()
    assert not held(client, "stuck")


def test_the_locks_of_a_task_are_recalled(client: redis.Redis) -> None:
    locks = [hold(client, f"celery:shop.build:{number}", kind="celery") for number in range(2)]
    assert run("release", "--task", "shop.build", "--gently", "--yes") == "Recalled 2 locks of shop.build.\n"
    for lock in locks:
        with pytest.raises(LockLost, match="asked for it back"):
            lock.extend()
