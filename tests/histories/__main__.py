"""Write the history of a soak: real processes and a real server, with this package's locks or those of a peer.

Judge it with check.py. In a calm soak nothing goes wrong.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.simulation.test_soak import storm


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.histories", description=__doc__)
    parser.add_argument("--history", metavar="FILE", required=True)
    parser.add_argument("--library", choices=["redis-py", "python-redis-lock"], default="")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--calm", action="store_true")
    parser.add_argument("--slack", type=float, default=0.5, help="seconds that a call may take on this machine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, storm(Path(folder), False, options.library) as world:
        for process in world.processes:
            process.wait_for(event="works")
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            if not options.calm:
                world.blow()
            time.sleep(0.3)
        world.end()
        histories = world.histories()
    for head, *_ in histories:
        head["slack"] = options.slack
    lines = [line for history in histories for line in history]
    Path(options.history).write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines)} lines; faults: {dict(world.faults)}")


if __name__ == "__main__":
    main()
