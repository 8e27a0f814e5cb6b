"""The diagnosis of the servers that hold the locks: findings, trial locks, and the least rights of a user."""

from __future__ import annotations

import secrets
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

from django.core.cache import caches
from redis import SSLConnection
from redis.exceptions import NoPermissionError, RedisError

from . import conf
from .core import Lock
from .core.clock import monotonic
from .core.driver.cluster.cluster import Cluster
from .core.driver.cluster.table import SLOTS, Node
from .core.driver.effects import advice_for
from .core.driver.registry import Client, replicated, server_of
from .core.driver.sentinels import UnknownService
from .core.driver.server import Server
from .core.keys import literal
from .core.operations import renew_call
from .core.watchdog import ask
from .exceptions import LockError

OLDEST = (6, 2)
"""The oldest version of Redis that has the commands of the scripts. Valkey reports 7.2 as its version of Redis."""
MAX_CLOCK_DIFFERENCE = 1.0
"""Seconds."""
MAX_ROUND_TRIP = 0.05
"""Seconds; a lock costs two round trips."""
PINGS = 9
MANY_LOCKS = 16

Status = Literal["ok", "advice", "problem"]


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    status: Status
    message: str
    advice: str = ""


class Probe:
    """A connection with the timeouts of the connections that locks use, and without their retries."""

    def __init__(self, server: Server) -> None:
        self._connection = server.connection()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.close()

    def execute(self, *command: str) -> Any:
        """Return the reply in bytes; raises RedisError."""
        if not self._connection.open:  # redis-py would not ask the Sentinels, but connect to its default address
            self._connection.connect()
        connection: Any = self._connection.redis_connection
        connection.send_command(*command)
        return connection.read_response(disable_decoding=True)

    def read(self, *command: str) -> dict[str, str]:
        """Return a reply of lines ``name:value``; raises RedisError."""
        lines = self.execute(*command).decode(errors="replace").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


def inspect(server: Server) -> Iterator[Finding]:
    """Yield the findings about the server, or about all nodes of a Cluster."""
    if not isinstance(server, Cluster):
        yield from _inspect_server(server)
        return
    try:
        nodes = server.all_nodes()
    except RedisError as error:
        advice = "Start a node that is named, or correct the addresses, the password or the firewall."
        if "cluster support disabled" in str(error):
            advice = (
                "It is no Cluster: use the backend 'django_redislock.cache.RedisCache', or a URL redis://host:port."
            )
        advice = advice_for(str(error)) or advice
        yield Finding("connection", "problem", f"No node reports the slots: {sentence_of(error)}", advice)
        return
    free = sum(server.table.last_owner(slot) is None for slot in range(SLOTS))
    if free:
        advice = "Create the Cluster, or give each slot a node: redis-cli --cluster fix HOST:PORT."
        yield Finding("connection", "problem", f"{free} of {SLOTS} slots have no node.", advice)
        return
    by_check: dict[str, list[tuple[str, Finding]]] = {}
    for node in nodes:
        for finding in _inspect_server(node):
            by_check.setdefault(finding.check, []).append((":".join(map(str, node.address)), finding))
    for findings in by_check.values():
        wrong = [(name, finding) for name, finding in findings if finding.status != "ok"]
        for name, finding in wrong or findings[:1]:
            advice = finding.advice
            if finding.check == "connection" and finding.status == "problem":
                advice += (
                    " If only the nodes can reach this address, give the client an address_remap, or set "
                    "cluster-announce-ip or cluster-announce-hostname of the node."
                )
            which = f"Node {name}" if wrong else f"All {len(findings)} nodes; of {name}"
            yield finding._replace(message=f"{which}: {finding.message}", advice=advice)


