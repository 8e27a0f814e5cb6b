"""Durations on the command line."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """Return the seconds of a duration such as 90, 90s, 5m, 1.5h or 2d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a duration; write 90s, 5m, 1.5h or 2d")
    return float(match[1]) * UNITS[match[2]]
