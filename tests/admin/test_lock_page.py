"""The admin's page of one lock, its address, and names of every kind."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.contrib.admin.utils import quote, unquote
from django.test import Client
from hypothesis import given, strategies as st

from django_redislock.celery.execution_lock import ExecutionLock
from django_redislock.core import Lock
from django_redislock.core.validation import MAX_NAME
from django_redislock.models import decode_key, encode_key
from django_redislock.texts import visible
from tests.support import wait_until
from tests.support.admin_pages import (
    LIST,
    hold,
    messages,
    names,
    page,
    page_of,
    rewrite,
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


def test_any_name_is_shown_and_has_its_page(web: Client, client: redis.Redis) -> None:
    fences = [hold(client, name).fence for name in AWKWARD]
    html = page(web)
    assert sorted(names(html)) == sorted(map(visible, AWKWARD))
    assert "<b>" not in html
    assert "alert(" not in re.sub(r"alert\(&quot;1&quot;\)", "", html)
    for name, fence in zip(AWKWARD, fences, strict=True):
        assert f'<a href="{page_of(name)}' in html
        assert str(fence) in page(web, path=page_of(name))
        assert page(web, path=page_of(name, view="history"))


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
    html = page(web, path=page_of("invoice:42"))
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
    html = page(web, path=page_of("invoice:42"))
    assert re.search(r"20\d\d, \d\d:\d\d:\d\d IST$", field(html, "acquired"))
    assert field(html, "last_renewed") == "30 s ago"
    assert field(html, "shortened_id").endswith("…")
    assert 'field-lock"' not in html  # the title names it
    hold(client, "just taken", auto_renewal=True)
    assert field(page(web, path=page_of("just taken")), "last_renewed") == "not yet"
    hold(client, "fixed")
    assert "field-last_renewed" not in page(web, path=page_of("fixed"))
    lock.release()


def test_the_page_of_a_lock_that_nobody_holds(web: Client, client: redis.Redis) -> None:
    hold(client, "gone").release()
    response = web.get(page_of("gone"))
    assert response.status_code == 200
    assert messages(response) == ["This lock is free now."]
    assert "Force-release" not in response.content.decode()
    assert web.get(page_of("gone", view="history")).status_code == 200


OTHER_ADDRESSES = [encode_key("elsewhere", "a"), encode_key("url", "x" * 1001)]
NO_KEYS = ["Z", "é", "!", "A", "AA", "dXJsAA", "dXJsAA" + "~" * 6000, "dXJsAP~~~~~~", "dXJsAGE="]
NO_KEYS += [encode_key("url", "a") + "!", encode_key("url", "ab") + "="]  # one lock has one address, and one history


def test_what_is_no_lock_has_no_page(web: Client) -> None:
    for key in ("nonsense", *OTHER_ADDRESSES, *NO_KEYS):
        for view in ("change", "history"):
            response = web.get(f"{LIST}{quote(key)}/{view}/", follow=True)
            assert response.redirect_chain == [("/admin/", 302)], key
    for key in NO_KEYS:
        with pytest.raises(ValueError):  # noqa: PT011
            decode_key(key)


def test_the_address_of_a_long_name_is_not_too_long_for_servers(web: Client, client: redis.Redis) -> None:
    """Gunicorn refuses a request line of more than 4,094 bytes."""
    for name in ("é" * (MAX_NAME // 2), "\U0010fffd" * (MAX_NAME // 4), "_" * MAX_NAME, "\0" * MAX_NAME):
        hold(client, name)
        for view in ("change", "history"):
            query = "_changelist_filters=o%3D-1.2%26older%3D3600%26state%3Dunrenewed%26p%3D2"
            address = f"{page_of(name, view=view)}?{query}"
            assert len(f"GET {address} HTTP/1.1\r\n") < 4094
            assert web.get(address).status_code == 200
        assert decode_key(encode_key("default", name)) == ("default", name)


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
    shown = re.search(r'22<ol class="redislock-waiters">(.*?)</ol>', page(web, path=page_of("a")))
    assert shown is not None
    lines = re.findall(r"<li>(.*?)</li>", shown[1])
    assert len(lines) == 21
    assert lines[0].startswith("<bdi>?</bdi> for ")
    assert re.fullmatch(r"<bdi>&lt;b&gt;web&lt;/b&gt; · 0</bdi> for <bdi>\d min( \d+ s)?</bdi>", lines[1])
    assert lines[-1] == "…"
    client.zremrangebyrank(lock._keys.queue, 0, 20)
    assert f"<li><bdi>{socket.gethostname()} · {os.getpid()}</bdi> for " in page(web, path=page_of("a"))
    lock.release()
    thread.join(30)
    assert not thread.is_alive()


def test_arguments_and_worker_of_a_task(web: Client, client: redis.Redis) -> None:
    details = {"arguments": "customer='<b>', day=3", "worker": "celery@one"}
    lock = ExecutionLock(client, "celery", kind="celery", expire=600, auto_renewal=False).with_name(
        "celery:a", details=details
    )
    assert lock.acquire(blocking=False)
    html = page(web, path=page_of("celery:a"))
    for text in ("customer=&#x27;&lt;b&gt;&#x27;, day=3", "celery@one"):
        assert text in html
    hold(client, "b")
    assert "Arguments" not in page(web, path=page_of("b"))
