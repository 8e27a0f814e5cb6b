"""From the settings to a redis-py client."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

from django.conf import settings as django_settings
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver
from django.utils.module_loading import import_string
from redis import Redis, RedisCluster
from redis.asyncio import RedisCluster as AsyncRedisCluster

from . import conf
from .core.driver.effects import Pipeline, with_retries
from .core.driver.registry import Client, close_unused, server_of
from .core.driver.server import Server
from .core.memory_server import GRANTS_ALL
from .exceptions import is_interruption
from .server_url import checked, client_from_url

_servers: tuple[conf.Settings | None, dict[str | None, Server]] = (None, {})
"""The settings in force, and the servers that were looked up under them; by None the server that the settings name."""


def get_client(using: str | None = None) -> Client:
    """Return the redis-py client of the Redis that the settings name, or of the cache alias `using`.

    Use it with the functions and classes of ``django_redislock.core``, and give them the ``KEY_PREFIX`` of the settings
    as `prefix`. The client of a Cluster is a `redis.asyncio.RedisCluster`. Opens no connection. Raises
    ImproperlyConfigured when the alias is missing or is not a Redis cache.
    """
    return _client(conf.get(), using)


def server(settings: conf.Settings, using: str | None = None) -> Server:
    """Return the server that holds the locks under these settings; with ``ENABLED: False`` it grants every lock.

    Each server is looked up once for a settings object. Raises what `get_client` does.
    """
    global _servers
    of, found = _servers
    if of is not settings:
        _servers = of, found = settings, {}
    try:
        return found[using]
    except KeyError:
        found[using] = server_of(_client(settings, using)) if settings.enabled else GRANTS_ALL
        return found[using]


def ask(using: str | None, name: str, *commands: tuple[bytes, ...]) -> list[Any]:
    """Return the replies to commands that belong to the lock `name`. Raises LockBackendError when Redis cannot answer,
    and what `get_client` does."""
    asked = server(conf.get(), using)
    _, replies = asked.run(with_retries(name, Pipeline(commands), math.inf, asked))
    return replies  # type: ignore[no-any-return]


def _client(settings: conf.Settings, using: str | None) -> Client:
    if settings.url is not None and using in (None, URL):
        return _client_of_url(settings.url)
    alias = using or settings.cache_alias
    client, why = client_of_alias(alias)
    if client is None:
        raise ImproperlyConfigured(
            f"django-redislock: the cache {alias!r} cannot hold locks: {why}. Correct it in CACHES, name another in "
            f"{conf.NAME}['CACHE_ALIAS'], or give {conf.NAME}['URL']."
        )
    return client


def client_of_alias(alias: str) -> tuple[Client | None, str]:
    """Return the client of the cache of this alias; for one that cannot hold locks None, and why."""
    try:
        client = _client_of_cache(caches[alias])
        if client is None:
            return None, "it has no client of a single Redis"
        server_of(client)
        if isinstance(client, Redis):
            checked(client)
    except Exception as error:  # any that the backend, django-redis or redis-py raises for wrong settings
        if is_interruption(error):  # a soft time limit, which is no fault of the settings
            raise
        # "Port could not be cast to integer value as 'pa'": of a URL whose password has a slash, that is a part of it.
        text = re.sub(r"'.*'(?! in connection URL)", "'…'", str(error)) if type(error) is ValueError else str(error)
        return None, f"{type(error).__name__}: {text}".rstrip(".: ")
    return client, ""


def _client_of_cache(cache: Any) -> Client | None:
    """Return the client to the primary, or the Cluster, of a Redis cache (django-redis or Django's own), else None."""
    client: Any = None
    if hasattr(getattr(cache, "client", None), "get_unconnected_client"):  # ours for a Cluster
        client = cache.client.get_unconnected_client()
    elif hasattr(getattr(cache, "client", None), "get_client"):  # django-redis
        with suppress(NotImplementedError):  # sharded: no single server holds all keys
            client = cache.client.get_client(write=True)
    elif hasattr(getattr(cache, "_cache", None), "get_client"):  # Django's own
        client = cache._cache.get_client(write=True)
    return client if isinstance(client, (Redis, RedisCluster, AsyncRedisCluster)) else None


def connection_names() -> list[str]:
    """Return the aliases whose servers may hold locks: the alias of the settings, then the caches of this package."""
    settings = conf.get()
    first = [URL] if settings.url is not None else [settings.cache_alias]
    ours = [alias for alias, cache in django_settings.CACHES.items() if _is_ours(cache.get("BACKEND", ""))]
    return first + [alias for alias in ours if alias not in first]


def clients(connection: str | None = None) -> tuple[dict[str, Client], dict[str, str]]:
    """Return the client of each connection (or of this connection only), and for each one without a client the reason.

    A database to which several connections lead is included once. With ``ENABLED: False`` there is no connection. This
    connection may be any alias that ``lock(using=alias)`` takes, and need not be among the `connection_names`.
    Raises ImproperlyConfigured for wrong settings.
    """
    if not conf.get().enabled:
        return {}, {}
    found: dict[str, Client] = {}
    failed: dict[str, str] = {}
    places = set()
    for name in connection_names() if connection is None else [connection]:
        try:
            client = get_client(name)
        except ImproperlyConfigured as error:
            failed[name] = str(error)
            continue
        place = server_of(client).place
        if place not in places:
            places.add(place)
            found[name] = client
    return found, failed


def several_connections() -> bool:
    """Return whether locks are held on more than one connection."""
    try:
        found, failed = clients()
    except ImproperlyConfigured:  # reading the locks reports it
        return False
    return len(found) + len(failed) > 1


def _is_ours(backend: str) -> bool:
    """Return whether a backend is a backend of this package, or derived from one."""
    try:
        bases = getattr(import_string(backend), "__mro__", ())  # none of a function that makes the cache
    except (ImportError, ImproperlyConfigured):  # misspelt, or its extra is missing: this must be reported
        return backend.startswith("django_redislock.")
    ours = {base.__name__ for base in bases if base.__module__.startswith("django_redislock.cache")}
    return bool(ours) and "LocalBackend" not in ours  # it has no server


URL = "url"
"""The name of the connection to ``DJANGO_REDISLOCK["URL"]``."""


@lru_cache(maxsize=8)
def _client_of_url(url: str) -> Client:
    try:
        return client_from_url(url)
    except ValueError as error:
        raise ImproperlyConfigured(f"{conf.NAME}['URL'] is not a Redis URL: {error}") from error


@receiver(setting_changed)
def _close_unused(setting: str = "", **kwargs: Any) -> None:
    """Close the connections of overridden settings, because Django and django-redis keep their clients."""
    if setting in ("CACHES", conf.NAME):
        close_unused()
