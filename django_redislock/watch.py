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
"""Returns the lines of the table, each a text by heading, and what else is to be told."""


def watch(read: Read, output: TextIO, interval: float | None) -> None:
    """Draw what `read` returns: once with `interval` None, else again after so many seconds until Ctrl-C."""
    console = Console(file=output)
    if interval is None or not console.is_terminal:
        while True:
            console.print(_picture(*read()))
            if interval is None:
                return
            time.sleep(interval)
    with Live(_picture(*read()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(_picture(*read()), refresh=True)


def _picture(lines: list[dict[str, str]], remarks: list[str]) -> RenderableType:
    parts: list[RenderableType] = [Text(time.strftime("%H:%M:%S  ") + f"{len(lines)} held", style="bold")]
    if lines:
        table = Table(*(heading.upper() for heading in lines[0]), box=None, pad_edge=False)
        for line in lines:
            table.add_row(*(Text(text, overflow="ellipsis") for text in line.values()))  # as Text: names are no markup
        parts.append(table)
    return Group(*parts, *(Text(remark, style="red") for remark in remarks))
