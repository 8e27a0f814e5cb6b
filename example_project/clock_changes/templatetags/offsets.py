from __future__ import annotations

from django import template

register = template.Library()


@register.filter
def offset(seconds: int) -> str:
    """Show seconds as a signed time: ``+05:30``."""
    hours, rest = divmod(abs(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{'−' if seconds < 0 else '+'}{hours:02}:{minutes:02}" + (f":{left:02}" if left else "")  # noqa: RUF001


@register.filter
def shift(seconds: int) -> str:
    """Show by how much a clock is moved: ``+1 h``, ``+30 min``."""
    size = abs(seconds)
    number, unit = (size / 3600, "h") if size >= 3600 else (size / 60, "min")
    return f"{'−' if seconds < 0 else '+'}{number:.4g} {unit}"  # noqa: RUF001
