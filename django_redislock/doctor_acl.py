"""The least rights of a user of Redis, as lines of ``ACL SETUSER``; the tests try each of them on a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator

from django.core.cache import caches

from . import conf
from .core.driver.cluster import Cluster
from .core.driver.registry import Client, server_of

LOCKS = (
    "+eval +evalsha +subscribe +ping +select +publish +pubsub|numsub +time +get +set +del +exists +pttl +pexpire +mget "
    "+zadd +zrem +zrange +zrank +zpopmin +zscore +zcard +zrangebyscore +zremrangebyrank +zincrby +hincrby +hdel"
)
CACHE = "+multi +exec +ttl +strlen +getrange +setrange +persist +rename +unlink +expire +incrby +scan +flushdb"
LISTS = "+zscan +zcount +hgetall +hmget +hset"
"""Also for the runs of entries that several beats share."""


def least_rights(alias: str, client: Client) -> Iterator[str]:
    """Yield the lines for this connection: the rights of locks, then those of each further feature."""
    settings, server = conf.get(), server_of(client)
    user = f"ACL SETUSER {server.settings.get('username') or 'default'}"
    prefix = _literal(settings.key_prefix)
    yield f"{user} resetchannels ~{{{prefix}:* &redislock:wake:* {LOCKS}"
    keys = _cache_keys(alias)
    if keys is not None:
        yield f"{user} ~{keys} {CACHE}"
    yield f"{user} {LISTS}"
    yield f"{user} +info"
    if isinstance(server, Cluster):
        yield f"{user} +cluster|slots +scan"  # by scans, reset_all() finds the leases of values
    if settings.min_replicas:
        yield f"{user} +wait"
    if server.settings.get("client_name"):
        yield f"{user} +client|setname"


def _cache_keys(alias: str) -> str | None:
    """Return the pattern of the keys of the cache of this package that has this alias, None for another one."""
    from .cache import ComputeOnceMixin

    try:
        cache = caches[alias]
    except Exception:  # the URL's connection, or settings that other checks report
        return None
    if not isinstance(cache, ComputeOnceMixin):
        return None
    mark = "redislock-any-key"
    return _literal(cache.make_key(mark, version=1)).replace(f":1:{mark}", ":*").replace(mark, "*")


def _literal(text: str) -> str:
    """Return the pattern that matches this text only."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)
