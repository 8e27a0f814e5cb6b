"""``@locked(limit=...)``: a function of which a few calls run at a time."""

from __future__ import annotations

import asyncio

import pytest

from django_redislock import AcquireTimeout, held_locks, locked

from .test_decorator import User


@pytest.mark.parametrize("on_conflict", ["raise", "wait", "skip"])
def test_so_many_calls_run_at_a_time_and_one_more_is_a_conflict(client, on_conflict):
    options = {"timeout": 0} if on_conflict == "wait" else {}

    @locked("export:{user.id}", limit=2, on_conflict=on_conflict, **options)
    def export(user, inner=None):
        assert {(info.name, info.kind, info.limit) for info in held_locks()} == {("export:7", "semaphore", 2)}
        return inner() if inner else "exported"

    user = User()
    assert export(user, lambda: export(user)) == "exported"
    third = lambda: export(user, lambda: export(user, lambda: export(user)))  # noqa: E731
    if on_conflict == "skip":
        assert third() is None
    else:
        with pytest.raises(AcquireTimeout):
            third()
    assert list(held_locks()) == []


def test_so_many_calls_of_a_coroutine_function_run_at_a_time(client):
    async def call() -> None:
        @locked("export", limit=2, on_conflict="skip")
        async def export():
            await released.wait()
            return "exported"

        released = asyncio.Event()
        calls = [asyncio.create_task(export()) for _ in range(3)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert [call.result() for call in done] == [None]
        released.set()
        assert sorted(map(str, await asyncio.gather(*calls))) == ["None", "exported", "exported"]

    asyncio.run(call())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"limit": 0}, ValueError, "limit must be from 1 to 100, not 0"),
        ({"limit": "5"}, TypeError, "limit must be a whole number of holders, not '5'"),
        ({"limit": None}, TypeError, "limit must be a whole number of holders, not None"),
        ({"limit": 2, "reentrant": True}, TypeError, "reentrant cannot be used with limit"),
        ({"limit": 2, "until_commit": True}, TypeError, "until_commit cannot be used with limit"),
    ],
)
def test_a_wrong_limit_and_what_a_semaphore_does_not_have_are_errors_of_the_decorator(options, error, text):
    with pytest.raises(error, match=text):
        locked("export", **options)
