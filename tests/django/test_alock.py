"""alock: the settings' client and defaults for asyncio."""

from __future__ import annotations

import asyncio

import pytest
from django.test import override_settings

from django_redislock import AcquireTimeout, alock, lock
from django_redislock.core import Lock
from django_redislock.signals import lock_acquired, lock_released
from tests.support import acquire_and_release


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


def test_disabled_everything_runs_unlocked(own_server):
    async def main():
        async with alock("a", timeout=1) as one, alock("a") as two:
            assert two.fence >= one.fence > 0
            assert await alock("a").acquire()
            assert (await one.owner()).fence == one.fence
            await one.extend()
            one.raise_if_lost()

    with override_settings(DJANGO_REDISLOCK={"ENABLED": False, "URL": "redis://127.0.0.1:1/0"}):
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
