"""Run the benchmarks that are named, or all: each prints its own table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NOT_ONE = {"common", "failovers", "run"}


def main() -> None:
    known = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_ONE)
    wanted = sys.argv[1:] or known
    for name in wanted:
        if name not in known:
            sys.exit(f"There is no benchmark {name!r}: {', '.join(known)}")
    sys.exit(max(subprocess.run([sys.executable, HERE / f"{name}.py"], check=False).returncode for name in wanted))


if __name__ == "__main__":
    main()
