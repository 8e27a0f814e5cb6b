"""Texts for people, in the admin and in the command: names without hidden characters, and durations."""

from __future__ import annotations

from django.utils.formats import number_format
from django.utils.translation import gettext

from .core.keys import SLOT_IN_TEXT, split_slot


def visible(name: str) -> str:
    """Return the name with an escape in place of each character that is invisible or changes the text around it.

    Of a listed name of a semaphore's slot the number follows in brackets.
    """
    if SLOT_IN_TEXT in name:
        name, slot = split_slot(name)
        return f"{visible(name)} [{slot}]" if slot else visible(name)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    return shown if shown.strip() else repr(shown)


def duration(seconds: float) -> str:
    """Return a duration in at most two units."""
    if seconds < 9.95:
        # number_format() cuts the number and does not round it.
        return gettext("%(seconds)s s") % {"seconds": number_format(round(seconds, 1), 1)}
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [
        (days, gettext("%(days)d d") % {"days": days}),
        (hours, gettext("%(hours)d h") % {"hours": hours}),
        (minutes, gettext("%(minutes)d min") % {"minutes": minutes}),
        (whole, gettext("%(seconds)s s") % {"seconds": whole}),
    ]
    first = next(index for index, (number, _) in enumerate(parts) if number)
    return " ".join(text for number, text in parts[first : first + 2] if number)
