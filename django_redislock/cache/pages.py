"""`cache_page`: Django's decorator, but a missing page is rendered once for all requests that wait for it.

Nothing that was made for one request is sent to another one, unless Django's own decorator would have sent it: a page
from the cache. What the requests share about a rendering is a word (see `Said`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any, TypeVar, Unpack

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.cache import caches
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.db import connections
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.http.multipartparser import MultiPartParserError
from django.middleware.cache import CacheMiddleware
from django.template.response import SimpleTemplateResponse
from django.utils.timezone import get_current_timezone_name
from django.utils.translation import get_language

from ..core.clock import monotonic
from ..core.events import log
from ..exceptions import is_interruption
from .compute_once import ComputeOnceMixin
from .options import PageOptions, validate
from .page_cache import PageCache

View = TypeVar("View", bound=Callable[..., Any])

UNCACHEABLE_FOR = 60
"""Seconds for which each request renders a page that may not be stored, without a wait: Varnish's hit-for-pass."""
PAUSE = 1
"""Seconds for which a view that answered 5xx is not called again, for which requests take turns at one that raises,
and for which they look for a page that was rendered and is not stored yet."""
GONE = (404, 410)
"""The status codes that delete the stale copy of a page."""
LOOKS = (0.05, 0.1, 0.2)
"""Seconds between the looks for a page that was rendered, and is about to be stored."""
ROUNDS = 2
"""How often a request waits: first until the Vary header is known, then for the page of its own headers."""
FOR_ITS_HEADERS = (206, 304, 412, 416)
"""The status codes of answers to conditional and partial requests: the page itself may be stored."""
PERSONAL = (Http404, PermissionDenied, SuspiciousOperation, BadRequest, MultiPartParserError)
"""Errors that Django answers with a status 4xx: they are about one request, and another request may succeed."""


class Said:
    """What the request that called the view tells those that wait. Every serializer of a cache takes these values.

    When the view answered 5xx, it says the key of that page: only requests with the same headers may know of that.
    """

    LOOK_AGAIN: Any = True
    """The page is stored, or the names of its headers are known now."""
    RENDER: Any = False
    """The page may not be stored: each request renders its own."""
    PERSONAL: Any = None
    """An error for that request alone: each request renders its own."""
    RAISED: Any = "raised"
    """The view raised. A middleware may make anything of it, such as a redirect, so the requests call the view in
    turn."""
    SOON: Any = "soon"
    """The page is stored when it has passed the outer decorators and the middlewares."""
    PAUSED: Any = "paused"
    """The view failed, and there are stale copies until it is called again."""


RENDERED_ELSEWHERE: Any = object()
"""Returned by `get_or_set` when another request renders the page and there is a stale page."""
TOO_LATE: Any = object()
"""Returned by `get_or_set` when the turn of a request did not come."""


def cache_page(
    timeout: float, *, cache: str | None = None, key_prefix: str | None = None, **options: Unpack[PageOptions]
) -> Callable[[View], View]:
    """Cache a view's pages as Django's decorator of this name does, and render each page once for all waiting requests.

    `timeout` is in seconds. Django's own rules decide which page is stored, for how long and for whom: GET and HEAD
    only, Vary, Cache-Control, status 200, no cookies for some. A page that may not be stored is rendered by each
    request; for the next `UNCACHEABLE_FOR` seconds no request waits for such a page. A view that raises or answers 5xx
    is called by one request at a time. After a 5xx the requests with the same headers that waited, or come within
    `PAUSE` seconds, get a bare 503 with Retry-After. After an exception those that waited call the view in turn, and
    get the bare 503 when it still raises after `PAUSE` seconds. An error that Django answers by 4xx (`Http404`,
    `PermissionDenied`, …) is for its own request only. A `TemplateResponse` is rendered within the decorator, and
    stored when Django renders it, after the outer decorators; if these changed its context, it is rendered once more.

    With `stale` a copy of each page is kept that many seconds longer. While one request renders a new page, the others
    get the stale page at once. With ``on_error="stale"`` (or the setting) all requests get it when the view fails,
    too, and an exception rolls back the request's transaction (ATOMIC_REQUESTS). The failure is logged, and the next
    call of the view waits for a pause that grows from a second to a minute.
    The other `options` are those of `get_or_set` about waiting: `wait`, `expire`, `auto_renewal` and `max_hold`.

    Raises TypeError and ValueError for bad arguments. The loss of a lease is no error: another request may render, too.
    """
    wrong = options.keys() - PageOptions.__optional_keys__
    if wrong:
        raise TypeError(f"cache_page() got an unexpected argument {min(wrong)!r}")
    stale, on_error = validate("cache_page", **options).stale, options.pop("on_error", None)
    options.pop("stale", None)

    def decorate(view: View) -> View:
        rules = _Rules(view, page_timeout=timeout, cache_alias=cache, key_prefix=key_prefix)
        wrap: Any = _wrap_async if iscoroutinefunction(view) else _wrap
        return wrap(view, functools.partial(_Page, rules, stale, on_error), options)  # type: ignore[no-any-return]

    return decorate


