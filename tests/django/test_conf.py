from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_redislock import conf
from django_redislock.core import Lock

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def given(settings):
    """Return the settings as read after setting DJANGO_REDISLOCK."""

    def given(raw: object) -> conf.Settings:
        settings.DJANGO_REDISLOCK = raw
        return conf.get()

    return given


def test_every_key_is_optional(settings):
    if hasattr(settings, "DJANGO_REDISLOCK"):
        del settings.DJANGO_REDISLOCK
    assert conf.get() == conf.Settings()


def test_none_is_nothing(given):
    assert given(None) == given({}) == conf.Settings()


def test_every_documented_default():
    assert conf.Settings() == conf.Settings(
        cache_alias="default",
        url=None,
        key_prefix="redislock",
        expire=30,
        auto_renewal=True,
        max_hold=None,
        timeout=None,
        retry_for=None,
        enabled=True,
        cache=conf.CacheSettings(
            expire=10, auto_renewal=True, max_hold=300, wait=30, on_wait_timeout="compute", on_error="raise"
        ),
        celery=conf.CelerySettings(
            scope="run",
            key=None,
            tenant=None,
            expire=30,
            auto_renewal=True,
            max_hold=None,
            on_conflict="raise",
            wait=10,
            skip_result=None,
            on_duplicate="return",
            queue_life=3600,
            keep_for=0,
            on_backend_error="raise",
            lock_direct_calls=False,
            reschedule_delay=10,
            reschedule_limit=None,
        ),
    )


def test_override_settings_just_works(given):
    given({"EXPIRE": 40})
    with override_settings(DJANGO_REDISLOCK={"EXPIRE": 50}):
        assert conf.get().expire == 50
        with override_settings(DJANGO_REDISLOCK={}):
            assert conf.get().expire == 30
    assert conf.get().expire == 40


def test_the_users_dict_is_left_as_it_is(given):
    raw = {"EXPIRE": timedelta(minutes=1), "CACHE": {"EXPIRE": 5}}
    given(raw)
    assert raw == {"EXPIRE": timedelta(minutes=1), "CACHE": {"EXPIRE": 5}}


@pytest.mark.parametrize(("value", "seconds"), [(timedelta(minutes=1), 60.0), (5, 5.0), (0.001, 0.001), (2.5, 2.5)])
def test_lives(given, value, seconds):
    expire = given({"EXPIRE": value}).expire
    assert (expire, type(expire)) == (seconds, float)


def test_a_section_changes_only_what_it_names(given):
    assert given({"CACHE": {"EXPIRE": 5}}).cache == conf.CacheSettings(expire=5.0)


@pytest.mark.parametrize("value", ["raise", "skip", "reschedule", "wait", print])
def test_on_conflict_takes_a_word_or_a_callable(given, value):
    assert given({"CELERY": {"ON_CONFLICT": value}}).celery.on_conflict == value


@pytest.mark.parametrize(
    "url", ["redis://localhost:6379/1", "rediss://user:word@host", "unix:///run/redis.sock?db=1", None]
)
def test_urls(given, url):
    assert given({"URL": url}).url == url


BAD_LIVES = [0, -1, 0.0001, NAN, INF, 10**18, 10**400, "5", True, timedelta(0), []]
BAD_WAITS = [-1, NAN, INF, 10**18, 10**400, "5", False, timedelta(-1)]
BAD = [
    *[("EXPIRE", value) for value in [*BAD_LIVES, None]],
    *[("MAX_HOLD", value) for value in BAD_LIVES],
    *[("TIMEOUT", value) for value in BAD_WAITS],
    *[("RETRY_FOR", value) for value in BAD_WAITS],
    *[("MIN_REPLICAS", value) for value in (-1, 101, 1.5, "1", None, True)],
    *[("AUTO_RENEWAL", value) for value in (1, 0, "yes", None)],
    *[("ENABLED", value) for value in (1, "False", None)],
    *[("CACHE_ALIAS", value) for value in ("", 1, None)],
    *[("KEY_PREFIX", value) for value in ("", 1, None, "a{b", "a}b", b"a", "x" * 1001, "\ud800")],
    *[
        ("URL", value)
        for value in ("", 1, "localhost:6379", "http://localhost", "redis://host:port", b"redis://localhost")
    ],
    *[("CACHE", value) for value in (None, 1, [], "a")],
    *[("CELERY", value) for value in (None, 1, [], "a")],
]
BAD_CACHE = [
    *[("EXPIRE", value) for value in [*BAD_LIVES, None]],
    *[("MAX_HOLD", value) for value in BAD_LIVES],
    *[("WAIT", value) for value in BAD_WAITS],
    *[("AUTO_RENEWAL", value) for value in (1, None)],
    *[("ON_WAIT_TIMEOUT", value) for value in ("", "Raise", 1, None)],
    *[("ON_ERROR", value) for value in ("", "Stale", "compute", 1, None)],
    *[("JITTER", value) for value in (-0.1, 1.1, "0.5", True, None)],
]
BAD_CELERY = [
    *[("EXPIRE", value) for value in [*BAD_LIVES, None]],
    *[("MAX_HOLD", value) for value in BAD_LIVES],
    *[("WAIT", value) for value in [*BAD_WAITS, None]],
    *[("AUTO_RENEWAL", value) for value in (1, None)],
    *[("SCOPE", value) for value in ("", "queue", 1, None)],
    *[("ON_CONFLICT", value) for value in ("", "drop", 1, None)],
    *[("QUEUE_LIFE", value) for value in [*BAD_LIVES, None]],
    *[("ON_BACKEND_ERROR", value) for value in ("", "skip", 1, None)],
    *[("KEY", value) for value in ("", "account_id", "{a", 1, [1], b"a")],
    *[("TENANT", value) for value in ("", "schema", "shop.", "a b.c", 1)],
    *[("ON_DUPLICATE", value) for value in ("", "skip", 1, None)],
    *[("KEEP_FOR", value) for value in [*BAD_WAITS, None]],
    *[("LOCK_DIRECT_CALLS", value) for value in (1, "yes", None)],
    *[("RESCHEDULE_DELAY", value) for value in [*BAD_LIVES, None]],
    *[("RESCHEDULE_LIMIT", value) for value in BAD_WAITS],
]
CASES = [
    *[({key: value}, f"DJANGO_REDISLOCK['{key}'] is ") for key, value in BAD],
    *[({"CACHE": {key: value}}, f"DJANGO_REDISLOCK['CACHE']['{key}'] is ") for key, value in BAD_CACHE],
    *[({"CELERY": {key: value}}, f"DJANGO_REDISLOCK['CELERY']['{key}'] is ") for key, value in BAD_CELERY],
    *[(raw, "DJANGO_REDISLOCK is ") for raw in ([], "redis://localhost", 1, True)],
]


