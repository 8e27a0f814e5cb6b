"""Force-release in the admin: who may, what it asks, what it leaves alone, and what it leaves behind."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.contrib.admin.models import LogEntry
from django.contrib.messages import get_messages
from django.db import connection
from django.test import Client
from django.utils.translation import override

from django_redislock.celery.execution_lock import ExecutionLock
from django_redislock.core import Lock
from django_redislock.exceptions import LockLost
from django_redislock.models import HeldLock, encode_key
from django_redislock.signals import lock_force_released
from tests.support import Proxy, RedisServer
from tests.support.admin_pages import (
    LIST,
    browser,
    confirm,
    form,
    held,
    hold,
    messages,
    names,
    page,
    page_of,
    release,
    superuser,
    tick,
    user,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("locks_by_url")]

WARNING = "The holder is not stopped. If it still runs, two holders will overlap."


@pytest.fixture
def signals() -> Iterator[list[dict[str, Any]]]:
    received: list[dict[str, Any]] = []

    def receive(**data: Any) -> None:
        received.append(data)

    lock_force_released.connect(receive)
    yield received
    lock_force_released.disconnect(receive)


# The way through it


def test_from_the_list_over_the_question_to_the_release(web: Client, client: redis.Redis) -> None:
    stuck, other = hold(client, "stuck", label="nightly[7]"), hold(client, "other")
    [box] = re.findall(r'value="([^"]+)" class="action-select" aria-label="Select this lock: stuck"', page(web))

    question = confirm(web, box)
    html = question.content.decode()
    assert names(html) == ["stuck"]
    assert "nightly[7]" in html
    assert re.search(r'title="[^"]+"><bdi>\d\.\d s<', html)
    assert WARNING in html
    assert held(client, "stuck")

    answer = web.post(LIST, form(html), follow=True)
    assert answer.redirect_chain == [(LIST, 302)]
    assert "“stuck”" in messages(answer)[0]
    assert names(answer.content.decode()) == ["other"]
    assert not stuck.owned()
    assert other.owned()


def test_who_is_asked_to_stop_keeps_the_lock_until_it_gives_it_back(web: Client, client: redis.Redis) -> None:
    lock = hold(client, "stuck", label="nightly[7]")
    box = tick(lock)
    html = web.post(LIST, {"action": "recall", "index": "0", "_selected_action": box}).content.decode()
    assert "Nobody else gets the lock before it is released" in html
    assert WARNING not in html
    of_lock = {"action": "force_release", "recalls": "Ask to stop…", "_selected_action": box}
    assert names(web.post(LIST, of_lock).content.decode()) == names(html) == ["stuck"]

    for _ in range(2):  # a second ask changes nothing
        answer = web.post(LIST, form(html) | {"reason": "a deploy"}, follow=True)
        assert "The holder of 1 lock was asked to stop: “stuck”." in messages(answer)[0]
    assert "asked to stop" in page(web)
    assert "asked to stop" in page(web, path=page_of("stuck"))
    entry = LogEntry.objects.first()
    assert entry is not None
    assert re.match(r"Asked to stop after .* Held by nightly.* Reason: a deploy", entry.get_change_message())
    assert held(client, "stuck")
    with pytest.raises(LockLost, match=r"root asked for it back .*: a deploy"):
        lock.extend()
    assert "1 lock was force-released" in messages(release(web, box))[0]
    assert not held(client, "stuck")


def test_many_at_once(web: Client, client: redis.Redis) -> None:
    locks = [hold(client, f"lock {number}") for number in range(8)]
    answer = release(web, *[tick(lock) for lock in locks[:7]])
    assert [held(client, lock.name) for lock in locks] == [False] * 7 + [True]
    [message] = messages(answer)
    assert message.startswith("7 locks were force-released")
    assert "…" in message


def test_any_name_can_be_released(web: Client, client: redis.Redis) -> None:
    given = ["<script>alert(1)</script>", "a\r\nb", "nul \0", "🔒/é", "   ", "x" * 1000]
    for name in given:
        hold(client, name)
    question = confirm(web, *re.findall(r'name="_selected_action" value="([^"]+)"', page(web))).content.decode()
    answer = web.post(LIST, form(question), follow=True).content.decode()
    for html in (question, answer):
        assert "<script>alert" not in html
    assert not any(held(client, name) for name in given)
    logged = [entry.object_repr for entry in LogEntry.objects.all()]
    assert len(logged) == len(given)
    assert "\0" not in "".join(logged)  # PostgreSQL would refuse it


# What it leaves alone


def test_changed_hands_between_list_and_question(web: Client, client: redis.Redis) -> None:
    first = hold(client, "stuck")
    box = tick(first)
    first.release()
    second = hold(client, "stuck")
    answer = confirm(web, box)
    assert messages(answer) == ["1 lock has another holder now and was not released: “stuck”."]
    assert answer.redirect_chain == [(LIST, 302)]
    assert second.owned()


def test_changed_hands_between_question_and_answer(web: Client, client: redis.Redis) -> None:
    first, other = hold(client, "stuck"), hold(client, "other")
    question = confirm(web, tick(first), tick(other)).content.decode()
    first.release()
    second = hold(client, "stuck")
    answer = web.post(LIST, form(question), follow=True)
    assert sorted(message.split(":")[0] for message in messages(answer)) == [
        "1 lock has another holder now and was not released",
        "1 lock was force-released",
    ]
    assert second.owned()
    assert not other.owned()
    assert [entry.object_repr for entry in LogEntry.objects.all()] == ["other"]


@pytest.mark.parametrize("taken", [True, False])
def test_changed_hands_within_the_release_itself(
    web: Client, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """The script in Redis has the last word, however late the change."""
    first = hold(client, "stuck")
    box = tick(first)
    reset = Lock.reset

    def late(self: Lock, *args: Any, **kwargs: Any) -> bool:
        first.release()
        if taken:
            hold(client, "stuck")
        return reset(self, *args, **kwargs)

    monkeypatch.setattr(Lock, "reset", late)
    answer = release(web, box)
    what = "has another holder now and was not released" if taken else "is no longer held"
    assert messages(answer) == [f"1 lock {what}: “stuck”."]
    assert held(client, "stuck") == taken
    assert not LogEntry.objects.exists()


def test_not_held_any_more(web: Client, client: redis.Redis) -> None:
    lock = hold(client, "stuck")
    box = tick(lock)
    lock.release()
    assert messages(confirm(web, box)) == ["1 lock is no longer held: “stuck”."]
    assert messages(release(web, box)) == ["1 lock is no longer held: “stuck”."]


@pytest.mark.parametrize("send", [confirm, release])
def test_select_across_is_ignored(web: Client, client: redis.Redis, send: Any) -> None:
    locks = [hold(client, f"lock {number}") for number in range(25)]
    answer = send(web, tick(locks[3]), select_across="1")
    if send is confirm:
        assert names(answer.content.decode()) == ["lock 3"]
        web.post(LIST, form(answer.content.decode()) | {"select_across": "1"})
    assert [lock.name for lock in locks if not held(client, lock.name)] == ["lock 3"]
    answer = release(web, select_across="1")
    assert sum(held(client, lock.name) for lock in locks) == 24


def test_only_on_its_own_connection(web: Client, client: redis.Redis, settings: Any, server: Any) -> None:
    other = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": server.url_of_db(1)}
    settings.CACHES = settings.CACHES | {"other": other}
    lock = hold(client, "stuck")
    with redis.Redis.from_url(server.url_of_db(1)) as second:
        second.flushdb()
        twin = hold(second, "stuck")
        release(web, tick(twin, "other"))
        assert lock.owned()
        assert not twin.owned()


def test_forged_boxes_release_nothing(web: Client, client: redis.Redis) -> None:
    lock, key = hold(client, "a"), encode_key("url", "a")
    others = [f"{encode_key('elsewhere', 'a')}.1", f"{encode_key('url', 'x' * 1001)}.1"]
    for value in ("", ".", "nonsense.1", key, f"{key}.x", f"{key}.", f"{key}.1", *others):
        assert release(web, value).status_code == 200
        assert confirm(web, value).status_code == 200
        assert lock.owned(), value


@pytest.mark.processes
def test_a_connection_that_is_down_is_told_and_the_others_are_released(
    web: Client, client: redis.Redis, settings: Any, own_server: RedisServer
) -> None:
    cache = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": own_server.url}
    settings.CACHES = settings.CACHES | {"second": cache}
    with own_server.client() as second:
        boxes = [tick(hold(second, f"far {number}"), "second") for number in range(3)]
    lock = hold(client, "near")
    own_server.kill()
    answer = release(web, *boxes, tick(lock))
    told = " ".join(messages(answer))
    assert "“near”" in told
    assert "Connection “second” failed, and no lock was released there: ConnectionError" in told
    assert not held(client, "near")


@pytest.mark.slow
def test_a_release_that_is_not_answered_is_unknown(
    web: Client, settings: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DJANGO_REDISLOCK = {"URL": proxy.url + "?socket_timeout=1"}
    with redis.Redis.from_url(proxy.url) as near:
        boxes = [tick(hold(near, name)) for name in ("a", "b")]
        alone = tick(hold(near, "c"))
    reset = Lock.reset

    def stalled(self: Lock, *args: Any, **kwargs: Any) -> bool:
        proxy.stall()
        return reset(self, *args, **kwargs)

    monkeypatch.setattr(Lock, "reset", stalled)
    answer = web.post(LIST, {"action": "force_release", "confirmed": "yes", "_selected_action": boxes})
    proxy.heal()
    told = [str(message) for message in get_messages(answer.wsgi_request)]
    assert told[0] == "Redis did not answer for 1 lock, so it is unknown whether that was done: “a”."
    assert told[1].startswith("Connection “url” failed, and no other lock was released there: TimeoutError")
    answer = web.post(LIST, {"action": "force_release", "confirmed": "yes", "_selected_action": alone})
    proxy.heal()
    told = [str(message) for message in get_messages(answer.wsgi_request)]
    assert told[-1].startswith("Connection “url” failed: TimeoutError"), "there was no other lock"
    assert not LogEntry.objects.exists()


# What it leaves behind


def test_log_entry_record_and_signal(
    client: redis.Redis, signals: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    operator = user("olga", "view_heldlock", "force_release_heldlock")
    web = browser(operator)
    lock = hold(client, "stuck", label="nightly[7]")
    with caplog.at_level(logging.INFO, "django_redislock"):
        release(web, tick(lock))

    entry = LogEntry.objects.get()
    assert entry.user == operator
    assert entry.is_change()
    assert entry.object_repr == "stuck"
    assert entry.object_id == encode_key("url", "stuck")
    assert entry.content_type.model_class() is HeldLock
    for text in ("Force-released", "nightly[7]", str(lock.fence), "url"):
        assert text in entry.get_change_message()

    [record] = [record for record in caplog.records if "'stuck'" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "olga" in record.getMessage()

    [signal] = signals
    assert signal["user"] == operator
    assert signal["name"] == "stuck"
    assert signal["fence"] == lock.fence

    for text in (record.getMessage(), json.dumps(entry.change_message), repr(signals)):
        assert str(lock.id) not in text

    web = browser(superuser())
    assert web.get(entry.get_admin_url()).status_code == 200
    history = page(web, path=page_of("stuck", view="history"))
    for text in ("Force-released after", "olga"):
        assert text in history


def test_the_reason_reaches_the_former_holder_the_history_the_log_and_the_signal(
    web: Client, client: redis.Redis, signals: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    lock = hold(client, "stuck")
    assert 'name="reason"' in confirm(web, tick(lock)).content.decode()
    release(web, tick(lock), reason="  it hangs since noon ")
    assert LogEntry.objects.get().get_change_message().endswith("Reason: it hangs since noon")
    assert signals[0]["reason"] == "it hangs since noon"
    assert "was force-released by root (it hangs since noon)." in caplog.text
    with pytest.raises(LockLost, match=r"root force-released it at .* UTC: it hangs since noon\.") as raised:
        lock.release()
    assert raised.value.record.code == "force_released"


def test_a_database_that_writes_no_history_is_told_and_every_lock_is_released(
    web: Client, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Read-only after a failover, it was a server error: one lock was free without a word, and the others held.

    The whole test is one transaction, as a request with ATOMIC_REQUESTS is.
    """
    boxes = [tick(hold(client, name)) for name in "abc"]
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON django_admin_log WHEN NEW.object_repr = 'b' "
            "BEGIN SELECT RAISE(ABORT, 'read-only'); END"
        )
    told = messages(release(web, *boxes))
    assert not any(held(client, name) for name in "abc")
    assert [message.split(":")[0] for message in told] == [
        "3 locks were force-released",
        "The entry in the history of 1 lock could not be written",
    ]
    assert told[1].endswith(": “b”.")
    assert sorted(entry.object_repr for entry in LogEntry.objects.all()) == ["a", "c"]
    assert "read-only" in caplog.text, "the log has the cause"


