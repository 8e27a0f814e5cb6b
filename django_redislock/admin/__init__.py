"""The admin page of held locks: Django's own list over what Redis holds, and a force-release that can be trusted."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.auth import get_permission_codename
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext, gettext_lazy as _, ngettext

from .. import conf, inventory
from ..connections import connection_names
from ..core.loss import MAX_REASON
from ..exceptions import LockBackendError
from ..inventory import HeldLocks, duration, expiring, find, look_at_queue, reason, several_connections
from ..models import HeldLock, decode_key, visible
from . import contention
from .display import filled, holder_of, isolated, moment, name_of, now, queue_of, time_span, waiters_of
from .filters import AgeFilter, ConnectionFilter, HostFilter, KindFilter, StateFilter, TaskFilter
from .force_release import Release, ticked

if TYPE_CHECKING:
    from django.contrib.admin.views.main import ChangeList

    ModelAdmin = admin.ModelAdmin[HeldLock]
else:
    ModelAdmin = admin.ModelAdmin


@admin.register(HeldLock)
class HeldLockAdmin(ModelAdmin):
    list_display = ["lock", "held_for", "holder", "expires_in", "waiting_now", "kind"]
    list_filter = [ConnectionFilter, KindFilter, TaskFilter, StateFilter, AgeFilter, HostFilter]
    search_fields = ["name"]
    ordering = ["-age"]
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    actions = ["force_release"]

    class Media:
        css = {"all": ["django_redislock/admin.css"]}
        js = ["django_redislock/refresh.js"]

    def get_urls(self) -> Any:
        view = self.admin_site.admin_view(partial(contention.page, self))
        return [path("contention/", view, name="django_redislock_heldlock_contention"), *super().get_urls()]

    # Who may do what

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: HeldLock | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: HeldLock | None = None) -> bool:
        return False

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        codename = get_permission_codename("force_release", self.opts)
        return request.user.has_perm(f"{self.opts.app_label}.{codename}")

    # What is read

    def get_queryset(self, request: HttpRequest) -> Any:
        return HeldLocks()

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        return queryset.filter(term=search_term.strip()), False

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> HeldLock | None:
        """Return the lock even when nobody holds it: its history stays in reach, and a reloaded page says what happened."""
        try:
            connection, name = decode_key(object_id)
            if connection not in connection_names():
                return None
            row = find(connection, [name]).get(name)
        except (
            ImproperlyConfigured,
            LockBackendError,
        ) as error:  # first: as all of redis-py's LockErrors, it is a ValueError
            self.message_user(request, f"{connection}: {reason(error)}", messages.ERROR)
            return HeldLock.free(connection, name)
        except ValueError:
            return None
        if row is None:
            self.message_user(request, _("Nobody holds this lock now."), messages.INFO)
            return HeldLock.free(connection, name)
        lock = HeldLock.of(connection, row.info)
        look_at_queue(lock)
        return lock

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
            self._tell_what_is_missing(request, changelist.queryset)
            changelist.summary = self._summary(changelist.queryset)  # type: ignore[attr-defined]
        return changelist

    def _summary(self, locks: Any) -> SafeString:
        held, waiting, oldest = locks.summary
        text = ngettext(
            "As of %(now)s: %(held)s lock held, the oldest for %(age)s, %(waiting)s waiting.",
            "As of %(now)s: %(held)s locks held, the oldest for %(age)s, %(waiting)s waiting.",
            held,
        )
        if not held and locks.listing.failed:  # nothing could be read; a message reports it
            return mark_safe("")
        if not held:
            text = gettext("As of %(now)s: no lock held.")
        return filled(text, now=isolated(now()), held=held, age=time_span(oldest), waiting=waiting)

    def _tell_what_is_missing(self, request: HttpRequest, locks: Any) -> None:
        for connection, why in locks.listing.failed.items():
            text = _("The locks of connection “%(connection)s” cannot be shown: %(why)s")
            self.message_user(request, text % {"connection": connection, "why": why}, messages.ERROR)
        for connection in locks.listing.cut:
            text = _(
                "Connection “%(connection)s” holds more than %(limit)d locks; search for the name of those not shown."
            )
            self.message_user(request, text % {"connection": connection, "limit": inventory.LIMIT}, messages.WARNING)
        if not locks.listing.failed and not conf.get().enabled:
            text = _("Locks are switched off: %(setting)s is False.")
            self.message_user(request, text % {"setting": f"{conf.NAME}['ENABLED']"}, messages.WARNING)

    @admin.display(description=mark_safe('<input type="checkbox" id="action-toggle">'))
    def action_checkbox(self, obj: HeldLock) -> SafeString:
        """Return the box to tick; it remembers which acquisition was shown beside it."""
        label = gettext("Select this lock: %s") % obj
        # Django's widget would render a template for each row: a fifth of the page's time.
        return format_html(
            '<input type="checkbox" name="{}" value="{}" class="action-select" aria-label="{}">',
            *(ACTION_CHECKBOX_NAME, ticked(obj), label),
        )

    @admin.display(description=_("name"), ordering="name")
    def lock(self, obj: HeldLock) -> str:
        return name_of(obj)

    @admin.display(description=_("holder"), ordering="holder")
    def holder(self, obj: HeldLock) -> str:
        return holder_of(obj)

    @admin.display(description=_("held for"), ordering="age")
    def held_for(self, obj: HeldLock) -> str:
        since = moment(obj.acquired_at)
        return format_html('<span class="nowrap" title="{}">{}</span>', since, time_span(obj.age))

    @admin.display(description=_("expires in"), ordering="ttl")
    def expires_in(self, obj: HeldLock) -> str:
        life = max(obj.expire, obj.ttl)
        if not obj.auto_renewal:
            note = format_html('<br><span class="quiet">{}</span>', _("not renewed"))
        elif expiring(obj):
            note = format_html('<br><span class="redislock-late">{}</span>', _("renewal is late"))
        else:
            note = mark_safe("")
        return format_html(
            '<span class="nowrap"><meter class="redislock-meter" aria-hidden="true" '
            'max="{}" low="{}" high="{}" optimum="{}" value="{}"></meter> {}</span>{}',
            *(life, life / 2, life / 2, life, obj.ttl, time_span(obj.ttl), note),
        )

    @admin.display(description=_("waiting"), ordering="waiting")
    def waiting_now(self, obj: HeldLock) -> str:
        """Return how many wait, in bold if there are any: these are the ones to look at."""
        return format_html('<span class="redislock-waiting">{}</span>', obj.waiting) if obj.waiting else "0"

    @admin.display(description=_("fence"), ordering="fence")
    def fence_number(self, obj: HeldLock) -> str:
        return str(obj.fence)

    # The page of one lock

    def get_fieldsets(self, request: HttpRequest, obj: HeldLock | None = None) -> Any:
        if obj is None or not obj.fence:
            return [(None, {"fields": ["connection"]})]
        task = [field for field in ("arguments", "worker") if getattr(obj, field)]
        renewed = ["auto_renewal", *(["last_renewed"] if obj.auto_renewal else [])]
        return [
            (None, {"fields": ["kind", "connection", "fence_number", "waiters"]}),  # the name is the page's title
            (_("Holder"), {"fields": ["label", *task, "host", "process", "thread", "shortened_id"]}),
            (_("Life"), {"fields": ["acquired", "held_for", "expires_in", "life", *renewed]}),
        ]

    @admin.display(description=_("acquired"))
    def acquired(self, obj: HeldLock) -> str:
        return isolated(moment(obj.acquired_at))

    @admin.display(description=_("last renewed"))
    def last_renewed(self, obj: HeldLock) -> str:
        """Return the time since the last renewal. Each renewal gives the whole life again."""
        ago = max(0.0, obj.expire - obj.ttl)
        if ago >= obj.age - 0.05:
            return gettext("not yet")
        return filled(gettext("%(time)s ago"), time=time_span(ago))

    @admin.display(description=_("process"))
    def process(self, obj: HeldLock) -> str:
        return str(obj.pid)

    @admin.display(description=_("id"))
    def shortened_id(self, obj: HeldLock) -> str:
        return format_html('<bdi dir="ltr">{}</bdi>', obj.owner_id)

    @admin.display(description=_("arguments"))
    def arguments(self, obj: HeldLock) -> str:
        return isolated(visible(obj.arguments))

    @admin.display(description=_("worker"))
    def worker(self, obj: HeldLock) -> str:
        return isolated(visible(obj.worker))

    @admin.display(description=_("waiting"))
    def waiters(self, obj: HeldLock) -> str:
        """Return the number of waiters, and a list of the first ones with place and time; the next one is on top."""
        return queue_of(obj)

    @admin.display(description=_("life"))
    def life(self, obj: HeldLock) -> str:
        return time_span(obj.expire)

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
            context |= {"ticked": ticked(obj), "action_checkbox_name": ACTION_CHECKBOX_NAME}
        return super().render_change_form(request, context, add, change, form_url, obj)

    # Force-release

    @admin.action(description=_("Force-release selected locks…"), permissions=["force_release"])
    def force_release(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        """Ask, then release what is still held by the holder that was shown.

        Only what was ticked counts: the queryset would be every lock there is when the request says "select across".
        """
        release = Release(request.POST.getlist(ACTION_CHECKBOX_NAME))
        if request.POST.get("confirmed"):
            why = request.POST.get("reason", "").strip()
            for lock in release.carry_out(request.user, why):
                self._log_release(request, lock, why)
        for level, message in release.messages():
            self.message_user(request, message, level)
        if request.POST.get("confirmed") or not release.held:
            return None
        title = ngettext("Force-release a lock", "Force-release locks", len(release.held))
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request,
            "admin/django_redislock/heldlock/force_release.html",
            {
                **self.admin_site.each_context(request),
                "title": title,
                "original": title,
                "opts": self.opts,
                "media": self.media,
                "has_view_permission": True,
                "action_checkbox_name": ACTION_CHECKBOX_NAME,
                "longest_reason": MAX_REASON,
                "several_connections": several_connections(),
                "locks": [
                    {
                        "name": self.lock(lock),
                        "holder": holder_of(lock, whole=True),
                        "arguments": visible(lock.arguments) if lock.arguments else "",
                        "held_for": self.held_for(lock),
                        "waiting": lock.waiting,
                        "next": next(iter(waiters_of(look_at_queue(lock))), ""),
                        "connection": lock.connection,
                        "ticked": ticked(lock),
                    }
                    for lock in release.held
                ],
            },
        )

    def _log_release(self, request: HttpRequest, lock: HeldLock, why: str) -> None:
        text = gettext("Force-released after %(age)s. Held by %(holder)s (fence %(fence)d, connection %(connection)s).")
        known = {"age": duration(lock.age), "fence": lock.fence, "connection": lock.connection}
        text %= {"holder": visible(f"{lock.label} {lock.place}".strip()), **known}
        if why:
            text += " " + gettext("Reason: %(reason)s") % {"reason": visible(why)}
        self.log_change(request, lock, text)
