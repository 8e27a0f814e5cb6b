"""Tries every command of the pages that a reader would paste: python3 .ci/commands.py [--list | KIND...]

The commands are found in README.rst, in docs/ and in what these include. Each belongs to a kind, and each kind has an
environment of its own. A command of no kind is an error, so that none is left out. Needs `redis-server`, and tox in
.venv.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from first_hour import CELERY, HOLD, OWN, PIP, ROOT, Failed, block, redis, run, wheel_of

PAGES = [ROOT / "README.rst", *sorted((ROOT / "docs").glob("*.rst"))]
INCLUDED = re.compile(r"^\.\. include:: (\S+\.rst)$", re.MULTILINE)
BEGINS = re.compile(
    r"(\$ |([A-Z_]+=\S+ )*(\.venv/bin/)?(python3?|pip|tox|celery|manage\.py|docker|redis-cli|valkey-cli|kubectl) "
    r"|[\d*/]+( [\d*/]+){4} )"
)
"""How a line begins that is a command; the last is that of a crontab."""
TOX = ROOT / ".venv/bin/tox"
FOR = 1.0
"""Seconds for which a command runs that would take long, or not end."""


def commands() -> Iterator[tuple[str, str]]:
    """Yield the page and each command: of its indented blocks, and of literals in its text."""
    seen = set()
    for page in PAGES:
        text = page.read_text()
        for included in INCLUDED.findall(text):
            text += (page.parent / included).read_text()
        found, begun = [], ""
        for line in text.splitlines():
            begun = f"{begun}\n{line[4:]}" if begun else line[4:] if line.startswith("    ") else ""
            if begun.count('"') % 2 == 0:  # a command may have several lines in quotation marks
                found += [begun] if BEGINS.match(begun) else []
                begun = ""
            elif not BEGINS.match(begun):
                begun = ""
        flowing = re.sub(r"\n(?=\S)", " ", text)
        found += [literal for literal in re.findall(r"``([^`\n]+)``", flowing) if BEGINS.match(literal)]
        for command in found:
            plain = re.sub(r"\s+# .*", "", command.removeprefix("$ ")).strip()
            if plain not in seen:
                seen.add(plain)
                yield page.name, plain


KINDS: dict[str, tuple[str, Callable[[list[str]], None]]] = {}
"""By kind: what its commands match, and what tries them. The first one that matches counts."""


def kind(pattern: str) -> Callable[[Callable[[list[str]], None]], None]:
    return lambda function: KINDS.update({function.__name__: (pattern, function)})


@kind(r"celery beat$|celery inspect ping$|(python )?manage\.py redislock( run)?$|.*(…|\[options\])")
def names(found: list[str]) -> None:
    """What the text only names, and the synopsis of a command."""


@kind(r"docker ")
def docker(found: list[str]) -> None:
    """Docker's server is Redis' own image, which needs Docker."""


@kind(r"(.*&& )?(\.venv/bin/)?(tox run -e bench|python benchmarks/)|(.*&& )?python benchmarks/")
def bench(found: list[str]) -> None:
    """Each benchmark runs for a second in the environment of tox, which has what its group says and no more."""
    run(TOX, "run", "-e", "bench", "--notest", cwd=ROOT)
    with tempfile.TemporaryDirectory() as name:  # of --keep
        run("cp", "-r", ROOT / "benchmarks", ROOT / "tests", name)
        for command in found:
            _, _, arguments = command.partition(" -- ")
            given = f"run.py {arguments}" if "tox run" in command else command.rpartition("benchmarks/")[2]
            for_a_second(".tox/bench/bin/python", f"{name}/benchmarks/{given}")
            print(f"ok: {command}", flush=True)


def for_a_second(python: str, arguments: str) -> None:
    environment = {**OWN, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [python, *shlex.split(arguments)], cwd=ROOT, env=environment, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=FOR + 4)  # its imports take seconds
    except subprocess.TimeoutExpired:
        return
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    if process.returncode:
        raise Failed(f"{arguments}\n{output}")


@kind(r"python3 -m venv \.venv && \.venv/bin/pip install|\.venv/bin/tox run|tox run")
def tox(found: list[str]) -> None:
    """The main job runs; of the other environments it is seen that they exist, because .ci/run itself runs most."""
    known = run(TOX, "list", "--no-desc", cwd=ROOT).split()
    run(TOX, "run", "-e", "demo", cwd=ROOT, stdin=subprocess.DEVNULL)
    for command in found:
        for name in re.findall(r"[\w-]+", "".join(re.findall(r"tox run -e ([\w,-]+)", command))):
            if name not in known:
                raise Failed(f"{command}: tox.ini has no environment {name}")
        print(f"ok: {command}", flush=True)


@kind(r"([A-Z_]+=\S+ )*python -m (tests|pytest)")
def tests(found: list[str]) -> None:
    """Commands about the tests, in the environment of the tests: few seeds, and the tests are only collected."""
    run(TOX, "run", "-e", "test", "--notest", cwd=ROOT)
    for command in found:
        more = " --collect-only -q" if "pytest" in command else ""
        brief = re.sub(r"--seeds \d+", "--seeds 20", command).replace("--planted", "--help")
        path = {**OWN, "PATH": f"{ROOT}/.tox/test/bin:{os.environ['PATH']}"}
        run("bash", "-c", brief + more, cwd=ROOT, env=path)
        print(f"ok: {command}", flush=True)


@contextmanager
def new_site(folder: Path, requirement: str) -> Iterator[tuple[Path, dict[str, object]]]:
    """Give the folder of a new Django project with the README's settings, and how to run a command there."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    run(*PIP, "--python", folder / "env/bin/python", "install", "-q", "--no-compile", requirement)
    run(folder / "env/bin/django-admin", "startproject", "proj", folder)
    with redis(folder) as url:
        more = f"\nOF_DJANGO = INSTALLED_APPS\n{block('INSTALLED_APPS')}\nINSTALLED_APPS += OF_DJANGO\n"
        more += "INSTALLED_APPS += ['django_celery_beat']\n"
        more += f"CACHES['default']['LOCATION'] = CELERY_BROKER_URL = '{url}/0'\n"
        with (folder / "proj/settings.py").open("a") as settings:
            settings.write(more)
        (folder / "proj/celery.py").write_text(CELERY.replace("shop", "proj"))
        (folder / "proj/__init__.py").write_text("from .celery import app\n")
        for script in ("report", "nightly", "hourly"):
            (folder / f"{script}.sh").write_text("#!/bin/sh\n")
            (folder / f"{script}.sh").chmod(0o755)
        (folder / ".venv").symlink_to("env")
        environment = {
            **OWN,
            "PATH": f"{folder}/env/bin:{os.environ['PATH']}",
            "DJANGO_SETTINGS_MODULE": "proj.settings",
            "RELEASE": "v1",
            "PORT": url.rpartition(":")[2],
        }
        yield folder, {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL}


