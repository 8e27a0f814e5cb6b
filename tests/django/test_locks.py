"""The lock as the settings give it: re-entrant, listed and reset under their prefix, and with ``ENABLED: False``."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis.sentinel
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.test import override_settings

import django_redislock
from django_redislock import (
    AcquireTimeout,
    LockBackendError,
    LockLost,
    NotAcquired,
    alock,
    get_client,
    held_locks,
    lock,
    locked_atomic,
    reset_all,
    rlock,
)
from django_redislock.core import Lock, events, held_locks as held_locks_of
from django_redislock.signals import lock_acquired, lock_released
from django_redislock.testing import unlocked
from tests.support import acquire_and_release


def names(**options):
    return [info.name for info in held_locks(**options)]


# Re-entrance


@pytest.mark.parametrize("make", [lambda: rlock("a"), lambda: lock("a", reentrant=True)])
def test_a_reentrant_lock_is_acquired_again_by_its_thread_through_another_object(client, make):
    with make() as outer:
        with make() as inner:
            assert inner.fence == outer.fence
            assert not lock("a").acquire(blocking=False)
        assert outer.owned()
    assert names() == []


def test_a_reentrant_alock_is_acquired_again_by_its_task_through_another_object(client):
    async def main():
        async with alock("a", reentrant=True) as outer:
            async with alock("a", reentrant=True) as inner:
                assert inner.fence == outer.fence
            assert await outer.owned()
        assert not await outer.locked()

    asyncio.run(main())


def test_rlock_takes_the_options_of_lock_and_reentrant_is_a_flag(client):
    with rlock("a", expire=7, label="me", blocking=False), lock("a", blocking=False, reentrant=True) as held:
        assert (held.owner().expire, held.owner().label) == (7, "me")
    with pytest.raises(TypeError):
        rlock("a", expires=7)
    for make in (lock, alock):
        for value in (None, 1, "yes"):
            with pytest.raises(TypeError, match="reentrant must be True or False"):
                make("a", reentrant=value)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_lock_until_the_commit_is_reentrant_in_any_case(client, reentrant):
    with transaction.atomic():
        with lock("a", until_commit=True, reentrant=reentrant), lock("a", until_commit=True, reentrant=reentrant):
            pass
        with lock("a", reentrant=True):
            pass
        assert names() == ["a"]
    assert names() == []
    with lock("a", reentrant=True), locked_atomic("a", reentrant=True):
        assert names() == ["a"]


@pytest.mark.django_db(transaction=True)
def test_a_reentrant_lock_released_before_the_commit_is_told_of_and_an_inner_block_of_it_is_not(client, caplog):
    with rlock("a"):
        with transaction.atomic(), rlock("a"):
            pass
        assert caplog.text == ""
    with transaction.atomic(), rlock("a"), rlock("a"):
        pass
    assert caplog.text.count("was released inside an atomic block") == 1
    with transaction.atomic(), rlock("a", until_commit=False):
        pass
    assert caplog.text.count("was released inside an atomic block") == 1


# For tasks


def test_alock_takes_client_and_defaults_from_the_settings(client):
    async def main():
        async with alock("a", label="invoice") as lock:
            holder = await lock.owner()
            assert (holder.expire, holder.label, holder.auto_renewal) == (7, "invoice", False)
            with pytest.raises(AcquireTimeout) as caught:
                await acquire_and_release(alock("a"))
            assert caught.value.timeout == 0.1
            assert not await alock("a", blocking=False).acquire(blocking=False)
            assert not Lock(client, "a", prefix="mine").acquire(blocking=False)
        async with alock("a", expire=9, auto_renewal=True, timeout=3) as lock:
            holder = await lock.owner()
            assert (holder.expire, holder.auto_renewal) == (9, True)

    with override_settings(DJANGO_REDISLOCK={"EXPIRE": 7, "AUTO_RENEWAL": False, "TIMEOUT": 0.1, "KEY_PREFIX": "mine"}):
        asyncio.run(main())


def test_an_asynchronous_receiver_of_a_signal_breaks_no_lock_of_an_event_loop(client, caplog, monkeypatch):
    """The lock was acquired and kept, and the block never ran: RuntimeError of AsyncToSync."""
    heard = []

    async def asynchronous(name, **data):
        heard.append(f"{name} asynchronously")

    def plain(name, **data):
        heard.append(name)

    async def main():
        async with alock("a"):
            heard.append("body")

    for signal in (lock_acquired, lock_released):
        monkeypatch.setattr(signal, "receivers", [])
        signal.connect(asynchronous)
        signal.connect(plain)
    asyncio.run(main())
    assert heard == ["a", "body", "a"]
    assert not Lock(client, "a").locked()
    assert "Connect plain functions to the signals" in caplog.text
    with lock("b"):
        pass
    assert heard[3:] == ["b", "b asynchronously"] * 2


def test_a_lock_tells_nobody_until_a_signal_has_a_receiver(client, monkeypatch):
    """Each cycle made two events that nobody received: a twentieth of its CPU."""
    monkeypatch.setattr(events, "listeners", [])
    heard = []

    def note(sender, name, **data):
        heard.append((sender, name))

    with lock("a"):
        assert events.listeners == []
    for signal in (lock_acquired, lock_released):
        monkeypatch.setattr(signal, "receivers", [])
        signal.connect(note)
    assert len(events.listeners) == 1
    with lock("b"):
        pass
    assert heard == [("acquired", "b"), ("released", "b")]


# The list, the reset and the client


def test_held_locks_and_reset_all_follow_the_settings(client, server, settings):
    elsewhere = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": server.url_of_db(9)}
    settings.CACHES = settings.CACHES | {"elsewhere": elsewhere}
    settings.DJANGO_REDISLOCK = {"KEY_PREFIX": "mine"}
    mine = [lock("a"), lock("b")]
    others = [Lock(client, "of another prefix"), lock("c", using="elsewhere")]
    for each in mine + others:
        assert each.acquire()
    assert (names(), names(using="elsewhere")) == (["a", "b"], ["c"])
    assert [info.name for info in held_locks_of(get_client(), "mine")] == ["a", "b"]
    assert get_client("elsewhere").connection_pool.connection_kwargs["db"] == 9
    assert reset_all() == 2
    assert names() == []
    for each in mine:
        with pytest.raises(LockLost):
            each.release()
    assert [each.owned() for each in others] == [True, True]
    assert reset_all(using="elsewhere") == 1
    others[0].release()


def test_the_client_is_that_of_the_url_or_of_the_alias(client, settings, server):
    settings.DJANGO_REDISLOCK = {"URL": server.url_of_db(9)}
    assert get_client().connection_pool.connection_kwargs["db"] == 9
    with lock("a"):
        assert (names(), names(using="default")) == (["a"], [])
    with pytest.raises(ImproperlyConfigured, match="nowhere"):
        get_client("nowhere")
    settings.DJANGO_REDISLOCK = {}
    assert get_client() is not None
    assert get_client().connection_pool.connection_kwargs["db"] == client.connection_pool.connection_kwargs["db"]


def test_every_thread_gets_the_client_of_the_settings_in_force(client, settings, server):
    """What is kept of the settings is not kept beyond them, in whatever way they were changed."""

    def database():
        found = []
        thread = threading.Thread(target=lambda: found.append(lock("a")._server.settings["db"]))
        thread.start()
        thread.join()
        assert found == [lock("a")._server.settings["db"]]
        return found[0]

    before = database()
    at_9 = {"BACKEND": settings.CACHES["default"]["BACKEND"], "LOCATION": server.url_of_db(9)}
    with override_settings(CACHES={"default": at_9}):
        assert database() == 9
        with override_settings(DJANGO_REDISLOCK={"URL": server.url_of_db(8)}):
            assert database() == 8
            with override_settings(CACHES={"default": at_9, "other": at_9}):
                assert database() == 8
            with override_settings(DJANGO_REDISLOCK={"KEY_PREFIX": "b"}):
                assert (database(), lock("a")._prefix) == (9, "b")
        assert database() == 9
    assert database() == before


def test_settings_that_are_assigned_or_deleted_are_noticed(monkeypatch):
    from django.conf import settings

    for expire in (41, 42):
        monkeypatch.setattr(settings, "DJANGO_REDISLOCK", {"EXPIRE": expire}, raising=False)
        assert lock("a").expire == expire
    monkeypatch.delattr(settings, "DJANGO_REDISLOCK")
    assert lock("a").expire == 30
    with override_settings(DEBUG=True):
        assert lock("a").expire == 30
        settings.DJANGO_REDISLOCK = {"EXPIRE": 43}
        assert lock("a").expire == 43
        del settings.DJANGO_REDISLOCK
        assert lock("a").expire == 30


# ENABLED: False


@pytest.mark.parametrize("make", [lock, rlock, lambda name, **given: caches["default"].lock("a", **given)])
def test_disabled_a_lock_tells_of_the_callers_acquisition_what_was_asked_for(client, make):
    with unlocked():
        held = make("a", expire=7, label="invoice", id="mine")
        assert (held.owned(), held.locked(), held.ttl(), held.owner()) == (False, False, None, None)
        with held:
            assert (held.owned(), held.locked(), held.ttl()) == (True, True, 7)
            with ThreadPoolExecutor(1) as pool, lock("shared") as shared:
                assert (pool.submit(shared.locked).result(), pool.submit(shared.owned).result()) == (True, False)
            assert (names(), reset_all()) == ([], 0)
            holder = held.owner()
            assert (holder.id, holder.fence, holder.label, holder.expire) == ("mine", held.fence, "invoice", 7)
            assert (holder.name, holder.ttl, holder.waiting) == (held.name, 7, 0)
            assert abs(holder.age) < 60
            with make("a", expire=8) as other:  # everybody gets it
                assert (other.ttl(), held.ttl()) == (8, 7) or make is rlock
            held.extend(expire=0.001)
            threading.Event().wait(0.01)
            held.raise_if_lost()
            assert (held.lost, held.ttl(), held.owned()) == (None, 0.001, True), "nothing is lost when its life is over"
        assert (held.owned(), held.locked(), held.ttl(), held.owner()) == (False, False, None, None)
        with pytest.raises(NotAcquired):
            make("a").release()
    assert names() == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_disabled_an_alock_tells_of_the_callers_acquisition_what_was_asked_for(client, reentrant):
    async def main():
        async with alock("a", expire=7, label="invoice", reentrant=reentrant) as held:
            assert (await held.owned(), await held.locked(), await held.ttl()) == (True, True, 7)
            holder = await held.owner()
            assert (holder.id, holder.label, holder.auto_renewal) == (held.id, "invoice", True)
            await held.extend(9)
            assert await held.ttl() == 9
        assert (await held.owned(), await held.locked(), await held.ttl()) == (False, False, None)

    with unlocked():
        asyncio.run(main())


def test_disabled_bad_arguments_are_refused_all_the_same(client):
    with unlocked():
        for make in (lock, alock, rlock, lambda name, **given: caches["default"].lock("a", **given)):
            with pytest.raises(ValueError, match="expire"):
                make("a", expire=-1)
            with pytest.raises(TypeError, match="label"):
                make("a", label=5)


# The names of the package


def test_the_package_offers_each_public_name_and_no_other():
    assert set(django_redislock.__all__) <= set(dir(django_redislock))
    for name in django_redislock.__all__:
        assert getattr(django_redislock, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'django_redislock' has no attribute 'looked'"):
        django_redislock.looked  # noqa: B018


# How long a server that is away is tried again


@pytest.fixture
def door():
    """A port whose connections are closed at once, and how many there were."""
    tries = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def close() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    tries.append(connection.close())

        thread = threading.Thread(target=close)
        thread.start()
        yield f"redis://127.0.0.1:{port}/0", tries
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


USES = {
    "lock": lambda: lock("a").acquire(timeout=60),
    "alock": lambda: asyncio.run(alock("a").acquire(timeout=60)),
    "owner": lambda: lock("a").owner(),
    "held_locks": lambda: list(held_locks()),
    "core": lambda: Lock(get_client(), "a").acquire(),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
@pytest.mark.usefixtures("without_janitor")
def test_a_server_that_is_away_is_tried_again_for_as_long_as_the_settings_say(door, settings, use):
    url, tries = door
    settings.DJANGO_REDISLOCK = {"URL": url, "RETRY_FOR": 0}
    with pytest.raises(LockBackendError):
        USES[use]()
    assert len(tries) <= 2
    settings.DJANGO_REDISLOCK = {"URL": url, "RETRY_FOR": 1}
    with pytest.raises(LockBackendError):
        USES[use]()
    assert len(tries) > 4


def test_without_the_setting_a_server_named_by_sentinel_is_tried_until_a_failover_is_over(settings, client):
    manager = redis.sentinel.Sentinel([("127.0.0.1", 1)])
    plain, primary = Lock(client, "a"), Lock(manager.master_for("main"), "a")
    settings.DJANGO_REDISLOCK = {}
    lock("a")
    assert (plain._new_lease(None, "x").retry_for, primary._new_lease(None, "x").retry_for) == (5, 40)
    settings.DJANGO_REDISLOCK = {"RETRY_FOR": 7}
    lock("a")
    assert (plain._new_lease(None, "x").retry_for, primary._new_lease(None, "x").retry_for) == (7, 7)
