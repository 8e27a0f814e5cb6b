"""Cache backends whose `get_or_set` computes a missing value once for all threads and processes.

One mixin serves django-redis's backend (`RedisCache`, and `ClusterCache` for a Redis Cluster) and Django's own
(`DjangoRedisCache`). Everything else works as in the base class, and stored bytes are the same. `LocMemCache` and
`DummyCache` have the same methods without Redis, for tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from .backends.django_backend import DjangoRedisCache, DummyCache, LocMemCache
from .compute_once import ComputeOnceMixin
from .decorators import cached
from .pages import cache_page
from .refresh import refreshable

if TYPE_CHECKING:
    from .backends.cluster_backend import ClusterCache
    from .backends.django_redis_backend import RedisCache

__all__ = [
    "ClusterCache",
    "ComputeOnceMixin",
    "DjangoRedisCache",
    "DummyCache",
    "LocMemCache",
    "RedisCache",
    "cache_page",
    "cached",
    "get_cache",
    "refreshable",
]


def get_cache(using: str = "default") -> ComputeOnceMixin:
    """Return ``caches[using]``, typed with the methods and options of this package.

    Raises ImproperlyConfigured when its backend is not one of this package.
    """
    cache = caches[using]
    if isinstance(cache, ComputeOnceMixin):
        return cache
    raise ImproperlyConfigured(
        f"The cache {using!r} ({type(cache).__module__}.{type(cache).__qualname__}) has no methods of "
        "django-redislock. "
        "Give it a BACKEND of django_redislock.cache; in tests that may be LocMemCache or DummyCache."
    )


def __getattr__(name: str) -> Any:
    # django-redis is an extra: it is imported only when a backend on it is used.
    module = {"RedisCache": "django_redis_backend", "ClusterCache": "cluster_backend"}.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.backends.{module}"), name)
    except ModuleNotFoundError as error:
        raise ImproperlyConfigured(
            f"django_redislock.cache.{name} needs django-redis ({error}): pip install django-redislock[cache]. "
            "For Django's own Redis backend use django_redislock.cache.DjangoRedisCache."
        ) from error
