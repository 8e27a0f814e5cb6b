from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from redis.sentinel import SentinelManagedSSLConnection

from django_redislock import conf, get_client
from django_redislock.core import Lock
from django_redislock.core.driver.kinds import place_of, settings_of
from django_redislock.core.driver.registry import server_of
from django_redislock.server_url import client_from_url

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def given(settings):
    """Return the settings as read after setting DJANGO_REDISLOCK."""

    def given(raw: object) -> conf.Settings:
        settings.DJANGO_REDISLOCK = raw
        return conf.get()

    return given


def test_every_key_is_optional(settings, given):
    if hasattr(settings, "DJANGO_REDISLOCK"):
        del settings.DJANGO_REDISLOCK
    assert conf.get() == given(None) == given({}) == conf.Settings()
    assert given({"CACHE": {"EXPIRE": 5}}).cache == conf.CacheSettings(expire=5.0), "a section changes what it names"


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
        tenant=None,
        enter_tenant=None,
        cache=conf.CacheSettings(
            expire=10, auto_renewal=True, max_hold=300, wait=30, on_wait_timeout="compute", on_error="raise"
        ),
        celery=conf.CelerySettings(
            scope="run",
            key=None,
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


def test_good_values_are_converted_and_the_users_dict_is_left_as_it_is(given):
    raw = {"EXPIRE": timedelta(minutes=1), "CACHE": {"EXPIRE": 5}}
    given(raw)
    assert raw == {"EXPIRE": timedelta(minutes=1), "CACHE": {"EXPIRE": 5}}
    for value, seconds in ((timedelta(minutes=1), 60.0), (5, 5.0), (0.001, 0.001), (2.5, 2.5)):
        expire = given({"EXPIRE": value}).expire
        assert (expire, type(expire)) == (seconds, float)
    for value in ("raise", "skip", "reschedule", "wait", print):
        assert given({"CELERY": {"ON_CONFLICT": value}}).celery.on_conflict == value
    for url in ("redis://localhost:6379/1", "rediss://user:word@host", "unix:///run/redis.sock?db=1", None):
        assert given({"URL": url}).url == url


BAD_LIVES = [0, -1, 0.0001, NAN, INF, 10**18, 10**400, "5", "x" * 10_000, True, timedelta(0), []]
BAD_WAITS = [-1, NAN, INF, 10**18, 10**400, "5", False, timedelta(-1)]
BAD_SHARES = (-0.1, 1.1, "0.5", True, None)
BAD = [
    *[("EXPIRE", value) for value in [*BAD_LIVES, None]],
    *[("MAX_HOLD", value) for value in BAD_LIVES],
    *[("TIMEOUT", value) for value in BAD_WAITS],
    *[("RETRY_FOR", value) for value in BAD_WAITS],
    *[("MIN_REPLICAS", value) for value in (-1, 101, 1.5, "1", None, True)],
    *[("AUTO_RENEWAL", value) for value in (1, 0, "yes", None)],
    *[("RENEWAL_JITTER", value) for value in BAD_SHARES],
    *[("ENABLED", value) for value in (1, "False", None)],
    *[("CACHE_ALIAS", value) for value in ("", 1, None)],
    *[(name, value) for name in ("TENANT", "ENTER_TENANT") for value in ("", "schema", "shop.", "a b.c", 1)],
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
    *[("RENEWAL_JITTER", value) for value in BAD_SHARES],
    *[("ON_WAIT_TIMEOUT", value) for value in ("", "Raise", 1, None)],
    *[("ON_ERROR", value) for value in ("", "Stale", "compute", 1, None)],
    *[("JITTER", value) for value in BAD_SHARES],
]
BAD_CELERY = [
    *[("EXPIRE", value) for value in [*BAD_LIVES, None]],
    *[("MAX_HOLD", value) for value in BAD_LIVES],
    *[("WAIT", value) for value in [*BAD_WAITS, None]],
    *[("AUTO_RENEWAL", value) for value in (1, None)],
    *[("RENEWAL_JITTER", value) for value in BAD_SHARES],
    *[("SCOPE", value) for value in ("", "queue", 1, None)],
    *[("ON_CONFLICT", value) for value in ("", "drop", 1, None)],
    *[("QUEUE_LIFE", value) for value in [*BAD_LIVES, None]],
    *[("ON_BACKEND_ERROR", value) for value in ("", "skip", 1, None)],
    *[("KEY", value) for value in ("", "account_id", "{a", 1, [1], b"a")],
    *[("ON_DUPLICATE", value) for value in ("", "skip", 1, None)],
    *[("KEEP_FOR", value) for value in [*BAD_WAITS, None]],
    *[("LOCK_DIRECT_CALLS", value) for value in (1, "yes", None)],
    *[("RESCHEDULE_DELAY", value) for value in [*BAD_LIVES, None]],
    *[("RESCHEDULE_LIMIT", value) for value in BAD_WAITS],
]
SECTIONS = {"": BAD, "CACHE": BAD_CACHE, "CELERY": BAD_CELERY}
CASES = [
    (
        f"DJANGO_REDISLOCK['{section}']['{key}']" if section else f"DJANGO_REDISLOCK['{key}']",
        [{section: {key: value}} if section else {key: value} for named, value in cases if named == key],
    )
    for section, cases in SECTIONS.items()
    for key in dict(cases)
]
CASES.append(("DJANGO_REDISLOCK", [[], "redis://localhost", 1, True]))


@pytest.mark.parametrize(("where", "raws"), CASES)
def test_a_bad_value_is_named_with_what_it_must_be(given, where, raws):
    for raw in raws:
        for _ in range(2):  # it is told each time
            with pytest.raises(ImproperlyConfigured) as caught:
                given(raw)
            assert str(caught.value).startswith(f"{where} is "), raw
            assert "It must be " in str(caught.value)
            assert len(str(caught.value)) < 500, "a huge value does not flood the message"


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


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("valkey://user:hunter2@localhost", "URL"),
        ("redis://:hunter2@one/0?socket_timeot=5", "redis-py does not take its options: .*'socket_timeot'"),
        ("redis+sentinel://:hunter2@one/main?socket_timeot=5", "redis-py does not take its options: .*'socket_timeot'"),
        ("redis+cluster://:hunter2@one?socket_timeot=5", "redis-py does not take its options: .*'socket_timeot'"),
        ("redis://:hunter2@one/0?protocol=5", "redis-py does not take its options: protocol must be"),
        ("rediss://:hunter2@one/0?ssl_cert_reqs=needed", "redis-py does not take its options: .*needed"),
        ("redis://:hun/ter2@one:6379/0", "percent-encode / . # and % in its password"),
        ("redis://:hun#ter2@one:6379/0", "percent-encode / . # and % in its password"),
        ("redis://:hun?ter2@one:6379/0", "percent-encode / . # and % in its password"),
        # The host ended at the first of these characters, and so the locks went to localhost.
        ("redis://:/hunter2@one:6379/0", "percent-encode / . # and % in its password"),
        ("redis://:12/hunter2@one:6379/0", "percent-encode / . # and % in its password"),
        ("redis://:?password=hunter2@one:6379/0", "percent-encode / . # and % in its password"),
        ("redis://:?hunter2@one:6379/0", "percent-encode / . # and % in its password"),
        ("rediss://:#hunter2@one:6379/0", "percent-encode / . # and % in its password"),
        ("redis+sentinel://me:#hunter2@one/main/0", "percent-encode / . # and % in its password"),
        ("redis+cluster://:?hunter2@one", "percent-encode / . # and % in its password"),
        ("unix:///run/redis#hunter2.sock", "percent-encode / . # and % in its password"),
        ("redis://one:6379/hun", "must be a URL that begins with redis://"),
    ],
)
def test_a_wrong_url_is_told_of_and_its_password_is_not(given, url, why):
    with pytest.raises(ImproperlyConfigured, match=why) as caught:
        given({"URL": url})
    assert "hun" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://one/0?password=a@b",
        "redis://one/?db=2",
        "redis://one/shop?db=2",
        "redis://one/%31",
        "redis:///0/",
        "unix:///run/a@b.sock?db=0",
        "redis://[::1]/1",
    ],
)
def test_a_url_that_redis_py_understands_is_taken(url):
    assert conf.read({"URL": url})[1] == []


