"""Who may see and force-release locks in the admin."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

from tests.support import counting
from tests.support.admin_pages import (
    LIST,
    browser,
    confirm,
    form,
    hold,
    messages,
    page_of,
    release,
    superuser,
    tick,
    user,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("locks_by_url")]


def who(kind: str) -> Client:
    if kind == "anonymous":
        return Client()
    if kind == "superuser":
        return browser(superuser())
    permissions = {
        "user": (),
        "staff": (),
        "viewer": ("view_heldlock",),
        "releaser without view": ("force_release_heldlock",),
        "releaser": ("view_heldlock", "force_release_heldlock"),
    }
    return browser(user("somebody", *permissions[kind], staff=kind != "user"))


@pytest.mark.parametrize(
    ("kind", "sees", "releases"),
    [
        ("anonymous", False, False),
        ("user", False, False),
        ("staff", False, False),
        ("viewer", True, False),
        ("releaser without view", False, False),
        ("releaser", True, True),
        ("superuser", True, True),
    ],
)
def test_who_may_what(client: redis.Redis, kind: str, sees: bool, releases: bool) -> None:
    lock = hold(client, "stuck")
    box = tick(lock)
    web = who(kind)
    outside = {"anonymous": 302, "user": 302}.get(kind, 403)
    for path in (LIST, page_of("stuck"), page_of("stuck", view="history")):
        response = web.get(path)
        assert response.status_code == (200 if sees else outside)
        assert ("stuck" in response.content.decode()) == sees
    if sees:
        for path in (LIST, page_of("stuck")):
            assert ("force_release" in web.get(path).content.decode()) == releases
    assert ("The holder is not stopped." in confirm(web, box).content.decode()) == releases
    assert lock.owned()
    release(web, box)
    assert lock.owned() != releases
    assert LogEntry.objects.exists() == releases


def test_who_may_not_view_learns_nothing_of_a_lock(client: redis.Redis, settings: Any) -> None:
    """Django's next page told whether a lock of that name is held, and the address of a Redis that was away."""
    web = who("staff")
    hold(client, "stuck")
    pages = [page_of(name, view=view) for name in ("stuck", "free") for view in ("change", "history", "delete")]
    with counting(client) as counts:
        assert {web.get(path).status_code for path in pages} == {403}
    assert counts["evalsha"] == 0
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0"}
    assert web.get(page_of("stuck")).status_code == 403
    assert messages(web.get("/admin/")) == []


@pytest.mark.parametrize("kind", ["viewer", "superuser"])
def test_nobody_adds_edits_or_deletes(client: redis.Redis, kind: str) -> None:
    lock = hold(client, "stuck")
    web = who(kind)
    html = web.get(LIST).content.decode() + web.get(page_of("stuck")).content.decode()
    assert "delete" not in re.sub(r"delete_selected|deletelink", "", html).lower()
    for path in (f"{LIST}add/", page_of("stuck", view="delete")):
        assert web.get(path).status_code == 403
        assert web.post(path, {"post": "yes"}).status_code == 403
    assert web.post(page_of("stuck"), {"name": "other"}).status_code == 403
    web.post(LIST, {"action": "delete_selected", "index": "0", "_selected_action": [tick(lock)], "post": "yes"})
    assert lock.owned()


def test_the_token_against_forged_requests_is_needed(client: redis.Redis) -> None:
    lock = hold(client, "stuck")
    web = browser(superuser(), enforce_csrf_checks=True)
    for send in (confirm, release):
        assert send(web, tick(lock)).status_code == 403
    assert lock.owned()
    html = web.get(page_of("stuck")).content.decode()
    assert f'formaction="{LIST}"' in html
    question = web.post(LIST, form(html)).content.decode()
    assert "If it still runs, two holders will overlap." in question
    assert lock.owned()
    web.post(LIST, form(question))
    assert not lock.owned()


@pytest.mark.parametrize("method", ["get", "head", "options", "put", "delete"])
def test_only_post_releases(web: Client, client: redis.Redis, method: str) -> None:
    lock = hold(client, "stuck")
    query = f"?action=force_release&confirmed=yes&index=0&_selected_action={tick(lock)}"
    for path in (LIST + query, page_of("stuck") + query, LIST):
        getattr(web, method)(path)
    assert lock.owned()
    assert not LogEntry.objects.exists()


def test_a_permission_taken_away_between_question_and_answer(client: redis.Redis) -> None:
    operator = user("olga", "view_heldlock", "force_release_heldlock")
    lock = hold(client, "stuck")
    question = confirm(browser(operator), tick(lock)).content.decode()
    operator.user_permissions.clear()
    web = browser(User.objects.get(pk=operator.pk))
    assert web.post(LIST, form(question)).status_code == 403
    assert lock.owned()
