"""Lengths of time, moments and names on the admin's pages, isolated, so that a right-to-left page keeps its order."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from django.utils.formats import date_format, number_format
from django.utils.html import conditional_escape, escape, format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.timezone import localtime
from django.utils.translation import gettext

from ..inventory import duration
from ..models import HeldLock, visible

SHOWN_OF_ID = 8
"""Characters of a task's id in the list; the whole id is in the title."""
_TASK = re.compile(r"(.*)\[([^\[\]]+)\]", re.DOTALL)


def isolated(text: str) -> SafeString:
    """Return the text such that its order does not depend on the direction of the text around it."""
    return format_html("<bdi>{}</bdi>", text)


def filled(text: str, **values: Any) -> SafeString:
    """Return the text with these values in place of its ``%(name)s``; text that is not safe HTML is escaped."""
    return mark_safe(escape(text) % {key: conditional_escape(value) for key, value in values.items()})  # noqa: S308


def time_span(seconds: float) -> SafeString:
    """Return a length of time in at most two units."""
    return isolated(duration(seconds))


def wait_span(seconds: float) -> SafeString:
    """Return the length of a wait: of less than a second in milliseconds, because most waits are that short."""
    if seconds >= 0.9995 or not seconds:
        return time_span(seconds)
    return isolated(gettext("%(milliseconds)s ms") % {"milliseconds": number_format(max(1, round(seconds * 1000)))})


def moment(when: datetime) -> str:
    """Return a moment with its seconds and its time zone."""
    local = localtime(when)
    return f"{date_format(local, 'DATE_FORMAT')}, {local:%H:%M:%S %Z}".strip()


def now() -> str:
    """Return the time of day with its seconds and its time zone."""
    return f"{localtime(datetime.now(UTC)):%H:%M:%S %Z}".strip()


def name_of(lock: HeldLock) -> SafeString:
    """Return the name of a lock, with everything made visible in it."""
    return format_html('<bdi class="redislock-name">{}</bdi>', visible(lock.name))


def holder_of(lock: HeldLock, *, whole: bool = False) -> SafeString:
    """Return the holder of a lock and its place; the id of a task is shortened unless `whole`."""
    place = isolated(visible(lock.place))
    if not lock.label:
        return place
    label, task = visible(lock.label), _TASK.fullmatch(lock.label)
    shown, title = label, SafeString("")
    if task is not None and not whole and len(task[2]) > SHOWN_OF_ID + 1:
        shown = visible(f"{task[1]}[{task[2][:SHOWN_OF_ID]}…]")
        title = format_html(' title="{}"', label)
    return format_html('<bdi{}>{}</bdi><br><span class="quiet">{}</span>', title, shown, place)


def waiters_of(lock: HeldLock) -> list[SafeString]:
    """Return a line for each known waiter, in the order in which they get the lock, with place and time."""
    return [
        filled(gettext("%(place)s for %(time)s"), place=isolated(place), time=time_span(seconds))
        for host, pid, seconds in lock.queue
        for place in [visible(f"{host} · {pid}") if host else "?"]
    ]


def queue_of(lock: HeldLock) -> SafeString:
    """Return the number of waiters of a lock, and a list of the first ones."""
    lines = waiters_of(lock)
    if not lines:
        return SafeString(lock.waiting)
    if lock.waiting > len(lines):
        lines.append(SafeString("…"))
    items = format_html_join("", "<li>{}</li>", ((line,) for line in lines))
    return format_html('{}<ol class="redislock-waiters">{}</ol>', lock.waiting, items)