def _wrap(
    view: Callable[..., HttpResponseBase], new_page: Callable[[HttpRequest], _Page], options: PageOptions
) -> Callable[..., HttpResponseBase]:
    @functools.wraps(view)
    def cached_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        page = new_page(request)

        def render_once() -> Any:
            try:
                if page.find_or_begin() is None:
                    page.store(view(request, *args, **kwargs))
            except Exception as error:
                page.fail(error)
            return page.say()

        while (asked := page.ask()) is not None:
            key, waiting = asked
            page.hear(page.cache.get_or_set(key, render_once, page.said_for, **(options | waiting)))
            for pause in page.looks:
                time.sleep(pause)
                if page.find(from_primary=True) is not None:
                    break
        if not page.is_answered:
            try:
                page.begin()
                page.store(view(request, *args, **kwargs))
            except Exception as error:
                page.fail(error)
        return page.answer()

    return cached_view


def _wrap_async(
    view: Callable[..., Awaitable[HttpResponseBase]], new_page: Callable[[HttpRequest], _Page], options: PageOptions
) -> Callable[..., Awaitable[HttpResponseBase]]:
    @functools.wraps(view)
    async def cached_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        page = new_page(request)
        find, store, ask = sync_to_async(page.find), sync_to_async(page.store), sync_to_async(page.ask)

        async def render_once() -> Any:
            try:
                if await sync_to_async(page.find_or_begin)() is None:
                    await store(await view(request, *args, **kwargs))
            except Exception as error:
                await sync_to_async(page.fail)(error)
            return await sync_to_async(page.say)()

        while (asked := await ask()) is not None:
            key, waiting = asked
            said = await page.cache.aget_or_set(key, render_once, page.said_for, **(options | waiting))
            await sync_to_async(page.hear)(said)
            for pause in page.looks:
                await asyncio.sleep(pause)
                if await find(from_primary=True) is not None:
                    break
        if not page.is_answered:
            try:
                await sync_to_async(page.begin)()
                await store(await view(request, *args, **kwargs))
            except Exception as error:
                await sync_to_async(page.fail)(error)
        return page.answer()

    return cached_view


class _Rules(CacheMiddleware):
    """Django's rules. For one request they have a cache of its own, in place of the property."""

    cache: Any = None


