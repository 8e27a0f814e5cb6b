"""Values of tenants that are refreshed by a thread or a worker: for the caller's tenant, or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from contextlib import contextmanager

import pytest
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from celery import Task
from django.core.cache import caches
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from kombu.utils.json import dumps, loads

from django_redislock import tasks
from django_redislock.cache import refresh, refreshable
from django_redislock.cache.lease import single_flight
from django_redislock.checks import TAG
from tests.support import wait_until
from tests.support.cache_programs import held
from tests.support.tenants_site.site import main

HERE = threading.local()


def tenant() -> str:
    return getattr(HERE, "tenant", "public")


@contextmanager
def entered(name):
    before, HERE.tenant = tenant(), name
    try:
        yield
    finally:
        HERE.tenant = before


@contextmanager
def refused(name):
    raise PermissionError(f"nobody enters {name}")
    yield


def make_key(key, key_prefix, version):
    return f"{tenant()}:{key_prefix}:{version}:{key}"


def make_short_key(key, key_prefix, version):
    return hashlib.sha256(f"{key_prefix}:{version}:{key}".encode()).hexdigest()


def report() -> str:
    return f"new of {tenant()}"


async def areport() -> str:
    return await sync_to_async(report)()


report_by_worker, areport_by_worker = refreshable(report), refreshable(areport)

BOTH = {"TENANT": tenant, "ENTER_TENANT": entered}


@pytest.fixture(autouse=True)
def _no_pause():
    single_flight._paused.clear()


@pytest.fixture
def caches_of_tenants(backend, redis_url, settings):
    """Return a function that gives the default cache this key function."""

    def configure(key_function=make_key):
        options = {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": redis_url}
        settings.CACHES = {"default": {**options, "KEY_FUNCTION": key_function}}
        return caches["default"]

    return configure


def ask_sync(cache, default, **options):
    with entered("acme"):
        return cache.get_or_set("k", default, 60, stale=30, **options)


def ask_under_asgi(cache, default, **options):
    async def server():
        async with ThreadSensitiveContext():
            await sync_to_async(setattr)(HERE, "tenant", "acme")
            value = await cache.aget_or_set("k", default, 60, stale=30, **options)
        wait_for = [task for task in asyncio.all_tasks() if task.get_name() == "redislock-refresh"]
        await asyncio.gather(*wait_for)
        return value

    return asyncio.run(server())


def ask_under_wsgi(cache, default, **options):
    with entered("acme"):
        return async_to_sync(cache.aget_or_set)("k", default, 60, stale=30, **options)


ways = pytest.mark.parametrize(
    ("ask", "default"),
    [
        (ask_sync, report),
        (ask_under_asgi, report),
        (ask_under_asgi, areport),
        (ask_under_wsgi, report),
        (ask_under_wsgi, areport),
    ],
    ids=["sync", "asgi", "asgi, coroutine", "wsgi", "wsgi, coroutine"],
)


@pytest.fixture
def sent(monkeypatch):
    """The messages that were sent; no worker has them yet."""
    messages: list[tuple] = []
    # Of the class, because a thread of a request has Celery's default app, and so another object of the task.
    monkeypatch.setattr(Task, "apply_async", lambda task, args, **options: messages.append(loads(dumps(args))))
    return messages


def at_rest():
    return not refresh._workers._known


@ways
@pytest.mark.parametrize("by", ["thread", "celery"])
def test_a_refresh_elsewhere_enters_the_tenant_of_its_caller(caches_of_tenants, settings, sent, ask, default, by):
    """A thread computed for "public", and stored that for acme; a worker made another key, and dropped the message."""
    settings.DJANGO_REDISLOCK = BOTH
    cache = caches_of_tenants()
    with entered("acme"):
        cache.set("k", "old", 25)
    assert ask(cache, default, refresh=by) == "old"
    for message in sent:
        tasks.refresh(*message)
    with entered("acme"):
        wait_until(lambda: cache.get("k") == "new of acme")
    assert cache.get("k") is None
    assert tenant() == "public"


@ways
@pytest.mark.parametrize("by", ["thread", "celery"])
@pytest.mark.parametrize(
    "options", [{}, {"TENANT": tenant}, {"TENANT": tenant, "ENTER_TENANT": refused}], ids=["", "no way in", "refused"]
)
def test_a_refresh_that_cannot_be_done_for_the_tenant_is_not_done_but_logged_counted_and_paused(
    caches_of_tenants, client, settings, sent, ask, default, by, options, caplog
):
    settings.DJANGO_REDISLOCK = options
    cache = caches_of_tenants()
    with entered("acme"):
        cache.set("k", "old", 25)
    errors = cache.stats().errors
    assert ask(cache, default, refresh=by) == "old"
    for message in sent:
        with pytest.raises((ImproperlyConfigured, PermissionError), match="acme"):
            tasks.refresh(*message)
    wait_until(lambda: cache.stats().errors == errors + 1)
    wait_until(at_rest)
    if by == "thread":
        assert "is not refreshed for the tenant" in caplog.text or "nobody enters acme" in caplog.text
    with entered("acme"):
        assert cache.get("k") == "old"
    assert cache.get("k") is None
    assert not held(client)
    assert client.keys("*failed:*"), "over all processes the next one tries after a pause"
    single_flight._paused.clear()
    assert ask(cache, default, refresh=by) == "old"
    wait_until(at_rest)
    assert cache.stats().errors == errors + 1


@ways
def test_a_tenant_that_is_no_part_of_the_key_is_entered_or_nothing_is_done(
    caches_of_tenants, settings, ask, default, caplog
):
    settings.DJANGO_REDISLOCK = BOTH
    cache = caches_of_tenants(None)
    cache.set("k", "old", 25)
    assert ask(cache, default, refresh="thread") == "old"
    wait_until(lambda: cache.get("k") == "new of acme")
    settings.DJANGO_REDISLOCK = {"TENANT": tenant}
    cache.set("k", "old", 25)
    single_flight._paused.clear()
    assert ask(cache, default, refresh="thread") == "old"
    wait_until(lambda: "is not refreshed for the tenant 'acme'" in caplog.text)
    wait_until(at_rest)
    assert cache.get("k") == "old"


@ways
@pytest.mark.parametrize("by", ["thread", "celery"])
def test_a_key_function_that_makes_the_same_key_everywhere_needs_no_tenant(caches_of_tenants, sent, ask, default, by):
    cache = caches_of_tenants(make_short_key)
    cache.set("k", "old", 25)
    assert ask(cache, default, refresh=by) == "old"
    for message in sent:
        tasks.refresh(*message)
    wait_until(lambda: cache.get("k").startswith("new of"))


@ways
@pytest.mark.parametrize("by", ["thread", "celery"])
@pytest.mark.parametrize(("get", "said"), [(lambda: 1 / 0, "ZeroDivisionError"), (lambda: 7, "must return a str")])
def test_a_tenant_that_cannot_be_told_gives_the_caller_the_old_value(
    caches_of_tenants, settings, ask, default, by, get, said, caplog
):
    settings.DJANGO_REDISLOCK = {"TENANT": get}
    cache = caches_of_tenants(None)
    cache.set("k", "old", 25)
    assert ask(cache, default, refresh=by) == "old"
    assert said in caplog.text
    assert cache.get("k") == "old"


def findings():
    return [(message.id, message.msg) for message in run_checks(tags=[TAG]) if message.id[-4:] in ("W012", "E014")]


@pytest.mark.parametrize(
    ("key_function", "options", "warned"),
    [
        (make_key, {}, True),
        (make_key, {"TENANT": tenant}, True),
        (make_key, BOTH, False),
        (None, {}, False),
    ],
    ids=["own keys", "no way in", "tenants", "Django's keys"],
)
def test_a_check_warns_of_keys_that_a_refresh_elsewhere_may_make_otherwise(
    caches_of_tenants, settings, key_function, options, warned
):
    settings.DJANGO_REDISLOCK = options
    caches_of_tenants(key_function)
    found = findings()
    assert [id for id, _ in found] == ["redislock.W012"] * warned
    for _, message in found:
        assert message.startswith("The cache 'default' makes keys by a function of the site.")


@pytest.mark.parametrize("backend", ["LocMemCache", "DummyCache"])
def test_no_check_warns_of_a_local_cache_which_refreshes_nothing(caches_of_tenants):
    caches_of_tenants()
    assert findings() == []


@pytest.mark.parametrize("name", ["TENANT", "ENTER_TENANT"])
@pytest.mark.parametrize("backend", ["RedisCache"])
def test_a_check_reports_a_tenant_that_cannot_be_imported(caches_of_tenants, settings, name):
    caches_of_tenants(None)
    settings.DJANGO_REDISLOCK = {name: "nowhere.tenant"}
    said = f"The {name} 'nowhere.tenant' cannot be imported: No module named 'nowhere'."
    assert ("redislock.E014", said) in findings()  # besides those of tasks that other tests have left


# A site of django-tenants, with a schema for each tenant


@pytest.fixture
def answers(run_python, postgres, redis_url, backend, client, request):
    """What the site answered, by the handler and the view."""
    env = {
        "DJANGO_SETTINGS_MODULE": "tests.support.tenants_site.settings",
        "TENANTS_DATABASE": json.dumps(postgres.new_database()),
        "TENANTS_REDIS": redis_url,
        "TENANTS_BACKEND": backend,
        "PYTHONDEVMODE": "",  # which tells of each slow step of asyncio, and of Django's connections at the exit
        **getattr(request, "param", {}),
    }
    return run_python(main, env=env, new=True).finish()


@pytest.mark.processes
def test_django_tenants_each_tenant_has_its_own_values_sync_and_async_by_wsgi_and_asgi(answers):
    """Under ASGI and WSGI a coroutine got the value of the tenant that had asked first."""
    for said in answers:
        match said:
            case {"refresh": _}:
                assert said["answers"] == ["old", "old"]
                assert said["stored"] == ["acme", "umbrella"], said
                assert not any(said["errors"])
            case {"tenant": tenant}:
                assert said["answers"] == [tenant] * 2, said
            case _:
                assert said["deleted"] == [str([said["view"] != "decorated", said["view"] == "decorated"])] * 2, said
    assert len(answers) == 2 * (5 * 3 + 3 * 2)


@pytest.mark.processes
@pytest.mark.parametrize("answers", [{"TENANTS_UNKNOWN": "1"}], indirect=True)
def test_django_tenants_without_the_setting_no_value_of_another_tenant_is_stored(answers):
    refreshed = [said for said in answers if "refresh" in said]
    assert [said["stored"] for said in refreshed] == [["old", "old"]] * 12
    assert [said["errors"] for said in refreshed if said["refresh"] == "celery"] == [["ImproperlyConfigured"] * 2] * 6
