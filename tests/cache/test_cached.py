"""@cached."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial

import pytest
from asgiref.sync import async_to_sync, iscoroutinefunction
from django.core.cache import caches
from django.db import transaction

from django_redislock.cache import cached
from tests.support import sqlite_file, using_databases

pytestmark = pytest.mark.usefixtures("caches_in_settings")


def test_a_function_runs_once_for_its_arguments(client):
    calls = []

    @cached(60, key="user:{user_id}:{full}")
    def user(user_id, *, full=False):
        """Return a user."""
        calls.append((user_id, full))
        return {"id": user_id}

    assert [user(1), user(user_id=1), user(1, full=False)] == [{"id": 1}] * 3
    assert user(2, full=True) == {"id": 2}
    assert calls == [(1, False), (2, True)]
    assert caches["default"].get("user:1:False") == {"id": 1}
    assert 50_000 < client.pttl(":1:user:1:False") <= 60_000
    assert user.__name__ == "user"
    assert user.__doc__ == "Return a user."
    assert list(inspect.signature(user).parameters) == ["user_id", "full"]


def test_invalidate_takes_what_the_function_takes():
    calls = []

    @cached(60, key="user:{user_id}")
    def user(user_id):
        calls.append(user_id)
        return user_id

    user(1), user(2)
    assert user.invalidate(1) is True
    assert user.invalidate(user_id=1) is False
    user(1), user(2)
    assert calls == [1, 2, 1]
    assert asyncio.run(user.ainvalidate(2)) is True
    assert user.key(7) == "user:7"


def test_what_is_computed_while_it_is_invalidated_is_not_stored():
    @cached(60, key="user:{user_id}")
    def user(user_id):
        user.invalidate(user_id)
        return "stale"

    assert user(1) == "stale"
    assert caches["default"].get("user:1") is None


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_invalidate_may_wait_for_the_commit(client, tmp_path, django_db_blocker, asynchronous):
    """What others compute before it comes from what was there before the transaction."""
    row = ["before"]

    @cached(60, key="user:{user_id}")
    def user(user_id):
        return row[0]

    def invalidate(**options):
        if asynchronous:
            return async_to_sync(user.ainvalidate)(1, **options)
        return user.invalidate(1, **options)

    with django_db_blocker.unblock(), using_databases(default=sqlite_file(tmp_path)):
        assert user(1) == "before"
        with transaction.atomic():
            assert invalidate(on_commit=True) is None
            assert user(1) == "before"
            row[0] = "after"
        assert user(1) == "after"
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            invalidate(on_commit=True)
            raise ZeroDivisionError
        assert caches["default"].has_key("user:1"), "rolled back"
        invalidate(on_commit=True)
        assert not caches["default"].has_key("user:1"), "at once without a transaction"


def test_a_callable_key_another_cache_and_a_version():
    @cached(60, key=lambda a, b=2: f"sum:{a + b}", using="other", version=5)
    def add(a, b=2):
        return a + b

    assert add(1) == add(2, b=1) == 3
    assert caches["other"].get("sum:3", version=5) == 3
    assert caches["default"].get("sum:3", version=5) is None
    assert add.invalidate(1)


def test_methods():
    calls = []

    class Cart:
        def __init__(self, pk):
            self.pk = pk

        @cached(60, key="cart:{self.pk}:{currency}")
        def total(self, currency="EUR"):
            calls.append(self.pk)
            return f"{self.pk} {currency}"

        @cached(60, key="acart:{self.pk}")
        async def atotal(self):
            calls.append(self.pk)
            return self.pk

    cart = Cart(1)
    assert [cart.total(), Cart(1).total(), Cart(2).total("USD")] == ["1 EUR", "1 EUR", "2 USD"]
    assert cart.total.invalidate() is True
    assert Cart.total.invalidate(Cart(2), "USD") is True
    assert cart.total() == "1 EUR"
    assert calls == [1, 2, 1]
    assert asyncio.run(cart.atotal()) == 1
    assert cart.atotal.invalidate()


def test_class_methods_and_static_methods():
    class Shop:
        @cached(60, key="shop:{cls.__name__}:{pk}")
        @classmethod
        def of(cls, pk=None):
            return f"{cls.__name__} {pk}"

        @cached(60, key="sum:{a}")
        @staticmethod
        def double(a):
            return 2 * a

    class Kiosk(Shop):
        pass

    assert [Shop.of(7), Shop().of(7), Kiosk.of(7), Kiosk().of()] == ["Shop 7", "Shop 7", "Kiosk 7", "Kiosk None"]
    assert Kiosk.of.key(7) == "shop:Kiosk:7"
    assert [Shop.of.invalidate(7), Shop.of.invalidate(7), Kiosk().of.invalidate(7)] == [True, False, True]
    assert [Shop.double(1), Shop().double(1), Shop.double.invalidate(1)] == [2, 2, True]


def test_a_class_method_whose_class_is_not_known_is_refused():
    """As below @classmethod from Python 3.13 on: invalidate(7) took 7 for the class, and deleted another value."""

    class Shop:
        @cached(60, key="shop:{pk}")
        def of(cls, pk=None):
            return pk

    of = Shop.of
    assert of(Shop, 7) == 7
    for wrong in (of.key, of.invalidate):
        with pytest.raises(TypeError, match="write @cached above @classmethod"):
            wrong(7)


def test_coroutine_functions():
    calls = []

    @cached(60, key="user:{user_id}")
    async def user(user_id):
        calls.append(user_id)
        await asyncio.sleep(0)
        return [user_id]

    async def main():
        return await asyncio.gather(*[user(1) for _ in range(5)])

    assert iscoroutinefunction(user)
    assert asyncio.run(main()) == [[1]] * 5
    assert calls == [1]


@pytest.mark.parametrize("timeout", [60, lambda value: 60], ids=["seconds", "function"])
def test_what_should_not_be_cached_is_not_in_a_cache_of_another_package_either(settings, timeout):
    settings.CACHES = {
        "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": str(id(timeout))}
    }

    @cached(timeout, key="k:{value}", should_cache=bool)
    def same(value):
        return value

    @cached(timeout, key="k:{value}", should_cache=bool)
    async def asame(value):
        return value

    for call in (same, lambda value: asyncio.run(asame(value))):
        caches["default"].clear()
        assert [call(0), call(1)] == [0, 1]
        assert [caches["default"].get(key) for key in ("k:0", "k:1")] == [None, 1]


def test_an_object_whose_call_is_a_coroutine_function():
    class Report:
        async def __call__(self):
            return "built"

    assert asyncio.run(cached(60, key="k")(Report())()) == "built"


def test_without_parameters_the_name_is_the_key():
    @cached(60)
    def settings():
        return 1

    assert settings() == 1
    assert settings.key() == f"{__name__}.test_without_parameters_the_name_is_the_key.<locals>.settings"
    assert settings.invalidate()


async def agenerate():
    yield


def test_bad_use_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match="needs a key"):
        cached(60)(lambda a: a)
    with pytest.raises(TypeError, match="key"):
        cached(60, key=5)
    with pytest.raises(TypeError, match="nonsense"):
        cached(60, key="k", nonsense=1)
    with pytest.raises(ValueError, match="wait"):
        cached(60, key="k", wait=-1)
    with pytest.raises(TypeError, match="decorates functions"):
        cached(60, key="k")(5)
    with pytest.raises(TypeError, match=r"needs a key for .*, which has no name"):
        cached(60)(partial(lambda: 1))
    for generator in (lambda: (yield), agenerate):
        with pytest.raises(TypeError, match="generator function"):
            cached(60, key="k")(generator)
    with pytest.raises(TypeError, match=r"'\{b\}' does not fit the arguments: KeyError"):
        cached(60, key="{b}")(lambda **options: 1)(a=1)


def test_a_key_that_does_not_fit_the_parameters_is_refused_where_it_is_written():
    """With key="user" every user got the value of the first one."""

    def user(user_id):
        return user_id

    with pytest.raises(ValueError, match=r"key='user' is the same for all arguments .*'user:\{user_id\}'"):
        cached(60, key="user")(user)
    with pytest.raises(ValueError, match=r"key='user:\{usr_id\}' names 'usr_id', which is no parameter"):
        cached(60, key="user:{usr_id}")(user)
    assert cached(60, key=lambda user_id: "user")(user)(1) == 1
    assert cached(60, key="user")(lambda: 2).key() == "user"


def test_a_function_that_uses_variables_of_the_function_around_it_needs_a_key_because_two_of_them_have_one_name(cache):
    def make(number):
        return lambda: number

    with pytest.raises(TypeError, match=r"needs a key for .*, which uses variables of the function around it"):
        cached(60)(make(1))
    assert [cached(60, key=f"k{number}")(make(number))() for number in (1, 2)] == [1, 2]


def test_a_method_reads_its_signature_once(cache, monkeypatch):
    class Shop:
        pk = 7

        @cached(60, key="shop:{self.pk}")
        def total(self):
            return self.pk

    cache.get_or_set("warm", lambda: 1)  # a connection's class has a signature, too
    monkeypatch.setattr(inspect, "signature", None)
    assert [Shop().total(), Shop().total()] == [7, 7]
    assert Shop().total.key() == "shop:7"