@pytest.mark.parametrize(("raw", "message"), CASES)
def test_a_bad_value_is_named_with_what_it_must_be(given, raw, message):
    with pytest.raises(ImproperlyConfigured) as caught:
        given(raw)
    assert str(caught.value).startswith(message)
    assert "It must be " in str(caught.value)


def test_every_key_has_a_bad_value_above():
    anything = ("SKIP_RESULT", object())  # none is bad
    for section, cases in (
        (conf.Settings, BAD),
        (conf.CacheSettings, BAD_CACHE),
        (conf.CelerySettings, [*BAD_CELERY, anything]),
    ):
        assert {name.upper() for name in section.__dataclass_fields__} == {key for key, _ in cases}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"EXPIRY": 1}, "DJANGO_REDISLOCK['EXPIRY'] is not a known setting. Did you mean 'EXPIRE'?"),
        ({"expire": 1}, "DJANGO_REDISLOCK['expire'] is not a known setting. Did you mean 'EXPIRE'?"),
        (
            {"CACHE": {"ON_TIMEOUT": 1}},
            "['CACHE']['ON_TIMEOUT'] is not a known setting. Did you mean 'ON_WAIT_TIMEOUT'?",
        ),
        ({"CELERY": {"TIMEOUT": 1}}, "['CELERY']['TIMEOUT'] is not a known setting. Did you mean 'WAIT'?"),
        ({"TTL": 1}, "DJANGO_REDISLOCK['TTL'] is not a known setting. Did you mean 'EXPIRE'?"),
        ({"CELERY": {"SCOPES": 1}}, "['CELERY']['SCOPES'] is not a known setting. Did you mean 'SCOPE'?"),
        ({7: 1}, "DJANGO_REDISLOCK[7] is not a known setting. Known keys: AUTO_RENEWAL, CACHE, "),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(given, raw, message):
    with pytest.raises(ImproperlyConfigured) as caught:
        given(raw)
    assert message in str(caught.value)


def test_the_password_of_a_bad_url_is_not_shown(given):
    with pytest.raises(ImproperlyConfigured) as caught:
        given({"URL": "valkey://user:hunter2@localhost"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://:hunter2@one/0", "redis+sentinel://:hunter2@one/main", "redis+cluster://:hunter2@one"]
)
def test_a_misspelt_option_of_the_url_is_named_and_the_password_is_not(given, url):
    with pytest.raises(ImproperlyConfigured, match=r"redis-py does not take its options: .*'socket_timeot'") as caught:
        given({"URL": f"{url}?socket_timeot=5"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("password", ["hun/ter2", "hun#ter2", "hun?ter2"])
def test_a_password_that_must_be_encoded_is_told_so(given, password):
    with pytest.raises(ImproperlyConfigured, match=r"percent-encode / . # and % in its password") as caught:
        given({"URL": f"redis://:{password}@one:6379/0"})
    assert "hun" not in str(caught.value)


def test_a_huge_value_does_not_flood_the_message(given):
    with pytest.raises(ImproperlyConfigured) as caught:
        given({"EXPIRE": "x" * 10_000})
    assert len(str(caught.value)) < 300


def test_bad_settings_are_told_each_time(given):
    for _ in range(2):
        with pytest.raises(ImproperlyConfigured):
            given({"EXPIRE": 0})


def test_read_lists_every_problem_and_keeps_defaults_for_what_is_wrong():
    typed, problems = conf.read({"EXPIRE": 0, "TIMEOUT": 3, "CACHE": {"WAIT": -1}, "NONSENSE": 1})
    assert typed == conf.Settings(timeout=3.0)
    assert [problem.unknown_key for problem in problems] == [False, False, True]


def test_override_raises_the_first_problem_where_nobody_collects_them():
    with pytest.raises(ImproperlyConfigured, match=r"OPTIONS\['EXPIRE'\] is 0"):
        conf.override(conf.CacheSettings(), {"EXPIRE": 0}, "OPTIONS")


def test_settings_that_no_longer_hold_do_not_shorten_the_retries_of_a_plain_lock(client):
    usual = Lock(client, "a")._new_lease(None, "x").retry_for
    with override_settings(DJANGO_REDISLOCK={"RETRY_FOR": 0.5}):
        conf.get()
        assert Lock(client, "a")._new_lease(None, "x").retry_for == 0.5
    assert Lock(client, "a")._new_lease(None, "x").retry_for == usual
