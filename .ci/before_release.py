"""Says what is still to be filled in before a release; the exit status is 1 while there is anything.

With a tag as its argument, the tag must be that of the version. .ci/RELEASING.rst has the whole list.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path


def open_points(root: Path, tag: str | None = None) -> Iterator[str]:
    """Yield what is missing in the checkout at `root`."""
    if not runpy.run_path(str(root / "setup.py"), run_name="setup")["HOME"]:
        yield "setup.py: set HOME, the address of the repository"
    for path in sorted((root / ".github/workflows").glob("*.yml")):
        used = set(re.findall(r"^ *-? *uses: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE))
        for action in sorted(action for action in used if not re.search(r"@[0-9a-f]{40}$", action)):
            yield f".github/workflows/{path.name}: pin {action} to a commit"
    (version,) = re.findall(
        r'^__version__ = "(.*)"$', (root / "django_redislock/__init__.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    changelog = (root / "CHANGELOG.rst").read_text(encoding="utf-8")
    if not re.search(rf"^{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        yield f"CHANGELOG.rst: give version {version} its date"
    if tag not in (None, f"v{version}"):
        yield f"the tag is {tag}, and the version {version}"


if __name__ == "__main__":
    found = list(open_points(Path(__file__).parents[1], *sys.argv[1:2]))
    print("\n".join(found) or "Nothing is to be filled in.")
    sys.exit(bool(found))
