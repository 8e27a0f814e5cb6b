"""The admin's page about the waits now and in the last hour, with a plot in SVG without script and inline style."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import strip_tags
from django.utils.translation import gettext, gettext_lazy as _, ngettext

from .. import conf
from ..connections import clients, several_connections
from ..core.keys import SLOT_IN_TEXT, queue_name, split_slot
from ..core.listing import MINUTES, Contention, Waits, contention
from ..exceptions import LockBackendError
from ..inventory import RETRY_FOR, HeldLockRow, Listing, cause_of, of_nodes, read
from ..models import HeldLock, encode_key
from ..texts import visible
from .display import age_html, breakable, fill_in, holder_html, queue_html, wait_html
from .queryset import read_waiters

ROWS = 50
"""Names on the page: this many with the longest waits, and this many that saved most."""
ROWS_NOW, WAITERS_NOW = 20, 3
"""Locks that are waited for now, and waiters of each; those of each lock are read by a call of their own."""
WIDTH, HEIGHT = 720, 120


class Column(NamedTuple):
    """A column of the table, and the link that sorts by it."""

    title: str
    query: str
    sorted: str
    """"ascending", "descending" or ""."""


Found = tuple[Waits, str, str]
"""The waits for a lock, its connection, its name."""
COLUMNS: dict[str, tuple[Any, Callable[[Found], Any]]] = {
    "name": (_("name"), lambda found: found[2].casefold()),
    "waited": (_("total wait"), lambda found: found[0].seconds),
    "mean": (_("average wait"), lambda found: _mean(found[0])),
    "waits": (_("waits"), lambda found: found[0].waits),
    "gave_up": (_("gave up"), lambda found: found[0].gave_up),
    "duplicates": (_("duplicates prevented"), lambda found: found[0].duplicates),
    "avoided": (_("recomputations avoided"), lambda found: found[0].avoided),
    "connection": (_("connection"), lambda found: found[1]),
}
"""By the word in the query string: the title, and the sort key."""


class Bar(NamedTuple):
    """One minute of the plot. The numbers are texts, so that no locale writes a comma in them."""

    x: str
    y: str
    width: str
    height: str
    title: str


def page(model_admin: Any, request: HttpRequest) -> HttpResponse:
    """Show the locks that are waited for now, and those with the longest waits and the highest savings of an hour."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    listing = read()
    found = _read_counts(listing)
    model_admin.report_missing_locks(request, listing)
    # One row for a semaphore, because its slots have one queue.
    waited_for = list({(r.connection, queue_name(r.held.name)): r for r in listing.rows if r.held.waiting}.values())
    minutes = [Waits() for _minute in range(MINUTES)]
    names = []
    for connection, (by_name, by_minute) in found.items():
        names += [(waits, connection, name) for name, waits in by_name.items()]
        for minute, waits in zip(minutes, by_minute, strict=True):
            minute.seconds += waits.seconds
            minute.waits += waits.waits
    sorting = request.GET.get("sort", "")
    shown = _pick(names, sorting)
    several = several_connections()
    site = request.current_app = model_admin.admin_site.name
    count = sum(minute.waits for minute in minutes)
    most = max(minute.seconds for minute in minutes)
    duplicates, avoided = (sum(getattr(waits, what) for waits, *_ in names) for what in ("duplicates", "avoided"))
    context = {
        **model_admin.admin_site.each_context(request),
        "title": gettext("Contention in the last hour"),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "listing": listing,
        "now": [_row_now(site, lock) for lock in _waited_for_now(waited_for)],
        "now_cut": ngettext(
            "%(count)d lock is waited for; those with most waiters are shown.",
            "%(count)d locks are waited for; those with most waiters are shown.",
            len(waited_for),
        )
        % {"count": len(waited_for)}
        if len(waited_for) > ROWS_NOW
        else "",
        "rows": [_row(site, *item) for item in shown],
        "columns": [_column(word, sorting) for word in COLUMNS if several or word != "connection"],
        "several_connections": several,
        "cut": len(names) > len(shown),
        "bars": bars(minutes),
        "scale": [wait_html(most), wait_html(most / 2), "0"] if most else [],
        "ticks": [gettext("%(minutes)d min ago") % {"minutes": ago} for ago in (60, 45, 30, 15)] + [gettext("now")],
        "width": str(WIDTH),
        "height": str(HEIGHT),
        "most": wait_html(most) if most else "",
        "summary": [
            fill_in(
                ngettext("%(count)s wait, %(time)s in total", "%(count)s waits, %(time)s in total", count),
                count=count,
                time=wait_html(sum(minute.seconds for minute in minutes)),
            ),
            ngettext("%(count)d duplicate task prevented", "%(count)d duplicate tasks prevented", duplicates)
            % {"count": duplicates},
            ngettext("%(count)d recomputation avoided", "%(count)d recomputations avoided", avoided)
            % {"count": avoided},
        ],
    }
    return TemplateResponse(request, "admin/django_redislock/heldlock/contention.html", context)


