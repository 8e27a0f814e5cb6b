"""Force-release in the admin, and its gentle sibling, the recall: ask, read the selected locks again, and release or
recall those that did not change hands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext

from ..connections import connection_names, several_connections
from ..core.lease import MAX_REASON
from ..exceptions import LockBackendError
from ..inventory import cause_of, find, force_release
from ..models import HeldLock, decode_key
from ..texts import duration, visible
from .display import age_html, holder_html, name_html, waiter_lines
from .queryset import read_waiters


def selection_value(lock: HeldLock) -> str:
    """Return the value of a lock's check box: its primary key, and the fence of the shown acquisition."""
    return f"{lock.key}.{lock.fence}"


def _parse(value: str) -> tuple[str, str, int]:
    key, _, fence = value.partition(".")
    return *decode_key(key), int(fence)


class ForceRelease:
    """The force-release, or the recall, of the selected locks. `held` are those whose holder is still the one that was
    shown."""

    def __init__(self, values: Iterable[str], recalls: bool) -> None:
        self.recalls = recalls
        self.held: list[HeldLock] = []
        self.unwritten: list[str] = []
        """The released locks whose entry in the history could not be written."""
        self._released: list[str] = []
        self._changed: list[str] = []
        self._gone: list[str] = []
        self._unknown: list[str] = []
        self._failed: dict[str, str] = {}
        self._left: set[str] = set()
        """The failed connections with locks that were not tried after the failure."""
        shown: dict[str, dict[str, int]] = {connection: {} for connection in connection_names()}
        for value in values:
            with suppress(ValueError, KeyError):  # a forged value, or one from before a change of the settings
                connection, name, fence = _parse(value)
                shown[connection][name] = fence
        for connection, fences in shown.items():
            if fences:
                self._read(connection, fences)

    def _read(self, connection: str, fences: dict[str, int]) -> None:
        try:
            found = find(connection, fences)
        except (ImproperlyConfigured, LockBackendError) as error:
            self._failed[connection] = cause_of(error)
            return
        for name, fence in fences.items():
            if name not in found:
                self._gone.append(name)
            elif found[name].held.fence != fence:
                self._changed.append(name)
            else:
                self.held.append(HeldLock.of(connection, found[name].info))

    def release(self, by: object, reason: str) -> Iterator[HeldLock]:
        """Release the locks and yield each after its release; after an error, no other lock of that server is released.

        The holders get the user `by` and the `reason`.
        """
        for lock in self.held:
            if lock.connection in self._failed:
                self._left.add(lock.connection)
                continue
            try:
                if force_release(lock.connection, lock.name, lock.fence, by, reason, self.recalls):
                    self._released.append(lock.name)
                    yield lock
                elif find(lock.connection, [lock.name]):  # acquired by another holder since it was read
                    self._changed.append(lock.name)
                else:
                    self._gone.append(lock.name)
            except LockBackendError as error:
                self._unknown.append(lock.name)
                self._failed[lock.connection] = cause_of(error)

    def messages(self) -> Iterator[tuple[int, str]]:
        """Yield the messages about the result, each with its level."""
        if self._released and self.recalls:
            text = ngettext(
                "The holder of %(count)d lock was asked to stop: %(names)s. It is told when it next renews the lock. "
                "Nobody else gets the lock before it is released, or expires.",
                "The holders of %(count)d locks were asked to stop: %(names)s. They are told when they next renew "
                "their locks. Nobody else gets a lock before it is released, or expires.",
                len(self._released),
            )
            yield messages.SUCCESS, fill_in_names(text, self._released)
        elif self._released:
            text = ngettext(
                "%(count)d lock was force-released: %(names)s. If its former holder still runs, it is notified when it "
                "next renews the lock.",
                "%(count)d locks were force-released: %(names)s. Former holders that still run are notified when they "
                "next renew their locks.",
                len(self._released),
            )
            yield messages.SUCCESS, fill_in_names(text, self._released)
        if self.unwritten:
            text = ngettext(
                "The entry in the history of %(count)d lock could not be written: %(names)s.",
                "The entries in the histories of %(count)d locks could not be written: %(names)s.",
                len(self.unwritten),
            )
            yield messages.ERROR, fill_in_names(text, self.unwritten)
        if self._changed:
            text = ngettext(
                "%(count)d lock has another holder now and was not released: %(names)s.",
                "%(count)d locks have other holders now and were not released: %(names)s.",
                len(self._changed),
            )
            yield messages.WARNING, fill_in_names(text, self._changed)
        if self._gone:
            text = ngettext(
                "%(count)d lock is no longer held: %(names)s.",
                "%(count)d locks are no longer held: %(names)s.",
                len(self._gone),
            )
            yield messages.INFO, fill_in_names(text, self._gone)
        if self._unknown:
            text = ngettext(
                "Redis did not answer for %(count)d lock, so it is unknown whether that was done: %(names)s.",
                "Redis did not answer for %(count)d locks, so it is unknown whether that was done: %(names)s.",
                len(self._unknown),
            )
            yield messages.ERROR, fill_in_names(text, self._unknown)
        for connection, why in self._failed.items():
            if connection in self._left:
                text = gettext("Connection “%(connection)s” failed, and no other lock was released there: %(why)s")
            elif any(lock.connection == connection for lock in self.held):  # the only lock there was tried
                text = gettext("Connection “%(connection)s” failed: %(why)s")
            else:
                text = gettext("Connection “%(connection)s” failed, and no lock was released there: %(why)s")
            yield messages.ERROR, text % {"connection": connection, "why": why}


