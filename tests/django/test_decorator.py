"""``@locked``: which functions it takes, how it names their locks, and that none of them runs without its lock."""

from __future__ import annotations

import asyncio
import functools
import inspect
from contextlib import asynccontextmanager, contextmanager

import pytest

from django_redislock import AcquireTimeout, held_locks, lock, locked
from django_redislock.core import Lock


class User:
    id = 7


def names():
    return [info.name for info in held_locks()]


# Which functions


def generator():
    yield


async def async_generator():
    yield


class AsyncCall:
    async def __call__(self):
        return 1


class GeneratorCall:
    def __call__(self):
        yield


@pytest.mark.parametrize(
    "function",
    [
        generator,
        async_generator,
        AsyncCall(),
        GeneratorCall(),
        functools.partial(generator),
        functools.partial(async_generator),
        functools.partial(AsyncCall()),
        functools.partial(functools.partial(generator)),
        contextmanager(generator),
        asynccontextmanager(async_generator),
        functools.partial(contextmanager(generator)),
        User,
        classmethod(generator),
        staticmethod(names),
        property(names),
        5,
    ],
)
def test_what_would_run_without_its_lock_is_refused_where_it_is_decorated(function):
    for decorate in [locked("a"), locked(), locked("a", on_conflict="skip"), *[locked] * callable(function)]:
        with pytest.raises(TypeError, match=r"locked\(\) (does not take|decorates functions)") as refused:
            decorate(function)
        if isinstance(function, AsyncCall):
            refused.match(r"__call__ is async.*async with alock\(name\)")


def test_a_plain_function_that_returns_a_coroutine_is_refused_when_it_is_called(client):
    async def work():
        raise AssertionError("runs without the lock")

    with pytest.raises(
        TypeError, match=r"returned a coroutine, which would run without the lock.*async with alock\(name\)"
    ):
        locked("a")(lambda: work())()
    assert names() == []


def wrapped(function):
    return functools.wraps(function)(lambda: function())


@pytest.mark.parametrize(
    "function",
    [
        lambda: generator(),
        lambda: async_generator(),
        wrapped(generator),
        wrapped(async_generator),
        wrapped(contextmanager(generator)),
        wrapped(asynccontextmanager(async_generator)),
    ],
)
def test_a_result_whose_body_would_run_without_the_lock_is_refused(client, function):
    @locked("a")
    async def work():
        return function()

    for call in (locked("a")(function), lambda: asyncio.run(work())):
        with pytest.raises(TypeError, match=r"returned a .*which would run without the lock.*with lock\(name\)"):
            call()
        assert names() == []


def test_a_wrapper_that_uses_its_generator_up_runs_under_the_lock(client):
    @locked("a")
    @functools.wraps(generator)
    def work():
        return [names() for _ in generator()]

    assert work() == [["a"]]


@pytest.mark.parametrize("tasks", [False, True])
def test_a_task_that_would_run_without_the_lock_is_cancelled(client, tasks):
    tried = []

    async def work():
        raise AssertionError("runs without the lock")

    def start():
        tried.append(asyncio.ensure_future(work()))
        return tried[0]

    async def astart():
        return start()

    async def main():
        with pytest.raises(TypeError, match="returned a Task"):
            await locked("a")(astart)() if tasks else locked("a")(start)()
        with pytest.raises(asyncio.CancelledError):
            await tried[0]

    asyncio.run(main())


def test_partials_and_objects_that_can_be_called_run_under_the_lock(client):
    class Job:
        def __call__(self, number):
            return number, names()

    assert locked("job:{number}")(Job())(5) == (5, ["job:5"])
    assert locked("job:{number}")(functools.partial(Job(), number=6))() == (6, ["job:6"])
    for nameless in (Job(), functools.partial(Job(), 1)):
        with pytest.raises(TypeError, match=r"locked\(\) needs a name for"):
            locked(nameless)


def test_methods_run_under_a_lock_named_by_their_object(client):
    class Account:
        pk = 3

        @locked("account:{self.pk}")
        def close(self):
            return names()

        @staticmethod
        @locked("all")
        def close_all():
            return names()

        @classmethod
        @locked("{cls.pk}")
        async def aclose(cls):
            return names()

    assert Account().close() == ["account:3"]
    assert Account.close_all() == ["all"]
    assert asyncio.run(Account.aclose()) == ["3"]


def test_a_coroutine_function_takes_the_lock_by_asyncio(client):
    @locked("report:{user}", expire=9)
    async def report(user, *, fail=False):
        """Make it."""
        assert [(info.name, info.expire) for info in held_locks()] == [(f"report:{user}", 9)]
        assert not lock(f"report:{user}").acquire(blocking=False)
        await asyncio.sleep(0)
        return 1 / 0 if fail else user

    async def main():
        return await asyncio.gather(report(1), report(1), report(1))

    assert inspect.iscoroutinefunction(report)
    assert (report.__name__, report.__doc__) == ("report", "Make it.")
    assert asyncio.run(main()) == [1, 1, 1]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(report(1, fail=True))
    assert names() == []


