"""The admin's page about the last hour: waits, and what they saved; its plot is drawn here: no script, no inline style."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext, ngettext

from . import conf
from .core.contention import MINUTES, Waits, contention
from .exceptions import LockBackendError
from .heldlocks import RETRY_FOR, clients, duration, reason
from .models import visible

ROWS = 50
"""Names on the page: so many that were waited for longest, and so many that saved most."""
WIDTH, HEIGHT = 720, 120


class Row(NamedTuple):
    """One line of the table."""

    name: str
    connection: str
    waited: str
    mean: str
    waits: int
    gave_up: int
    duplicates: int
    avoided: int


class Bar(NamedTuple):
    """One minute of the plot; texts, so that no locale puts a comma into them."""

    x: str
    y: str
    width: str
    height: str
    title: str


def page(model_admin: Any, request: HttpRequest) -> HttpResponse:
    """Show which names were waited for most in the last hour and saved most, on all connections."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    found, failed = _read()
    for connection, why in failed.items():
        text = gettext("Connection “%(connection)s” failed: %(why)s") % {"connection": connection, "why": why}
        model_admin.message_user(request, text, "ERROR")
    minutes = [Waits() for _ in range(MINUTES)]
    names = []
    for connection, (by_name, by_minute) in found.items():
        names += [(waits, connection, name) for name, waits in by_name.items()]
        for minute, waits in zip(minutes, by_minute, strict=True):
            minute.seconds += waits.seconds
            minute.waits += waits.waits
    names.sort(key=lambda item: (item[0].seconds, item[0].saved), reverse=True)
    shown = names[:ROWS]
    rest = sorted((item for item in names[ROWS:] if item[0].saved), key=lambda item: item[0].saved, reverse=True)
    shown += rest[:ROWS]
    request.current_app = model_admin.admin_site.name
    count = sum(minute.waits for minute in minutes)
    duplicates, avoided = (sum(getattr(waits, what) for waits, *_ in names) for what in ("duplicates", "avoided"))
    context = {
        **model_admin.admin_site.each_context(request),
        "title": gettext("Contention in the last hour"),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "rows": [_row(*item) for item in shown],
        "cut": len(names) > len(shown),
        "bars": bars(minutes),
        "width": str(WIDTH),
        "height": str(HEIGHT),
        "most": duration(max(minute.seconds for minute in minutes)),
        "summary": [
            ngettext("%(count)d wait, %(time)s in all", "%(count)d waits, %(time)s in all", count)
            % {"count": count, "time": duration(sum(minute.seconds for minute in minutes))},
            ngettext("%(count)d duplicate task prevented", "%(count)d duplicate tasks prevented", duplicates)
            % {"count": duplicates},
            ngettext("%(count)d recomputation avoided", "%(count)d recomputations avoided", avoided)
            % {"count": avoided},
        ],
    }
    return TemplateResponse(request, "admin/django_redislock/heldlock/contention.html", context)


def _read() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the waits of each connection, and why others could not be read."""
    try:
        found, failed = clients()
    except ImproperlyConfigured as error:
        return {}, {conf.NAME: str(error)}
    read = {}
    for connection, client in found.items():
        try:
            read[connection] = contention(client, conf.get().key_prefix, retry_for=RETRY_FOR)
        except LockBackendError as error:
            failed[connection] = reason(error)
    return read, failed


def _row(waits: Waits, connection: str, name: str) -> Row:
    mean = waits.seconds / max(1, waits.waits)
    return Row(
        *(visible(name), connection, duration(waits.seconds), duration(mean), waits.waits, waits.gave_up),
        *(waits.duplicates, waits.avoided),
    )


def bars(minutes: list[Waits]) -> list[Bar]:
    """Return a bar for each minute in which a wait ended: as high as what was waited in all, the longest as the plot."""
    most = max(minute.seconds for minute in minutes)
    step = WIDTH / len(minutes)
    drawn = []
    for number, minute in enumerate(minutes):
        if minute.waits:
            height = max(1.0, HEIGHT * minute.seconds / most) if most else 1.0
            ago = len(minutes) - 1 - number
            title = gettext("%(ago)d min ago: waited for %(time)s") % {"ago": ago, "time": duration(minute.seconds)}
            x, y, width, tall = (f"{value:.1f}" for value in (number * step, HEIGHT - height, step - 1, height))
            drawn.append(Bar(x, y, width, tall, title))
    return drawn
