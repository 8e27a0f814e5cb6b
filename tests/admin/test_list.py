"""The admin's list of held locks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.contrib import admin
from django.test import Client

from django_redislock import inventory, leader
from django_redislock.core import Lock
from django_redislock.core.records import StoredLock
from django_redislock.texts import duration
from tests.support import counting, wait_in_a_thread
from tests.support.admin_pages import (
    LIST,
    hold,
    messages,
    names,
    next_millisecond,
    page,
    page_of,
    rewrite,
    tick,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("locks_by_url")]


def rows(html: str) -> str:
    return re.search(r"<tbody>.*?</tbody>", html, re.DOTALL)[0]  # type: ignore[index]


def test_the_list_tells_who_holds_what(web: Client, client: redis.Redis) -> None:
    lock = hold(client, "celery:rebuild:1", kind="celery", label="rebuild[task-1]", expire=3600)
    info = lock.owner()
    assert info is not None
    html = page(web)
    row = rows(html)
    for text in ("celery:rebuild:1", "Celery", "rebuild[task-1]", info.host, str(info.pid)):
        assert text in row
    assert re.search("<bdi>(59 min 5. s|1 h)</bdi>", row)
    assert "not renewed" in row
    assert '<meter class="redislock-meter"' in row


def test_the_term_of_a_leader_is_listed_as_that_and_shown_with_its_number(web: Client, client: redis.Redis) -> None:
    with leader("scheduler", label="main") as term:
        row = rows(page(web))
        assert re.search(r"scheduler.*\bleader\b", row, re.DOTALL | re.IGNORECASE)
        assert "main" in row
        hold(client, "other")
        assert names(page(web, "?kind=leader")) == ["scheduler"]
        assert str(term.fence) in page(web, path=page_of("scheduler"))


def test_a_renewed_lock_says_nothing_of_renewal_unless_it_is_late(web: Client, client: redis.Redis) -> None:
    lock = hold(client, "renewed", auto_renewal=True)
    assert "not renewed" not in rows(page(web))
    assert "renewal is late" not in rows(page(web))
    client.pexpire(lock._keys.lock, 200_000)  # of 600 s: as when its holder died
    assert "renewal is late" in rows(page(web))
    lock.release()


def test_every_column_sorts_both_ways(web: Client, client: redis.Redis, listen: Callable[..., None]) -> None:
    a = hold(client, "a", label="3", expire=200, kind="lock")
    next_millisecond(client)
    hold(client, "b", label="1", expire=300, kind="cache")
    next_millisecond(client)
    c = hold(client, "c", label="2", expire=100, kind="celery")
    listen("channel")
    for lock, waiters in ((a, 2), (c, 1)):
        client.zadd(lock._keys.queue, {f"channel\n{number}": number for number in range(waiters)})
    assert names(page(web)) == ["a", "b", "c"], "the oldest is on top"
    # Name, held for (the youngest first), holder, expires in, waiting, kind
    for column, by_it in enumerate(["abc", "cba", "bca", "cab", "bca", "bca"], 1):
        assert "".join(names(page(web, f"?o={column}"))) == by_it
        assert "".join(names(page(web, f"?o=-{column}"))) == by_it[::-1]


def test_sorting_by_two_columns(web: Client, client: redis.Redis) -> None:
    for name, kind in (("a", "lock"), ("b", "cache"), ("c", "lock"), ("d", "cache")):
        hold(client, name, kind=kind)
    assert names(page(web, "?o=6.-1")) == ["d", "b", "c", "a"]


def test_search_by_part_of_the_name(web: Client, client: redis.Redis) -> None:
    for name in ("invoice:42", "invoice:43", "Rechnung:42"):
        hold(client, name)
    assert sorted(names(page(web, "?q=42"))) == ["Rechnung:42", "invoice:42"]
    assert names(page(web, "?q=+rechNUNG+")) == ["Rechnung:42"]
    assert names(page(web, "?q=nothing")) == []
    assert names(page(web, "?q=%25")) == []


def test_filter_by_kind(web: Client, client: redis.Redis) -> None:
    for kind in ("lock", "cache", "celery"):
        hold(client, f"of {kind}", kind=kind)
    for kind in ("lock", "cache", "celery"):
        assert names(page(web, f"?kind={kind}")) == [f"of {kind}"]
    assert names(page(web, "?kind=cache&q=lock")) == []
    assert names(page(web, "?kind=nonsense")) == []


def test_filter_by_state(web: Client, client: redis.Redis) -> None:
    renewed = hold(client, "renewed", auto_renewal=True)
    late = hold(client, "late", auto_renewal=True)
    hold(client, "fixed")
    hold(client, "fixed, nearly over")
    for name in ("late", "fixed, nearly over"):
        client.pexpire(Lock(client, name)._keys.lock, 200_000)  # of 600 s
    assert names(page(web, "?state=renewed")) == ["renewed"]
    assert sorted(names(page(web, "?state=expiring"))) == ["fixed, nearly over", "late"]
    assert sorted(names(page(web, "?state=unrenewed"))) == ["fixed", "fixed, nearly over"]
    assert names(page(web, "?state=nonsense")) == []
    renewed.release()
    late.release()


def test_filter_by_age(web: Client, client: redis.Redis) -> None:
    for name, age in (("young", 0), ("of two minutes", 120), ("of two hours", 7200)):
        rewrite(client, hold(client, name), younger_by=-age)
    assert sorted(names(page(web, "?older=60"))) == ["of two hours", "of two minutes"]
    assert names(page(web, "?older=3600")) == ["of two hours"]
    assert names(page(web, "?older=86400")) == []
    for value in ("nan", "-1", "x", "1e999"):
        assert len(names(page(web, f"?older={value}"))) == 3


def test_filter_by_host(web: Client, client: redis.Redis) -> None:
    for name, host in (("a", "web-1"), ("b", "web-2"), ("c", "<i>web</i>")):
        rewrite(client, hold(client, name), host=host)
    with counting(client) as counts:
        html = page(web)
    assert counts["evalsha"] == 2  # the names, and the locks: offering the hosts reads nothing more
    for host in ("web-1", "web-2", "&lt;i&gt;web&lt;/i&gt;"):
        assert f">{host}</a>" in html
    assert "<i>web" not in html
    assert names(page(web, "?host=web-2")) == ["b"]
    html = page(web, "?host=gone")
    assert names(html) == []
    assert ">gone</a>" in html  # what is chosen can be seen, and with it the way back


def test_filter_by_task(web: Client, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """All locks of the task: of its runs and of what waits; of the many locks of a connection, only these are read."""
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
        html = page(web)
    assert counts["evalsha"] == 2
    for task in ("shop.build", "shop.buildings", "%3Ci%3E:"):
        assert f">{task}</a>" in html
    monkeypatch.setattr(inventory, "LIMIT", 2)
    html = page(web, "?task=shop.build&o=1")
    assert names(html) == sorted(locks[:2])
    for task in ("shop.build", "shop.buildings", "%3Ci%3E:"):
        assert f">{task}</a>" in html, "the others stay in reach"
    assert names(page(web, "?task=shop.build&q=queue")) == [locks[1]]
    html = page(web, "?task=gone")
    assert names(html) == []
    assert ">gone</a>" in html


def test_pages_of_a_hundred(web: Client, client: redis.Redis) -> None:
    for number in range(105):
        hold(client, f"{number:03}")
    assert names(page(web, "?o=1")) == [f"{number:03}" for number in range(100)]
    assert names(page(web, "?o=1&p=2")) == [f"{number:03}" for number in range(100, 105)]
    html = page(web, "?o=1&all=")
    assert len(names(html)) == 105
    assert 'class="question' not in page(web)  # "select all 105": that is nowhere offered


def test_odd_queries_are_no_server_error(web: Client, client: redis.Redis) -> None:
    hold(client, "a")
    for query in ("p=99", "p=x", "name__contains=a", "age__gt=1", "foo=bar", "pk=1", "e=1", "o=99.x.-0", "_popup=1"):
        assert names(web.get(f"{LIST}?{query}", follow=True).content.decode()) in (["a"], []), query


def test_an_empty_list_offers_no_action(web: Client) -> None:
    html = page(web)
    assert "0 held locks" in html
    assert 'name="action"' not in html


def test_ids_are_not_in_the_pages(web: Client, client: redis.Redis) -> None:
    drawn, chosen = hold(client, "a"), hold(client, "b", id="chosen")
    for lock in (drawn, chosen):
        for html in (page(web), page(web, path=page_of(lock.name))):
            assert str(lock.id) not in html
    assert f"{str(drawn.id)[:6]}…" in page(web, path=page_of("a"))


def test_pages_need_no_inline_script_or_style(web: Client, client: redis.Redis) -> None:
    hold(client, "a")
    wait_in_a_thread(client, "b")
    for html in (page(web), page(web, path=page_of("a")), page(web, path=f"{LIST}contention/")):
        assert not re.search(r"<[^>]+\s(style|on\w+)=", html)
        assert "<style" not in html
        for script in re.findall(r"<script\b.*?</script>", html, re.DOTALL):
            assert 'src="' in script or "application/json" in script


def test_a_sum_line_says_of_when_it_is_and_how_many_are_held_and_wait(
    web: Client, client: redis.Redis, listen: Callable[..., None]
) -> None:
    assert re.search(r"As of <bdi>\d\d:\d\d:\d\d \S+</bdi>: no lock held\.", page(web))
    rewrite(client, hold(client, "old"), younger_by=-7200)
    lock = hold(client, "young")
    listen("channel")
    client.zadd(lock._keys.queue, {f"channel\n{number}": number for number in range(2)})
    assert ": 2 locks held, the oldest for <bdi>2 h</bdi>, 2 waiting." in page(web)
    assert ": 1 lock held, the oldest for <bdi>2 h</bdi>, 0 waiting." in page(web, "?q=old")
    for query in ("?q=nothing", "?kind=cache"):
        assert names(page(web, query)) == []
        assert "no lock held" not in page(web, query), "two are held, and do not match"


def test_the_list_names_the_connection_only_where_there_are_several(
    web: Client, client: redis.Redis, settings: Any, server: Any
) -> None:
    lock = hold(client, "a")
    assert "column-connection" not in page(web)
    assert str(lock.fence) not in re.sub('value="[^"]*"', "", rows(page(web)))
    other = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": server.url_of_db(1)}
    settings.CACHES = settings.CACHES | {"other": other}
    assert "column-connection" in page(web)


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
    html = response.content.decode()
    assert ": more than 5 locks held. Of those that were read, the oldest is held for " in html
    response = web.get(LIST + "?q=z")
    assert names(response.content.decode()) == ["z"]
    assert messages(response) == []
    monkeypatch.setattr(inventory, "LIMIT", 0)
    assert "no lock held" not in page(web)


@pytest.mark.slow
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
        html = page(web)
    assert "10000 held locks" in html
    assert counts["evalsha"] <= 74  # 500 names each, and 200 locks each
    with counting(client) as counts:
        assert names(page(web, "?q=many:4242")) == ["many:4242"]
    assert counts["evalsha"] <= 24
    with counting(client) as counts:
        page(web, path=page_of("many:4242"))
    assert counts["evalsha"] == 1


# What else looks at the list


def test_actions_of_the_site_are_not_offered(web: Client, client: redis.Redis) -> None:
    """The export of Django's documentation was a server error, because it wants the `values_list` of a table."""

    def export(model_admin: object, request: object, queryset: Any) -> Any:
        return queryset.values_list("name")

    box = tick(hold(client, "a"))
    admin.site.add_action(export)
    try:
        html = page(web)
        assert 'value="force_release"' in html
        assert 'value="export"' not in html
        answer = web.post(LIST, {"action": "export", "index": "0", "_selected_action": [box]}, follow=True)
    finally:
        admin.site.disable_action("export")
        del admin.site._global_actions["export"]
    assert messages(answer) == ["No action selected."]