def test_read_lists_every_problem_and_keeps_defaults_for_what_is_wrong():
    typed, problems = conf.read({"EXPIRE": 0, "TIMEOUT": 3, "CACHE": {"WAIT": -1}, "NONSENSE": 1})
    assert typed == conf.Settings(timeout=3.0)
    assert [problem.unknown_key for problem in problems] == [False, False, True]
    with pytest.raises(ImproperlyConfigured, match=r"OPTIONS\['EXPIRE'\] is 0"):
        conf.override(conf.CacheSettings(), {"EXPIRE": 0}, "OPTIONS")


def test_settings_that_no_longer_hold_do_not_shorten_the_retries_of_a_plain_lock(client):
    usual = Lock(client, "a")._new_lease(None, "x").retry_for
    with override_settings(DJANGO_REDISLOCK={"RETRY_FOR": 0.5}):
        conf.get()
        assert Lock(client, "a")._new_lease(None, "x").retry_for == 0.5
    assert Lock(client, "a")._new_lease(None, "x").retry_for == usual


# The URL of the server


def sentinels_of(pool):
    return [settings_of(each.connection_pool) for each in pool.sentinel_manager.sentinels]


def test_a_url_names_sentinels_their_service_and_what_the_primary_wants():
    url = "redis+sentinel://me:p%40ss@one:1,[::1]:2,three/my%2Fservice/4?socket_timeout=7&sentinel_password=s"
    pool = client_from_url(url).connection_pool
    of_primary = settings_of(pool)
    assert pool.service_name == "my/service"
    assert pool.is_master
    assert [(each["host"], each["port"]) for each in sentinels_of(pool)] == [("one", 1), ("::1", 2), ("three", 26379)]
    assert {(each["username"], each["password"]) for each in sentinels_of(pool)} == {(None, "s")}
    assert (of_primary["username"], of_primary["password"], of_primary["db"]) == ("me", "p@ss", 4)
    assert server_of(client_from_url(url)).timeout == 7


