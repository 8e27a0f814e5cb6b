"""The admin's list of held locks and the page of one."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.contrib import admin
from django.contrib.admin.utils import quote, unquote
from django.test import Client
from hypothesis import given, strategies as st

from django_redislock import inventory
from django_redislock.celery.execution_lock import ExecutionLock
from django_redislock.core import Lock
from django_redislock.core.records import Held
from django_redislock.core.validation import MAX_NAME
from django_redislock.models import HeldLock, decode_key, encode_key
from django_redislock.texts import duration, visible
from tests.support import RedisServer, Server, counting, wait_until
from tests.support.admin_pages import (
    LIST,
    browser,
    hold,
    messages,
    names,
    next_millisecond,
    page_of,
    rewrite,
    superuser,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("locks_by_url")]

AWKWARD = [
    "a/b/../c?d=e#f",
    "..",
    "change",
    "add/",
    '<script>alert("1")</script>',
    'it\'s "quoted" & <b>bold</b>',
    "Grüße, 世界 🔒",
    "two\nlines\r\nand\ttabs",
    "nul \0 byte",
    "right-to-left \u202egnp.exe",
    "   ",
    "%2F%00_2F",
    "{braces}{{ template }}{% now 'Y' %}",
    "x" * MAX_NAME,
    "🔒" * (MAX_NAME // 4),
]


@pytest.fixture
def web() -> Client:
    return browser(superuser())


def get(web: Client, query: str = "", path: str = LIST) -> str:
    response = web.get(path + query)
    assert response.status_code == 200
    return response.content.decode()


def rows(html: str) -> str:
    return re.search(r"<tbody>.*?</tbody>", html, re.DOTALL)[0]  # type: ignore[index]


# The list


def test_the_list_tells_who_holds_what(web: Client, client: redis.Redis) -> None:
    lock = hold(client, "celery:rebuild:1", kind="celery", label="rebuild[task-1]", expire=3600)
    info = lock.owner()
    assert info is not None
    html = get(web)
    row = rows(html)
    for text in ("celery:rebuild:1", "Celery", "rebuild[task-1]", info.host, str(info.pid)):
        assert text in row
    assert re.search("<bdi>(59 min 5. s|1 h)</bdi>", row)
    assert "not renewed" in row
    assert '<meter class="redislock-meter"' in row


def test_a_renewed_lock_says_nothing_of_renewal_unless_it_is_late(web: Client, client: redis.Redis) -> None:
    lock = hold(client, "renewed", auto_renewal=True)
    assert "not renewed" not in rows(get(web))
    assert "renewal is late" not in rows(get(web))
    client.pexpire(lock._keys.lock, 200_000)  # of 600 s: as when its holder died
    assert "renewal is late" in rows(get(web))
    lock.release()


def test_the_oldest_is_on_top(web: Client, client: redis.Redis) -> None:
    for name in ("b", "c", "a"):
        hold(client, name)
        next_millisecond(client)
    assert names(get(web)) == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("column", "by_it"),
    [
        (1, ["a", "b", "c"]),
        (2, ["c", "b", "a"]),  # held for: the youngest first
        (3, ["b", "c", "a"]),
        (4, ["c", "a", "b"]),
        (5, ["b", "c", "a"]),
        (6, ["b", "c", "a"]),
    ],
    ids=["name", "held for", "holder", "expires in", "waiting", "kind"],
)
def test_every_column_sorts_both_ways(
    web: Client, client: redis.Redis, listen: Callable[..., None], column: int, by_it: list[str]
) -> None:
    a = hold(client, "a", label="3", expire=200, kind="lock")
    next_millisecond(client)
    hold(client, "b", label="1", expire=300, kind="cache")
    next_millisecond(client)
    c = hold(client, "c", label="2", expire=100, kind="celery")
    listen("channel")
    for lock, waiters in ((a, 2), (c, 1)):
        client.zadd(lock._keys.queue, {f"channel\n{number}": number for number in range(waiters)})
    assert names(get(web, f"?o={column}")) == by_it
    assert names(get(web, f"?o=-{column}")) == by_it[::-1]


def test_sorting_by_two_columns(web: Client, client: redis.Redis) -> None:
    for name, kind in (("a", "lock"), ("b", "cache"), ("c", "lock"), ("d", "cache")):
        hold(client, name, kind=kind)
    assert names(get(web, "?o=6.-1")) == ["d", "b", "c", "a"]


def test_search_by_part_of_the_name(web: Client, client: redis.Redis) -> None:
    for name in ("invoice:42", "invoice:43", "Rechnung:42"):
        hold(client, name)
    assert sorted(names(get(web, "?q=42"))) == ["Rechnung:42", "invoice:42"]
    assert names(get(web, "?q=+rechNUNG+")) == ["Rechnung:42"]
    assert names(get(web, "?q=nothing")) == []
    assert names(get(web, "?q=%25")) == []


def test_filter_by_kind(web: Client, client: redis.Redis) -> None:
    for kind in ("lock", "cache", "celery"):
        hold(client, f"of {kind}", kind=kind)
    for kind in ("lock", "cache", "celery"):
        assert names(get(web, f"?kind={kind}")) == [f"of {kind}"]
    assert names(get(web, "?kind=cache&q=lock")) == []
    assert names(get(web, "?kind=nonsense")) == []


def test_filter_by_state(web: Client, client: redis.Redis) -> None:
    renewed = hold(client, "renewed", auto_renewal=True)
    late = hold(client, "late", auto_renewal=True)
    hold(client, "fixed")
    hold(client, "fixed, nearly over")
    for name in ("late", "fixed, nearly over"):
        client.pexpire(Lock(client, name)._keys.lock, 200_000)  # of 600 s
    assert names(get(web, "?state=renewed")) == ["renewed"]
    assert sorted(names(get(web, "?state=expiring"))) == ["fixed, nearly over", "late"]
    assert sorted(names(get(web, "?state=unrenewed"))) == ["fixed", "fixed, nearly over"]
    assert names(get(web, "?state=nonsense")) == []
    renewed.release()
    late.release()


def test_filter_by_age(web: Client, client: redis.Redis) -> None:
    for name, age in (("young", 0), ("of two minutes", 120), ("of two hours", 7200)):
        rewrite(client, hold(client, name), younger_by=-age)
    assert sorted(names(get(web, "?older=60"))) == ["of two hours", "of two minutes"]
    assert names(get(web, "?older=3600")) == ["of two hours"]
    assert names(get(web, "?older=86400")) == []
    for value in ("nan", "-1", "x", "1e999"):
        assert len(names(get(web, f"?older={value}"))) == 3


def test_filter_by_host(web: Client, client: redis.Redis) -> None:
    for name, host in (("a", "web-1"), ("b", "web-2"), ("c", "<i>web</i>")):
        rewrite(client, hold(client, name), host=host)
    with counting(client) as counts:
        html = get(web)
    assert counts["evalsha"] == 2  # the names, and the locks: offering the hosts reads nothing more
    for host in ("web-1", "web-2", "&lt;i&gt;web&lt;/i&gt;"):
        assert f">{host}</a>" in html
    assert "<i>web" not in html
    assert names(get(web, "?host=web-2")) == ["b"]
    html = get(web, "?host=gone")
    assert names(html) == []
    assert ">gone</a>" in html  # what is chosen can be seen, and with it the way back


def test_filter_by_task(web: Client, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """All locks of the task: of its runs and of what waits; and of the many locks of a connection, only these are read."""
    locks = [
        "celery:shop.build:1",
        "celery-queue:shop.build:2",
        "celery:shop.buildings",
        "celery:%3Ci%3E%3A:1",
        "shop.build",
    ]
    for name in locks:
        hold(client, name)
    with counting(client) as counts:
        html = get(web)
    assert counts["evalsha"] == 2
    for task in ("shop.build", "shop.buildings", "%3Ci%3E:"):
        assert f">{task}</a>" in html
    monkeypatch.setattr(inventory, "LIMIT", 2)
    html = get(web, "?task=shop.build&o=1")
    assert names(html) == sorted(locks[:2])
    for task in ("shop.build", "shop.buildings", "%3Ci%3E:"):
        assert f">{task}</a>" in html, "the others stay in reach"
    assert names(get(web, "?task=shop.build&q=queue")) == [locks[1]]
    html = get(web, "?task=gone")
    assert names(html) == []
    assert ">gone</a>" in html


def test_pages_of_a_hundred(web: Client, client: redis.Redis) -> None:
    for number in range(105):
        hold(client, f"{number:03}")
    assert names(get(web, "?o=1")) == [f"{number:03}" for number in range(100)]
    assert names(get(web, "?o=1&p=2")) == [f"{number:03}" for number in range(100, 105)]
    html = get(web, "?o=1&all=")
    assert len(names(html)) == 105
    assert 'class="question' not in get(web)  # "select all 105": that is nowhere offered


@pytest.mark.parametrize(
    "query",
    ["?p=99", "?p=x", "?name__contains=a", "?age__gt=1", "?foo=bar", "?pk=1", "?e=1", "?o=99.x.-0", "?_popup=1"],
)
def test_odd_queries_are_no_server_error(web: Client, client: redis.Redis, query: str) -> None:
    hold(client, "a")
    assert names(web.get(LIST + query, follow=True).content.decode()) in (["a"], [])


def test_an_empty_list_offers_no_action(web: Client) -> None:
    html = get(web)
    assert "0 held locks" in html
    assert 'name="action"' not in html


def test_ids_are_not_in_the_pages(web: Client, client: redis.Redis) -> None:
    drawn, chosen = hold(client, "a"), hold(client, "b", id="chosen")
    for lock in (drawn, chosen):
        for html in (get(web), get(web, path=page_of(lock.name))):
            assert str(lock.id) not in html
    assert f"{str(drawn.id)[:6]}…" in get(web, path=page_of("a"))


def test_pages_need_no_inline_script_or_style(web: Client, client: redis.Redis) -> None:
    hold(client, "a")
    for html in (get(web), get(web, path=page_of("a"))):
        assert not re.search(r"<[^>]+\s(style|on\w+)=", html)
        assert "<style" not in html
        for script in re.findall(r"<script\b.*?</script>", html, re.DOTALL):
            assert 'src="' in script


@pytest.mark.parametrize("name", AWKWARD, ids=repr)
def test_any_name_is_shown_and_has_its_page(web: Client, client: redis.Redis, name: str) -> None:
    lock = hold(client, name)
    html = get(web)
    assert names(html) == [visible(name)]
    assert "<b>" not in html
    assert "alert(" not in re.sub(r"alert\(&quot;1&quot;\)", "", html)
    link = re.search(r'<a href="([^"]+/change/[^"]*)"', html)
    assert link is not None
    assert str(lock.fence) in get(web, path=link[1])
    assert get(web, path=page_of(name, view="history"))


@given(
    connection=st.text(st.characters(exclude_characters="\0", codec="utf-8")),
    name=st.text(min_size=1, max_size=MAX_NAME // 4),
)
def test_a_key_stands_for_its_lock(connection: str, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:  # no lock has such a name
        return
    key = encode_key(connection, name)
    assert key.isascii()
    assert unquote(quote(key)) == key
    assert decode_key(key) == (connection, name)


@given(st.text())
def test_other_text_is_no_key(text: str) -> None:
    try:
        connection, name = decode_key(text)
    except ValueError:
        return
    assert encode_key(connection, name) == text


# The page of one lock


def test_the_page_of_a_lock(web: Client, client: redis.Redis) -> None:
    lock = hold(client, "invoice:42", label="billing", expire=90)
    html = get(web, path=page_of("invoice:42"))
    info = lock.owner()
    assert info is not None
    for text in ("invoice:42", "billing", info.host, str(info.pid), info.thread, str(info.fence), "1 min 30 s"):
        assert text in html
    assert 'name="_save"' not in html


def field(html: str, name: str) -> str:
    """Return what the page of a lock says in one of its fields, without markup."""
    found = re.search(rf'field-{name}.*?<div class="readonly">(.*?)</div>', html, re.DOTALL)
    assert found is not None, name
    return re.sub("<[^>]+>", "", found[1]).strip()


def test_the_page_of_a_lock_tells_the_second_and_the_zone_of_its_begin_and_its_last_renewal(
    web: Client, client: redis.Redis, settings: Any
) -> None:
    settings.TIME_ZONE = "Asia/Kolkata"
    lock = hold(client, "invoice:42", auto_renewal=True)
    rewrite(client, lock, younger_by=-100)
    client.pexpire(lock._keys.lock, 570_000)  # of 600 s
    html = get(web, path=page_of("invoice:42"))
    assert re.search(r"20\d\d, \d\d:\d\d:\d\d IST$", field(html, "acquired"))
    assert field(html, "last_renewed") == "30 s ago"
    assert field(html, "shortened_id").endswith("…")
    assert 'field-lock"' not in html  # the title names it
    hold(client, "just taken", auto_renewal=True)
    assert field(get(web, path=page_of("just taken")), "last_renewed") == "not yet"
    hold(client, "fixed")
    assert "field-last_renewed" not in get(web, path=page_of("fixed"))
    lock.release()


def test_a_sum_line_says_of_when_it_is_and_how_many_are_held_and_wait(
    web: Client, client: redis.Redis, listen: Callable[..., None]
) -> None:
    assert re.search(r"As of <bdi>\d\d:\d\d:\d\d \S+</bdi>: no lock held\.", get(web))
    rewrite(client, hold(client, "old"), younger_by=-7200)
    lock = hold(client, "young")
    listen("channel")
    client.zadd(lock._keys.queue, {f"channel\n{number}": number for number in range(2)})
    assert ": 2 locks held, the oldest for <bdi>2 h</bdi>, 2 waiting." in get(web)
    assert ": 1 lock held, the oldest for <bdi>2 h</bdi>, 0 waiting." in get(web, "?q=old")


def test_the_list_names_the_connection_only_where_there_are_several(
    web: Client, client: redis.Redis, settings: Any, server: Any
) -> None:
    lock = hold(client, "a")
    assert "column-connection" not in get(web)
    assert str(lock.fence) not in re.sub('value="[^"]*"', "", rows(get(web)))
    other = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": server.url_of_db(1)}
    settings.CACHES = settings.CACHES | {"other": other}
    assert "column-connection" in get(web)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.57, "0.6 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (3453, "57 min 33 s"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations_are_rounded(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_page_of_a_lock_that_nobody_holds(web: Client, client: redis.Redis) -> None:
    hold(client, "gone").release()
    response = web.get(page_of("gone"))
    assert response.status_code == 200
    assert messages(response) == ["This lock is free now."]
    assert "Force-release" not in response.content.decode()
    assert web.get(page_of("gone", view="history")).status_code == 200


@pytest.mark.parametrize(
    "key",
    [
        *("nonsense", "Z", "é"),
        *(encode_key("elsewhere", "a"), encode_key("url", "x" * 1001)),
        *(encode_key("url", "a") + "!", encode_key("url", "ab") + "="),  # one lock has one address, and one history
    ],
)
def test_what_is_no_lock_has_no_page(web: Client, key: str) -> None:
    for view in ("change", "history"):
        response = web.get(f"{LIST}{quote(key)}/{view}/", follow=True)
        assert response.redirect_chain == [("/admin/", 302)]


# Connections


@pytest.fixture
def two(settings: Any, own_server: RedisServer) -> redis.Redis:
    """A second connection, to another server."""
    cache = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": own_server.url}
    settings.CACHES = settings.CACHES | {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
    settings.CACHES = settings.CACHES | {"second": cache}
    return own_server.client()


@pytest.mark.processes
def test_several_connections_on_one_page(web: Client, client: redis.Redis, two: redis.Redis) -> None:
    hold(client, "first's")
    hold(two, "second's")
    hold(client, "both's", expire=500)
    hold(two, "both's", expire=400)
    assert sorted(names(get(web))) == ["both's", "both's", "first's", "second's"]
    assert sorted(names(get(web, "?connection=second"))) == ["both's", "second's"]
    assert sorted(names(get(web, "?connection=url"))) == ["both's", "first's"]
    assert names(get(web, "?o=7.1")) == ["both's", "second's", "both's", "first's"]
    assert "8 min" in get(web, path=page_of("both's", "url"))
    assert "6 min" in get(web, path=page_of("both's", "second"))
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
    page = get(web, "?connection=second")
    assert names(page) == []
    assert "no lock held" not in page


def test_a_connection_that_is_not_redis_does_not_hide_the_others(
    web: Client, client: redis.Redis, settings: Any
) -> None:
    hold(client, "still here")
    settings.CACHES = settings.CACHES | {"second": {"BACKEND": "django_redislock.cache.Missing"}}
    response = web.get(LIST)
    assert names(response.content.decode()) == ["still here"]
    assert "second" in messages(response)[0]


def test_a_server_that_two_connections_lead_to_is_listed_once(
    web: Client, client: redis.Redis, settings: Any, server: Server
) -> None:
    hold(client, "a")
    same = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": server.url, "TIMEOUT": 7}
    other = same | {"LOCATION": server.url_of_db(1)}
    settings.CACHES = settings.CACHES | {"same": same, "other": other}
    assert names(get(web)) == ["a"]


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


def test_wrong_settings_are_a_message(web: Client, settings: Any) -> None:
    settings.DJANGO_REDISLOCK = {"EXPIRES": 3}
    response = web.get(LIST)
    assert response.status_code == 200
    assert "EXPIRES" in messages(response)[0]


def test_locks_switched_off_are_a_message(web: Client, settings: Any, redis_url: str) -> None:
    settings.DJANGO_REDISLOCK = {"URL": redis_url, "ENABLED": False}
    response = web.get(LIST)
    assert "switched off" in messages(response)[0]


# Many locks


def test_a_list_that_is_cut_says_so_and_search_reaches_the_rest(
    web: Client, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "LIMIT", 5)
    for number in range(5):
        hold(client, f"a{number}")
    assert messages(web.get(LIST)) == []
    hold(client, "z")
    response = web.get(LIST)
    assert sorted(names(response.content.decode())) == [f"a{number}" for number in range(5)]
    assert "more than 5 locks" in messages(response)[0]
    response = web.get(LIST + "?q=z")
    assert names(response.content.decode()) == ["z"]
    assert messages(response) == []


def test_ten_thousand_locks_are_read_by_few_commands(web: Client, client: redis.Redis) -> None:
    pattern = hold(client, "pattern")
    value = client.get(pattern._keys.lock)
    pattern.release()
    with client.pipeline(transaction=False) as pipe:
        for number in range(10_000):
            name = f"many:{number}"
            keys = type(pattern)(client, name)._keys
            pipe.set(keys.lock, value, px=600_000)
            pipe.zadd(keys.held, {name: 9e15})
        pipe.execute()
    with counting(client) as counts:
        html = get(web)
    assert "10000 held locks" in html
    assert counts["evalsha"] <= 64  # a thousand names each, and 200 locks each
    with counting(client) as counts:
        assert names(get(web, "?q=many:4242")) == ["many:4242"]
    assert counts["evalsha"] <= 14
    with counting(client) as counts:
        get(web, path=page_of("many:4242"))
    assert counts["evalsha"] == 1


# What else looks at the list


def test_actions_of_the_site_can_use_what_is_ticked(web: Client, client: redis.Redis) -> None:
    seen: list[str] = []

    def export(model_admin: object, request: object, queryset: Any) -> None:
        seen.extend(lock.name for lock in queryset)
        assert isinstance(queryset[0], HeldLock)

    locks = [hold(client, name) for name in ("a", "b", "c")]
    admin.site.add_action(export)
    try:
        boxes = re.findall(r'name="_selected_action" value="([^"]+)"', get(web, "?o=1"))
        assert len(boxes) == len(locks)
        web.post(LIST, {"action": "export", "index": "0", "_selected_action": boxes[1:]})
    finally:
        admin.site.disable_action("export")
        del admin.site._global_actions["export"]
    assert sorted(seen) == ["b", "c"]


def test_only_the_locks_that_are_shown_are_read_in_full(
    web: Client, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000 locks a page shows a hundred; to read what the holders of all say would take most of the page's time."""
    with client.pipeline(transaction=False) as pipe:
        value = client.get(hold(client, "pattern")._keys.lock)
        for name in (f"{number:03}" for number in range(249)):
            keys = Lock(client, name)._keys
            pipe.set(keys.lock, value, px=600_000).zadd(keys.held, {name: 9e15})
        pipe.execute()
    whole = Held.info.fget
    read: list[str] = []
    monkeypatch.setattr(Held, "info", property(lambda held: (read.append(held.name), whole(held))[1]))
    get(web)  # connects
    read.clear()
    with counting(client) as counts:
        html = get(web)
    assert len(names(html)) == len(read) == 100
    assert (counts["evalsha"], counts["mget"], counts["get"]) == (3, 2, 0)
    read.clear()
    assert len(names(get(web, "?kind=lock&p=3"))) == 50
    assert len(read) == 250 + 50


