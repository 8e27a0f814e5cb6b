"""The trials of the diagnosis: locks on each server, and a value in each cache."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator

from django.core.cache import caches
from redis.exceptions import RedisError

from . import conf
from .core import Lock
from .core.clock import monotonic
from .core.driver.cluster import Cluster
from .core.driver.registry import Client, server_of
from .core.driver.server import Server
from .core.operations import renew_call
from .core.renewals import ask
from .doctor import Finding, compare_timeouts, inspect, sentence_of
from .exceptions import LockError

TRIAL_TIMEOUT = 10.0
"""Seconds; also the expiry of the locks."""
RIGHTS = "Give the user of Redis the rights that 'manage.py redislock doctor --acl' prints."


def diagnose(client: Client) -> Iterator[Finding]:
    """Yield all findings about the server of this client, with those of trial locks."""
    server = server_of(client)
    for finding in inspect(server):
        yield finding
        if finding.check == "connection" and finding.status == "problem":
            return  # every other trial would fail in the same way
    yield compare_timeouts(server)
    yield from _try_lock(server)
    yield from _try_two_locks(server)


def _try_lock(server: Server) -> Iterator[Finding]:
    """Acquire a new lock, renew it, wait for it in a thread, and release it."""
    prefix = conf.get().key_prefix
    name = f"redislock-doctor:{secrets.token_hex(8)}"
    first, second = (Lock(server, name, prefix=prefix, expire=TRIAL_TIMEOUT, auto_renewal=False) for _ in range(2))
    waited: list[Finding] = []

    def wait() -> None:
        try:
            if second.acquire(timeout=TRIAL_TIMEOUT):
                second.release()
                waited.append(_heard(server))
            else:
                advice = "Check that the server allows publish and subscribe, and that no proxy blocks them."
                waited.append(
                    Finding(
                        "wait", "problem", f"A waiting thread did not get the lock within {TRIAL_TIMEOUT:g} s.", advice
                    )
                )
        except Exception as error:
            waited.append(_failed("wait", error))

    step = "acquire"
    waiter = threading.Thread(target=wait, name="redislock-doctor", daemon=True)
    try:
        if not first.acquire(blocking=False):
            advice = "Find the other program that writes keys with this prefix."
            yield Finding(step, "problem", "A new lock, which nobody else uses, could not be acquired.", advice)
            return
        yield Finding(step, "ok", "A lock was acquired.")
        step = "renew"
        first.extend()
        yield Finding(step, "ok", "It was renewed.")
        step = "wait"
        waiter.start()
        _until_queued(server, first, waiter)
        step = "release"
        first.release()
        yield Finding(step, "ok", "It was released.")
    except LockError as error:
        yield _failed(step, error)
    if waiter.ident is not None:
        waiter.join(2 * TRIAL_TIMEOUT)
        yield from waited or [_failed("wait", TimeoutError("the waiting thread did not end"))]


def _heard(server: Server) -> Finding:
    """Report how the waiting thread noticed that the lock was free."""
    if not _may_not_subscribe(server):
        return Finding("wait", "ok", "A waiting thread got the lock after its release.")
    message = "The user may not subscribe, so a waiting thread got the lock only by trying again and again."
    return Finding("permissions (wait)", "advice", message, RIGHTS)


def _may_not_subscribe(server: Server) -> bool:
    nodes = list(server.table.nodes.values()) if isinstance(server, Cluster) else [server]
    return any(node.refusal.stands for node in nodes)


def _until_queued(server: Server, lock: Lock, waiter: threading.Thread) -> None:
    """Return when the waiter is in the queue, or cannot be woken there, or has ended, or after half of the timeout."""
    give_up = monotonic() + TRIAL_TIMEOUT / 2
    while waiter.is_alive() and not _may_not_subscribe(server) and monotonic() < give_up:
        info = lock.owner()
        if info is None or info.waiting:
            return
        time.sleep(0.005)


def _failed(step: str, error: Exception) -> Finding:
    if "NOPERM" in str(error) or "ermission" in str(error):
        step = f"permissions ({step})"
        advice = RIGHTS
    elif "MovedError" in str(error):
        advice = "Use a redis.RedisCluster, or a URL that begins with redis+cluster://."
    else:
        advice = "Read the log about this error. Until it is solved, nothing can be locked on this connection."
    return Finding(step, "problem", sentence_of(error), advice)


def _try_two_locks(server: Server) -> Iterator[Finding]:
    """Hold two locks at once, and renew both by one call, as the watchdog does."""
    prefix, check = conf.get().key_prefix, "two locks"
    names = [f"redislock-doctor:{secrets.token_hex(8)}" for _ in range(2)]
    locks = [Lock(server, name, prefix=prefix, expire=TRIAL_TIMEOUT, auto_renewal=False) for name in names]
    try:
        with locks[0], locks[1]:
            leases = [lease for lock in locks for lease in lock._leases.values()]
            if ask(server, leases, renew_call) == [1, 1]:
                how = "each by a call, because the server is in cluster mode" if server.splits else "by one call"
                yield Finding(check, "ok", f"Two locks were held at once and renewed, {how}.")
            else:
                advice = (
                    "Check whether another program writes keys with this prefix, and whether the server evicts keys."
                )
                yield Finding(check, "problem", "Two locks were held at once, and one of them was lost.", advice)
    except (LockError, RedisError) as error:
        yield _failed(check, error)


def diagnose_cache(alias: str) -> Finding | None:
    """Compute, read and delete a value in the cache of this alias; None for a cache of another package."""
    from .cache import ComputeOnceMixin

    check = "cache"
    try:
        cache = caches[alias]
        if not isinstance(cache, ComputeOnceMixin):
            return None
        key = f"redislock-doctor:{secrets.token_hex(8)}"
        values = [cache.get_or_set(key, lambda: "computed", 60), cache.get(key)]
        gone = cache.delete(key)
    except Exception as error:  # any error that the cache raises is the finding
        return _failed(check, error)
    if values == ["computed", "computed"] and gone:
        return Finding(check, "ok", "A value was computed, read and deleted.")
    advice = "Check whether the alias ignores exceptions (IGNORE_EXCEPTIONS), and whether the server evicts keys."
    return Finding(check, "problem", "A computed value could not be read again.", advice)
