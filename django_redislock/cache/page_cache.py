"""The cache as Django's rules for pages use it: the pages, their stale copies, and the names of their headers.

What belongs to a page has a name that a pattern for the page matches, too, so that it is deleted with the page: between
the two digests of Django's key stands what it is. ``delete_pattern("views.decorators.cache.cache_page*")`` left the
stale copies behind, and visitors got the page from before the edit for ten minutes more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from django.http import HttpRequest, HttpResponseBase
from django.utils.cache import get_cache_key, learn_cache_key, patch_cache_control
from django.utils.http import http_date

from ..core.clock import monotonic
from ..core.keys import new_id
from ..exceptions import LockBackendError
from .lease.request import begin_rendering, end_rendering, read_value, was_ignored_since

NAMES_LIFE = 3600
"""Seconds by which the names of the headers expire later than the page and its copy. Without the names a request waits
for all requests of the same address, also for those with other headers."""
LONGEST_PAUSE = 60
"""Longest pause in seconds between two calls of a failing view. The first is a second; each failure doubles it."""

OF_PAGES = "views.decorators.cache.cache_page."
"""Begins Django's key of each page."""
STALE, FAILURES, LEASE, RENDERING = "stale", "stale.failures", "page", "rendering"
"""What belongs to a page: its copy, the number of failures to replace it, the computation that its requests share, and
the mark of those that render it."""
_DIGESTS = re.compile(r"(\.[0-9a-f]{32})(\.[0-9a-f]{32})(.*)", re.DOTALL)
"""The digests of the address and of the headers in the key of a page, and the rest of the key."""
_NAMES = re.compile(r"views\.decorators\.cache\.cache_header\.(.*\.)([0-9a-f]{32})(.*)", re.DOTALL)
"""Django's key of the names of an address's headers."""


def name_for_page(kind: str, page_key: str) -> str:
    """Return the name of what belongs to the page of this key."""
    return _DIGESTS.sub(rf"\1.redislock.{kind}\2\3", page_key, count=1)


def name_for_address(kind: str, page_key: str) -> str:
    """Return the name of what belongs to all pages of the address that the page of this key has."""
    return _DIGESTS.sub(rf"\1.redislock.{kind}\3", page_key, count=1)


def deleted_with(keys: Iterable[Any]) -> tuple[list[str], list[str]]:
    """Return what is deleted with these keys if they are those of pages, and the keys of their computations."""
    pages = [key for key in keys if isinstance(key, str) and OF_PAGES in key and _DIGESTS.search(key)]
    if not pages:  # each delete of a cache asks this
        return [], []
    leases = [name(LEASE, key) for key in pages for name in (name_for_page, name_for_address)]
    marks = [name(RENDERING, key) for key in pages for name in (name_for_page, name_for_address)]
    copies = [name_for_page(STALE, key) for key in pages]
    return list(dict.fromkeys((*marks, *copies, *leases))), list(dict.fromkeys(leases))


def patterns_with(pattern: str) -> list[str]:
    """Return the pattern, and one for what belongs to the pages that it matches, if it does not match that itself."""
    # All other patterns match those names because they end at, or have a wildcard for, one of the digests.
    return list(dict.fromkeys((pattern, _DIGESTS.sub(r"\1.redislock*\3", pattern, count=1))))