def test_the_question_shows_the_task_its_arguments_and_who_is_next(
    web: Client, client: redis.Redis, listen: Any
) -> None:
    details = {"arguments": "customer='<b>', day=3", "worker": "celery@one"}
    label = "shop.tasks.rebuild[0b6c8f0e-3b60-4a52-9c1f-2f5d0c9b6a11]"
    lock = ExecutionLock(client, "celery", kind="celery", expire=600, auto_renewal=False)
    lock = lock.with_name("celery:a", label=label, details=details)
    assert lock.acquire(blocking=False)
    channels = [f"redislock:wake:0:{number}:web" for number in (11, 22)]
    listen(*channels)
    client.zadd(lock._keys.queue, {f"{channel}\n1": number for number, channel in enumerate(channels)})
    html = confirm(web, tick(lock)).content.decode()
    for text in (label, "customer=&#x27;&lt;b&gt;&#x27;, day=3", "2<br>next: <bdi>web · 11</bdi> for "):
        assert text in html


def test_the_history_is_in_the_language_of_the_site_and_not_of_the_user_who_released(
    web: Client, client: redis.Redis, settings: Any
) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    data = {"action": "force_release", "confirmed": "yes", "_selected_action": tick(hold(client, "stuck"))}
    with override("en"):  # what the request switches this thread to ends here
        answer = web.post(LIST, data, headers={"accept-language": "de"})
        [told] = [str(message) for message in get_messages(answer.wsgi_request)]
    assert "zwangsweise freigegeben" in told
    assert LogEntry.objects.get().get_change_message().startswith("Force-released after ")
