"""Where the package cannot work it says so in one sentence, and where there is no fork it does without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"} | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import django; django.VERSION = (4, 2, 16, 'final', 0); import django_redislock; django_redislock.lock",
            "django-redislock needs Django 5.2 or newer, and 4.2.16 is installed: pip install -U 'Django>=5.2'.",
        ),
        (
            "import django; django.VERSION = (4, 2, 16, 'final', 0); django.setup()",
            "django-redislock needs Django 5.2 or newer, and 4.2.16 is installed: pip install -U 'Django>=5.2'.",
        ),
        (
            (
                "import celery, django; celery.VERSION = celery.VERSION._replace(major=5, minor=3); "
                "celery.__version__ = '5.3.0'; django.setup(); import django_redislock.celery"
            ),
            (
                "django_redislock.celery needs Celery 5.4 or newer, and 5.3.0 is installed: "
                "pip install -U 'django-redislock[celery]'."
            ),
        ),
    ],
)
def test_a_version_that_is_too_old_is_one_import_error_that_says_what_to_install(code, said):
    done = run(code)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"ImportError: {said}"


def test_without_fork_as_on_windows_locks_and_the_cache_work(redis_url):
    code = """
import os
for name in [name for name in dir(os) if "fork" in name]:
    delattr(os, name)
import django
django.setup()
import django_redislock.admin, django_redislock.celery, django_redislock.cache
from django.core.cache import cache
from django_redislock import lock
with lock("a", timeout=3) as held:
    held.extend()
    assert cache.get_or_set("k", lambda: 5, 60) == 5
with cache.lock("b"):
    print("done")
"""
    done = run(code)
    assert (done.stdout, done.stderr) == ("done\n", "")
