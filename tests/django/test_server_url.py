from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured
from redis.sentinel import SentinelManagedSSLConnection

from django_redislock import conf, get_client
from django_redislock.core.driver.kinds import place_of, settings_of
from django_redislock.core.driver.registry import server_of
from django_redislock.server_url import client_from_url


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