class _Page:
    """The answer to one request, by Django's rules: a page, or the error of the view."""

    def __init__(self, rules: _Rules, stale: float, on_error: str | None, request: HttpRequest) -> None:
        if not hasattr(request, "META"):
            raise TypeError("cache_page didn't receive an HttpRequest: decorate methods with @method_decorator")
        self.rules = copy(rules)
        self.request = request
        self.cache: Any = caches[rules.cache_alias]
        self.rules.cache = self.cache
        self.response: HttpResponseBase | None = None
        self.error: Exception | None = None
        """The error of the view."""
        self._on_error = on_error
        self._stored: PageCache | None = None
        """None with a cache of another package: there all is as in Django."""
        if isinstance(self.cache, ComputeOnceMixin):
            self._stored = PageCache(self.cache, request, rules.key_prefix, stale)
            self.rules.cache = self._stored
        self._rounds = 0
        self.looks: tuple[float, ...] = ()
        """The pauses between looks for a page that the request that was waited for is about to store."""
        self._alone = False
        """Whether the request calls the view without a wait for another one."""
        self._refused = False
        """Whether another request found that the page may not be stored."""
        self._raised_at: float | None = None
        """When the request heard first that the view raised."""
        self._failed_key: Any = None
        """The key of the page for which the view answered 5xx, when the request waited for its address."""
        self._old: HttpResponseBase | None = None
        self._said_soon = False
        self._pause = 0.0
        """For how many seconds no request calls the view again, because it failed here."""

    @property
    def may_be_cached(self) -> bool:
        """Whether the page may come from the cache at all."""
        return bool(getattr(self.request, "_cache_update_cache", False))

    @property
    def is_answered(self) -> bool:
        """Whether there is a page or an error."""
        return self.response is not None or self.error is not None

    def ask(self) -> tuple[str, dict[str, Any]] | None:
        """Return the key and the options by which to wait for another request, or to be the one that renders.

        None when there is an answer, or no other request to wait for.
        """
        if self.is_answered or self._alone or self.find(self._rounds > 0) is not None:
            return None
        if self._stored is None or not self.may_be_cached or self._rounds == ROUNDS:
            return None
        key = self._stored.find_lease_key()
        self._old = self._stored.find_stale()
        if self._old is not None:
            return key, {"wait": 0, "on_wait_timeout": lambda: RENDERED_ELSEWHERE}
        if key == self._failed_key:
            self._refuse()
            return None
        if self._raised_at is not None:
            return key, {"on_wait_timeout": lambda: TOO_LATE}
        return key, {}

    def find(self, from_primary: bool = False) -> HttpResponseBase | None:
        """Return the page from the cache, if it is there. A replica may not have one that was stored just now."""
        if self._stored is not None:
            self._stored.forget(from_primary)
        self.response = self.rules.process_request(self.request)
        return self.response

    def find_or_begin(self) -> HttpResponseBase | None:
        """Return the page from the primary, if it is there; if not, begin to render it."""
        if self.find(from_primary=True) is None:
            self.begin()
        return self.response

    def begin(self) -> None:
        """Mark that the page is rendered from now on, so that it is not stored if it is deleted meanwhile."""
        # A refused page costs nothing more than its view. When it may be stored after all, the next request does it.
        if self._stored is not None and self.may_be_cached and not self._refused:
            self._stored.begin()

    def store(self, response: Any) -> None:
        """Note the page of the view, and store it if that is allowed: one that is not rendered yet, after that.

        Raises TypeError for what is no response.
        """
        if response is None or inspect.iscoroutine(response):
            raise TypeError(self._no_response(response))
        self.response = response
        if not self._is_unrendered:
            self.response = self._store(response)
            return
        is_usual = getattr(type(response), "rendered_content", None) is SimpleTemplateResponse.rendered_content
        if is_usual and self.may_be_cached and not self._alone:
            _Prerendered(response)
        # Outer decorators may yet make it private, or add a header to Vary, and middlewares add to its context: stored
        # before, the account page of one user was shown to the next one.
        response.add_post_render_callback(self._store)

    def _no_response(self, found: Any) -> str:
        view = self.rules.get_response
        name = f"{view.__module__}.{getattr(view, '__qualname__', type(view).__qualname__)}"
        if found is None:
            return f"cache_page got None in place of a response from the view {name}: it may lack a return"
        found.close()
        return (
            f"cache_page got a coroutine in place of a response from the view {name}: a decorator between them hides "
            "that the view is asynchronous. Put cache_page directly above the view, or make the decorator asynchronous."
        )

    @property
    def _is_unrendered(self) -> bool:
        return not getattr(self.response, "is_rendered", True)

    def _store(self, response: HttpResponseBase) -> HttpResponseBase:
        getattr(response, "__dict__", {}).pop("resolve_template", None)
        late = response.status_code < 500 and self._said_soon
        self.request._cache_update_cache = self.may_be_cached  # type: ignore[attr-defined]
        response = self.rules.process_response(self.request, response)  # type: ignore[assignment]
        if self._stored is None or self._stored.is_silent:
            return response
        if self._stored.stored:
            self._stored.save_stale(response)
            self._stored.end()
        elif response.status_code in GONE:
            self._stored.delete_stale()
        if late and self._is_refused(response):
            self.cache.set(self._stored.lease_key, Said.RENDER, UNCACHEABLE_FOR)
        elif self._said_soon or (self._refused and self._stored.withheld):
            # Later requests must not hear what was said, or no request would wait for this page after its expiry.
            self.cache.delete(self._stored.lease_key)
        return response

    def _is_refused(self, response: Any) -> bool:
        """Whether the page of this response may not be stored."""
        is_kept = self._stored.stored or self._stored.withheld  # type: ignore[union-attr]
        return not is_kept and self.may_be_cached and response.status_code not in FOR_ITS_HEADERS

    def fail(self, error: Exception) -> None:
        """Note the error of the view."""
        if is_interruption(error):
            raise error
        self.error = error
        if isinstance(error, Http404) and self._stored is not None and self.may_be_cached:
            self._stored.delete_stale()

    def say(self) -> Any:
        """Return what the waiting requests may know of this one.

        After a failure, if there is a stale page, log the failure and set the next pause.
        """
        stored: PageCache = self._stored  # type: ignore[assignment]  # it is asked for no other page
        if isinstance(self.error, PERSONAL):
            return Said.PERSONAL
        if not self._failed:
            self._said_soon = self._is_unrendered
            return Said.SOON if self._said_soon else Said.RENDER if self._is_refused(self.response) else Said.LOOK_AGAIN
        if self._old is not None:
            self._pause = stored.next_pause()
            self._log_failure()
            return Said.PAUSED
        if self.error is not None:
            return Said.RAISED
        asked = stored.lease_key
        stored.learn_names(self.response)  # type: ignore[arg-type]
        key = stored.find_lease_key()
        if key != asked:  # the requests asked by the address, and those that come next will ask by the page
            self.cache.set(key, key, PAUSE)
        return key

    def said_for(self, said: Any) -> float:
        """Return for how many seconds later requests hear this, too; 0: only the waiting ones do."""
        if said is Said.RENDER:
            return UNCACHEABLE_FOR
        # SOON, because a request that came between the rendering and the storing rendered the page once more.
        times = {self._stored.lease_key: PAUSE, Said.SOON: PAUSE, Said.PAUSED: self._pause}  # type: ignore[union-attr]
        return times.get(said, 0)

    def hear(self, said: Any) -> None:
        """Note what another request said, unless this one called the view itself."""
        self.looks = ()
        if self.is_answered:
            return
        self._refused = said is Said.RENDER
        self._alone = said is Said.RENDER or said is Said.PERSONAL
        if self._alone:
            return
        if self._old is not None and said is not Said.LOOK_AGAIN:
            self._answer_with_stale()
        elif said == Said.RAISED or said == Said.PAUSED:
            self._take_turn(said)
        elif said is TOO_LATE or said == self._stored.lease_key:  # type: ignore[union-attr]
            self._refuse()
        else:
            self._rounds += 1
            self.looks = LOOKS if said == Said.SOON else ()
            self._failed_key = said  # whether that page is this request's is known once the names are read

    def _take_turn(self, said: Any) -> None:
        """Call the view next, unless it has raised for too long."""
        if said == Said.PAUSED:  # the pause is meant for those who have a stale page
            self.cache.delete(self._stored.lease_key)  # type: ignore[union-attr]
        if self._raised_at is None:
            self._raised_at = monotonic()
        elif monotonic() - self._raised_at > PAUSE:
            self._refuse()

    def answer(self) -> HttpResponseBase:
        """Return the page, or raise the error of the view."""
        hides_errors = self._old is not None and (self._on_error or self.cache._settings.on_error) == "stale"
        if hides_errors and self.response is not self._old and self._failed:
            if self.error is not None:
                roll_back_request()
            if not self._pause:  # the request was alone, and said nothing
                self._log_failure()
            self._answer_with_stale()
        if self.error is not None:
            raise self.error
        return self.response  # type: ignore[return-value]

    @property
    def _failed(self) -> bool:
        """Whether the view raised, or answered 5xx."""
        if self.error is not None:
            return not isinstance(self.error, PERSONAL)
        return self.response is not None and self.response.status_code >= 500

    def _log_failure(self) -> None:
        self.cache._counters.count("errors")
        message = "The page %s could not be rendered again. The stale page is shown, and the next try is in %g s."
        log.error(message, self.request.path, self._pause, exc_info=self.error)

    def _answer_with_stale(self) -> None:
        self.response, self.error = self._old, None
        self.request._cache_update_cache = False  # type: ignore[attr-defined]  # no middleware may store it as new
        self.cache._counters.count("stale_served")

    def _refuse(self) -> None:
        self.response = HttpResponse(status=503, headers={"Retry-After": str(PAUSE)})
        self.request._cache_update_cache = False  # type: ignore[attr-defined]


