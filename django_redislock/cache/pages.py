"""`cache_page`: Django's decorator, but a missing page is rendered once for all requests that wait for it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.cache import caches
from django.http import Http404, HttpRequest, HttpResponseBase
from django.middleware.cache import CacheMiddleware
from django.utils.cache import get_cache_key

from ..core.events import log
from .compute_once import ComputeOnceMixin
from .failures import PERSONAL, portable_error, portable_response
from .lease.request import is_interruption
from .options import PageOptions, validate
from .stale_pages import StalePages

View = TypeVar("View", bound=Callable[..., Any])

UNCACHEABLE_FOR = 60
"""Seconds for which each request renders a page that may not be stored, without a wait: Varnish's hit-for-pass."""
PAUSE = 1
"""Seconds for which a failed view is not called again: the requests of that time get the same failure."""
GONE = (404, 410)
"""The status codes that delete the stale copy of a page."""
ROUNDS = 2
"""How often a request waits: first until the Vary header is known, then for the page of its own headers."""


def cache_page(
    timeout: float, *, cache: str | None = None, key_prefix: str | None = None, **options: Unpack[PageOptions]
) -> Callable[[View], View]:
    """Cache a view's pages as Django's decorator of this name does, and render each page once for all waiting requests.

    `timeout` is in seconds. Django's own rules decide which page is stored, for how long and for whom: GET and HEAD
    only, Vary, Cache-Control, status 200, no cookies for some. A page that may not be stored is rendered by each
    request; for the next `UNCACHEABLE_FOR` seconds no request waits for such a page. A view that raises or answers 5xx
    is called by one request at a time: the requests that waited for it, or come within `PAUSE` seconds, get the same
    answer or exception. An error that Django answers by 4xx (`Http404`, `PermissionDenied`, …) is for its own request
    only. A template response is rendered within the decorator.

    With `stale` a copy of each page is kept that many seconds longer. While one request renders a new page, the others
    get the stale page at once. With ``on_error="stale"`` (or the setting) all requests get it when the view fails,
    too. The failure is logged, and the next call of the view waits for a pause that grows from a second to a minute.
    The other `options` are those of `get_or_set` about waiting: `wait`, `expire`, `auto_renewal` and `max_hold`.

    Raises TypeError and ValueError for bad arguments. The loss of a lease is no error: another request may render, too.
    """
    wrong = options.keys() - PageOptions.__optional_keys__
    if wrong:
        raise TypeError(f"cache_page() got an unexpected argument {min(wrong)!r}")
    stale, on_error = validate("cache_page", **options).stale, options.pop("on_error", None)
    options.pop("stale", None)

    def decorate(view: View) -> View:
        rules = CacheMiddleware(view, page_timeout=timeout, cache_alias=cache, key_prefix=key_prefix)

        if iscoroutinefunction(view):

            @functools.wraps(view)
            async def async_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
                page = _Page(rules, request, stale, on_error)
                find, store = sync_to_async(page.find), sync_to_async(page.store)

                async def render_once() -> Any:
                    try:
                        if await find() is None:
                            await store(await view(request, *args, **kwargs))
                    except Exception as error:
                        page.fail(error)
                    return await sync_to_async(page.finish)()

                for _ in range(ROUNDS):
                    if await find() is not None or not page.shared:
                        break
                    key = await sync_to_async(page.learn_key)()
                    all_options = options | await sync_to_async(page.find_stale)()
                    if page.accept(await page.cache.aget_or_set(key, render_once, page.remembered_for, **all_options)):
                        break
                else:
                    await find()
                if not page.is_answered:
                    await store(await view(request, *args, **kwargs))
                return page.answer()

            return async_view  # type: ignore[return-value]

        @functools.wraps(view)
        def sync_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            page = _Page(rules, request, stale, on_error)

            def render_once() -> Any:
                try:
                    if page.find() is None:
                        page.store(view(request, *args, **kwargs))
                except Exception as error:
                    page.fail(error)
                return page.finish()

            for _ in range(ROUNDS):
                if page.find() is not None or not page.shared:
                    break
                key, all_options = page.learn_key(), options | page.find_stale()
                if page.accept(page.cache.get_or_set(key, render_once, page.remembered_for, **all_options)):
                    break
            else:
                page.find()
            if not page.is_answered:
                page.store(view(request, *args, **kwargs))
            return page.answer()

        return sync_view  # type: ignore[return-value]

    return decorate


RENDERED_ELSEWHERE: Any = object()
"""Returned by `get_or_set` when another request renders the page and there is a stale page."""