def _inspect_server(server: Server) -> Iterator[Finding]:
    """Yield the findings from the server's replies to INFO, PING and TIME; one finding when it does not answer."""
    with Probe(server) as probe:
        try:
            began = monotonic()
            probe.execute("PING")
            yield Finding(
                "connection", "ok", f"It answers within {_ms(monotonic() - began)}, with the time to connect."
            )
        except NoPermissionError as error:
            yield Finding("permissions (PING)", "advice", sentence_of(error), "Let the user run PING.")
        except (RedisError, OSError) as error:
            advice = "Start it, or correct the address, the password or the firewall between it and this machine."
            if isinstance(error, UnknownService):
                advice = "Correct the name of the service in the URL, or in the options of the cache."
            elif issubclass(server.connection_class, SSLConnection) and not server.settings.get("ssl_certfile"):
                # With TLS 1.3 the client sees only that the connection was closed.
                advice += " If it wants a certificate of its clients, give ssl_certfile and ssl_keyfile."
            advice = advice_for(str(error)) or advice
            yield Finding("connection", "problem", f"It cannot be reached: {sentence_of(error)}", advice)
            return
        for check, section, judge in INFO_CHECKS:
            try:
                yield judge(probe.read("INFO", section))
            except NoPermissionError as error:
                advice = (
                    "Let the user run INFO, or look at version, eviction, persistence and replicas yourself. Locks do "
                    "not need INFO."
                )
                yield Finding("permissions (INFO)", "advice", sentence_of(error), advice)
                break
            except (RedisError, OSError) as error:
                yield Finding(check, "problem", f"INFO could not be read: {sentence_of(error)}", "Try again.")
        if not isinstance(server, Node):
            yield from _cluster(probe)
        yield from _times(probe)


def _version(info: dict[str, str]) -> Finding:
    # For the compatibility of clients, redis_version of Valkey is 7.2.4.
    name = "Valkey" if "valkey_version" in info else "Redis"
    text = info.get("valkey_version") or info.get("redis_version", "")
    numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        return Finding(
            "version", "problem", f"It is {name} {text or '?'}.", "Use Redis 6.2, Valkey 7.2, or a newer one."
        )
    return Finding("version", "ok", f"It is {name} {text}.")


def _eviction(info: dict[str, str]) -> Finding:
    policy = info.get("maxmemory_policy", "unknown")
    limited = info.get("maxmemory", "0") != "0"
    message = f"maxmemory-policy is {policy}, maxmemory {info.get('maxmemory', '0')} bytes."
    if policy == "noeviction" or not limited:
        return Finding("eviction", "ok", message)
    advice = (
        "Set maxmemory-policy to noeviction, or give the locks a server of their own, because an evicted lock gets a "
        "second holder."
    )
    if policy.startswith("volatile-"):  # it evicts keys with an expiry, and every lease has one
        advice += (
            f" On a server for caches alone a lost lock does little harm. But {policy} evicts only keys with an "
            "expiry, such as the leases of values, and without its lease several processes compute the same value "
            "(lease_evicted in cache.stats()). Use allkeys-lru there."
        )
    return Finding("eviction", "problem", message, advice)


def _persistence(info: dict[str, str]) -> Finding:
    if info.get("aof_enabled") == "1":
        return Finding("persistence", "ok", "The append-only file is on.")
    advice = "A restart loses the locks of holders that still run: set appendonly to yes, or use fences."
    return Finding("persistence", "advice", "The append-only file is off.", advice)


def _replicas(info: dict[str, str]) -> Finding:
    check, wanted = "replicas", conf.get().min_replicas
    role = info.get("role", "unknown")
    if role != "master":  # a replica of a Cluster, which has none of its own: a healthy Cluster was a problem
        return Finding(check, "ok", f"Its role is {role}.")
    connected = int(info.get("connected_slaves", 0))
    message = f"It has {connected or 'no'} connected replica{'' if connected == 1 else 's'}."
    if connected < wanted:
        advice = f"Connect more replicas, or lower {conf.NAME}['MIN_REPLICAS'] ({wanted}): no lock can be acquired now."
        return Finding("min_replicas", "problem", message, advice)
    if not connected or "min_slaves_good_slaves" in info:  # which it reports only with min-replicas-to-write
        return Finding(check, "ok", message)
    advice = (
        "Set min-replicas-to-write to 1 and min-replicas-max-lag to 2: a primary that is cut off, or that a failover "
        "has replaced, goes on confirming locks without it, and each gets a second holder."
    )
    return Finding(check, "advice", f"{message[:-1]}, and min-replicas-to-write is 0.", advice)


