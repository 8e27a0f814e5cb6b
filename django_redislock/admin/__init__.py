"""The admin page of held locks: Django's change list of the locks in Redis, and a force-release with confirmation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_permission_codename
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import Error, router, transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext, gettext_lazy as _, ngettext, override

from .. import conf, inventory
from ..connections import connection_names, several_connections
from ..core.events import log
from ..exceptions import LockBackendError
from ..inventory import cause_of, find
from ..models import HeldLock, decode_key
from ..texts import visible
from . import contention, display
from .force_release import ForceRelease, confirmation_page, fill_in_names, history_entry, selection_value
from .queryset import (
    AgeFilter,
    ConnectionFilter,
    HeldLocks,
    HostFilter,
    KindFilter,
    StateFilter,
    TaskFilter,
    read_waiters,
)

if TYPE_CHECKING:
    from django.contrib.admin.views.main import ChangeList

    ModelAdmin = admin.ModelAdmin[HeldLock]
else:
    ModelAdmin = admin.ModelAdmin


def _column(title: Any, show: Callable[[HeldLock], str], order: str | None = None) -> Any:
    """Return a method of the admin that shows a lock by this function, as a column or on its page."""

    def column(self: Any, obj: HeldLock) -> str:
        return show(obj)

    return admin.display(description=title, ordering=order)(column)


@admin.register(HeldLock)
class HeldLockAdmin(ModelAdmin):
    list_display = ["lock", "held_for", "holder", "expires_in", "waiting_now", "kind"]
    list_filter = [ConnectionFilter, KindFilter, TaskFilter, StateFilter, AgeFilter, HostFilter]
    search_fields = ["name"]
    ordering = ["-age"]
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    actions = ["recall", "force_release"]

    class Media:
        css = {"all": ["django_redislock/admin.css"]}
        js = ["django_redislock/refresh.js"]

    def get_urls(self) -> Any:
        view = self.admin_site.admin_view(partial(contention.page, self))
        return [path("contention/", view, name="django_redislock_heldlock_contention"), *super().get_urls()]

    # Permissions

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: HeldLock | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: HeldLock | None = None) -> bool:
        return False

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        codename = get_permission_codename("force_release", self.opts)
        return request.user.has_perm(f"{self.opts.app_label}.{codename}")

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> Any:
        """Return the actions of this class only: those of the site want a real queryset, as the export of Django's
        documentation does with `values_list`."""
        own = {getattr(action, "__name__", action) for action in self.actions}
        where = {} if action_location is None else {"action_location": action_location}  # from Django 6.1 on
        return {name: action for name, action in super().get_actions(request, **where).items() if name in own}

    # The queryset

    def get_queryset(self, request: HttpRequest) -> Any:
        return HeldLocks()

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        return queryset.filter(term=search_term.strip()), False

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> HeldLock | None:
        """Return the lock even when it is free, because its history can be opened and a page can be reloaded."""
        if not self.has_view_permission(request):
            # Django asks later, and its next page would show whether the lock is free, or the address of a dead Redis.
            raise PermissionDenied
        try:
            connection, name = decode_key(object_id)
            if connection not in connection_names():
                return None
            row = find(connection, [name]).get(name)
        except (ImproperlyConfigured, LockBackendError) as error:  # caught first, because a LockError is a ValueError
            self.message_user(request, f"{connection}: {cause_of(error)}", messages.ERROR)
            return HeldLock.free(connection, name)
        except ValueError:
            return None
        if row is None:
            self.message_user(request, _("This lock is free now."), messages.INFO)
            return HeldLock.free(connection, name)
        return read_waiters(HeldLock.of(connection, row.info))

    # The list

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Return the columns, with the connection only where there are several."""
        return [*self.list_display, *(["connection"] if several_connections() else [])]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        return super().changelist_view(request, {"title": _("Held locks"), **(extra_context or {})})

    def get_changelist_instance(self, request: HttpRequest) -> ChangeList:
        changelist = super().get_changelist_instance(request)
        changelist.show_admin_actions = changelist.result_count > 0
        if not changelist.query and not changelist.has_active_filters:
            changelist.full_result_count = changelist.result_count
        if request.method == "GET":
            self.report_missing_locks(request, changelist.queryset.listing)
            changelist.summary = self._summary(changelist)  # type: ignore[attr-defined]
        return changelist

    def _summary(self, changelist: Any) -> SafeString:
        locks = changelist.queryset
        held, waiting, oldest = locks.summary
        text = ngettext(
            "As of %(now)s: %(held)s lock held, the oldest for %(age)s, %(waiting)s waiting.",
            "As of %(now)s: %(held)s locks held, the oldest for %(age)s, %(waiting)s waiting.",
            held,
        )
        if held and locks.listing.cut:
            text = gettext(
                "As of %(now)s: more than %(held)s locks held. Of those that were read, the oldest is held for "
                "%(age)s, %(waiting)s waiting."
            )
        if not held and (
            locks.listing.failed or locks.listing.cut or changelist.query or changelist.has_active_filters
        ):
            return mark_safe("")  # other locks may be held: those that could not be read, or that do not match
        if not held:
            text = gettext("As of %(now)s: no lock held.")
        return display.fill_in(
            text,
            now=display.isolate(display.time_of_day()),
            held=held,
            age=display.duration_html(oldest),
            waiting=waiting,
        )

    def report_missing_locks(self, request: HttpRequest, listing: inventory.Listing) -> None:
        """Report the connections whose locks could not be read, or not all of them."""
        for connection, why in listing.failed.items():
            text = _("The locks of connection “%(connection)s” cannot be shown: %(why)s")
            self.message_user(request, text % {"connection": connection, "why": why}, messages.ERROR)
        for connection in listing.cut:
            text = _(
                "Connection “%(connection)s” holds more than %(limit)d locks. Search by name for the locks that are "
                "not shown."
            )
            self.message_user(request, text % {"connection": connection, "limit": inventory.LIMIT}, messages.WARNING)
        for connection, names in listing.foreign.items():
            unread = ngettext(
                "Connection “%(connection)s” has %(count)d key that is not shown, because no lock wrote its value: "
                "%(names)s.",
                "Connection “%(connection)s” has %(count)d keys that are not shown, because no lock wrote their "
                "values: %(names)s.",
                len(names),
            )
            self.message_user(request, fill_in_names(unread, names, connection=connection), messages.ERROR)
        if not listing.failed and not conf.get().enabled:
            text = _("Locks are switched off: %(setting)s is False.")
            self.message_user(request, text % {"setting": f"{conf.NAME}['ENABLED']"}, messages.WARNING)

    @admin.display(description=mark_safe('<input type="checkbox" id="action-toggle">'))
    def action_checkbox(self, obj: HeldLock) -> SafeString:
        """Return the check box of a lock; its value also names the acquisition that is shown beside it."""
        label = gettext("Select this lock: %s") % obj
        # Django's widget would render a template for each row: a fifth of the page's time.
        return format_html(
            '<input type="checkbox" name="{}" value="{}" class="action-select" aria-label="{}">',
            *(ACTION_CHECKBOX_NAME, selection_value(obj), label),
        )

    @admin.display(description=_("waiting"), ordering="waiting")
    def waiting_now(self, obj: HeldLock) -> str:
        """Return the number of waiters, in bold if there are any."""
        return format_html('<span class="redislock-waiting">{}</span>', obj.waiting) if obj.waiting else "0"

    lock = _column(_("name"), display.name_html, "name")
    holder = _column(_("holder"), display.holder_html, "holder")
    held_for = _column(_("held for"), display.age_html, "age")
    expires_in = _column(_("expires in"), display.expiry_html, "ttl")

    # The page of one lock

    def get_fieldsets(self, request: HttpRequest, obj: HeldLock | None = None) -> Any:
        if obj is None or not obj.fence:
            return [(None, {"fields": ["connection"]})]
        task = [field for field in ("arguments", "worker") if getattr(obj, field)]
        renewed = ["auto_renewal", *(["last_renewed"] if obj.auto_renewal else [])]
        return [
            (None, {"fields": ["kind", "connection", "fence_number", "waiters"]}),  # the name is the page's title
            (_("Holder"), {"fields": ["label", *task, "host", "process", "thread", "shortened_id"]}),
            (_("Expiry"), {"fields": ["acquired", "held_for", "expires_in", "expiry", *renewed]}),
        ]

    @admin.display(description=_("last renewed"))
    def last_renewed(self, obj: HeldLock) -> str:
        """Return the time since the last renewal: each renewal gives the lock its whole expiry again."""
        ago = max(0.0, obj.expire - obj.ttl)
        if ago >= obj.age - 0.05:
            return gettext("not yet")
        return display.fill_in(gettext("%(time)s ago"), time=display.duration_html(ago))

    fence_number = _column(_("fence"), lambda lock: str(lock.fence), "fence")
    acquired = _column(_("acquired"), lambda lock: display.isolate(display.date_and_time(lock.acquired_at)))
    process = _column(_("process"), lambda lock: str(lock.pid))
    shortened_id = _column(_("id"), lambda lock: format_html('<bdi dir="ltr">{}</bdi>', lock.owner_id))
    arguments = _column(_("arguments"), lambda lock: display.isolate(visible(lock.arguments)))
    worker = _column(_("worker"), lambda lock: display.isolate(visible(lock.worker)))
    waiters = _column(_("waiting"), display.queue_html)
    expiry = _column(_("expiry"), lambda lock: display.duration_html(lock.expire))

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: HeldLock | None = None,
    ) -> HttpResponse:
        if obj is not None and obj.fence and self.has_force_release_permission(request):
            context |= {"selection_value": selection_value(obj), "action_checkbox_name": ACTION_CHECKBOX_NAME}
        return super().render_change_form(request, context, add, change, form_url, obj)

    # Force-release, and recall

    @admin.action(description=_("Ask holders of selected locks to stop…"), permissions=["force_release"])
    def recall(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        """Do as `force_release`, but recall the locks."""
        return self._release(request, recalls=True)

    @admin.action(description=_("Force-release selected locks…"), permissions=["force_release"])
    def force_release(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        """Ask for confirmation, then release the selected locks that the shown holders still hold.

        The queryset is ignored, because it would contain every lock if the request said "select across".
        """
        return self._release(request, recalls="recalls" in request.POST)  # by the other button on the page of a lock

    def _release(self, request: HttpRequest, recalls: bool) -> HttpResponse | None:
        selected = ForceRelease(request.POST.getlist(ACTION_CHECKBOX_NAME), recalls)
        confirmed = request.POST.get("confirmed")
        if confirmed:
            reason = request.POST.get("reason", "").strip()
            for lock in selected.release(request.user, reason):
                self._log_release(request, selected, lock, reason)
        for level, message in selected.messages():
            self.message_user(request, message, level)
        return confirmation_page(self, request, selected) if selected.held and not confirmed else None

    def _log_release(self, request: HttpRequest, selected: ForceRelease, lock: HeldLock, reason: str) -> None:
        """Write the entry in the history. A database that is read-only after a failover keeps no other lock held."""
        try:
            # A savepoint, because with ATOMIC_REQUESTS an error would let every later command of the request fail.
            with transaction.atomic(using=router.db_for_write(LogEntry)), override(settings.LANGUAGE_CODE):
                # In the site's language, because those who read the history may not know this user's.
                self.log_change(request, lock, history_entry(lock, reason, selected.recalls))
        except Error:
            log.exception("The force-release of lock %r could not be written into its history.", lock.name)
            selected.unwritten.append(lock.name)