class _Prerendered:
    """Takes the place of a response's template, because its page was rendered under the lease."""

    def __init__(self, response: Any) -> None:
        self._name, self._resolve = response.template_name, response.resolve_template
        self._template: Any = self._resolve(self._name)
        self._context = dict(response.resolve_context(response.context_data) or {})
        self._place = get_language(), get_current_timezone_name()
        if not any(hasattr(value, "__next__") for value in self._context.values()):  # those can be read once only
            self._content = response.rendered_content
            response.resolve_template = self.resolve

    def resolve(self, name: Any) -> Any:
        """Return this in place of its template, or another template that a middleware chose."""
        return self if name == self._name else self._resolve(name)

    def render(self, context: Any = None, request: HttpRequest | None = None) -> str:
        """Return the page, rendered anew if the values of its context, or the language, are others now."""
        now, place = context or {}, (get_language(), get_current_timezone_name())
        same = place == self._place and now.keys() == self._context.keys()
        if same and all(now[name] is value for name, value in self._context.items()):
            return self._content  # type: ignore[no-any-return]
        return self._template.render(context, request)  # type: ignore[no-any-return]


def roll_back_request() -> None:
    """Roll back the request's transactions (ATOMIC_REQUESTS), as Django does for an error that leaves the view."""
    for connection in connections.all(initialized_only=True):
        if connection.settings_dict["ATOMIC_REQUESTS"] and connection.in_atomic_block:
            connection.set_rollback(True)
