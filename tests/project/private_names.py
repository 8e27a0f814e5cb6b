"""The private names of other packages that the package uses: each with its place, the reason, and what happens without.

A private name may be renamed by any release. So there are as few as possible, `test_private_names` finds each of them
in the installed version, and finds each use in the package that is not listed here. Django's ``_meta``, ``_state`` and
``_base_manager`` are documented.
"""

from __future__ import annotations

from typing import NamedTuple

LOUD = "an AttributeError or ImportError names it at the first use"


class Private(NamedTuple):
    """Private names: the module that defines them, the names, the files of ours that use them, the reason, and what
    replaces them."""

    module: str
    names: str
    used_in: tuple[str, ...]
    why: str
    without: str = LOUD


KINDS = ("core/driver/kinds.py",)
DJANGOS = ("cache/backends/django_backend.py",)
DJANGO_REDIS = ("cache/backends/django_redis_backend.py",)
DECORATOR = ("celery/decorator.py",)
TRANSACTIONS = ("transactions.py",)
REDIS_CACHE = "django.core.cache.backends.redis"

PRIVATE = [
    Private("redis.connection", "_sock", KINDS, "a connection's socket, which we read by ourselves"),
    Private("redis.connection", "_parsers", KINDS, "the class whose `parse_error` makes redis-py's errors"),
    Private("redis._parsers.base", "parse_error", KINDS, "makes redis-py's errors from Redis' words"),
    Private("redis.connection", "connection_kwargs", KINDS, "how a client's pool connects"),
    Private("redis.asyncio.connection", "_writer", KINDS, "the transport of a connection for asyncio, and its end"),
    Private("redis.asyncio.connection", "_reader", KINDS, "whether the server has closed a new connection"),
    Private(
        "asyncio.selector_events",
        "_call_connection_lost",
        KINDS,
        "closes the socket of a connection whose loop was closed before it",
        "the server is told, and the garbage collector closes the socket",
    ),
    Private(
        "redis.sentinel",
        "_force_master_ip",
        KINDS,
        "the host that a client was told to use",
        "Sentinel's word counts, as before redis-py 5.1",
    ),
    Private("redis.cluster", "nodes_manager startup_nodes nodes_cache", KINDS, "the nodes that a client knows"),
    Private("redis.cluster", "user_on_connect_func", KINDS, "what the client does with new connections"),
    Private("redis.cluster", "address_remap", KINDS, "the addresses that a client was told to use"),
    Private(
        "redis.cluster",
        "REDIS_ALLOWED_KEYS",
        ("cache/backends/cluster_backend.py",),
        "the options of a cache that are those of redis-py's client of a Cluster",
    ),
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
        "eventlet.hubs",
        "_threadlocal",
        ("core/driver/os_threads.py",),
        "whether a hub of eventlet runs in this thread: to ask for it would make one",
        "the thread is the acquirer, as without greenlets",
    ),
    Private("asgiref.local", "_storage", TRANSACTIONS, "a thread's connections, quicker", "connections.all()"),
    Private("django.utils.connection", "_connections", TRANSACTIONS, "the same", "connections.all()"),
    Private(
        "django.db.transaction",
        "_from_testcase",
        TRANSACTIONS,
        "the atomic block of a TestCase never commits",
        "a lock until the commit would stay in tests: Django documents no other way",
    ),
    Private(
        "django.test.testcases",
        "_overridden_settings",
        ("testing.py",),
        "a decorated class grants its locks before its own setUpClass and within its other settings",
    ),
    Private("django.utils.functional", "_wrapped", ("conf.py",), "the settings, quicker", "LazySettings' attributes"),
    Private(REDIS_CACHE, "_get_connection_pool", DJANGOS, "the pool of a cache"),
    Private(REDIS_CACHE, "_client", DJANGOS, "the class of a cache's client"),
    Private(REDIS_CACHE, "_class _servers _options", DJANGOS, "what makes the clients of a cache"),
    Private(
        REDIS_CACHE,
        "_cache",
        (*DJANGOS, "connections.py"),
        "the client of a cache",
        "connections.py names the cache as one that cannot hold locks",
    ),
    Private(
        "django.middleware.cache",
        "_cache_update_cache",
        ("cache/pages.py",),
        "a page says that it is not to be stored",
        "every page that Django would store is stored",
    ),
    Private("django.core.management.base", "_out", ("management/commands/redislock.py",), "pieces of a line"),
    Private(
        "django.core.cache.backends.locmem",
        "_expire_info _has_expired _delete",
        DJANGOS,
        "when a value ends, and the values whose keys match a pattern",
    ),
    Private("django_redis.cache", "_ignore_exceptions", DJANGO_REDIS, "the option IGNORE_EXCEPTIONS"),
    Private("django_redis.client.sharded", "_serverdict", DJANGO_REDIS, "the servers of a sharded cache"),
    Private("celery.app.base", "_task_from_fun", DECORATOR, "where a task below @app.task is made, and nowhere else"),
    Private(
        "celery._state",
        "_get_active_apps",
        (*DECORATOR, "management/selection.py"),
        "the check of marked functions that are no tasks; the group of a task for redislock release",
    ),
    Private(
        "celery.app.task",
        "_dump_pydantic_arguments",
        ("celery/publishing.py",),
        "models among the newest arguments are sent as Celery 5.7 sends those of a message",
        "they are refused by the serializer, as by Celery 5.6",
    ),
    Private(
        "celery.backends.asynchronous",
        "_pending_results",
        ("celery/message.py",),
        "who waits for a result before Celery 5.7",
        "a duplicate that is dropped ends no wait",
    ),
    Private("celery.worker.request", "_context", ("celery/main_process.py",), "the request that ended by its limit"),
    Private(
        "django_celery_beat.schedulers",
        "_dirty",
        ("celery/beat.py",),
        "a run that did not happen is not stored, and one of a killed leader is",
        "django-celery-beat stores a wrong time until the next run, or none",
    ),
    Private("threading", "_DummyThread", ("core/lease.py",), "a thread that has no end to wait for"),
    Private(
        "asyncio.coroutines",
        "_is_coroutine",
        ("core/async_lock.py",),
        "Python 3.11 has no inspect.markcoroutinefunction",
        "it is not used from Python 3.12 on",
    ),
]