@pytest.mark.parametrize("record", ["", "{", "[]", "1,2", '{"host": 1', '"text"'])
def test_a_record_that_cannot_be_read_hides_no_other_lock(web: Client, client: redis.Redis, record: str) -> None:
    hold(client, "a")
    client.set(hold(client, "odd")._keys.lock, f"id\n5\n1\n{record}", px=60_000)
    assert sorted(names(get(web))) == ["a", "odd"]
    assert "5" in get(web, path=page_of("odd"))


@pytest.mark.parametrize(
    "name", ["é" * (MAX_NAME // 2), "\U0010fffd" * (MAX_NAME // 4), "_" * MAX_NAME, "\0" * MAX_NAME]
)
@pytest.mark.parametrize("view", ["change", "history"])
def test_the_address_of_a_long_name_is_not_too_long_for_servers(
    web: Client, client: redis.Redis, name: str, view: str
) -> None:
    """Gunicorn refuses a request line of more than 4,094 bytes."""
    hold(client, name)
    address = f"{page_of(name, view=view)}?_changelist_filters=o%3D-1.2%26older%3D3600%26state%3Dunrenewed%26p%3D2"
    assert len(f"GET {address} HTTP/1.1\r\n") < 4094
    assert web.get(address).status_code == 200
    assert decode_key(encode_key("default", name)) == ("default", name)


@pytest.mark.parametrize("key", ["!", "A", "AA", "dXJsAA", "dXJsAA" + "~" * 6000, "dXJsAP~~~~~~", "dXJsAGE="])
def test_an_address_that_is_no_key_of_a_lock_is_no_server_error(web: Client, key: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode_key(key)
    assert web.get(f"{LIST}{quote(key)}/change/").status_code == 302


def test_who_waits_is_told_with_host_and_process(web: Client, client: redis.Redis, listen: Callable[..., None]) -> None:
    lock = hold(client, "a")

    def wait() -> None:
        with Lock(client, "a", expire=600):
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: (info := lock.owner()) is not None and info.waiting == 1)
    channels = [f"redislock:wake:0:{number}:%3Cb%3Eweb%3C/b%3E" for number in range(20)]
    listen("of another version", *channels)
    client.zadd(lock._keys.queue, {"of another version\n1": 1})  # waits since 1970, and is first
    for number, channel in enumerate(channels):
        ticket = (client.time()[0] - 90) * 1_000_000
        client.zadd(lock._keys.queue, {f"{channel}\n{number}": ticket + number})
    shown = re.search(r'22<ol class="redislock-waiters">(.*?)</ol>', get(web, path=page_of("a")))
    assert shown is not None
    lines = re.findall(r"<li>(.*?)</li>", shown[1])
    assert len(lines) == 21
    assert lines[0].startswith("<bdi>?</bdi> for ")
    assert re.fullmatch(r"<bdi>&lt;b&gt;web&lt;/b&gt; · 0</bdi> for <bdi>\d min( \d+ s)?</bdi>", lines[1])
    assert lines[-1] == "…"
    client.zremrangebyrank(lock._keys.queue, 0, 20)
    assert f"<li><bdi>{socket.gethostname()} · {os.getpid()}</bdi> for " in get(web, path=page_of("a"))
    lock.release()
    thread.join(30)
    assert not thread.is_alive()


def test_arguments_and_worker_of_a_task(web: Client, client: redis.Redis) -> None:
    details = {"arguments": "customer='<b>', day=3", "worker": "celery@one"}
    lock = ExecutionLock(client, "celery", kind="celery", expire=600, auto_renewal=False).with_name(
        "celery:a", details=details
    )
    assert lock.acquire(blocking=False)
    html = get(web, path=page_of("celery:a"))
    for text in ("customer=&#x27;&lt;b&gt;&#x27;, day=3", "celery@one"):
        assert text in html
    hold(client, "b")
    assert "Arguments" not in get(web, path=page_of("b"))