@kind(r"pip install|(python )?manage\.py|celery -A|redis-cli|[\d*/]+ ")
def site(found: list[str]) -> None:
    """What a user does in a site: packages are installed from a wheel of this tree."""
    with tempfile.TemporaryDirectory() as name:
        wheel = wheel_of(Path(name))
        extras = {extra for command in found for extra in re.findall(r"\[([\w,]+)\]", command)}
        requirement = f"django-redislock[{','.join(sorted(extras))}] @ {wheel.as_uri()}"
        folder = Path(name) / "site"
        folder.mkdir()
        with new_site(folder, requirement) as (_, options):
            for command in sorted(found, key=lambda each: "migrate" not in each):  # the others need the tables
                if not command.startswith("pip"):  # all of them are installed already
                    use(command, folder, options)
                print(f"ok: {command}", flush=True)


def use(command: str, folder: Path, options: dict[str, object]) -> None:
    """Run a command of a site as its reader would, while a lock of the pages' name is held."""
    if re.match(r"[\d*/]+ ", command):  # as cron does it: a % would end the command
        command = (
            re.sub(r"(?<!\\)%.*", "", command.split(" ", 5)[5]).replace("\\%", "%").replace("/srv/shop", str(folder))
        )
    command = re.sub(r"^manage\.py", "python manage.py", command)
    command = command.replace("redis-cli", f"redis-cli -p {options['env']['PORT'].partition('/')[0]}")
    if " shell -c " in command:  # it holds the lock itself, until Enter
        run("bash", "-c", command, **options | {"stdin": None, "input": "\n"})
        return
    command += " --once --format=json" if command.endswith(" watch") else ""
    command = command.replace("release NAME", "release invoice:42") + (
        " --yes" if " redislock release" in command else ""
    )
    with subprocess.Popen(
        ["python", "-c", f"import django\ndjango.setup()\n{HOLD}"],
        **options | {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        executable=folder / "env/bin/python",
    ) as holder:
        try:
            if holder.stdout.readline() != "held\n":
                raise Failed(f"The lock of the pages was not taken:\n{holder.stderr.read()}")
            if command.startswith("celery"):
                schedule_for_a_while(command, folder, options)
            else:
                of_task = "--task" in command  # of which nothing waits
                checks = "--deploy" in command or "doctor" in command  # which have advice for a server of a test
                try:
                    run("bash", "-c", command, status=int(of_task), **options)
                except Failed:
                    if not checks:
                        raise
                    run("bash", "-c", command, status=1, **options)
        finally:  # not killed: the lock would stay for its expiry, and the next command wait for it
            try:
                holder.communicate("\n", timeout=30)
            except subprocess.TimeoutExpired:
                holder.kill()


def schedule_for_a_while(command: str, folder: Path, options: dict[str, object]) -> None:
    """Start a beat, wait until it leads, and end it."""
    with tempfile.TemporaryFile("w+") as output:
        more = [] if "--schedule " in command or "Database" in command else ["--schedule", folder / "schedule"]
        words = [*shlex.split(command), *more, "--loglevel=INFO", f"--pidfile={folder / 'pid'}"]
        beat = subprocess.Popen(
            words, **options | {"stdout": output, "stderr": output}, executable=folder / "env/bin/celery"
        )
        try:
            deadline = time.monotonic() + 60
            while "Beat leads" not in (said := (output.seek(0), output.read())[1]):
                if beat.poll() is not None or time.monotonic() > deadline:
                    raise Failed(f"{command}\n{said}")
                time.sleep(0.2)
        finally:
            beat.terminate()
            beat.wait()


def main(wanted: list[str]) -> int:
    by_kind: dict[str, list[str]] = {name: [] for name in KINDS}
    nowhere = []
    for page, command in commands():
        name = next((name for name, (pattern, _) in KINDS.items() if re.match(pattern, command)), None)
        if name is None:
            nowhere.append(f"{page}: {command}")
        else:
            by_kind[name].append(command)
        if "--list" in wanted:
            print(f"{name}: {page}: {command}")
    if nowhere:
        print("No kind of .ci/commands.py tries these:", *nowhere, sep="\n")
        return 1
    if "--list" in wanted:
        return 0
    # Most of the time is spent in waiting. Two runs of tox at once would build the package in one place, though.
    by_tox = ["bench", "tox", "tests"]
    lanes = [by_tox, [name for name in KINDS if name not in by_tox]]
    with ThreadPoolExecutor(len(lanes)) as pool:
        return min(sum(pool.map(lambda lane: try_kinds(lane, by_kind, wanted), lanes)), 1)


def try_kinds(kinds: list[str], by_kind: dict[str, list[str]], wanted: list[str]) -> int:
    """Try the commands of these kinds, one kind after the other, and return how many of them failed."""
    failed = 0
    for name in kinds:
        if not wanted or name in wanted:
            try:
                KINDS[name][1](by_kind[name])
            except Exception as error:
                failed += 1
                print(f"FAILED: {name}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
