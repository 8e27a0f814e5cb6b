"""What the tests of the admin share: locks to look at, users, and the pages as they are sent."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import redis
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from django_redislock.admin.force_release import selection_value
from django_redislock.core import Lock
from django_redislock.models import HeldLock, encode_key
from tests.support import wait_until

LIST = "/admin/django_redislock/heldlock/"
CONNECTION = "url"


def hold(client: redis.Redis, name: str, **options: Any) -> Lock:
    lock = Lock(client, name, **{"expire": 600, "auto_renewal": False} | options)
    assert lock.acquire(blocking=False)
    return lock


def rewrite(client: redis.Redis, lock: Lock, *, host: str | None = None, younger_by: int = 0) -> None:
    """Have the lock say that another host took it, or that it was taken later (negative seconds: earlier)."""
    key = lock._keys.lock
    id, fence, acquired, raw = client.get(key).decode().split("\n", 3)  # type: ignore[union-attr]
    fields = json.loads(raw) | ({} if host is None else {"host": host})
    value = "\n".join([id, fence, str(int(acquired) + younger_by * 1000), json.dumps(fields, separators=(",", ":"))])
    client.set(key, value, keepttl=True)


def next_millisecond(client: redis.Redis) -> None:
    """Return when the server's clock shows another millisecond: what ages are told in."""
    before = client.time()
    wait_until(lambda: (client.time()[0], client.time()[1] // 1000) > (before[0], before[1] // 1000))


def held(client: redis.Redis, name: str) -> bool:
    return Lock(client, name).locked()


def user(name: str, *permissions: str, staff: bool = True) -> User:
    made = User.objects.create_user(name, password="secret", is_staff=staff)
    made.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return made


def superuser() -> User:
    return User.objects.create_superuser("root", password="secret")


def browser(of: User, **options: Any) -> Client:
    client = Client(**options)
    client.force_login(of)
    return client


def tick(lock: Lock, connection: str = CONNECTION) -> str:
    """Return what the check box beside the lock sends."""
    info = lock.owner()
    assert info is not None
    return selection_value(HeldLock.of(connection, info))


def page_of(name: str, connection: str = CONNECTION, view: str = "change") -> str:
    """Return the address of a page of the lock, made as the admin makes it."""
    from django.contrib.admin.utils import quote

    return reverse(f"admin:django_redislock_heldlock_{view}", args=[quote(encode_key(connection, name))])


def names(html: str) -> list[str]:
    """Return the names in the list, from top to bottom."""
    found = re.findall(r'<bdi class="redislock-name"[^>]*>(.*?)</bdi>', html, re.DOTALL)
    return [unescape(name.replace("<wbr>", "")) for name in found]


def messages(response: Any) -> list[str]:
    return [str(message) for message in response.context["messages"]] if response.context else []


def confirm(client: Client, *ticks: str, **data: str) -> Any:
    """Send the list with these boxes ticked and the action chosen: the answer asks for confirmation."""
    return client.post(LIST, {"action": "force_release", "index": "0", "_selected_action": ticks} | data, follow=True)


def release(client: Client, *ticks: str, **data: str) -> Any:
    """Confirm the release, as the form of the confirmation page does."""
    return client.post(
        LIST, {"action": "force_release", "confirmed": "yes", "_selected_action": ticks} | data, follow=True
    )


def page(client: Client, query: str = "", path: str = LIST) -> str:
    """Return the HTML of a page, by default of the list."""
    response = client.get(path + query)
    assert response.status_code == 200
    return response.content.decode()


def form(html: str) -> dict[str, Any]:
    """Return what the form of the page that can be sent by POST to the list sends."""
    data: dict[str, Any] = {}
    for field in re.findall(r'<input type="hidden"[^>]*>', html):
        name, value = (unescape(re.search(rf'{key}="([^"]*)"', field)[1]) for key in ("name", "value"))  # type: ignore[index]
        if name in data and name == "_selected_action":
            data[name] = [*data[name], value]
        else:
            data[name] = [value] if name == "_selected_action" else value
    return data
