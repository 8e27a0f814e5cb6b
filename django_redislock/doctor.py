"""What may be wrong between this program and the servers that hold its locks, each finding with what to do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from redis.exceptions import NoPermissionError, RedisError

from . import conf
from .core.clock import monotonic
from .core.driver.server import Server

OLDEST = (6, 2)
"""The oldest version of Redis whose commands the scripts know. Valkey tells 7.2 to clients that ask for Redis."""
CLOCK = 1.0
"""Seconds by which the clocks may differ."""
ROUND_TRIP = 0.05
"""Seconds; a lock costs two of them."""
PINGS = 9

Status = Literal["ok", "advice", "problem"]


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    status: Status
    message: str
    advice: str = ""


class Probe:
    """A connection like those that the locks use: it gives up after the same time and does not try again."""

    def __init__(self, server: Server) -> None:
        self._connection: Any = server.connection().redis_connection

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.disconnect()

    def ask(self, *command: str) -> Any:
        """Return the reply in bytes; raises RedisError."""
        self._connection.send_command(*command)
        return self._connection.read_response(disable_decoding=True)

    def info(self, section: str) -> dict[str, str]:
        """Return a section of INFO; raises RedisError."""
        lines = self.ask("INFO", section).decode(errors="replace").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


def look(server: Server) -> Iterator[Finding]:
    """Yield what the server says of itself; a single finding when it does not answer."""
    with Probe(server) as probe:
        try:
            began = monotonic()
            probe.ask("PING")
            yield Finding("connection", "ok", f"It answers within {_ms(monotonic() - began)}, connecting included.")
        except NoPermissionError as error:
            yield Finding("connection", "advice", f"It answers, but: {told(error)}", "Let the user run PING.")
        except (RedisError, OSError) as error:
            advice = "Start it, or correct the address, the password or the firewall between it and this machine."
            yield Finding("connection", "problem", f"It cannot be reached: {told(error)}", advice)
            return
        for check, section, judge in LOOKS:
            try:
                yield judge(probe.info(section))
            except NoPermissionError as error:
                advice = "Let the user run INFO, or look at the server's configuration yourself. Locks do not need it."
                yield Finding(check, "advice", f"It is not allowed to be read: {told(error)}", advice)
            except (RedisError, OSError) as error:
                yield Finding(check, "problem", f"It could not be read: {told(error)}", "Try again.")
        yield from _times(probe)


def _version(info: dict[str, str]) -> Finding:
    # Valkey calls itself Redis 7.2.4 in redis_version, for the sake of clients.
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
        "Set maxmemory-policy to noeviction, or give the locks a server of their own: an evicted lock is held twice."
    )
    if policy.startswith("volatile-"):  # it evicts keys with an expiry only, and every lease has one
        advice += (
            f" On a server for caches alone a lost lock does little harm, but {policy} evicts the keys with the "
            "shortest life first. These are the rights to compute values: without them several processes compute the "
            "same value (lease_evicted in cache.stats()). Use allkeys-lru there."
        )
    return Finding("eviction", "problem", message, advice)


def _persistence(info: dict[str, str]) -> Finding:
    if info.get("aof_enabled") == "1":
        return Finding("persistence", "ok", "The append-only file is on.")
    advice = (
        "After a restart its locks are forgotten while their holders still run: set appendonly to yes, or use fences."
    )
    return Finding("persistence", "advice", "The append-only file is off.", advice)


LOOKS = (
    ("version", "server", _version),
    ("eviction", "memory", _eviction),
    ("persistence", "persistence", _persistence),
)


def _times(probe: Probe) -> Iterator[Finding]:
    """Yield the round trip time and how far the clocks are apart."""
    trips = []
    try:
        for _ in range(PINGS):
            began = monotonic()
            probe.ask("PING")
            trips.append(monotonic() - began)
        trip = statistics.median(trips)
        before = time.time()
        seconds, microseconds = probe.ask("TIME")
        apart = int(seconds) + int(microseconds) / 1e6 - (before + time.time()) / 2
    except (RedisError, OSError) as error:
        advice = "Look at its load, its slow log (SLOWLOG GET) and what the user may run (PING, TIME)."
        yield Finding("round trip", "problem", f"Not measured: {told(error)}", advice)
        return
    text = f"The median of {PINGS} round trips is {_ms(trip)}."
    far = trip > ROUND_TRIP
    advice = "Each lock costs two: use a server nearer to this machine, or look at its slow log (SLOWLOG GET)."
    yield Finding("round trip", "advice" if far else "ok", text, advice if far else "")
    text = f"Its clock is {abs(apart):.3f} s {'ahead of' if apart > 0 else 'behind'} this machine's."
    off = abs(apart) > CLOCK
    advice = "Run a time service (NTP) on both. Locks go by the server's clock alone; logs and fences after a failover suffer."
    yield Finding("clock", "advice" if off else "ok", text, advice if off else "")


def patience(server: Server) -> Finding:
    """Compare how long a call may take with how long a lock lives."""
    expire = conf.get().expire
    text = f"An answer is waited for {server.timeout:g} s, a lock lives {expire:g} s (EXPIRE)."
    if server.timeout < expire:
        return Finding("socket timeout", "ok", text)
    advice = "Set the client's socket_timeout to less than EXPIRE: else an answer may arrive when the lock has ended."
    return Finding("socket timeout", "problem", text, advice)


def told(error: Exception) -> str:
    """Return the error as a sentence."""
    return f"{type(error).__name__}: {error}".rstrip(".: ") + "."


def _ms(seconds: float) -> str:
    return "less than 0.1 ms" if seconds < 0.00005 else f"{seconds * 1000:.1f} ms"
