"""The tenant of the caller, by the site's own functions: keys of tasks begin with it, and refreshes enter it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from . import conf


def import_callable(named: Callable[..., Any] | str | None, argument: str) -> Callable[..., Any] | None:
    """Return the callable, or what its dotted path names.

    Raises ImproperlyConfigured, which names the argument, when it cannot be imported or is no callable.
    """
    if not isinstance(named, str):
        return named
    try:
        found = import_string(named)
    except ImportError as error:
        raise ImproperlyConfigured(f"The {argument} {named!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ImproperlyConfigured(f"The {argument} {named!r} is no callable, but {found!r}")
    return found  # type: ignore[no-any-return]


def current_tenant() -> str | None:
    """Return what TENANT says of the caller; None without that setting. Raises TypeError when it is no str."""
    get = import_callable(conf.get().tenant, "TENANT")
    tenant = None if get is None else get()
    if get is not None and not isinstance(tenant, str):
        raise TypeError(f"the callable given as TENANT must return a str, not {type(tenant).__name__}")
    return tenant


@contextmanager
def tenant_entered(tenant: str | None) -> Iterator[None]:
    """Run the block for this tenant, by ENTER_TENANT; without a tenant or that setting nothing is entered."""
    enter = None if tenant is None else import_callable(conf.get().enter_tenant, "ENTER_TENANT")
    if enter is None:
        yield
        return
    with enter(tenant):
        yield