def test_only_the_locks_that_are_shown_are_read_in_full(
    web: Client, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000 locks a page shows 100; to read what the holders of all say would take most of the page's time."""
    with client.pipeline(transaction=False) as pipe:
        value = client.get(hold(client, "pattern")._keys.lock)
        for name in (f"{number:03}" for number in range(249)):
            keys = Lock(client, name)._keys
            pipe.set(keys.lock, value, px=600_000).zadd(keys.held, {name: 9e15})
        pipe.execute()
    whole = StoredLock.info.fget
    read: list[str] = []
    monkeypatch.setattr(StoredLock, "info", property(lambda held: (read.append(held.name), whole(held))[1]))
    page(web)  # connects
    read.clear()
    with counting(client) as counts:
        html = page(web)
    assert len(names(html)) == len(read) == 100
    assert (counts["evalsha"], counts["mget"], counts["get"]) == (3, 2, 0)
    read.clear()
    assert len(names(page(web, "?kind=lock&p=3"))) == 50
    assert len(read) == 250 + 50


def test_a_record_that_cannot_be_read_hides_no_other_lock(web: Client, client: redis.Redis) -> None:
    records = ["", "{", "[]", "1,2", '{"host": 1', '"text"']
    for number, record in enumerate(records):
        client.set(hold(client, f"odd {number}")._keys.lock, f"id\n5\n1\n{record}", px=60_000)
    hold(client, "a")
    assert sorted(names(page(web))) == ["a", *(f"odd {number}" for number in range(len(records)))]
    for number in range(len(records)):
        assert "5" in page(web, path=page_of(f"odd {number}"))