class _Page:
    """The answer to one request, by Django's rules: a page, or the error of the view."""

    def __init__(self, rules: CacheMiddleware, request: HttpRequest, stale: float, on_error: str | None) -> None:
        if not hasattr(request, "META"):
            raise TypeError("cache_page didn't receive an HttpRequest: decorate methods with @method_decorator")
        self.rules = rules
        self.request = request
        self.cache: Any = caches[rules.cache_alias]
        self.response: HttpResponseBase | None = None
        self.error: Exception | None = None
        """The error of the view."""
        self.stored = False
        self.key = ""
        """The key of the computation that the requests share."""
        self._refused = False
        """Whether another request found that the page may not be stored."""
        self._stale_pages = (
            StalePages(rules, self.cache, stale) if stale and isinstance(self.cache, ComputeOnceMixin) else None
        )
        self._old: HttpResponseBase | None = None
        self._on_error = on_error
        self._pause: float = PAUSE

    @property
    def may_be_cached(self) -> bool:
        """Whether the page may come from the cache at all."""
        return bool(getattr(self.request, "_cache_update_cache", False))

    @property
    def shared(self) -> bool:
        """Whether to wait for another request; not with a cache of another package, where all is as in Django."""
        return self.may_be_cached and isinstance(self.cache, ComputeOnceMixin)

    @property
    def is_answered(self) -> bool:
        """Whether there is a page or an error."""
        return self.response is not None or self.error is not None

    @property
    def outcome(self) -> Any:
        """The outcome for the waiting requests: whether the page is stored, its failure, or None: call the view."""
        if isinstance(self.error, PERSONAL):
            return None
        if self.error is not None:
            return portable_error(self.key, self.error)
        if self.response is not None and self.response.status_code >= 500:
            return portable_response(self.response)
        return self.stored

    def finish(self) -> Any:
        """Return the outcome. After a failure, if there is a stale page, log the failure and set the next pause."""
        outcome = self.outcome
        if self._old is not None and self._stale_pages is not None and _is_failure(outcome):
            self._pause = self._stale_pages.pause(self.request)
            self.cache._counters.count("errors")
            message = "The page %s could not be rendered again. The stale page is shown, and the next try is in %g s."
            log.error(message, self.request.path, self._pause, exc_info=self.error)
        return outcome

    def remembered_for(self, outcome: Any) -> float:
        """Return the timeout of the outcome in seconds; 0: only the waiting requests get it."""
        if outcome is False:
            return UNCACHEABLE_FOR
        return self._pause if _is_failure(outcome) else 0

    def find_stale(self) -> dict[str, Any]:
        """Find a stale page, and return options of `get_or_set`: with a stale page the request does not wait."""
        if self._stale_pages is not None:
            self._old = self._stale_pages.find(self.request)
        return {} if self._old is None else {"wait": 0, "on_wait_timeout": lambda: RENDERED_ELSEWHERE}

    def learn_key(self) -> str:
        """Return the key of the page for these headers, or for this address while the Vary header is unknown."""
        method = str(self.request.method)
        known = get_cache_key(self.request, self.rules.key_prefix, method, cache=self.cache)
        if known is None:
            address = hashlib.sha256(self.request.build_absolute_uri().encode()).hexdigest()
            known = f"{self.rules.key_prefix}.{method}.{address}"
        self.key = f"redislock.page.{known}"
        return self.key

    def find(self) -> HttpResponseBase | None:
        """Return the page from the cache, if it is there."""
        self.response = self.rules.process_request(self.request)
        self.stored = self.response is not None
        return self.response

    def store(self, response: HttpResponseBase) -> None:
        """Note the page of the view, and store it if that is allowed."""
        render = getattr(response, "render", None)
        if callable(render) and not getattr(response, "is_rendered", True):
            response = render()
        self.request._cache_update_cache = self.may_be_cached  # type: ignore[attr-defined]
        self.response = self.rules.process_response(self.request, response)  # type: ignore[assignment]
        key = get_cache_key(self.request, self.rules.key_prefix, str(self.request.method), cache=self.cache)
        self.stored = self.may_be_cached and key is not None and self.cache.has_key(key)
        if self.stored and self._refused:
            self.cache.delete(self.key)  # otherwise no request would wait for this page after its expiry
        if self._stale_pages is None or self.response is None:
            return
        if self.stored:
            self._stale_pages.save(self.request, self.response)
        elif self.response.status_code in GONE:
            self._stale_pages.delete(self.request)

    def fail(self, error: Exception) -> None:
        """Note the error of the view."""
        if is_interruption(error):
            raise error
        self.error = error
        if self._stale_pages is not None and isinstance(error, Http404):
            self._stale_pages.delete(self.request)

    def accept(self, outcome: Any) -> bool:
        """Note the outcome of the request that called the view; return whether there is nothing more to wait for."""
        if not self.is_answered:
            if outcome is RENDERED_ELSEWHERE or (self._old is not None and _is_failure(outcome)):
                self._answer_with_stale()
            elif isinstance(outcome, Exception):
                self.error = outcome
            elif isinstance(outcome, HttpResponseBase):
                self.response = outcome
            self._refused = outcome is False
        return self.is_answered or outcome is not True

    def answer(self) -> HttpResponseBase:
        """Return the page, or raise the error of the view."""
        if (
            self._old is not None
            and self._hides_errors
            and self.response is not self._old
            and _is_failure(self.outcome)
        ):
            self._answer_with_stale()
        if self.error is not None:
            raise self.error
        return self.response  # type: ignore[return-value]

    @property
    def _hides_errors(self) -> bool:
        return (self._on_error or self.cache._settings.on_error) == "stale"

    def _answer_with_stale(self) -> None:
        self.response, self.error = self._old, None
        self.request._cache_update_cache = False  # type: ignore[attr-defined]  # no middleware may store it as new
        self.cache._counters.count("stale_served")


def _is_failure(outcome: Any) -> bool:
    return isinstance(outcome, (Exception, HttpResponseBase))
