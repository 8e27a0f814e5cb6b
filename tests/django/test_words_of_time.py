"""The words of time: those of other packages are answered with ours."""

from __future__ import annotations

import logging

import pytest

from django_redislock import alock, lock, locked, locked_atomic, rlock
from django_redislock.cache.backends import base
from django_redislock.core import AsyncLock, AsyncQuorumLock, Lock, QuorumLock
from tests.support.cache_programs import cache_at
from tests.support.locks import AsyncRLock, RLock


def atomically(name, **options):
    with locked_atomic(name, **options):
        pass


def by_client(kind):
    return lambda name, **options: kind("no client", name, **options)


MAKERS = {
    "lock": lock,
    "alock": alock,
    "rlock": rlock,
    "locked": locked,
    "locked_atomic": atomically,
    "Lock": by_client(Lock),
    "RLock": by_client(RLock),
    "AsyncLock": by_client(AsyncLock),
    "AsyncRLock": by_client(AsyncRLock),
    "QuorumLock": by_client(QuorumLock),
    "AsyncQuorumLock": by_client(AsyncQuorumLock),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("wait", "how long to wait for the lock is timeout=, in seconds"),
        ("blocking_timeout", "how long to wait for the lock is timeout=, in seconds"),
        ("ttl", "the expiry without renewal is expire=, in seconds"),
        ("lock_timeout", "the expiry without renewal is expire=, in seconds"),
        ("tiemout", r"did you mean 'timeout'\?"),
    ],
)
def test_a_word_that_is_not_ours_is_a_type_error_with_the_word_that_is(maker, word, answer):
    with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{word}': {answer}$"):
        MAKERS[maker]("name", **{word: 3})


def test_a_word_that_resembles_none_is_a_type_error_that_names_it():
    with pytest.raises(TypeError, match=r"^lock\(\) got an unexpected keyword argument 'zebra'$"):
        lock("name", zebra=3)


def test_the_timeout_of_a_cache_lock_is_told_once_to_be_its_life(redis_url, backend, caplog):
    cache = cache_at(redis_url, backend)
    base.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "django_redislock"):
        cache.lock("a", expire=2)
        cache.lock("a", blocking_timeout=2)
        cache.lock("a", timeout=2, blocking_timeout=2)
        cache.lock("a", timeout=2, blocking=False)
        assert not caplog.messages
        cache.lock("a", timeout=2)
        cache.lock("b", timeout=3)
    (message,) = caplog.messages
    assert "is the expiry of the lock" in message
    assert "blocking_timeout=" in message
