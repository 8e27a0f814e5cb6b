"""Shows values that were read in another way to the tools that wrap `get` and `get_many` of a cache object.

Sentry and Django Debug Toolbar put their own functions on each cache object, and count its hits and misses there. The
functions of Sentry are not asynchronous. So they are called after the reading, in the same thread or task, and nothing
is read again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from django.core.cache.backends.base import BaseCache

if TYPE_CHECKING:
    Base = BaseCache
else:
    Base = object

_shown: ContextVar[tuple[Any, ...]] = ContextVar("redislock_shown", default=())
"""The value that was read, while it is shown."""


class ShownMixin(Base):
    """The methods that the tools wrap."""

    def get(self, key: Any, default: Any = None, version: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the value of the key, or `default`."""
        shown = _shown.get()
        return shown[0] if shown else super().get(key, default, version, *args, **kwargs)

    def get_many(self, keys: Iterable[Any], version: int | None = None, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return the values of the keys that have one."""
        shown = _shown.get()
        return shown[0] if shown else super().get_many(keys, version, *args, **kwargs)

    def _is_watched(self, method: str) -> bool:
        """Whether a tool wraps the method of this object."""
        return method in vars(self)

    def _show(self, method: str, value: Any, *args: Any, version: int | None) -> None:
        """Show this value to the tools as the result of the method for these arguments."""
        if self._is_watched(method):
            token = _shown.set((value,))
            try:
                getattr(self, method)(*args, version=version)
            finally:
                _shown.reset(token)
