"""The least rights of a user of Redis, as lines of ``ACL SETUSER``; the tests try each of them on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.cache import caches

from . import conf
from .core.driver.cluster import Cluster
from .core.driver.registry import Client, server_of
from .core.keys import literal

LOCKS = (
    "+eval +evalsha +subscribe +ping +select +publish +pubsub|numsub +time +get +set +del +exists +pttl +pexpire +mget "
    "+zadd +zrem +zrange +zrank +zpopmin +zscore +zcard +zrangebyscore +zremrangebyrank +zincrby +hincrby +hdel"
)
CACHE = "+strlen +getrange +setrange +persist +rename +unlink +scan +zscan +incrby +multi +exec +expire"
DJANGO_CACHE = "+mset"
DJANGO_REDIS_CACHE = "+keys +ttl +expireat +pexpireat"
"""What the further methods of each backend need: Django's, and django-redis's (not its hashes and sets)."""
LISTS = "+zscan +zcount +hgetall +hmget +hset"
"""Also for the runs of entries that several beats share."""


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
    from .cache import ComputeOnceMixin

    try:
        cache = caches[alias]
    except Exception:  # the URL's connection, or settings that other checks report
        return None
    return cache if isinstance(cache, ComputeOnceMixin) else None
