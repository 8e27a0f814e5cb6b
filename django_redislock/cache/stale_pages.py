"""Copies of pages that expire later than the pages: `cache_page` shows them while a view renders, or when it fails."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponseBase
from django.middleware.cache import CacheMiddleware
from django.utils.cache import get_cache_key, get_max_age, learn_cache_key, patch_cache_control
from django.utils.http import http_date

LONGEST_PAUSE = 60
"""Longest pause in seconds between two calls of a failing view. The first is a second; each failure doubles it."""


class StalePages:
    """The copies of the pages of one view. Django's own rules store each copy, under a separate prefix."""

    def __init__(self, rules: CacheMiddleware, cache: Any, stale: float) -> None:
        self._rules = rules
        self._cache = cache
        self._prefix = f"redislock.stale.{rules.key_prefix}"
        self.stale = stale
        """Seconds by which a copy expires later than its page."""

    def find(self, request: HttpRequest) -> HttpResponseBase | None:
        """Return the copy for this request, marked as expired so that no browser keeps it."""
        for method in dict.fromkeys(("GET", str(request.method))):
            key = get_cache_key(request, self._prefix, method, cache=self._cache)
            page: HttpResponseBase | None = None if key is None else self._cache.get(key)
            if page is not None:
                patch_cache_control(page, max_age=0)
                page["Expires"] = http_date()
                return page
        return None

    def save(self, request: HttpRequest, page: HttpResponseBase) -> None:
        """Save a copy of a page that was stored just now."""
        timeout: Any = self._rules.page_timeout  # type: ignore[attr-defined]
        if timeout is None:
            timeout = get_max_age(page)  # Django wrote it into the page that it stored
        expiry = timeout + self.stale
        self._cache.set(learn_cache_key(request, page, expiry, self._prefix, cache=self._cache), page, expiry)
        self._cache.delete(self._failures(request))

    def delete(self, request: HttpRequest) -> None:
        """Delete the copy, because the page does not exist any more."""
        key = get_cache_key(request, self._prefix, str(request.method), cache=self._cache)
        if key is not None:
            self._cache.delete(key)

    def pause(self, request: HttpRequest) -> float:
        """Count a failure, and return the seconds until the view may be called again."""
        key = self._failures(request)
        failures = self._cache.get(key, 0)
        pause = float(min(LONGEST_PAUSE, 2**failures))
        self._cache.set(key, failures + 1, pause + LONGEST_PAUSE)
        return pause

    def _failures(self, request: HttpRequest) -> str:
        key = get_cache_key(request, self._prefix, str(request.method), cache=self._cache)
        return f"redislock.stale.failures.{key}"