def _waited_for_now(rows: list[HeldLockRow]) -> list[HeldLock]:
    """Return the locks with most waiters, with the first of these; the lock that is waited for longest comes first."""
    most = sorted(rows, key=lambda row: row.held.waiting, reverse=True)[:ROWS_NOW]
    locks = [read_waiters(HeldLock.of(row.connection, row.info)) for row in most]
    return sorted(locks, key=lambda lock: max((waiter.seconds for waiter in lock.queue), default=0.0), reverse=True)


def _row_now(site: str, lock: HeldLock) -> dict[str, Any]:
    return {
        "name": visible(lock.name),
        "shown": breakable(lock.name),
        "address": _address(site, lock.connection, lock.name),
        "waiting": queue_html(lock, WAITERS_NOW),
        "held_for": age_html(lock),
        "holder": holder_html(lock),
        "connection": lock.connection,
    }


def _address(site: str, connection: str, name: str) -> str:
    """Return the address of the page of a lock in the admin of that name; of a semaphore, of the list of its slots."""
    if name.endswith(SLOT_IN_TEXT):
        found = reverse("admin:django_redislock_heldlock_changelist", current_app=site)
        return f"{found}?{urlencode({'q': split_slot(name)[0]})}"
    key = quote(encode_key(connection, name))
    return reverse("admin:django_redislock_heldlock_change", args=[key], current_app=site)


def _read_counts(listing: Listing) -> dict[str, Contention]:
    """Return the counts of the connections that are in the listing, and add to it those that fail now."""
    try:
        found, _failed = clients()
    except ImproperlyConfigured:  # the listing has it
        return {}
    counts = {}
    for connection, client in found.items():
        if connection in listing.failed:  # a silent server would keep the page waiting once more
            continue
        missing: dict[str, str] = {}
        try:
            counts[connection] = contention(client, conf.get().key_prefix, retry_for=RETRY_FOR, missing=missing)
        except LockBackendError as error:
            listing.failed[connection] = cause_of(error)
        listing.failed.update(of_nodes(connection, missing))
    return counts


def _pick(names: list[Found], sorting: str) -> list[Found]:
    """Return the names to show: sorted by the wanted column, or the longest waits and then the highest savings."""
    word = sorting.removeprefix("-")
    if word in COLUMNS:
        return sorted(names, key=COLUMNS[word][1], reverse=sorting.startswith("-"))[: 2 * ROWS]
    names = sorted(names, key=lambda found: (found[0].seconds, found[0].saved), reverse=True)
    saved = sorted((found for found in names[ROWS:] if found[0].saved), key=lambda found: found[0].saved, reverse=True)
    return names[:ROWS] + saved[:ROWS]


def _column(word: str, sorting: str) -> Column:
    now = {word: "ascending", f"-{word}": "descending"}.get(sorting, "")
    first = "" if word in ("name", "connection") else "-"  # numbers begin with the highest
    query = f"-{word}" if now == "ascending" else word if now else f"{first}{word}"
    return Column(str(COLUMNS[word][0]), f"?sort={query}", now)


def _mean(waits: Waits) -> float:
    return waits.seconds / max(1, waits.waits)


def _row(site: str, waits: Waits, connection: str, name: str) -> dict[str, Any]:
    waited = [wait_html(waits.seconds), wait_html(_mean(waits))] if waits.waits else ["\N{EN DASH}"] * 2
    return vars(waits) | {
        "name": visible(name),
        "shown": breakable(name),
        "address": _address(site, connection, name),
        "connection": connection,
        "waited": waited[0],
        "mean": waited[1],
    }


def bars(minutes: list[Waits]) -> list[Bar]:
    """Return a bar for each minute in which a wait ended. Its height is the sum of the waits of that minute."""
    most = max(minute.seconds for minute in minutes)
    step = WIDTH / len(minutes)
    drawn = []
    for number, minute in enumerate(minutes):
        if minute.waits:
            height = max(1.0, HEIGHT * minute.seconds / most) if most else 1.0
            ago = len(minutes) - 1 - number
            time = strip_tags(wait_html(minute.seconds))
            title = gettext("%(ago)d min ago: waits of %(time)s in total ended") % {"ago": ago, "time": time}
            x, y, width, tall = (f"{value:.1f}" for value in (number * step, HEIGHT - height, step - 1, height))
            drawn.append(Bar(x, y, width, tall, title))
    return drawn