def fill_in_names(text: str, names: list[str], **values: str) -> str:
    """Return the text with the number of the names and the first of them, and with these values."""
    shown = ", ".join(f"“{Truncator(visible(name)).chars(60)}”" for name in names[:5])
    return text % ({"count": len(names), "names": shown if len(names) <= 5 else f"{shown}, …"} | values)


def confirmation_page(model_admin: Any, request: HttpRequest, selected: ForceRelease) -> HttpResponse:
    """Show the locks, and ask whether to release or recall them and why."""
    locks = selected.held
    if selected.recalls:
        title = ngettext("Ask a holder to stop", "Ask holders to stop", len(locks))
    else:
        title = ngettext("Force-release a lock", "Force-release locks", len(locks))
    request.current_app = model_admin.admin_site.name
    context = {
        **model_admin.admin_site.each_context(request),
        "title": title,
        "opts": model_admin.opts,
        "media": model_admin.media,
        "action_checkbox_name": ACTION_CHECKBOX_NAME,
        "longest_reason": MAX_REASON,
        "recalls": selected.recalls,
        "several_connections": several_connections(),
        "locks": [
            {
                "name": name_html(lock),
                "holder": holder_html(lock, whole=True),
                "arguments": visible(lock.arguments) if lock.arguments else "",
                "held_for": age_html(lock),
                "waiting": lock.waiting,
                "next": next(iter(waiter_lines(read_waiters(lock))), ""),
                "connection": lock.connection,
                "selection_value": selection_value(lock),
            }
            for lock in locks
        ],
    }
    return TemplateResponse(request, "admin/django_redislock/heldlock/force_release.html", context)


def history_entry(lock: HeldLock, reason: str, recalls: bool) -> str:
    """Return the text about a forced release, or a recall, in the history of the lock."""
    if recalls:
        text = gettext("Asked to stop after %(age)s. Held by %(holder)s (fence %(fence)d, connection %(connection)s).")
    else:
        text = gettext("Force-released after %(age)s. Held by %(holder)s (fence %(fence)d, connection %(connection)s).")
    text %= {
        "age": duration(lock.age),
        "holder": visible(f"{lock.label} {lock.place}".strip()),
        "fence": lock.fence,
        "connection": lock.connection,
    }
    if not reason:
        return text
    # Not within the f-string, because the tool for catalogues does not find it there.
    why = gettext("Reason: %(reason)s") % {"reason": visible(reason)}
    return f"{text} {why}"
