"""From the settings to a redis-py client."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

from django.conf import settings as django_settings
from django.core.cache import caches
from django.core.cache.backends.base import InvalidCacheBackendError
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver
from django.utils.module_loading import import_string
from redis import Redis

from . import conf
from .core.driver.registry import close_unused, server_of

_found: tuple[conf.Settings | None, dict[str | None, Redis]] = (None, {})
"""The clients that were looked up under the settings in force; their names are None where the settings choose."""


def get_client(using: str | None = None) -> Redis:
    """Return the client on which the locks of the settings are, or that of the cache alias `using`.

    It is for the functions of ``django_redislock.core``, which take the ``KEY_PREFIX`` of the settings as their `prefix`. Opens no
    connection. Raises ImproperlyConfigured when the alias is missing or is not a Redis cache.
    """
    return client_of(conf.get(), using)


def client_of(settings: conf.Settings, using: str | None = None) -> Redis:
    """Return the client as `get_client` does under these settings; it is looked up once for each settings object."""
    global _found
    of, clients = _found
    if of is not settings:
        _found = of, clients = settings, {}
    try:
        return clients[using]
    except KeyError:
        clients[using] = _look_up(settings, using)
        return clients[using]


def _look_up(settings: conf.Settings, using: str | None) -> Redis:
    if settings.url is not None and using in (None, URL):
        return _client_of_url(settings.url)
    alias = using or settings.cache_alias
    try:
        cache = caches[alias]
    except InvalidCacheBackendError as error:
        raise ImproperlyConfigured(
            f"django-redislock: {error} Name a Redis cache in {conf.NAME}['CACHE_ALIAS'], or give {conf.NAME}['URL']."
        ) from error
    client = client_of_cache(cache)
    if client is None:
        raise ImproperlyConfigured(
            f"django-redislock: the cache {alias!r} ({type(cache).__module__}.{type(cache).__qualname__}) is not a Redis cache. "
            f"Name one in {conf.NAME}['CACHE_ALIAS'], or give {conf.NAME}['URL']."
        )
    try:
        server_of(client)
    except TypeError as error:
        raise ImproperlyConfigured(f"django-redislock: the cache {alias!r} cannot hold locks: {error}.") from error
    return client


def client_of_cache(cache: Any) -> Redis | None:
    """Return the client to the primary of a Redis cache (django-redis or Django's own), or None for another cache."""
    client: Any = None
    if hasattr(getattr(cache, "client", None), "get_client"):  # django-redis
        with suppress(NotImplementedError):  # sharded: no one server holds all
            client = cache.client.get_client(write=True)
    elif hasattr(getattr(cache, "_cache", None), "get_client"):  # Django's own
        client = cache._cache.get_client(write=True)
    return client if isinstance(client, Redis) else None


def connection_names() -> list[str]:
    """Return the cache aliases whose servers may hold locks: that of the settings first, then the caches of this package."""
    settings = conf.get()
    first = [URL] if settings.url is not None else [settings.cache_alias]
    ours = [alias for alias, cache in django_settings.CACHES.items() if _is_ours(cache.get("BACKEND", ""))]
    return first + [alias for alias in ours if alias not in first]


def _is_ours(backend: str) -> bool:
    """Tell whether a backend is one of this package, or derived from one."""
    try:
        bases = import_string(backend).__mro__
    except (ImportError, ImproperlyConfigured):  # misspelt, or without its extra: it must be reported, not ignored
        return backend.startswith("django_redislock.")
    ours = {base.__module__ for base in bases if base.__module__.startswith("django_redislock.cache")}
    return bool(ours) and "django_redislock.cache.backends.local" not in ours  # a local cache has no server


URL = "url"
"""The name of the connection that ``DJANGO_REDISLOCK["URL"]`` gives."""


@lru_cache(maxsize=8)
def _client_of_url(url: str) -> Redis:
    try:
        return Redis.from_url(url)
    except ValueError as error:
        raise ImproperlyConfigured(f"{conf.NAME}['URL'] is not a Redis URL: {error}") from error


@receiver(setting_changed)
def _leave(setting: str = "", **kwargs: Any) -> None:
    """Leave no connection to what a test has overridden: Django and django-redis keep their clients of it."""
    if setting in ("CACHES", conf.NAME):
        close_unused()