@pytest.mark.parametrize("on_conflict", ["raise", "skip", "wait"])
def test_a_function_in_conflict_waits_or_raises_or_is_skipped(client, on_conflict):
    decorate = locked("a", on_conflict=on_conflict, **{"timeout": 0} if on_conflict == "wait" else {})

    async def arun():
        return "run"

    run, arun = decorate(lambda: "run"), decorate(arun)
    assert (run(), asyncio.run(arun())) == ("run", "run")
    Lock(client, "a").acquire()
    for call in (run, lambda: asyncio.run(arun())):
        if on_conflict == "skip":
            assert call() is None
        else:
            with pytest.raises(AcquireTimeout):
                call()


def test_a_function_may_call_itself_under_a_reentrant_lock(client):
    @locked("tree", reentrant=True)
    def depth(number):
        assert names() == ["tree"]
        return 1 + depth(number - 1) if number else 0

    @locked("tree", reentrant=True)
    async def adepth(number):
        return 1 + await adepth(number - 1) if number else 0

    assert depth(3) == asyncio.run(adepth(3)) == 3
    assert names() == []


# Their names


@locked
def plain(number):
    return number, names()


@locked
async def plain_async(number):
    return number, names()


def test_bare_it_decorates_the_function_and_names_the_lock_like_it(client):
    assert plain(1) == (1, ["tests.django.test_decorator.plain"])
    assert asyncio.run(plain_async(2)) == (2, ["tests.django.test_decorator.plain_async"])
    assert locked(expire=5)(plain.__wrapped__)(3) == (3, ["tests.django.test_decorator.plain"])

    @locked
    def inner():
        return names()

    (name,) = inner()
    assert name.endswith("test_bare_it_decorates_the_function_and_names_the_lock_like_it.<locals>.inner")


@pytest.mark.parametrize("options", [{"on_conflict": "skip"}, {"expire": 5}, {"name": "a"}, {}], ids=str)
def test_a_function_by_position_is_refused_where_it_may_be_meant_to_make_the_name(options):
    with pytest.raises(TypeError, match=r"locked\(name=\.\.\.\)"):
        locked(generator if options else lambda user: f"user:{user}", **options)


def test_a_function_makes_the_name(client):
    @locked(name=lambda user, *, day: f"{user.id} on {day}")
    def function(user, *, day):
        return names()

    assert function(User(), day=3) == ["7 on 3"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("report:{customer}", "name names 'customer', which is no parameter of .*function: user, day"),
        ("{customer.id}", "name names 'customer'"),
        ("{user} {day:{width}}", "name names 'width'"),
        ("{}", "name names '', which is no parameter"),
        ("{0}", "name names '0', which is no parameter"),
        ("report:{user", "name is no format string"),
        ("}", "name is no format string"),
        ("", "name must have 1 to 1000 bytes"),
    ],
)
def test_a_name_that_does_not_fit_the_function_is_refused_where_it_is_decorated(template, said):
    def function(user, day=1):
        raise AssertionError

    async def coroutine_function(user, day=1):
        raise AssertionError

    for each in (function, coroutine_function):
        with pytest.raises(ValueError, match=said):
            locked(template)(each)


def test_a_name_is_made_of_the_bound_arguments(client):
    @locked("{user.id}:{rest[0]}:{extra}:{day}:{{}}")
    def function(user, *rest, day=3, **kwargs):
        return names()

    assert function(User(), "x", extra="y") == ["7:x:y:3:{}"]
    with pytest.raises(TypeError, match=r"does not fit the arguments: KeyError: 'extra'"):
        function(User(), "x")
    with pytest.raises(TypeError, match=r"does not fit the arguments: IndexError"):
        function(User(), extra=1)
    with pytest.raises(TypeError, match=r"does not fit the arguments: AttributeError"):
        function(5, 1, extra=1)
    with pytest.raises(TypeError, match="missing a required argument: 'user'"):
        function(extra=1)


BAD_VALUES = [{"expire": 0}, {"timeout": -1}, {"timeout": 1, "on_conflict": "skip"}]
BAD_TYPES = [{"max_hold": "5"}, {"label": 5}, {"auto_renewal": 1}, {"on_lost": 5}, {"until_commit": 1}]
BAD_TYPES += [{"reentrant": None}, {"blocking": False}, {"expires": 5}]


@pytest.mark.parametrize(("error", "cases"), [(ValueError, BAD_VALUES), (TypeError, BAD_TYPES)])
def test_a_bad_option_is_refused_where_it_is_written(error, cases):
    for options in cases:
        with pytest.raises(error, match=next(iter(options))):
            locked("a", **options)


def test_names_and_functions_that_do_not_fit_are_refused():
    for name in (5, b"a", ["a"]):
        with pytest.raises(TypeError, match="name must be a str"):
            locked(name)
    with pytest.raises(TypeError, match="until_commit"):
        locked("a", until_commit=True)(AsyncCall.__call__)