INFO_CHECKS = (
    ("version", "server", _version),
    ("eviction", "memory", _eviction),
    ("persistence", "persistence", _persistence),
    ("replicas", "replication", _replicas),
)


def _cluster(probe: Probe) -> Iterator[Finding]:
    """Yield a finding when a client of one server is used for a Cluster of several primaries."""
    try:
        enabled = probe.read("INFO", "cluster").get("cluster_enabled") == "1"
        primaries = int(probe.read("CLUSTER", "INFO").get("cluster_size", 1)) if enabled else 1
    except (RedisError, OSError):  # a proxy or a service that is no node itself, or a user who may not ask
        return
    if primaries > 1:
        message = f"It is one of {primaries} primaries of a Cluster, and the client knows this one only."
        advice = (
            "Use the backend 'django_redislock.cache.ClusterCache' for a cache, and a URL redis+cluster://host:port in "
            f"{conf.NAME}['URL']."
        )
        yield Finding("cluster", "problem", message, advice)


def _times(probe: Probe) -> Iterator[Finding]:
    """Yield the findings about the round trip time and the clocks."""
    trips = []
    try:
        for _ in range(PINGS):
            began = monotonic()
            probe.execute("PING")
            trips.append(monotonic() - began)
        trip = statistics.median(trips)
        before = time.time()
        seconds, microseconds = probe.execute("TIME")
        apart = int(seconds) + int(microseconds) / 1e6 - (before + time.time()) / 2
    except NoPermissionError:  # the findings about permissions say so
        return
    except (RedisError, OSError) as error:
        advice = "Check its load and its slow log (SLOWLOG GET)."
        yield Finding("round trip", "problem", f"Not measured: {sentence_of(error)}", advice)
        return
    text = f"The median of {PINGS} round trips is {_ms(trip)}."
    far = trip > MAX_ROUND_TRIP
    advice = "Each lock costs two round trips: use a server nearer to this machine, or read its slow log (SLOWLOG GET)."
    yield Finding("round trip", "advice" if far else "ok", text, advice if far else "")
    text = f"Its clock is {abs(apart):.3f} s {'ahead of' if apart > 0 else 'behind'} this machine's."
    off = abs(apart) > MAX_CLOCK_DIFFERENCE
    advice = "Run a time service (NTP) on both: logs, and fences after a failover, depend on the clocks; locks do not."
    yield Finding("clock", "advice" if off else "ok", text, advice if off else "")


def compare_timeouts(server: Server) -> Finding:
    """Compare the socket timeout with the expiry of a lock."""
    expire = conf.get().expire
    text = f"The timeout for a reply is {server.timeout:g} s, the expiry of a lock {expire:g} s (EXPIRE)."
    if server.timeout < expire:
        return Finding("socket timeout", "ok", text)
    advice = "Set the client's socket_timeout to less than EXPIRE, else a reply may arrive after the lock has expired."
    return Finding("socket timeout", "problem", text, advice)


def sentence_of(error: Exception) -> str:
    """Return the error as a sentence."""
    return f"{type(error).__name__}: {error}".rstrip(".: ") + "."


def _ms(seconds: float) -> str:
    return "less than 0.1 ms" if seconds < 0.00005 else f"{seconds * 1000:.1f} ms"


# Trials: locks on each server, and a value in each cache

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
    trial = replicated(server, conf.get().min_replicas)
    yield from _try_lock(trial)
    yield from _try_many_locks(trial)


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
    message = sentence_of(error)
    if "NOPERM" in str(error) or "ermission" in str(error):
        step = f"permissions ({step})"
        advice = RIGHTS
    elif advice := advice_for(str(error)):
        message = message.replace(f" {advice}"[:-1], "")  # it is said once
    elif "MovedError" in str(error):
        advice = "Use a redis.RedisCluster, or a URL that begins with redis+cluster://."
    else:
        advice = "Read the log about this error. Until it is solved, nothing can be locked on this connection."
    return Finding(step, "problem", message, advice)


