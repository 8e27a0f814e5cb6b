"""The admin's list with several connections, and with connections and settings that fail."""

from __future__ import annotations

import io
from typing import Any

import pytest
import redis
from django.core.cache.backends.dummy import DummyCache
from django.core.management import CommandError, call_command
from django.test import Client
from prometheus_client import CollectorRegistry

from django_redislock.metrics import _Held, _Values
from tests.support import RedisServer, Server
from tests.support.admin_pages import (
    LIST,
    hold,
    messages,
    names,
    page,
    page_of,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("locks_by_url")]


@pytest.fixture
def two(settings: Any, own_server: RedisServer) -> redis.Redis:
    """A second connection, to another server."""
    cache = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": own_server.url}
    settings.CACHES = settings.CACHES | {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
    settings.CACHES = settings.CACHES | {"second": cache}
    return own_server.client()


@pytest.mark.processes
def test_several_connections_on_one_page(web: Client, client: redis.Redis, two: redis.Redis, settings: Any) -> None:
    hold(client, "first's")
    hold(two, "second's")
    hold(client, "both's", expire=500)
    hold(two, "both's", expire=400)
    assert sorted(names(page(web))) == ["both's", "both's", "first's", "second's"]
    assert sorted(names(page(web, "?connection=second"))) == ["both's", "second's"]
    assert sorted(names(page(web, "?connection=url"))) == ["both's", "first's"]
    assert names(page(web, "?o=7.1")) == ["both's", "second's", "both's", "first's"]
    assert "8 min" in page(web, path=page_of("both's", "url"))
    assert "6 min" in page(web, path=page_of("both's", "second"))
    stock = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
    settings.CACHES = settings.CACHES | {"stock": stock}
    for other in ("stock", "default", "gone"):  # which are not offered, so nothing is asked of them
        response = web.get(f"{LIST}?connection={other}")
        assert len(names(response.content.decode())) == 4
        assert messages(response) == []
    two.close()


@pytest.mark.processes
def test_a_connection_that_is_down_does_not_hide_the_others(
    web: Client, client: redis.Redis, two: redis.Redis, own_server: RedisServer
) -> None:
    hold(client, "still here")
    two.close()
    own_server.kill()
    response = web.get(LIST)
    assert names(response.content.decode()) == ["still here"]
    [message] = messages(response)
    assert "second" in message
    assert "ConnectionError" in message
    response = web.get(page_of("a", "second"))
    assert response.status_code == 200
    assert "ConnectionError" in messages(response)[0]
    html = page(web, "?connection=second")
    assert names(html) == []
    assert "no lock held" not in html


OURS = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1"}


@pytest.mark.parametrize(
    "cache",
    [
        {"BACKEND": "django_redislock.cache.Missing"},
        OURS | {"LOCATION": "localhost:6379"},
        OURS | {"LOCATION": "redis://127.0.0.1/1?misspelt=1"},
        OURS | {"LOCATION": "redis://.shop.svc:6379"},
        OURS | {"OPTIONS": {"CLIENT_CLASS": "nowhere.Client"}},
        OURS | {"BACKEND": "django_redislock.cache.DjangoRedisCache", "LOCATION": "localhost:6379"},
    ],
    ids=["no backend", "no scheme", "no option", "no host", "no module", "no scheme, Django's"],
)
def test_a_connection_with_wrong_settings_does_not_hide_the_others(
    web: Client, client: redis.Redis, settings: Any, cache: dict[str, Any]
) -> None:
    """All pages and commands failed: of whatever the backend and redis-py raise only some errors were expected."""
    lock = hold(client, "still here")
    settings.CACHES = settings.CACHES | {"second": cache}
    for path in (LIST, f"{LIST}contention/"):
        response = web.get(path)
        assert response.status_code == 200
        assert "second" in messages(response)[0]
    assert names(page(web)) == ["still here"]
    registry = CollectorRegistry()
    for collector in (_Held(), _Values()):
        registry.register(collector)
    assert registry.get_sample_value("redislock_held_locks", {"connection": "url"}) == 1
    assert "still here" in listed()
    assert lock.owned()


def listed() -> str:
    out = io.StringIO()
    with pytest.raises(CommandError, match=r"Connection 'second' could not be read: .*second"):
        call_command("redislock", "list", stdout=out, stderr=out)
    return out.getvalue()


@pytest.mark.parametrize("password", ["open/sesame", "open[sesame]x", "open℀sesame"])
def test_a_password_that_was_not_encoded_is_on_no_page(web: Client, settings: Any, password: str) -> None:
    settings.CACHES = settings.CACHES | {"second": OURS | {"LOCATION": f"redis://:{password}@localhost:6379/0"}}
    response = web.get(LIST)
    assert "ValueError: " in messages(response)[0]
    assert "open" not in messages(response)[0]
    assert "sesame" not in messages(response)[0]


def make_cache(location: str, params: dict[str, Any]) -> DummyCache:
    return DummyCache(location, params)


def test_a_function_may_make_a_cache(web: Client, client: redis.Redis, settings: Any) -> None:
    hold(client, "a")
    settings.CACHES = settings.CACHES | {"made": {"BACKEND": f"{__name__}.{make_cache.__name__}"}}
    assert names(page(web)) == ["a"]


def test_a_server_that_two_connections_lead_to_is_listed_once(
    web: Client, client: redis.Redis, settings: Any, server: Server
) -> None:
    hold(client, "a")
    same = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": server.url, "TIMEOUT": 7}
    other = same | {"LOCATION": server.url_of_db(1)}
    settings.CACHES = settings.CACHES | {"same": same, "other": other}
    assert names(page(web)) == ["a"]


@pytest.mark.parametrize("value", [None, "garbage", b"\xff\n12\n5\n{}", "id\n1\nx\n{}"])
def test_a_key_that_something_else_wrote_is_named(web: Client, client: redis.Redis, value: Any) -> None:
    hold(client, "a")
    key = hold(client, "damaged\r\n")._keys.lock
    client.delete(key)
    if value is None:
        client.lpush(key, "of another type")
    else:
        client.set(key, value)
    for path in (LIST, page_of("damaged\r\n")):
        response = web.get(path)
        assert response.status_code == 200
        assert "damaged" in messages(response)[0]
    html = page(web)
    assert names(html) == ["a"]
    assert "has 1 key that is not shown, because no lock wrote its value: “damaged\\r\\n”." in html


ODD_RECORDS = [
    b"id\n5\n99999999999999999999\n{}",
    b"id\n5\n-1\n{}",
    b'id\n5\n%d\n{"kind":["lock"],"host":{},"pid":"x","thread":7,"label":[],"expire":"long","auto_renewal":"no"}',
    b'id\n5\n%d\n{"expire":NaN,"pid":1e400,"label":null,"arguments":3,"worker":{}}',
    b'id\n5\n%d\n{"expire":Infinity,"pid":99999999999999999999999999,"kind":"\\u202elock"}',
    b"id\n5\n%d\n" + b"[" * 100_000,
    b'id\n5\n%d\n{"label":"import \\udcff \\u202egnp.exe","host":"\\udcfe","thread":"\\udcfd"}',
]


def test_a_record_of_odd_types_or_times_or_characters_is_no_server_error(web: Client, client: redis.Redis) -> None:
    lock = hold(client, "a")
    now = client.time()[0] * 1000
    client.zadd(lock._keys.held, {b"\xff": now + 600_000})
    odd = [f"odd {number}" for number in range(len(ODD_RECORDS))]
    for name, value in zip(odd, ODD_RECORDS, strict=True):
        client.set(hold(client, name)._keys.lock, value.replace(b"%d", b"%d" % now))
    html = page(web)
    assert "a" in names(html)
    for path in (*map(page_of, odd), f"{LIST}?state=unrenewed", f"{LIST}?o=-5", f"{LIST}?o=3.6"):
        html = page(web, path=path)
        assert "\u202e" not in html
    for form in ("table", "json"):
        out = io.StringIO()
        call_command("redislock", "list", format=form, stdout=out, stderr=out)
        out.getvalue().encode()
        assert all(name in out.getvalue() for name in odd)


@pytest.mark.parametrize(("raw", "said"), [({"EXPIRES": 3}, "EXPIRES"), ({"ENABLED": False}, "switched off")])
def test_settings_in_the_way_are_a_message(web: Client, settings: Any, raw: dict[str, Any], said: str) -> None:
    settings.DJANGO_REDISLOCK = raw
    response = web.get(LIST)
    assert response.status_code == 200
    assert said in messages(response)[0]