def test_the_database_may_be_missing():
    assert place_of(client_from_url("redis+sentinel://one/main").connection_pool)[-1] == "0"


def test_with_tls_the_sentinels_use_it_too():
    pool = client_from_url("rediss+sentinel://one/main/0?ssl_ca_certs=/ca.pem").connection_pool
    assert pool.connection_class is SentinelManagedSSLConnection
    assert settings_of(pool)["ssl_ca_certs"] == "/ca.pem"
    (sentinel,) = pool.sentinel_manager.sentinels
    assert issubclass(SentinelManagedSSLConnection, sentinel.connection_pool.connection_class)
    assert sentinels_of(pool)[0]["ssl_ca_certs"] == "/ca.pem"


ONE = "redis+sentinel://me:x@a:1,b:2/main/0"


def test_the_same_sentinels_service_database_and_user_are_one_server():
    same = [ONE, "redis+sentinel://me:x@b:2,a:1/main"]
    assert len({server_of(client_from_url(url)) for url in same}) == 1


@pytest.mark.parametrize(
    "other",
    [
        "redis+sentinel://me:x@a:1/main/0",
        "redis+sentinel://me:x@a:1,b:2/other/0",
        "redis+sentinel://me:x@a:1,b:2/main/1",
        "redis+sentinel://you:x@a:1,b:2/main/0",
        "rediss+sentinel://me:x@a:1,b:2/main/0",
        "redis+sentinel://me:x@a:1,b:2/main/0?sentinel_password=y",
    ],
)
def test_what_differs_is_another_server(other):
    one, another = client_from_url(ONE), client_from_url(other)
    assert server_of(one) is not server_of(another)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+sentinel://one:1", "names no service"),
        ("redis+sentinel://one:1/", "names no service"),
        ("redis+sentinel:///main", "'' is not host:port of a Sentinel"),
        ("redis+sentinel://one:1,/main", "'' is not host:port of a Sentinel"),
        ("redis+sentinel://one:x/main", "'one:x' is not host:port of a Sentinel"),
        ("redis+sentinel://one:1/main/zero", "database .* must be a number, not 'zero'"),
        ("redis+sentinel://one:1/main/0?socket_timeout=x", "socket_timeout"),
        ("sentinel://one:1/main/0", "scheme"),
        ("redis://.shop.svc:6379/0", "label empty"),  # where the variable before the dot is empty
        ("redis+sentinel://.shop.svc:1/main/0", "'.shop.svc:1' is not host:port of a Sentinel"),
    ],
)
def test_a_url_that_cannot_work_says_why(url, why):
    with pytest.raises(ValueError, match=why):
        client_from_url(url)


def test_the_settings_check_it_and_keep_the_password_to_themselves(settings):
    settings.DJANGO_REDISLOCK = {"URL": "redis+sentinel://me:secret@one:1"}
    with pytest.raises(ImproperlyConfigured, match=r"host:26379,host:26379/service/0") as failure:
        get_client()
    assert "secret" not in str(failure.value)
    settings.DJANGO_REDISLOCK = {"URL": ONE}
    assert conf.get().url == ONE
    assert get_client().connection_pool.service_name == "main"
