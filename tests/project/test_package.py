"""What is in the package, and which of its modules may import which."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import django_redislock

PACKAGE = Path(django_redislock.__file__).parent
ROOT = PACKAGE.parent
MODULES = ["django_redislock", *(m.name for m in pkgutil.walk_packages([str(PACKAGE)], "django_redislock."))]
CORE = [name for name in MODULES if name.startswith("django_redislock.core")]
# Django, Celery or the user imports these by name; nothing of the package does.
LEAVES = [
    f"django_redislock.{name}"
    for name in (
        *("admin", "cache", "celery", "management", "metrics", "pytest_plugin", "tasks", "testing", "tracing", "watch"),
    )
]

# Imports each module named in a process of its own, forked after the setup, and prints what is loaded then.
PROBE = """
import importlib, json, os, sys
{setup}
for name in sys.argv[1:]:
    if not os.fork():
        importlib.import_module(name)
        print(json.dumps([name, sorted(sys.modules)]), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit("cannot import " + name)
"""


def loaded_by(modules: list[str], setup: str = "") -> dict[str, set[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    result = subprocess.run(
        [sys.executable, "-c", PROBE.format(setup=setup), *modules],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return {name: set(loaded) for name, loaded in map(json.loads, result.stdout.splitlines())}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.processes
def test_core_imports_the_standard_library_redis_and_the_exceptions_only():
    of_redis = set.union(*loaded_by(["redis", "redis.asyncio", "redis.sentinel"]).values())
    # `multiprocessing` gives `__main__` a second name.
    third_party = {name.partition(".")[0] for name in of_redis} | sys.stdlib_module_names
    third_party |= {"django_redislock", "__mp_main__"}
    for module, loaded in loaded_by(CORE, "import redis, redis.asyncio, redis.sentinel").items():
        ours = {name for name in loaded if within(name, "django_redislock")}
        assert {name.partition(".")[0] for name in loaded} <= third_party, module
        assert ours <= {"django_redislock", "django_redislock.exceptions", *CORE}, module


def test_the_package_imports_what_it_offers_with_its_first_use():
    names = json.dumps(django_redislock.__all__)
    code = f"""
import sys
import django_redislock
ours = lambda: {{name for name in sys.modules if name.startswith(("django", "celery", "kombu"))}} - {{"django"}}
assert ours() == {{"django_redislock"}}, ours()
assert set({names}) <= set(dir(django_redislock))
assert ours() == {{"django_redislock"}}, ours()
from django_redislock import LockLost
assert ours() == {{"django_redislock", "django_redislock.exceptions"}}, ours()
from django_redislock import *
assert set({names}) <= set(globals())
assert locked.__module__ == "django_redislock.decorator"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True)


@pytest.mark.processes
def test_nothing_imports_a_leaf():
    # SimpleAdminConfig does not look for admin modules, so that only the module in question is loaded.
    setup = """
import django
from django.conf import settings
apps = ["auth", "contenttypes", "sessions", "messages", "admin.apps.SimpleAdminConfig"]
settings.configure(
    INSTALLED_APPS=["django.contrib." + app for app in apps] + ["django_redislock"],
    CACHES={"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": "redis://127.0.0.1:1"}},
)
django.setup()
"""
    for module, loaded in loaded_by(MODULES, setup).items():
        for leaf in LEAVES:
            if not within(module, leaf):
                assert leaf not in loaded, f"{module} imports {leaf}"
        if not within(module, "django_redislock.celery") and module != "django_redislock.tasks":
            assert "celery" not in loaded, module
        if not within(module, "django_redislock.cache"):
            assert "django_redis" not in loaded, module


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    target = tmp_path_factory.mktemp("wheel")
    source = target / "source"
    # A copy, for setuptools leaves files where it builds, and takes old ones from there.
    ignored = (".git", ".tox", ".venv", ".*_cache", ".hypothesis", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*ignored))
    result = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    with zipfile.ZipFile(next(target.glob("*.whl"))) as archive:
        yield archive


@pytest.fixture
def metadata(wheel: zipfile.ZipFile) -> Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    on_disk = {
        str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == on_disk
    assert "django_redislock/py.typed" in packed
    assert any(name.startswith("django_redislock/core/lua/") for name in packed)


def test_metadata(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("django-redislock", django_redislock.__version__)
    assert (metadata["Requires-Python"], metadata["License-Expression"]) == (">=3.11", "BSD-3-Clause")
    assert metadata["Summary"]
    assert "lock" in metadata.get_payload().lower()


def test_base_install_needs_django_and_redis_only(metadata):
    requirements = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(requirements) == ["Django>=5.2", "redis>=5.0"]


def test_extras(metadata):
    extras = {"beat", "cache", "celery", "hiredis", "metrics", "opentelemetry", "watch"}
    assert set(metadata.get_all("Provides-Extra")) == extras


def test_pytest_finds_the_fixture_by_itself(wheel):
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert "[pytest11]\ndjango_redislock = django_redislock.pytest_plugin" in wheel.read(name).decode()
