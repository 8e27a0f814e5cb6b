from __future__ import annotations

from weakref import WeakSet

import pytest
from django.apps import apps
from django.core import checks
from django.core.cache import InvalidCacheBackendError, caches
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from django_redislock.celery import decorator

NOWHERE = "redis://127.0.0.1:1/0"  # nobody answers there: a check that connected would fail
REDIS = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": NOWHERE}


@pytest.fixture(autouse=True)
def _no_marks_of_other_tests(monkeypatch):
    """Functions that other tests marked as single-instance tasks are told of for as long as they live."""
    monkeypatch.setattr(decorator, "_declarations", WeakSet())


@pytest.fixture
def found(settings):
    """Return the messages of the checks under these settings, as {id: (message, hint)}."""

    def found(lock: object = None, **caches: dict[str, object]) -> dict[str, tuple[str, str]]:
        settings.CACHES = {"default": REDIS} | caches
        settings.DJANGO_REDISLOCK = lock
        messages = checks.run_checks(tags=["redislock"])
        assert all(message.hint for message in messages)
        by_id = {str(message.id): (message.msg, str(message.hint)) for message in messages}
        assert len(by_id) == len(messages), "more messages than ids"
        return by_id

    return found


def test_good_settings_have_no_message(found):
    assert checks.run_checks(tags=["redislock"]) == []
    assert found({"EXPIRE": 30, "CACHE": {"EXPIRE": 1}}) == {}
    assert found({"EXPIRE": 0.5, "AUTO_RENEWAL": False}) == {}
    assert found({"URL": None, "CACHE_ALIAS": "default"}) == {}
    for kind in ("django_redis.cache", "django.core.cache.backends.redis", "django_redislock.cache"):
        assert found({"CACHE_ALIAS": "other"}, other={"BACKEND": f"{kind}.RedisCache", "LOCATION": NOWHERE}) == {}
    for lock in ({"ENABLED": False}, {"URL": NOWHERE}):
        assert found(lock, default={"BACKEND": "django.core.cache.backends.dummy.DummyCache"}) == {}, (
            "any cache will do"
        )


