"""What does the first miss of ``get_or_set`` cost a fresh process? Each backend's CPU time, and its base class's."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from common import server, table

PROCESSES = 20
PROGRAM = """
import sys, time
sys.path.insert(0, {here!r})
from cache_hit import configure
configure(sys.argv[1])
from django.core.cache import caches
cache = caches[sys.argv[2]]
getattr(cache, "client", None) or cache._cache  # made, with whatever that imports, and not connected
began = time.process_time()
assert cache.get_or_set(sys.argv[3], lambda: 1, 60) == 1
print(time.process_time() - began)
"""
PAIRS = {
    "django-redislock on django-redis": "django-redis",
    "django-redislock on Django's": "Django",
}


def first_miss(url: str, backend: str, number: int) -> float:
    command = [
        sys.executable,
        "-c",
        PROGRAM.format(here=str(Path(__file__).parent)),
        url,
        backend,
        f"{backend} {number}",
    ]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1000


def main() -> None:
    names = [name for pair in PAIRS.items() for name in pair]
    spent: dict[str, list[float]] = {name: [] for name in names}
    with server() as url:
        for number in range(PROCESSES):
            for name in names:
                spent[name].append(first_miss(url, name, number))
    rows = []
    for ours, base in PAIRS.items():
        ratio = statistics.median(a / b for a, b in zip(spent[ours], spent[base], strict=True))
        rows += [[base, f"{statistics.median(spent[base]):.1f}", ""]]
        rows += [[ours, f"{statistics.median(spent[ours]):.1f}", f"{ratio:.2f}"]]
    table("The first miss of a process", ["", "ms of CPU", "to its base"], rows)


if __name__ == "__main__":
    main()
