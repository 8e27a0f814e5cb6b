"""The live table of ``redislock watch``, drawn by rich."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

Read = Callable[[], tuple[list[dict[str, str]], list[str]]]
"""Returns the lines of the table, each as texts by heading, and remarks to show above the table."""


LONG = {"name": 3, "holder": 2, "id": 2}
"""Headings of the columns that share the remaining width, with their parts of it. Long texts are folded and not cut."""
LEFT_OUT = {"fence"}
"""Headings of columns that are not shown, because the names need the room. ``redislock show`` shows them."""


def watch(read: Read, output: TextIO, interval: float | None) -> None:
    """Draw the table once, or, with an `interval` in seconds, again and again until Ctrl-C."""
    console = Console(file=output)
    if interval is None or not console.is_terminal:
        while True:
            console.print(_picture(*read()))
            if interval is None:
                return
            time.sleep(interval)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_picture(*read(), console.height), refresh=True)
            time.sleep(interval)


def _picture(lines: list[dict[str, str]], remarks: list[str], height: int | None = None) -> RenderableType:
    """Return the table of the lines, or of as many as a terminal of that height may show; the others would cost time.

    The remarks are above it, because what does not fit is cut at the end.
    """
    count = f"{len(lines)} held" if lines or not remarks else ""  # the number is unknown when nothing could be read
    parts: list[RenderableType] = [Text(time.strftime("%H:%M:%S  ") + count, style="bold")]
    parts += (Text(remark, style="red") for remark in remarks)
    if lines:
        table = Table(box=None, pad_edge=False)
        shown = [heading for heading in lines[0] if heading not in LEFT_OUT]
        if len({line["connection"] for line in lines}) == 1:
            shown.remove("connection")
        for heading in shown:
            long = heading in LONG
            table.add_column(heading.upper(), overflow="fold", no_wrap=not long, ratio=LONG.get(heading))
        for line in lines[:height]:
            table.add_row(*(Text(line[heading]) for heading in shown))  # as Text, because a name may look like markup
        parts.append(table)
    return Group(*parts)
