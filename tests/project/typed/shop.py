"""Code as users write it, for their type checkers: mypy --strict and pyright read it in CI, and nothing runs it.

A line with ``# type: ignore`` is a mistake that both must find; that they do find it is checked, too, because an ignore
that is not needed is an error.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import assert_type

import redis
from celery import Celery, shared_task
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import SimpleTestCase

from django_redislock import alock, alock_all, asemaphore, lock, lock_all, locked, locked_atomic, rlock, semaphore
from django_redislock.cache import LocMemCache, cache_page, cached, get_cache
from django_redislock.celery import SingleInstanceTask, single_instance
from django_redislock.core import AsyncLock, AsyncSemaphore, Lock, LockInfo, Semaphore
from django_redislock.exceptions import LongTimeoutWarning
from django_redislock.locks import Locks
from django_redislock.testing import UnlockedMixin, assert_locked, unlocked

app = Celery("shop")


# Locks


def charge(invoice: int) -> int:
    with lock(f"invoice:{invoice}", timeout=10, expire=timedelta(seconds=30)) as held:
        assert_type(held, Lock)
        held.raise_if_lost()
        return held.fence


async def charge_soon(invoice: int) -> None:
    async with alock(f"invoice:{invoice}") as held:
        assert_type(held, AsyncLock)


async def transfer() -> None:
    with lock_all(["account:1", "account:2"], timeout=5, until_commit=True) as held:
        assert_type(held["account:1"], Lock)
        held.raise_if_lost()
    async with alock_all({"account:1", "account:2"}, timeout=5) as both:
        assert_type(both["account:1"], AsyncLock)
    lock_all(["a", 1])  # type: ignore
    lock_all(["a"], tiemout=3)  # type: ignore
    alock_all(["a"], until_commit=True)  # type: ignore


async def call_the_crm() -> None:
    with semaphore("crm", limit=20, timeout=5, max_hold=60) as slot:
        assert_type(slot, Semaphore)
        assert_type(slot.fence, int)
    async with asemaphore("crm", 20) as other:
        assert_type(other, AsyncSemaphore)
    semaphore("crm")  # type: ignore
    semaphore("crm", "20")  # type: ignore
    semaphore("crm", 20, reentrant=True)  # type: ignore


with rlock("a") as outer, locked_atomic("b", timeout=3) as inner:
    assert_type(outer, Lock)
    assert_type(inner, Lock)
    assert_type(outer.owner(), LockInfo | None)

lock("a", tiemout=3)  # type: ignore
alock("a", tiemout=3)  # type: ignore
rlock("a", tiemout=3)  # type: ignore
locked_atomic("a", tiemout=3)  # type: ignore
Lock(redis.Redis(), "a", tiemout=3)  # type: ignore
lock("a", timeout="3")  # type: ignore


def report(user_id: int) -> str:
    return str(user_id)


async def report_soon(user_id: int) -> str:
    return str(user_id)


def name_of(user_id: int) -> str:
    return f"report:{user_id}"


async def use_locked() -> None:
    with lock("x").attempt() as held:
        assert_type(held, Lock | None)
    with lock_all(["x"]).attempt() as several:
        assert_type(several, Locks | None)
    async with alock("x").attempt() as aheld:
        assert_type(aheld, AsyncLock | None)
    assert_type(locked(report)(1), str)
    assert_type(locked("report:{user_id}")(report)(1), str)
    assert_type(locked(on_conflict="raise")(report)(1), str)
    assert_type(locked(name=name_of, timeout=3)(report)(1), str)
    assert_type(locked("report:{user_id}", on_conflict="skip", expire=5)(report)(1), str | None)
    assert_type(locked("report:{user_id}", limit=5, on_conflict="raise")(report)(1), str)
    assert_type(await locked("report:{user_id}", limit=5)(report_soon)(1), str)
    assert_type(await locked(report_soon)(1), str)
    assert_type(await locked("report:{user_id}", expire=3)(report_soon)(1), str)
    assert_type(await locked("report:{user_id}", on_conflict="skip")(report_soon)(1), str | None)
    locked(report)("1")  # type: ignore
    locked("report:{user_id}")(report)("1")  # type: ignore
    locked("report:{user_id}", on_conflict="skip")(report)("1")  # type: ignore
    await locked("report:{user_id}")(report_soon)("1")  # type: ignore
    await locked("report:{user_id}", on_conflict="skip")(report_soon)("1")  # type: ignore


locked("x", tiemout=3)  # type: ignore
locked("x", on_conflict="rise")  # type: ignore
locked("x", limit="5")  # type: ignore


# The cache


def total() -> int:
    return 1


async def total_soon() -> int:
    return 1


mine = get_cache()
mine.get_or_set("total", total, 300, stale=60, refresh="thread")
mine.get_or_set("total", total, lambda value: 300 if value else 10)
mine.get_or_set("total", total, stail=60)  # type: ignore
mine.set("total", 1)
mine.get_or_set_many(["a", "b"], lambda keys: dict.fromkeys(keys, 1), wait=3)
mine.get_or_set_many(["a", "b"], lambda keys: dict.fromkeys(keys, 1), stale=3)  # type: ignore
with mine.lock("maintenance", expire=60) as held:
    held.raise_if_lost()
cache.get_or_set("total", total, 300)  # Django's own is as it was


async def use_cache() -> None:
    await mine.aget_or_set("total", total_soon, 300, stale=60)
    await mine.aget_or_set("total", total_soon, 300, stail=60)  # type: ignore
    await mine.aget_or_set_many(["a"], lambda keys: dict.fromkeys(keys, 1), 60)


@cached(300, key="user:{user_id}", stale=3600, refresh="thread")
def load_user(user_id: int) -> dict[str, int]:
    return {"id": user_id}


@cached(300, key="user:{user_id}")
async def load_user_soon(user_id: int) -> dict[str, int]:
    return {"id": user_id}


class Cart:
    pk = 1

    @cached(60, key="cart:{self.pk}:{rate}")
    def total(self, rate: float) -> float:
        return rate


async def use_cached() -> None:
    assert_type(load_user(7), dict[str, int])
    assert_type(await load_user_soon(7), dict[str, int])
    assert_type(load_user.key(7), str)
    load_user.invalidate(7, on_commit=True)
    assert_type(Cart().total(1.5), float)
    assert_type(Cart().total.key(1.5), str)
    assert_type(Cart.total(Cart(), 1.5), float)
    Cart().total("1")  # type: ignore
    load_user("7")  # type: ignore


cached(300, stail=60)  # type: ignore


@cache_page(60, wait=3)
def home(request: HttpRequest, shop: int) -> JsonResponse:
    return JsonResponse({"shop": shop})


@cache_page(60)
async def home_soon(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


assert_type(home(HttpRequest(), 1), JsonResponse)
home(HttpRequest(), "1")  # type: ignore
cache_page(60, stale=3)
cache_page(60, stail=3)  # type: ignore


# Celery


@shared_task
@single_instance(key="report:{customer_id}", on_conflict="skip")
def build_report(customer_id: int) -> str:
    return f"built {customer_id}"


@shared_task(bind=True, base=SingleInstanceTask)
@single_instance
def sync(self: SingleInstanceTask, account_id: int, full: bool = False) -> None:
    self.single_instance.raise_if_lost()


@app.task(base=SingleInstanceTask)
@single_instance(scope="queued", expire=60)
def send(order: int) -> None: ...


build_report.delay(1)
build_report.delay("1")  # type: ignore
sync.delay(3)
assert_type(sync.lock_info(3), LockInfo | None)
assert_type(sync.unlock(3), bool)
assert_type(sync.recall(3), bool)
assert_type(send.lock_info(3), LockInfo | None)
single_instance(kee="a")  # type: ignore


# Tests

warnings.simplefilter("ignore", LongTimeoutWarning)
local = LocMemCache("shop", {})
assert_type(local.ttl("a"), int | None)
assert_type(local.expire("a", timedelta(minutes=1)), bool)
assert_type(local.delete_pattern("a*"), int)


@unlocked()
class ShopTests(SimpleTestCase):
    @unlocked()
    def test_charge(self) -> None:
        with assert_locked("invoice:*") as taken:
            charge(1)
        assert_type(taken, list[str])


class MoreTests(UnlockedMixin, SimpleTestCase):
    pass
