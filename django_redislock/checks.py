"""System checks. Only `check_servers` opens connections."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from django.conf import settings
from django.core.cache import caches
from django.core.checks import CheckMessage, Error, Info, Warning
from django.core.exceptions import ImproperlyConfigured

from . import conf
from .connections import client_of_alias, clients, connection_names
from .core.driver.registry import server_of
from .doctor import inspect
from .name_template import without_text
from .tenants import import_callable

TAG = "redislock"

SHORTEST_RENEWED = 1.0
"""Seconds. A lock is renewed every third of its expiry, so it is lost when its holder stalls for two thirds of it.
Garbage collection, a busy core, or Redis forking to save its data may take some tenths of a second."""


def check_settings(**kwargs: object) -> list[CheckMessage]:
    return [
        Error(problem.message, hint=problem.hint, id="redislock.E001" if problem.unknown_key else "redislock.E002")
        for problem in _read()[1]
    ]


def check_alias_exists(**kwargs: object) -> list[CheckMessage]:
    alias = _lock_alias()
    if alias is None or alias in settings.CACHES:
        return []
    near = difflib.get_close_matches(alias, settings.CACHES, n=1)
    return [
        Error(
            f"{conf.NAME}['CACHE_ALIAS'] is {alias!r}, which is not in CACHES.",
            hint=f"Did you mean {near[0]!r}?" if near else f"Known aliases: {', '.join(sorted(settings.CACHES))}.",
            id="redislock.E003",
        )
    ]


def check_alias_is_redis(**kwargs: object) -> list[CheckMessage]:
    alias = _lock_alias()
    if alias is None or alias not in settings.CACHES:
        return []
    client, why = client_of_alias(alias)
    if client is not None:
        return []
    # A project that does not name the alias may use no locks at all, so it gets only a warning.
    kind, id = (Error, "redislock.E004") if _is_named() else (Warning, "redislock.W005")
    return [
        kind(
            f"The cache {alias!r} ({settings.CACHES[alias].get('BACKEND')}) cannot hold locks: {why}.",
            hint="Use the backend 'django_redislock.cache.RedisCache' for it, name another alias in "
            f"{conf.NAME}['CACHE_ALIAS'], give {conf.NAME}['URL'], or, where there is no Redis, set "
            f"{conf.NAME}['ENABLED'] to False.",
            id=id,
        )
    ]


def check_cluster_caches(**kwargs: object) -> list[CheckMessage]:
    """Report wrong URLs and options of a `ClusterCache`."""
    found: list[CheckMessage] = []
    for alias in settings.CACHES:
        try:
            check = getattr(caches[alias], "check_settings", None)
        except Exception:  # noqa: S112  # Django's own check, or one of the others, reports it
            continue
        try:
            if check is not None:
                check()
        except ImproperlyConfigured as error:
            hint = (
                "LOCATION names nodes, such as 'redis://node1:6379'. OPTIONS are those of django-redis and, in lower "
                "case, those of redis.RedisCluster."
            )
            found.append(Error(f"CACHES[{alias!r}]: {error}", hint=hint, id="redislock.E015"))
    return found


def _is_named() -> bool:
    """Return whether the settings name the cache for the locks."""
    raw = getattr(settings, conf.NAME, None)
    return isinstance(raw, Mapping) and "CACHE_ALIAS" in raw


def check_url_or_alias(**kwargs: object) -> list[CheckMessage]:
    if not _is_named() or getattr(settings, conf.NAME).get("URL") is None:
        return []
    return [
        Warning(
            f"{conf.NAME} has both 'URL' and 'CACHE_ALIAS'; locks use the URL.",
            hint="Remove one of them.",
            id="redislock.W001",
        )
    ]


def check_renewal_can_keep_up(**kwargs: object) -> list[CheckMessage]:
    return [
        Warning(
            f"{where}['EXPIRE'] is {section.expire:g} s, which is too short for a reliable renewal.",
            hint=f"Use at least {SHORTEST_RENEWED:g} s: a lock is renewed every third of its expiry, and lost after a "
            "pause of two thirds. A longer expiry costs only a longer wait after a crash. Or set "
            "'AUTO_RENEWAL' to False.",
            id="redislock.W002",
        )
        for where, section in _read()[0]
        if section.auto_renewal and section.expire < SHORTEST_RENEWED
    ]


def check_ignored_exceptions(**kwargs: object) -> list[CheckMessage]:
    alias = _lock_alias()
    if alias is None or alias not in settings.CACHES:
        return []
    if not _options(alias).get("IGNORE_EXCEPTIONS", getattr(settings, "DJANGO_REDIS_IGNORE_EXCEPTIONS", False)):
        return []
    return [
        Warning(
            f"The cache {alias!r} ignores exceptions and holds locks, but the errors of locks are raised.",
            hint="Handle LockBackendError where you use locks and silence this check, or give the locks an alias of "
            "their own.",
            id="redislock.W003",
        )
    ]


def check_tenants(**kwargs: object) -> list[CheckMessage]:
    """Report tenants that cannot be found or entered, and caches whose refreshes may need to enter one."""
    typed, _ = conf.read(getattr(settings, conf.NAME, None))
    found: list[CheckMessage] = []
    for name, named in (("TENANT", typed.tenant), ("ENTER_TENANT", typed.enter_tenant)):
        try:
            import_callable(named, name)
        except ImproperlyConfigured as error:
            found.append(Error(f"{error}.", hint=f"Correct {conf.NAME}[{name!r}].", id="redislock.E014"))
    if typed.tenant is not None and typed.enter_tenant is not None:
        return found
    for alias in settings.CACHES:
        try:
            makes_own = getattr(caches[alias], "_refreshes_by_own_keys", False)
        except Exception:  # noqa: S112  # Django's own check, or one of the others, reports it
            continue
        if makes_own:
            found.append(
                Warning(
                    f"The cache {alias!r} makes keys by a function of the site. With refresh='thread' or 'celery' a "
                    "thread or a worker that makes another key than the caller does not refresh the value.",
                    hint=f"If the keys depend on the caller's tenant, give {conf.NAME}['TENANT'] and "
                    f"{conf.NAME}['ENTER_TENANT'] (the page about the cache, Tenants). If not, silence this check.",
                    id="redislock.W012",
                )
            )
    return found


def check_celery_tasks(**kwargs: object) -> list[CheckMessage]:
    if "celery" not in sys.modules:
        return []  # there are no tasks
    if _read()[1]:
        return []  # reported already; tasks take options from these settings
    try:
        from .celery.decorator import check_tasks
    except ImportError:  # this Celery is too old for single-instance tasks
        return []
    return check_tasks()


def check_names(**kwargs: object) -> list[CheckMessage]:
    """Report methods whose lock or key is named by an object that has no text of its own."""
    return [
        Warning(
            f"The name {template!r} of {method} contains {{self}}, which has no text of its own.",
            hint="Each call is a TypeError. Name what identifies it, as in {self.pk}, or give its class a __str__.",
            id="redislock.W013",
        )
        for method, template in without_text()
    ]


CHECKS = (
    check_settings,
    check_alias_exists,
    check_alias_is_redis,
    check_cluster_caches,
    check_url_or_alias,
    check_renewal_can_keep_up,
    check_ignored_exceptions,
    check_tenants,
    check_celery_tasks,
    check_names,
)


def check_servers(**kwargs: object) -> list[CheckMessage]:
    """Check the server of each connection: reachable, its version, eviction, persistence, replicas, round
    trip and clock. Run by ``check --deploy`` only."""
    try:
        found, failed = clients()
    except ImproperlyConfigured:  # the checks of the settings report it
        return []
    failed.pop(connection_names()[0], None)  # as they do this one
    return [
        Error(f"Connection {connection!r}: {why}", hint="Correct CACHES.", id="redislock.E005")
        for connection, why in failed.items()
    ] + [
        level(f"Connection {connection!r}, {finding.check}: {finding.message}", hint=finding.advice, id=id)
        for connection, client in found.items()
        for finding in inspect(server_of(client))
        if finding.status != "ok" and finding.check in _OF_SERVERS
        for level, id in [_OF_SERVERS[finding.check]]
    ]


_OF_SERVERS: dict[str, tuple[Callable[..., CheckMessage], str]] = {
    "connection": (Error, "redislock.E005"),
    "version": (Error, "redislock.E006"),
    "eviction": (Warning, "redislock.W004"),
    "persistence": (Info, "redislock.I001"),
    "min_replicas": (Error, "redislock.E008"),
    "replicas": (Warning, "redislock.W006"),
    "cluster": (Error, "redislock.E009"),
    "round trip": (Info, "redislock.I002"),
    "clock": (Info, "redislock.I003"),
    "permissions (INFO)": (Info, "redislock.I004"),
}

Section = conf.Settings | conf.CacheSettings | conf.CelerySettings


def _read() -> tuple[list[tuple[str, Section]], list[conf.Problem]]:
    """Return each section of the settings with its name, also the lock options of cache aliases, and all problems."""
    typed, problems = conf.read(getattr(settings, conf.NAME, None))
    sections: list[tuple[str, Section]] = [
        (conf.NAME, typed),
        (f"{conf.NAME}['CACHE']", typed.cache),
        (f"{conf.NAME}['CELERY']", typed.celery),
    ]
    for alias in settings.CACHES:
        options = _options(alias)
        if "LOCK" in options:
            where = f"CACHES[{alias!r}]['OPTIONS']['LOCK']"
            sections.append((where, conf.override(typed.cache, options["LOCK"], where, problems)))
    return sections, problems


def _options(alias: str) -> dict[str, Any]:
    cache: dict[str, Any] = settings.CACHES[alias]
    return cache.get("OPTIONS") or {}


def _lock_alias() -> str | None:
    """Return the cache alias for the locks; None when the settings give a URL, or with ``ENABLED: False``."""
    typed, _ = conf.read(getattr(settings, conf.NAME, None))
    return typed.cache_alias if typed.enabled and typed.url is None else None
