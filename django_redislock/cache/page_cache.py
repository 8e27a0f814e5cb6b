"""The cache as Django's rules for pages use it: the pages, their stale copies, and the names of their headers."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponseBase
from django.utils.cache import get_cache_key, learn_cache_key, patch_cache_control
from django.utils.http import http_date

from ..core.clock import monotonic
from .lease.request import was_ignored_since

NAMES_LIFE = 3600
"""Seconds by which the names of the headers expire later than the page and its copy. Without the names a request waits
for all requests of the same address, also for those with other headers."""
LONGEST_PAUSE = 60
"""Longest pause in seconds between two calls of a failing view. The first is a second; each failure doubles it."""


class PageCache:
    """The cache as Django's rules use it for one request: they read the names once, and what they store is noted.

    Django's decorator finds the same names and pages. When the server did not answer the request before, and the cache
    ignores that, it is not asked again: each question would take one more time-out.
    """

    def __init__(self, cache: Any, request: HttpRequest, prefix: str, stale: float) -> None:
        self._cache = cache
        self._request = request
        self._prefix = prefix
        self._stale = stale
        self._began = monotonic()
        self._names: Any = None
        self._timeout = self._names_timeout = 0.0
        self.lease_key = ""
        """The key of the computation that the requests share."""
        self.stored = False
        """Whether Django's rules stored the page."""
        self.forget()

    def forget(self, from_primary: bool = False) -> None:
        """Read the names again, and from now on perhaps from the primary."""
        self._names_key, self._names = "", None
        self._get = self._cache._get_from_primary if from_primary else self._cache.get

    def get(self, key: str, default: Any = None) -> Any:
        """Return the names, or the page. Django's rules ask for the names first."""
        if key == self._names_key:
            return self._names
        value = default if self.is_silent else self._get(key, default)
        if not self._names_key:
            self._names_key, self._names = key, value
        return value

    def set(self, key: str, value: Any, timeout: float) -> None:
        """Store the page, and then the names, which expire later. Django's rules give the names first, but a request
        that knew them before the page was there rendered it once more."""
        if isinstance(value, list):
            self._names_key, self._names, self._names_timeout = key, value, timeout + self._stale + NAMES_LIFE
        elif not self.is_silent:
            answer = self._cache.set(key, value, timeout)
            self.stored = self._cache._stores(timeout) and not self._cache._was_ignored(answer)
            self._timeout = timeout
            self._save_names()

    def _save_names(self) -> None:
        if not self.is_silent:
            self._cache.set(self._names_key, self._names, self._names_timeout)

    def find_lease_key(self) -> str:
        """Return the key of the computation: that of the page, or of the address while the names are unknown."""
        self.lease_key = "redislock.page." + (self.page_key or f"{self._request.method}.{self._names_key}")
        return self.lease_key

    @property
    def page_key(self) -> str | None:
        """The key of the page for these headers; None while the names are unknown."""
        return self._page_key(str(self._request.method))

    def learn_names(self, response: HttpResponseBase) -> None:
        """Note the names of a page that is not stored, unless they are known."""
        if self.page_key is None:
            learn_cache_key(self._request, response, 0, self._prefix, cache=self)  # type: ignore[arg-type]
            self._save_names()

    def find_stale(self) -> HttpResponseBase | None:
        """Return the stale copy for this request, marked as expired so that no browser keeps it."""
        for method in dict.fromkeys(("GET", str(self._request.method))):
            key = self._page_key(method) if self._stale else None
            page: HttpResponseBase | None = None if key is None else self.get(f"redislock.stale.{key}")
            if page is not None:
                patch_cache_control(page, max_age=0)
                page["Expires"] = http_date()
                return page
        return None

    def save_stale(self, page: HttpResponseBase) -> None:
        """Save a copy of the page that was stored just now."""
        if self._stale:
            self._cache.set(f"redislock.stale.{self.page_key}", page, self._timeout + self._stale)
            self._cache.delete(self._failures_key)

    def delete_stale(self) -> None:
        """Delete the copies of GET and of HEAD, because the page does not exist any more."""
        if self._stale and self.page_key is not None and not self.is_silent:
            self._cache.delete_many([f"redislock.stale.{self._page_key(method)}" for method in ("GET", "HEAD")])

    def next_pause(self) -> float:
        """Count a failure, and return the seconds until the view may be called again."""
        failures = self.get(self._failures_key, 0)
        pause = float(min(LONGEST_PAUSE, 2**failures))
        if not self.is_silent:
            self._cache.set(self._failures_key, failures + 1, pause + LONGEST_PAUSE)
        return pause

    @property
    def _failures_key(self) -> str:
        return f"redislock.stale.failures.{self.page_key}"

    def _page_key(self, method: str) -> str | None:
        return get_cache_key(self._request, self._prefix, method, cache=self)  # type: ignore[arg-type]

    @property
    def is_silent(self) -> bool:
        """Whether the server of the lease did not answer, and the cache ignored that, since the request began."""
        if not self.lease_key or not self._cache._ignores_errors():
            return False
        server = self._cache._server_of(self._cache._redis_key(self.lease_key, None))
        return server is not None and was_ignored_since(server, self._began)
