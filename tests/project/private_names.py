"""The private names of other packages that the package uses: each with its place, the reason, and what happens without.

A private name may be renamed by any release. So there are as few as possible, `test_private_names` finds each of them
in the installed version, and finds each use in the package that is not listed here. Django's ``_meta``, ``_state`` and
``_base_manager`` are documented.
"""

from __future__ import annotations

from typing import NamedTuple


class Private(NamedTuple):
    """A private name: the module that defines it, the files of ours that use it, the reason, and what replaces it."""

    module: str
    name: str
    used_in: tuple[str, ...]
    why: str
    without: str


KINDS = ("core/driver/kinds.py",)
LOUD = "an AttributeError or ImportError names it at the first use"
PAGES = ("cache/pages.py",)
DJANGOS = ("cache/backends/django_backend.py",)

PRIVATE = [
    Private("redis.connection", "_sock", KINDS, "a connection's socket, which we read by ourselves", LOUD),
    Private("redis.connection", "_parsers", KINDS, "the class whose `parse_error` makes redis-py's errors", LOUD),
    Private("redis._parsers.base", "parse_error", KINDS, "makes redis-py's errors from Redis' words", LOUD),
    Private("redis.connection", "connection_kwargs", KINDS, "how a client's pool connects", LOUD),
    Private("redis.asyncio.connection", "_writer", KINDS, "the transport of a connection for asyncio", LOUD),
    Private("redis.asyncio.connection", "_reader", KINDS, "whether the server has closed a new connection", LOUD),
    Private("redis.asyncio.connection", "_close", KINDS, "closes a connection without waiting for the loop", LOUD),
    Private("redis.sentinel", "_force_master_ip", KINDS, "the host that a client was told to use", LOUD),
    Private("redis.cluster", "nodes_manager", KINDS, "the nodes that a Cluster's client knows", LOUD),
    Private("redis.cluster", "startup_nodes", KINDS, "the same", LOUD),
    Private("redis.cluster", "nodes_cache", KINDS, "the same", LOUD),
    Private("redis.cluster", "user_on_connect_func", KINDS, "what the client does with new connections", LOUD),
    Private("redis.cluster", "address_remap", KINDS, "the addresses that a client was told to use", LOUD),
    Private(
        "asgiref.sync",
        "_restore_context",
        ("cache/refresh.py",),
        "the refreshing thread has the caller's language and time zone",
        "the function runs in a copy of the caller's context, which is enough before asgiref 3.8",
    ),
    Private(
        "asgiref.current_thread_executor",
        "_work_thread",
        ("core/acquirers.py",),
        "a lock that is acquired through async_to_sync knows that it would wait for itself",
        "it waits as for any holder",
    ),
    Private(
        "asgiref.local",
        "_storage",
        ("transactions.py",),
        "the connections of a thread, quicker than by connections.all()",
        "connections.all()",
    ),
    Private("django.utils.connection", "_connections", ("transactions.py",), "the same", "connections.all()"),
    Private(
        "django.db.transaction",
        "_from_testcase",
        ("transactions.py",),
        "the atomic block of a TestCase never commits",
        "a lock until the commit would stay in tests: Django documents no other way",
    ),
    Private(
        "django.utils.functional",
        "_wrapped",
        ("conf.py",),
        "the settings are read quicker than by attributes of LazySettings",
        "they are read by attributes",
    ),
    Private("django.core.cache.backends.redis", "_get_connection_pool", DJANGOS, "the pool of a cache", LOUD),
    Private("django.core.cache.backends.redis", "_client", DJANGOS, "the class of a cache's client", LOUD),
    Private("django.core.cache.backends.redis", "_class", DJANGOS, "what makes the clients of a cache", LOUD),
    Private("django.core.cache.backends.redis", "_servers", DJANGOS, "the same", LOUD),
    Private("django.core.cache.backends.redis", "_options", DJANGOS, "the same", LOUD),
    Private(
        "django.core.cache.backends.redis",
        "_cache",
        (*DJANGOS, "connections.py"),
        "the client of a cache",
        "connections.py names the cache as one that cannot hold locks",
    ),
    Private(
        "django.middleware.cache",
        "_cache_update_cache",
        PAGES,
        "a page says that it is not to be stored",
        "every page that Django would store is stored",
    ),
    Private(
        "django.core.management.base",
        "_out",
        ("management/commands/redislock.py",),
        "`watch` writes pieces of a line",
        LOUD,
    ),
    Private(
        "django_redis.cache",
        "_ignore_exceptions",
        ("cache/backends/django_redis_backend.py",),
        "the option IGNORE_EXCEPTIONS",
        LOUD,
    ),
    Private(
        "django_redis.client.sharded",
        "_serverdict",
        ("cache/backends/django_redis_backend.py",),
        "the servers of a sharded cache",
        LOUD,
    ),
    Private(
        "celery.app.base",
        "_task_from_fun",
        ("celery/decorator.py",),
        "@single_instance below @app.task: the class of a task is made there, and nowhere else",
        LOUD,
    ),
    Private(
        "celery._state",
        "_get_active_apps",
        ("celery/decorator.py",),
        "the check of functions that are marked and are no tasks",
        LOUD,
    ),
    Private(
        "celery.app.task",
        "_dump_pydantic_arguments",
        ("celery/publishing.py",),
        "models among the newest arguments are sent as Celery 5.7 sends those of a message",
        "they are refused by the serializer, as by Celery 5.6",
    ),
    Private("celery.worker.request", "_context", ("celery/receivers.py",), "the request that ended by its limit", LOUD),
    Private(
        "django_celery_beat.schedulers",
        "_dirty",
        ("celery/beat.py",),
        "a run that did not happen is not stored, and one of a killed leader is",
        "django-celery-beat stores a wrong time until the next run, or none",
    ),
    Private(
        "threading",
        "_DummyThread",
        ("core/lease.py",),
        "a thread that Python did not start has no end to wait for",
        LOUD,
    ),
    Private(
        "asyncio.coroutines",
        "_is_coroutine",
        ("core/async_lock.py",),
        "Python 3.11 has no inspect.markcoroutinefunction",
        "it is not used from Python 3.12 on",
    ),
    Private(
        "asyncio.events",
        "_get_running_loop",
        ("core/driver/side_by_side.py", "core/quorum_lease.py"),
        "None where no loop runs, without an exception",
        LOUD,
    ),
]
