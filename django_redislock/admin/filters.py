"""The filters of the admin's list of held locks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.utils.translation import gettext, gettext_lazy as _

from ..connections import clients
from ..models import HeldLock
from ..texts import duration, visible

if TYPE_CHECKING:
    from django.contrib.admin.views.main import ChangeList


class KindFilter(admin.SimpleListFilter):
    title = _("kind")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return HeldLock._meta.get_field("kind").choices

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(kind=self.value())


class ConnectionFilter(admin.SimpleListFilter):
    title = _("connection")
    parameter_name = "connection"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        try:
            found, failed = clients()
        except ImproperlyConfigured:  # reading the locks reports it
            return []
        names = [*found, *failed]
        return [(name, name) for name in names] if len(names) > 1 else []

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(connection=self.value())


class StateFilter(admin.SimpleListFilter):
    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return [("renewed", _("renewing")), ("expiring", _("expiring soon")), ("unrenewed", _("not renewed"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(state=self.value())


class AgeFilter(admin.SimpleListFilter):
    title = _("age")
    parameter_name = "older"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return [
            (str(seconds), gettext("more than %(time)s") % {"time": duration(seconds)})
            for seconds in (60, 600, 3600, 86400)
        ]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        seconds = self.value()
        return queryset.filter(older=float(seconds)) if seconds and seconds in dict(self.lookup_choices) else queryset


class FoundFilter(admin.SimpleListFilter):
    """Offers the values of the locks that were read for the page, so that Redis is read only once."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return []

    def has_output(self) -> bool:
        return True

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        self.lookup_choices = [(value, visible(value)) for value in sorted(self.found(changelist.queryset))]
        return super().choices(changelist)

    def found(self, locks: Any) -> set[str]:
        raise NotImplementedError

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(**{str(self.parameter_name): self.value()})


class TaskFilter(FoundFilter):
    title = _("task")
    parameter_name = "task"

    def found(self, locks: Any) -> set[str]:
        return locks.tasks  # type: ignore[no-any-return]


class HostFilter(FoundFilter):
    title = _("host")
    parameter_name = "host"

    def found(self, locks: Any) -> set[str]:
        return locks.hosts  # type: ignore[no-any-return]