def _try_many_locks(server: Server) -> Iterator[Finding]:
    """Hold many locks at once, and renew all by one call, as the watchdog does.

    So many that a proxy which routes keys to several servers does not have all of them on one by chance.
    """
    prefix, check = conf.get().key_prefix, "many locks"
    names = [f"redislock-doctor:{secrets.token_hex(8)}" for _ in range(MANY_LOCKS)]
    locks = [Lock(server, name, prefix=prefix, expire=TRIAL_TIMEOUT, auto_renewal=False) for name in names]
    try:
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            leases = [lease for lock in locks for lease in lock._leases.values()]
            renewed = ask(server, leases, renew_call).count(1)
            if renewed == MANY_LOCKS:
                how = "each by a call, because the server is in cluster mode" if server.splits else "by one call"
                yield Finding(check, "ok", f"{MANY_LOCKS} locks were held at once and renewed, {how}.")
            else:
                message = f"{MANY_LOCKS} locks were held at once, and {MANY_LOCKS - renewed} of them were not renewed."
                advice = (
                    "A proxy that spreads keys over several servers (twemproxy) is not supported: connect to one "
                    "server, or use a Cluster. Without one, check whether another program writes keys with this "
                    "prefix, and whether the server evicts keys."
                )
                yield Finding(check, "problem", message, advice)
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


# The least rights of a user of Redis, as lines of ``ACL SETUSER``; the tests try each of them on a real server

LOCKS = (
    "+eval +evalsha +subscribe +ping +select +publish +pubsub|numsub +time +get +set +del +exists +pttl +pexpire +mget "
    "+zadd +zrem +zrange +zpopmin +zscore +zcard +zrangebyscore +zremrangebyrank "
    "+hmget +hset +hdel +hlen +hgetall"
)
"""Also for the runs of entries that several beats share."""
CACHE = "+strlen +getrange +setrange +persist +rename +unlink +scan +zscan +incrby +multi +exec +expire"
DJANGO_CACHE = "+mset"
DJANGO_REDIS_CACHE = "+keys +ttl +expireat +pexpireat"
"""What the further methods of each backend need: Django's, and django-redis's (not its hashes and sets)."""
LISTS = "+zscan +zcount"


NEW_USER = "app"


def notes(client: Client) -> Iterator[str]:
    """Yield what to know before the lines of `least_rights` are given to the user of this connection."""
    user = server_of(client).settings.get("username")
    if user in (None, "default"):
        yield (
            f"This connection uses the user 'default', whose rights have no limit. Create another user (ACL SETUSER "
            f"{NEW_USER} on '>password'), give it these rights, and put its name and password into the settings."
        )
    else:
        yield f"resetchannels takes all other channels from the user {user!r}: grant those again that it needs."
    if isinstance(server_of(client), Cluster):
        yield "The nodes of a Cluster do not share their users: repeat the lines on each node."


def least_rights(alias: str, client: Client) -> Iterator[str]:
    """Yield the lines for this connection: the rights of locks, then those of each further feature."""
    settings, server = conf.get(), server_of(client)
    given = server.settings.get("username")
    user = f"ACL SETUSER {NEW_USER if given in (None, 'default') else given}"
    prefix = literal(settings.key_prefix)
    yield f"{user} resetchannels ~{{{prefix}:* &redislock:wake:* {LOCKS}"
    cache = _cache_of(alias)
    if cache is not None:
        more = DJANGO_REDIS_CACHE if hasattr(cache, "delete_pattern") else DJANGO_CACHE
        yield f"{user} ~{cache.pattern_of_own_keys()} {CACHE} {more}"
    yield f"{user} {LISTS}"
    yield f"{user} +info"
    if isinstance(server, Cluster):
        # By scans, reset_all() finds the leases of values. redis-py asks by COMMAND where the keys of a command are.
        yield f"{user} +cluster|slots +scan{'' if cache is None else ' +command'}"
    if settings.min_replicas:
        yield f"{user} +wait"
    if server.settings.get("client_name"):
        yield f"{user} +client|setname"


def _cache_of(alias: str) -> Any:
    """Return the cache of this package that has this alias, None for another one."""
    from .cache import get_cache

    try:
        return get_cache(alias)
    except Exception:  # also for the URL's connection, or for settings that other checks report
        return None
