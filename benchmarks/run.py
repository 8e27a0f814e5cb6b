"""Run the benchmarks that are named, or all: each prints its own table. With --keep, figures.txt keeps it, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NOT_ONE = {"common", "failovers", "run"}
KEPT = HERE / "figures.txt"
"""What the benchmarks printed that the README names; a test compares the README's ranges with it."""


def run(name: str, keep: bool) -> int:
    done = subprocess.run([sys.executable, HERE / f"{name}.py"], stdout=subprocess.PIPE if keep else None, check=False)
    if keep and not done.returncode:
        text = done.stdout.decode()
        print(text, flush=True)
        with KEPT.open("a", encoding="utf-8") as file:
            file.writelines(f"{line.rstrip()}\n" for line in text.splitlines())
    return done.returncode


def main() -> None:
    known = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_ONE)
    keep = "--keep" in sys.argv
    wanted = [name for name in sys.argv[1:] if name != "--keep"] or known
    for name in wanted:
        if name not in known:
            sys.exit(f"There is no benchmark {name!r}: {', '.join(known)}")
    sys.exit(max(run(name, keep) for name in wanted))


if __name__ == "__main__":
    main()