def may_match_pages(pattern: str) -> bool:
    """Whether the pattern may match keys of pages."""
    begin = re.split(r"[*?[\\]", pattern, maxsplit=1)[0]
    return OF_PAGES.startswith(begin) or begin.startswith(OF_PAGES)


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
        self.withheld = False
        """Whether they would have stored it, but it may have been deleted while it was rendered."""
        self._mark = self._token = ""
        """The key in Redis of the mark of this rendering, and what it holds."""
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

    def begin(self) -> None:
        """Mark that the page is rendered from now on. Whatever deletes the page deletes the mark first, and a page
        without its mark is not stored: it may be older than the delete."""
        if self.is_silent:
            return
        mark = self._cache._redis_key(self._name_of(RENDERING), None)
        server = self._cache._server_of(mark)
        if server is None:  # a cache of one process
            return
        self._mark = mark
        try:
            self._token = server.run(begin_rendering(mark, new_id()))
        except LockBackendError as error:
            self._cache._raise_unless_ignored(error, self._cache._through(self.lease_key, None))

    def end(self) -> None:
        """End the rendering after its page was stored. If the mark is gone, delete the page again."""
        if not self._mark or not self.stored:
            return
        if not self._is_marked(end_rendering(self._mark)):
            self.stored, self.withheld = False, True
            self._cache.delete(self.page_key)

    def _is_marked(self, read: Any) -> bool:
        try:
            value, _ = self._cache._server_of(self._mark).run(read)
        except LockBackendError as error:
            self._cache._raise_unless_ignored(error, self._cache._through(self.lease_key, None))
            return False
        return bool(value == self._token.encode())

    def set(self, key: str, value: Any, timeout: float) -> None:
        """Store the page, and then the names, which expire later. Django's rules give the names first, but a request
        that knew them before the page was there rendered it once more."""
        if isinstance(value, list):
            self._names_key, self._names, self._names_timeout = key, value, timeout + self._stale + NAMES_LIFE
        elif not self.is_silent:
            if self._may_be_deleted():
                self.withheld = True
                return
            answer = self._cache.set(key, value, timeout)
            self.stored = self._cache._stores(timeout) and not self._cache._was_ignored(answer)
            self._timeout = timeout
            self._save_names()

    def _may_be_deleted(self) -> bool:
        if self._mark:
            return not self._is_marked(read_value(self._mark, with_ttl=False))
        return self._cache._server_of("") is not None

    def _save_names(self) -> None:
        if not self.is_silent:
            self._cache.set(self._names_key, self._names, self._names_timeout)

    def find_lease_key(self) -> str:
        """Return the key of the computation: that of the page, or of the address while the names are unknown."""
        self.lease_key = self._name_of(LEASE)
        return self.lease_key

    def _name_of(self, kind: str) -> str:
        """Return the name of what belongs to the page, or to the address while the names are unknown."""
        if self.page_key is not None:
            return name_for_page(kind, self.page_key)
        return _NAMES.sub(rf"{OF_PAGES}\1{self._request.method}.\2.redislock.{kind}\3", self._names_key)

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
            page: HttpResponseBase | None = None if key is None else self.get(name_for_page(STALE, key))
            if page is not None:
                patch_cache_control(page, max_age=0)
                page["Expires"] = http_date()
                return page
        return None

    def save_stale(self, page: HttpResponseBase) -> None:
        """Save a copy of the page that was stored just now."""
        if self._stale:
            self._cache.set(name_for_page(STALE, str(self.page_key)), page, self._timeout + self._stale)
            self._cache.delete(self._failures_key)

    def delete_stale(self) -> None:
        """Delete the copies of GET and of HEAD, because the page does not exist any more."""
        if self._stale and self.page_key is not None and not self.is_silent:
            self._cache.delete_many([name_for_page(STALE, str(self._page_key(method))) for method in ("GET", "HEAD")])

    def next_pause(self) -> float:
        """Count a failure, and return the seconds until the view may be called again."""
        failures = self.get(self._failures_key, 0)
        pause = float(min(LONGEST_PAUSE, 2**failures))
        if not self.is_silent:
            self._cache.set(self._failures_key, failures + 1, pause + LONGEST_PAUSE)
        return pause

    @property
    def _failures_key(self) -> str:
        return name_for_page(FAILURES, str(self.page_key))

    def _page_key(self, method: str) -> str | None:
        return get_cache_key(self._request, self._prefix, method, cache=self)  # type: ignore[arg-type]

    @property
    def is_silent(self) -> bool:
        """Whether the server of the lease did not answer, and the cache ignored that, since the request began."""
        if not self.lease_key or not self._cache._ignores_errors():
            return False
        server = self._cache._server_of(self._cache._redis_key(self.lease_key, None))
        return server is not None and was_ignored_since(server, self._began)
