"""Does what the README says, as a new user would: python3 .ci/first_hour.py PYTHON...

For each of these interpreters: an empty environment, the README's line to install (but from a wheel of this tree), a
new Django project with the README's settings, every block of code, a Celery worker with Redis as its broker, and every
command. Needs `redis-server` and the standard library. Prints what it does; ends with 1 and the output of the step that
failed.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

PIP = sys.executable, "-m", "pip"
OWN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.rst").read_text()
BLOCKS = ["\n".join(line[4:] for line in block.splitlines()) for block in
          re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", README)]  # fmt: skip
CELERY = """
import os
from celery import Celery
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["shop"])
"""
TASKS = """
from shop.tasks import build_report
assert build_report.delay(3).get(timeout=30) == "built 3"
"""
HOLD = """
from django_redislock import LockLost, lock
try:
    with lock("invoice:42"):
        print("held", flush=True)
        input()
except LockLost:
    print("lost", flush=True)
"""


class Failed(Exception):
    """A step that went wrong: what it was and what it wrote."""


def block(word: str) -> str:
    (found,) = [block for block in BLOCKS if word in block]
    return found


def run(*command: object, status: int = 0, **options: object) -> str:
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, **options
    )
    if done.returncode != status:
        raise Failed(f"{shlex.join(map(str, command))}\n{done.stdout}")
    return done.stdout


@contextmanager
def started(*command: object, **options: object):
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, **options)
        try:
            yield process
        except Exception as error:
            output.seek(0)
            raise Failed(f"{error}\n--- {shlex.join(map(str, command))}\n{output.read()}") from error
        finally:
            process.terminate()
            process.wait()


@contextmanager
def redis(folder: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with started("redis-server", "--port", port, "--save", "", "--dir", folder):
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"


def first_hour(interpreter: str, wheel: Path, folder: Path) -> str:
    """Do it all with this interpreter, and return which versions it had."""
    run(interpreter, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env/bin/python"
    (line,) = re.findall(r"^    (pip install \"django-redislock\[.*)$", README, re.MULTILINE)
    _, _, requirement = shlex.split(line)
    run(*PIP, "--python", python, "install", "-q", "--no-compile", f"{requirement} @ {wheel.as_uri()}")
    run(folder / "env/bin/django-admin", "startproject", "shop", cwd=folder)
    site = folder / "shop"
    for_site = {
        "cwd": site,
        "env": {**OWN, "DJANGO_SETTINGS_MODULE": "shop.settings"},
        "stdin": subprocess.DEVNULL,
    }
    with redis(folder) as url:
        with (site / "shop/settings.py").open("a") as settings:
            settings.write(f"\nOF_DJANGO = INSTALLED_APPS\n{block('INSTALLED_APPS')}\nINSTALLED_APPS += OF_DJANGO\n")
            settings.write(f"CACHES['default']['LOCATION'] = '{url}/0'\n")
            settings.write(f"CELERY_BROKER_URL = CELERY_RESULT_BACKEND = '{url}/1'\n")
        with (site / "shop/__init__.py").open("a") as package:
            package.write("from .celery import app\n")
        (site / "shop/celery.py").write_text(CELERY)
        (site / "shop/tasks.py").write_text(block("@single_instance"))
        manage = python, "manage.py"
        run(*manage, "check", "--fail-level", "WARNING", **for_site)
        run(*manage, "migrate", "-v0", **for_site)
        shown = block("INSTALLED_APPS"), block("@single_instance")
        code = "\n".join(block for block in BLOCKS if block not in shown)
        told = run(python, "-W", "error", "-c", f"import django\ndjango.setup()\n{code}", **for_site)
        if "report of 7" not in told or "fence" not in told:
            raise Failed(f"The README's code wrote:\n{told}")
        with started(python, "-m", "celery", "-A", "shop", "worker", "-P", "solo", "-l", "INFO", **for_site):
            run(python, "-c", f"import django\ndjango.setup()\n{TASKS}", **for_site)
        use_commands(python, for_site)
    versions = run(python, "-c", "import sys, celery, django, redis; print(*sys.version_info[:2], 'Django', "
                   "django.__version__, 'Celery', celery.__version__, 'redis-py', redis.__version__)")  # fmt: skip
    return versions.strip()


def use_commands(python: Path, for_site: dict[str, object]) -> None:
    """Run the README's commands while somebody holds the lock that they name."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    hold = for_site | pipes | {"text": True}
    with subprocess.Popen([python, "-c", f"import django\ndjango.setup()\n{HOLD}"], **hold) as holder:
        try:
            if holder.stdout.readline() != "held\n":
                raise Failed("The lock of the README's commands was not taken.")
            commands = re.findall(r"^    python (manage\.py redislock .*)$", README, re.MULTILINE)
            if len(commands) < 5:
                raise Failed(f"The README has these commands only: {commands}")
            for command in commands:
                more = (
                    ["--yes"] if " release" in command else ["--once", "--format=json"] if " watch" in command else []
                )
                of_task = "--task" in command  # of which nothing waits
                said = run(python, *shlex.split(command), *more, status=int(of_task), **for_site)
                expected = "No lock of the task" if of_task else "" if "doctor" in command else "invoice:42"
                if expected not in said:
                    raise Failed(f"{command} wrote:\n{said}")
            if holder.communicate("\n", timeout=60)[0] != "lost\n":
                raise Failed("The holder was not told that its lock was released by force.")
        finally:
            holder.kill()


def wheel_of(folder: Path) -> Path:
    """Return a wheel of this tree, made in this folder."""
    source = folder / "source"  # a copy, because setuptools leaves files where it builds
    source.mkdir()
    tracked = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    kept = [file for file in tracked if file and (ROOT / file).exists()]
    archive = subprocess.run(["tar", "-c", "--", *kept], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x"], cwd=source, check=True, input=archive)
    run(*PIP, "wheel", "-q", "--no-deps", "-w", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def main(interpreters: list[str]) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        wheel, failed = wheel_of(folder), 0
        results = [pool.submit(first_hour, each, wheel, folder / f"python{n}") for n, each in enumerate(interpreters)]
        for interpreter, result in zip(interpreters, results, strict=True):
            try:
                print(f"ok: {interpreter}: Python {result.result()}")
            except Exception as error:
                failed += 1
                print(f"FAILED: {interpreter}: {error}")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [sys.executable]))
