"""The command that explores."""

from __future__ import annotations

import argparse
import logging
import time

from .locks import History, explore


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one history only")
    parser.add_argument("--story", action="store_true", help="tell it")
    options = parser.parse_args()
    if options.seed is not None:
        logging.getLogger("django_redislock").setLevel(logging.CRITICAL)
        history = History(options.seed)
        try:
            history.run()
        finally:
            if options.story:
                print("\n".join(history.world.story))
        return
    began = time.monotonic()
    number = explore(range(options.first, options.first + options.seeds))
    print(f"{number} histories in {time.monotonic() - began:.1f} s, and nothing was wrong")


if __name__ == "__main__":
    main()
