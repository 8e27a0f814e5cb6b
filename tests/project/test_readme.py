"""The README's code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.rst").read_text()


def blocks():
    found = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", README)
    return ["\n".join(line[4:] for line in block.splitlines()) for block in found]


def block(word):
    (found,) = [block for block in blocks() if word in block]
    return found


def test_the_lock_and_the_cache_run_as_printed(redis_url):
    code = (
        f"import django; django.setup()\n{block('timeout=10')}\n{block('cache.get_or_set(')}\n"
        f"{block('rebuild(7)')}\n{block('load_user')}"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "fence" in run.stdout
    assert "report of 7" in run.stdout


def test_the_tasks_run_as_printed(run_python):
    code = "\n".join(
        [
            "from celery import Celery",
            "app = Celery(set_as_current=True)",
            "app.conf.task_always_eager = True",
            block("@single_instance"),
            "say(result=build_report.delay(3).get())",
        ]
    )
    assert run_python(code).finish() == [{"result": "built 3"}]


def test_the_install_block_is_valid():
    namespace: dict = {}
    exec(block("INSTALLED_APPS"), namespace)
    assert namespace["CACHES"]["default"]["BACKEND"] == "django_redislock.cache.RedisCache"
