"""`cache_page`: Django's, but a page that is not in the cache is rendered once for all who want it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.cache import caches
from django.http import HttpRequest, HttpResponseBase
from django.middleware.cache import CacheMiddleware
from django.utils.cache import get_cache_key

from .mixin import ComputeOnceMixin
from .options import checked

View = Callable[..., Any]

UNCACHEABLE_FOR = 60
"""Seconds for which nobody waits for a page that was not stored: each request renders its own, as Varnish's hit-for-pass."""
ROUNDS = 2
"""How often to wait: for who learns by which headers the page varies, and then for the page of one's own headers."""


def cache_page(
    timeout: float, *, cache: str | None = None, key_prefix: str | None = None, **options: Any
) -> Callable[[View], View]:
    """Cache a view's pages as Django's decorator of this name does, and render each once for all who want it.

    What is stored, for how long and for whom are Django's own rules: GET and HEAD only, Vary, Cache-Control, status 200,
    no cookies for some. A page that may not be stored is rendered for each request; for `UNCACHEABLE_FOR` seconds nobody
    waits for its like. A template response is rendered within the decorator. `options` are those of `get_or_set` that say
    how to wait: `wait`, `expire`, `auto_renewal` and `max_hold`.
    """
    wrong = options.keys() - {"wait", "expire", "auto_renewal", "max_hold"}
    if wrong:
        raise TypeError(f"cache_page() got an unexpected argument {min(wrong)!r}")
    checked(**options)

    def decorate(view: View) -> View:
        rules = CacheMiddleware(view, page_timeout=timeout, cache_alias=cache, key_prefix=key_prefix)

        if iscoroutinefunction(view):

            @functools.wraps(view)
            async def async_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
                page = _Page(rules, request)

                async def once() -> bool | None:
                    try:
                        if await sync_to_async(page.find)() is None:
                            made = await view(request, *args, **kwargs)
                            await sync_to_async(page.store)(made)
                    except Exception as error:
                        page.error = error
                    return page.stored

                for last in (*[False] * ROUNDS, True):
                    found = await sync_to_async(page.find)()
                    if found is not None or not page.shared or last:
                        break

                    stored = await page.cache.aget_or_set(
                        await sync_to_async(lambda: page.key)(), once, UNCACHEABLE_FOR, should_cache=_refused, **options
                    )
                    if page.made or not stored:
                        break
                if not page.made:
                    made = await view(request, *args, **kwargs)
                    await sync_to_async(page.store)(made)
                return page.answer()

            return async_view

        @functools.wraps(view)
        def sync_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            page = _Page(rules, request)

            def once() -> bool | None:
                try:
                    if page.find() is None:
                        page.store(view(request, *args, **kwargs))
                except Exception as error:
                    page.error = error
                return page.stored

            for last in (*[False] * ROUNDS, True):
                found = page.find()
                if found is not None or not page.shared or last:
                    break
                stored = page.cache.get_or_set(page.key, once, UNCACHEABLE_FOR, should_cache=_refused, **options)
                if page.made or not stored:
                    break
            if not page.made:
                page.store(view(request, *args, **kwargs))
            return page.answer()

        return sync_view

    return decorate


def _refused(stored: bool | None) -> bool:
    """Whether the page may not be stored: that is remembered; that it was stored, or that its view failed, is only told."""
    return stored is False


class _Page:
    """The page of one request, by Django's rules."""

    def __init__(self, rules: CacheMiddleware, request: HttpRequest) -> None:
        if not hasattr(request, "META"):
            raise TypeError("cache_page didn't receive an HttpRequest: decorate methods with @method_decorator")
        self.rules = rules
        self.request = request
        self.cache: Any = caches[rules.cache_alias]
        self.response: HttpResponseBase | None = None
        self.error: Exception | None = None
        """What the view raised: for this request alone, since another's may be allowed what this one's is not."""
        self.stored: bool | None = None

    @property
    def wanted(self) -> bool:
        """Whether the page may come from the cache at all."""
        return bool(getattr(self.request, "_cache_update_cache", False))

    @property
    def shared(self) -> bool:
        """Whether to wait for another request's: with another cache, a local one in tests, all is as in Django."""
        return self.wanted and isinstance(self.cache, ComputeOnceMixin)

    @property
    def made(self) -> bool:
        """Whether there is an answer."""
        return self.response is not None or self.error is not None

    @property
    def key(self) -> str:
        """What is wanted once: the page for these headers, or, where nobody knows yet by which it varies, for this address."""
        method = str(self.request.method)
        known = get_cache_key(self.request, self.rules.key_prefix, method, cache=self.cache)
        if known is None:
            address = hashlib.sha256(self.request.build_absolute_uri().encode()).hexdigest()
            known = f"{self.rules.key_prefix}.{method}.{address}"
        return f"redislock.page.{known}"

    def find(self) -> HttpResponseBase | None:
        """Take the page from the cache, if it is there."""
        self.response = self.rules.process_request(self.request)
        self.stored = True if self.response is not None else None
        return self.response

    def store(self, response: HttpResponseBase) -> None:
        """Take the page that was made, and store it if that is allowed."""
        render = getattr(response, "render", None)
        if callable(render) and not getattr(response, "is_rendered", True):
            response = render()
        self.request._cache_update_cache = self.wanted  # type: ignore[attr-defined]
        self.response = self.rules.process_response(self.request, response)  # type: ignore[assignment]
        key = get_cache_key(self.request, self.rules.key_prefix, str(self.request.method), cache=self.cache)
        self.stored = self.wanted and key is not None and self.cache.has_key(key)

    def answer(self) -> HttpResponseBase:
        """Return the page, or raise what the view raised."""
        if self.error is not None:
            raise self.error
        return self.response  # type: ignore[return-value]