@pytest.mark.parametrize(
    ("lock", "id", "message", "hint"),
    [
        ({"EXPIRY": 1}, "E001", "DJANGO_REDISLOCK['EXPIRY'] is not a known setting.", "Did you mean 'EXPIRE'?"),
        (
            {"CACHE": {"WAIT": "long"}},
            "E002",
            "DJANGO_REDISLOCK['CACHE']['WAIT'] is 'long'.",
            "It must be a number of seconds from 0 to ten years or a timedelta or None.",
        ),
        (
            {"CACHE_ALIAS": "lock"},
            "E003",
            "DJANGO_REDISLOCK['CACHE_ALIAS'] is 'lock', which is not in CACHES.",
            "Did you mean 'locks'?",
        ),
        (
            {"CACHE_ALIAS": "xyz"},
            "E003",
            "DJANGO_REDISLOCK['CACHE_ALIAS'] is 'xyz', which is not in CACHES.",
            "Known aliases: default, locks.",
        ),
        (
            {"URL": NOWHERE, "CACHE_ALIAS": "default"},
            "W001",
            "DJANGO_REDISLOCK has both 'URL' and 'CACHE_ALIAS'; locks use the URL.",
            "Remove one of them.",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_what_to_do(found, lock, id, message, hint):
    assert found(lock, locks=REDIS) == {f"redislock.{id}": (message, hint)}


def test_every_wrong_value_is_told(settings, found):
    assert list(found(["EXPIRE"])) == ["redislock.E002"]
    settings.DJANGO_REDISLOCK = {"EXPIRE": 0, "TIMEOUT": -1, "CELERY": {"SCOPE": "all"}}
    assert [message.id for message in checks.run_checks(tags=["redislock"])] == ["redislock.E002"] * 3


@pytest.mark.parametrize(
    ("lock", "id"), [({"EXPIRY": 1}, "redislock.E001"), ({"EXPIRE": 0}, "redislock.E002"), ([], "redislock.E002")]
)
def test_wrong_options_of_an_alias_are_a_message_of_plain_check_that_names_it(settings, redis_url, lock, id):
    cache = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": redis_url, "OPTIONS": {"LOCK": lock}}
    settings.CACHES = {"default": REDIS, "reports": cache}
    with pytest.raises(SystemCheckError, match=rf"{id}.*CACHES\['reports'\]\['OPTIONS'\]\['LOCK'\]"):
        call_command("check")
    with pytest.raises(ImproperlyConfigured, match=r"CACHES\['reports'\]\['OPTIONS'\]\['LOCK'\]"):
        caches["reports"].get_or_set("k", 1)


def test_a_misspelt_backend_is_djangos_error_in_a_check_and_at_the_first_use(settings):
    settings.CACHES = {"default": REDIS, "reports": {"BACKEND": "django_redislock.cache.RedisCahce"}}
    apps.get_app_config("django_redislock").ready()
    with pytest.raises(InvalidCacheBackendError, match=r"django_redislock\.cache\.RedisCahce"):
        call_command("check")
    with pytest.raises(InvalidCacheBackendError, match=r"django_redislock\.cache\.RedisCahce"):
        caches["reports"].get("k")


@pytest.mark.parametrize(
    ("backend", "options", "why"),
    [
        ("django.core.cache.backends.locmem.LocMemCache", {}, "no client of a single Redis"),
        (REDIS["BACKEND"], {"CLIENT_CLASS": "django_redis.client.ShardClient"}, "no client of a single Redis"),
        ("nowhere.Cache", {}, "No module named 'nowhere'"),
        (None, {}, "BACKEND"),
    ],
)
def test_alias_that_cannot_hold_locks(found, backend, options, why):
    cache = {"BACKEND": backend, "LOCATION": NOWHERE, "OPTIONS": options} if backend else {}
    message, hint = found({"CACHE_ALIAS": "other"}, other=cache)["redislock.E004"]
    assert message.startswith(f"The cache 'other' ({backend}) cannot hold locks: ")
    assert why in message
    assert "django_redislock.cache.RedisCache" in hint


@pytest.mark.parametrize(
    ("lock", "options", "where"),
    [
        ({"EXPIRE": 0.5}, {}, "DJANGO_REDISLOCK"),
        ({"CACHE": {"EXPIRE": 0.5}}, {}, "DJANGO_REDISLOCK['CACHE']"),
        ({"CELERY": {"EXPIRE": 0.5}}, {}, "DJANGO_REDISLOCK['CELERY']"),
        ({}, {"LOCK": {"EXPIRE": 0.5}}, "CACHES['other']['OPTIONS']['LOCK']"),
    ],
)
def test_expiry_that_the_renewal_cannot_keep(found, lock, options, where):
    message, _ = found(lock, other=REDIS | {"OPTIONS": options})["redislock.W002"]
    assert message == f"{where}['EXPIRE'] is 0.5 s, which is too short for a reliable renewal."


def test_ignored_exceptions_on_the_alias_of_the_locks(found, settings):
    ignoring = REDIS | {"OPTIONS": {"IGNORE_EXCEPTIONS": True}}
    assert "'default'" in found({}, default=ignoring)["redislock.W003"][0]
    assert found({}, other=ignoring) == {}
    assert found({"URL": NOWHERE}, default=ignoring) == {}
    settings.DJANGO_REDIS_IGNORE_EXCEPTIONS = True
    assert list(found({})) == ["redislock.W003"]
    assert found({}, default=REDIS | {"OPTIONS": {"IGNORE_EXCEPTIONS": False}}) == {}


def test_the_checks_of_tasks_import_no_celery(run_python):
    code = (
        "import django, sys; django.setup(); from django.core.checks import run_checks; "
        "run_checks(tags=['redislock']); say(imported='celery' in sys.modules)"
    )
    assert run_python(code, new=True).finish() == [{"imported": False}]


def test_options_that_nobody_reads_are_found_though_the_package_was_not_imported(run_python):
    code = "\n".join(
        [
            "import celery, django; django.setup(); from django.core.checks import run_checks",
            "app = celery.Celery()",
            "@app.task(name='unread', single_instance={'expire': 5})",
            "def unread(): pass",
            "say(ids=[message.id for message in run_checks(tags=['redislock'])])",
        ]
    )
    assert run_python(code).finish() == [{"ids": ["redislock.E012"]}]


# With --deploy: what needs the network


@pytest.fixture
def deployed(settings):
    """Return the messages of all checks about a server at this URL, as {id: hint}."""

    def deployed(url: str) -> dict[str, str]:
        settings.CACHES = {"default": {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": url}}
        messages = checks.run_checks(tags=["redislock"], include_deployment_checks=True)
        assert all(message.hint for message in messages)
        return {str(message.id): str(message.hint) for message in messages}

    return deployed


def test_only_a_deployment_check_uses_the_network(settings, found):
    assert found() == {}
    with pytest.raises(SystemCheckError, match=r"redislock\.E005.*cannot be reached"):
        call_command("check", "--tag", "redislock", "--deploy")


def test_a_cache_whose_location_is_wrong_is_reported_beside_the_one_of_the_locks(settings, redis_url):
    good = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": redis_url}
    settings.CACHES = {"default": good, "pages": {**good, "LOCATION": "redis://:pa/ss@host"}}
    messages = checks.run_checks(tags=["redislock"], include_deployment_checks=True)
    (said,) = [message.msg for message in messages if message.id == "redislock.E005"]
    assert said.startswith("Connection 'pages': ")


def test_server_that_forgets_at_a_restart(deployed, redis_url, client):
    assert "appendonly" in deployed(redis_url)["redislock.I001"]
    client.config_set("appendonly", "yes")
    try:
        assert not {"redislock.I001", "redislock.E005", "redislock.W004"} & deployed(redis_url).keys()
    finally:
        client.config_set("appendonly", "no")


def test_server_that_evicts(deployed, redis_url, client):
    client.config_set("maxmemory", "500mb")
    client.config_set("maxmemory-policy", "volatile-lru")
    try:
        told = deployed(redis_url)["redislock.W004"]
        assert "noeviction" in told
        assert "volatile-lru evicts only keys with an expiry, such as the leases of values" in told
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "0")
