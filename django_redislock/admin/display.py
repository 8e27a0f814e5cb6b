"""Durations, times, names and holders as HTML that keeps its order on right-to-left pages."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from django.utils.formats import date_format, number_format
from django.utils.html import conditional_escape, escape, format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.timezone import localtime
from django.utils.translation import gettext

from ..core.keys import split_slot
from ..core.listing import MAX_WAITERS
from ..models import HeldLock
from ..texts import duration, visible
from .queryset import renewal_is_late

SHOWN_OF_ID = 8
"""Characters of a task's id in the list; the whole id is in the title."""
_SEPARATORS = re.compile(r"(?<=\w)([:._/-]+)(?=\w)")
_TASK = re.compile(r"(.*)\[([^\[\]]+)\]", re.DOTALL)


def isolate(text: str) -> SafeString:
    """Return the text in an element that keeps its order on a page of the other direction."""
    return format_html("<bdi>{}</bdi>", text)


def fill_in(text: str, **values: Any) -> SafeString:
    """Return the text with these values in place of its ``%(name)s``; both are escaped unless they are safe."""
    return mark_safe(escape(text) % {key: conditional_escape(value) for key, value in values.items()})  # noqa: S308


def duration_html(seconds: float) -> SafeString:
    """Return a duration in at most two units."""
    return isolate(duration(seconds))


def wait_html(seconds: float) -> SafeString:
    """Return the duration of a wait; below a second in milliseconds, because most waits are that short."""
    if seconds >= 0.9995 or not seconds:
        return duration_html(seconds)
    return isolate(gettext("%(milliseconds)s ms") % {"milliseconds": number_format(max(1, round(seconds * 1000)))})


def date_and_time(when: datetime) -> str:
    """Return the date, and the time of day with its seconds and its time zone."""
    return f"{date_format(localtime(when), 'DATE_FORMAT')}, {time_of_day(when)}"


def time_of_day(when: datetime | None = None) -> str:
    """Return the time of day, by default of now, with its seconds and its time zone."""
    return f"{localtime(when or datetime.now(UTC)):%H:%M:%S %Z}".strip()


def breakable(text: str) -> SafeString:
    """Return a name for people; its lines may end after each separator, because else they would end within a word."""
    return mark_safe(_SEPARATORS.sub(r"\1<wbr>", escape(visible(text))))  # noqa: S308


def name_html(lock: HeldLock) -> SafeString:
    """Return the name of a lock, or of a semaphore with the number of the slot and the limit."""
    if not lock.slot:
        return format_html('<bdi class="redislock-name">{}</bdi>', breakable(lock.name))
    of = gettext("%(slot)d of %(limit)d") % {"slot": lock.slot, "limit": lock.limit}
    name = breakable(split_slot(lock.name)[0])
    return format_html('<bdi class="redislock-name">{}</bdi> <span class="quiet nowrap">{}</span>', name, of)


def holder_html(lock: HeldLock, *, whole: bool = False) -> SafeString:
    """Return the holder of a lock and its place; the id of a task is shortened unless `whole`."""
    place = isolate(visible(lock.place))
    if not lock.label:
        return place
    label, task = visible(lock.label), _TASK.fullmatch(lock.label)
    shown, title = label, SafeString("")
    if task is not None and not whole and len(task[2]) > SHOWN_OF_ID + 1:
        shown = visible(f"{task[1]}[{task[2][:SHOWN_OF_ID]}…]")
        title = format_html(' title="{}"', label)
    return format_html('<bdi{}>{}</bdi><br><span class="quiet">{}</span>', title, shown, place)


def expiry_html(lock: HeldLock) -> SafeString:
    """Return the time until the expiry with a meter, and a note about a late or missing renewal."""
    expire = max(lock.expire, lock.ttl)
    if lock.recalled:
        note = format_html('<br><span class="quiet">{}</span>', gettext("asked to stop"))
    elif not lock.auto_renewal:
        note = format_html('<br><span class="quiet">{}</span>', gettext("not renewed"))
    elif renewal_is_late(lock):
        note = format_html('<br><span class="redislock-late">{}</span>', gettext("renewal is late"))
    else:
        note = SafeString("")
    return format_html(
        '<span class="nowrap"><meter class="redislock-meter" aria-hidden="true" '
        'max="{}" low="{}" high="{}" optimum="{}" value="{}"></meter> {}</span>{}',
        *(expire, expire / 2, expire / 2, expire, lock.ttl, duration_html(lock.ttl), note),
    )


def age_html(lock: HeldLock) -> SafeString:
    """Return for how long the lock is held, with the time of its acquisition in the title."""
    since = date_and_time(lock.acquired_at)
    return format_html('<span class="nowrap" title="{}">{}</span>', since, duration_html(lock.age))


def waiter_lines(lock: HeldLock) -> list[SafeString]:
    """Return a line with place and waiting time for each known waiter; the next holder is the first."""
    return [
        fill_in(gettext("%(place)s for %(time)s"), place=isolate(place), time=duration_html(seconds))
        for host, pid, seconds in lock.queue
        for place in [visible(f"{host} · {pid}") if host else "?"]
    ]


def queue_html(lock: HeldLock, shown: int = MAX_WAITERS) -> SafeString:
    """Return the number of waiters of a lock, and a list of the first ones."""
    lines = waiter_lines(lock)[:shown]
    if not lines:
        return SafeString(lock.waiting)
    if lock.waiting > len(lines):
        lines.append(SafeString("…"))
    items = format_html_join("", "<li>{}</li>", ((line,) for line in lines))
    return format_html('{}<ol class="redislock-waiters">{}</ol>', lock.waiting, items)
