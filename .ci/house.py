"""Print how large and how involved the package and its tests are: files, lines, classes, functions, private names.

Run it in an environment with the package and its test group: ``python .ci/house.py``. Ruff's rule C901 counts the
complexity, if ruff is installed.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "django_redislock"
sys.path.insert(0, str(ROOT))


def lines(files: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)


def classes(ending: str) -> list[str]:
    """Return the classes whose names end so; a Protocol says what a server does, and is none."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith(ending):
                found += [node.name] if "Protocol" not in map(ast.unparse, node.bases) else []
    return sorted(found)


def complexities() -> list[tuple[int, str]]:
    """Return the functions of a complexity over 10, as ruff counts it."""
    ruff = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
    command = [ruff, "check", "--isolated", "--select", "C901", "--output-format", "concise", str(PACKAGE)]
    report = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.findall(r"`(\w+)` is too complex \((\d+)", report)
    return sorted(((int(number), name) for name, number in found), reverse=True)


DOCUMENTED = {"_replace", "_asdict", "_meta", "_base_manager", "_exit", "_getframe"}
"""Names with an underscore that Python or Django documents for everybody."""


def private_attributes(files: list[Path]) -> list[tuple[str, str]]:
    """Return the file and the name of each private attribute of something else than self or cls."""
    return [
        (path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name, node.attr)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr) is not None
        and node.attr not in DOCUMENTED
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]


def walk(call: Callable[[], object]) -> tuple[list[str], int]:
    """Return the files of the package through which a call runs in this thread, in order of the first use, and the
    number of calls within the package."""
    entered: list[str] = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            entered.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [file.removeprefix(f"{PACKAGE}/") for file in dict.fromkeys(entered)], len(entered)


def walks() -> Iterator[tuple[str, tuple[list[str], int]]]:
    """Yield the walks of a cycle of `core.Lock`, of an acquisition through the facade that waits, and of a miss."""
    import django
    import redis
    from django.conf import settings

    from tests.support.servers import RedisServer

    with RedisServer() as server:
        url = server.url
        settings.configure(
            INSTALLED_APPS=["django_redislock"],
            CACHES={"default": {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": url}},
        )
        django.setup()
        from django.core.cache import cache

        from django_redislock import lock
        from django_redislock.core import Lock

        kept = Lock(redis.Redis.from_url(url), "cycle")

        def cycle() -> None:
            kept.acquire()
            kept.release()

        def waiting() -> None:
            with lock("waited", timeout=10):
                pass

        def waited() -> tuple[list[str], int]:
            held = threading.Event()

            def hold() -> None:
                with Lock(redis.Redis.from_url(url), "waited") as taken:
                    held.set()
                    while not taken.owner().waiting:
                        pass

            holder = threading.Thread(target=hold)
            holder.start()
            held.wait()
            found = walk(waiting)
            holder.join()
            return found

        cycle()
        yield "one cycle of core.Lock", walk(cycle)
        waited()
        yield "an acquisition through lock() that waits", waited()
        cache.get_or_set("warm", lambda: 1)
        yield "a miss", walk(lambda: cache.get_or_set("cold", lambda: 1))


def main() -> None:
    code = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".lua") and path.stat().st_size]
    python = [path for path in code if path.suffix == ".py"]
    tests = list((ROOT / "tests").rglob("*.py"))
    print(f"package, Python and Lua: {lines(code):,} lines, {len(code)} files that hold something")
    for ending in ("Lock", "Lease", "Server"):
        found = classes(ending)
        print(f"classes that end in {ending}: {len(found)}: {', '.join(found)}")
    found = complexities()
    print(f"functions of a complexity over 10: {len(found)}, the largest: {found[:1]}")
    from tests.project.private_names import PRIVATE

    listed = {(file, name) for each in PRIVATE for file in each.used_in for name in each.names.split()}
    private = private_attributes(python)
    foreign, own = ([use for use in private if (use in listed) is of_others] for of_others in (True, False))
    for whose, uses in (("another package", foreign), ("another class of the package", own)):
        print(
            f"private attributes of {whose}: {len(uses)}, for each 1,000 lines {len(uses) / lines(python) * 1000:.1f}"
        )
    print(f"tests: {lines(tests):,} lines; private attributes of something else: {len(private_attributes(tests))}")
    for what, (files, calls) in walks():
        print(f"{what}: {len(files)} files, {calls} calls: {', '.join(files)}")


if __name__ == "__main__":
    main()
