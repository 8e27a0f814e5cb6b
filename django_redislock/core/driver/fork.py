"""The clean-up in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable


def after_in_child(function: Callable[[], object]) -> None:
    """Call the function in every forked child; where there is no fork, as on Windows, there is nothing to do."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
