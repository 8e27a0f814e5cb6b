"""Force-release in the admin: look again at what was ticked, release what is still as it was shown, tell of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from django.contrib import messages
from django.core.exceptions import ImproperlyConfigured
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext

from ..connections import connection_names
from ..exceptions import LockBackendError
from ..inventory import find, force_release, reason
from ..models import HeldLock, decode_key, visible


def ticked(lock: HeldLock) -> str:
    """Return what a form sends of a lock: its key, and the fence of the acquisition that was shown."""
    return f"{lock.key}.{lock.fence}"


def _parse(value: str) -> tuple[str, str, int]:
    key, _, fence = value.partition(".")
    return *decode_key(key), int(fence)


class Release:
    """The release of the locks that were ticked. `held` are those whose holder is still the one that was shown."""

    def __init__(self, values: Iterable[str]) -> None:
        self.held: list[HeldLock] = []
        self._released: list[str] = []
        self._changed: list[str] = []
        self._gone: list[str] = []
        self._unknown: list[str] = []
        self._failed: dict[str, str] = {}
        shown: dict[str, dict[str, int]] = {connection: {} for connection in connection_names()}
        for value in values:
            with suppress(ValueError, KeyError):  # made up, or from before a change of the settings
                connection, name, fence = _parse(value)
                shown[connection][name] = fence
        for connection, fences in shown.items():
            if fences:
                self._look(connection, fences)

    def _look(self, connection: str, fences: dict[str, int]) -> None:
        try:
            found = find(connection, fences)
        except (ImproperlyConfigured, LockBackendError) as error:
            self._failed[connection] = reason(error)
            return
        for name, fence in fences.items():
            if name not in found:
                self._gone.append(name)
            elif found[name].held.fence != fence:
                self._changed.append(name)
            else:
                self.held.append(HeldLock.of(connection, found[name].info))

    def carry_out(self, by: object, why: str) -> Iterator[HeldLock]:
        """Release the locks and yield each after its release; after an error, the other locks of that server stay.

        `by` is who releases them and `why` the reason, both for the former holders.
        """
        for lock in self.held:
            if lock.connection in self._failed:
                continue
            try:
                if force_release(lock.connection, lock.name, lock.fence, by, why):
                    self._released.append(lock.name)
                    yield lock
                elif find(lock.connection, [lock.name]):  # taken within the milliseconds since the look
                    self._changed.append(lock.name)
                else:
                    self._gone.append(lock.name)
            except LockBackendError as error:
                self._unknown.append(lock.name)
                self._failed[lock.connection] = reason(error)

    def messages(self) -> Iterator[tuple[int, str]]:
        """Yield what is to be told, each with its level."""
        if self._released:
            text = ngettext(
                "%(count)d lock was force-released: %(names)s. If its former holder still runs, it is told when it next "
                "renews the lock.",
                "%(count)d locks were force-released: %(names)s. Former holders that still run are told when they next "
                "renew their lock.",
                len(self._released),
            )
            yield messages.SUCCESS, _fill(text, self._released)
        if self._changed:
            text = ngettext(
                "%(count)d lock changed hands, left alone: %(names)s.",
                "%(count)d locks changed hands, left alone: %(names)s.",
                len(self._changed),
            )
            yield messages.WARNING, _fill(text, self._changed)
        if self._gone:
            text = ngettext(
                "%(count)d lock is not held any more: %(names)s.",
                "%(count)d locks are not held any more: %(names)s.",
                len(self._gone),
            )
            yield messages.INFO, _fill(text, self._gone)
        if self._unknown:
            text = ngettext(
                "Whether %(count)d lock was released is unknown, because Redis did not answer: %(names)s.",
                "Whether %(count)d locks were released is unknown, because Redis did not answer: %(names)s.",
                len(self._unknown),
            )
            yield messages.ERROR, _fill(text, self._unknown)
        for connection, why in self._failed.items():
            text = gettext("Connection “%(connection)s” failed, and nothing more was done there: %(why)s")
            yield messages.ERROR, text % {"connection": connection, "why": why}


def _fill(text: str, names: list[str]) -> str:
    shown = ", ".join(f"“{Truncator(visible(name)).chars(60)}”" for name in names[:5])
    return text % {"count": len(names), "names": shown if len(names) <= 5 else f"{shown}, …"}
