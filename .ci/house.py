"""Print how involved the package is: in how many ways a call ends, how many files an option touches, which scripts and
classes there are, and through which files three calls run.

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
    ruff = shutil.which("ruff")
    if ruff is None:
        return []
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

        def free() -> None:
            with lock("a"):
                pass

        cycle()
        yield "one cycle of core.Lock", walk(cycle)
        free()
        yield 'with lock("a")', walk(free)
        waited()
        yield "an acquisition through lock() that waits", waited()
        cache.get_or_set("warm", lambda: 1)
        yield "a miss", walk(lambda: cache.get_or_set("cold", lambda: 1))
        yield from walks_of_a_task()


def walks_of_a_task() -> Iterator[tuple[str, tuple[list[str], int]]]:
    """Yield the walks of a publication and of a run of ``queued+run``."""
    from celery import Celery

    from django_redislock.celery import single_instance
    from tests.celery.deliveries import deliver, take

    with Celery("house", set_as_current=False, broker="memory://", backend="cache+memory://") as app:

        @app.task(name="task", lazy=False)
        @single_instance(scope="queued+run", key=[])
        def task() -> None:
            pass

        task.delay()
        deliver(app, *take(app))
        yield "delay() of queued+run", walk(task.delay)
        (message,) = take(app)
        yield "a run of queued+run", walk(lambda: deliver(app, message))


INTERRUPTIONS = re.compile(r"BaseException|GeneratorExit|CancelledError")


def ways_to_end() -> dict[str, list[str]]:
    """Return the functions, by file, that do something of their own when a call is interrupted: each is one more way in
    which a call can end, for whoever reads it."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(
                isinstance(each, ast.ExceptHandler)
                and (
                    each.type is None
                    or re.search(r"BaseException|GeneratorExit|CancelledError", ast.unparse(each.type))
                )
                for each in ast.walk(node)
            ):
                found.setdefault(path.relative_to(PACKAGE).as_posix(), []).append(node.name)
    return found


def files_of_options() -> Iterator[tuple[str, list[str]]]:
    """Yield each option of a lock, and the files that name it."""
    from django_redislock.core.options import KINDS

    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    for option in KINDS:
        # As an argument, an attribute or a key; a docstring may speak of it.
        use = re.compile(rf"\b{option}\b *[:=]|\.{option}\b|[\"']{option}[\"']", re.IGNORECASE)
        yield option, [file for file, text in texts.items() if use.search(text)]


def main() -> None:
    code = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".lua") and path.stat().st_size]
    python = [path for path in code if path.suffix == ".py"]
    ends = ways_to_end()
    print(f"functions that handle an interruption: {sum(map(len, ends.values()))} in {len(ends)} files")
    for file, functions in ends.items():
        print(f"  {file}: {', '.join(functions)}")
    for option, files in files_of_options():
        if option in ("auto_renewal", "max_hold", "renewal_jitter", "min_replicas"):  # the names that mean nothing else
            print(f"files that name {option}: {len(files)}: {', '.join(files)}")
    for folder in ("core", "cache/lease", "celery"):
        scripts = sorted(path.stem for path in (PACKAGE / folder / "lua").glob("*.lua"))
        print(f"scripts of {folder}: {len(scripts)}: {', '.join(scripts)}")
    for ending in ("Lock", "Lease", "Server"):
        found = classes(ending)
        print(f"classes that end in {ending}: {len(found)}: {', '.join(found)}")
    complex_ones = complexities()
    print(f"functions of a complexity over 10: {len(complex_ones)}, the largest: {complex_ones[:1]}")
    from tests.project.private_names import PRIVATE

    listed = {(file, name) for each in PRIVATE for file in each.used_in for name in each.names.split()}
    private = private_attributes(python)
    print(f"private attributes of another package: {sum(use in listed for use in private)}")
    print(f"private attributes of another class of the package: {sum(use not in listed for use in private)}")
    for what, (files, calls) in walks():
        print(f"{what}: {len(files)} files, {calls} calls: {', '.join(files)}")


if __name__ == "__main__":
    main()
