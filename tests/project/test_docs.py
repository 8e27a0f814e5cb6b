"""The code of the pages and of the README runs: each block alone, as a reader types it, and those of a page at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import django
import pytest

DOCS = Path(__file__).parents[2] / "docs"
ELSEWHERE = {"celery.rst", "run-once.rst", "start.rst"}
"""Pages of whose code other tests show what it does; that of ``start.rst`` is the README's."""
AFTER = {
    "README.rst": """
assert rebuild(7) == "report of 7"
assert build_report.apply((3,)).get() == "built 3"
assert CACHES["default"]["BACKEND"] == "django_redislock.cache.RedisCache"
""",
    "cache.rst": """
assert report_of(7) == {"total": 7}
assert report(7) == {"total": 7}
change(7)
""",
    "howto.rst": """
from django_redislock import lock
assert invoice(None, 42).status_code == 200
assert pay(None, 1).status_code == 200
with lock("pay:1"):
    import threading
    answers = []
    thread = threading.Thread(target=lambda: answers.append(pay(None, 1).status_code))
    thread.start(); thread.join()
assert answers == [409]
from concurrent.futures import ThreadPoolExecutor
from time import sleep
charges = []
with ThreadPoolExecutor(6) as pool:
    answers = list(pool.map(lambda _: pay_once("k", lambda: [charges.append(1), sleep(0.1), "paid"][2]), range(6)))
assert (answers, charges) == (["paid"] * 6, [1])
first, again = handle_event.delay("e1", {}), handle_event.delay("e1", {})
assert first.id == again.id
assert handle_event.apply(("e2", {})).get() == "handled e2"
assert export.apply((1, ["a", "b"])).state == "SUCCESS"
from types import SimpleNamespace
from django_redislock import semaphore
request = SimpleNamespace(user=SimpleNamespace(pk=7))
assert export_view(request).status_code == 200
slots = [semaphore("export:7", 5) for _ in range(5)]
assert all([slot.acquire(blocking=False) for slot in slots])
assert export_view(request).status_code == 429
for slot in slots:
    slot.release()
""",
    "testing.rst": "InvoiceTests('test_charge_takes_the_lock').test_charge_takes_the_lock()",
}
# Runs the code of each page in a process of its own, forked after the imports, and names the pages that failed.
RUN = """
import json, logging, os, sys, traceback
import django
django.setup()
from celery import Celery
from django_redislock import get_client
logging.getLogger("django_redislock").setLevel("CRITICAL")
failed = []
for page, code in json.load(sys.stdin).items():
    if not os.fork():
        try:
            get_client().flushdb()
            app = Celery("docs", broker="memory://", backend="cache+memory://", set_as_current=True)
            # As at the end of a file of settings, where a project has its apps.
            exec(compile(code, page, "exec"), {"__name__": "docs", "INSTALLED_APPS": []})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.wait()[1]:
        failed.append(page)
sys.exit(f"failed: {failed}" if failed else 0)
"""


def blocks(page: Path) -> list[str]:
    found = re.findall(r"^( *)\.\. code-block:: python\n\n((?:\1 .*\n|\n)+)", page.read_text(), re.MULTILINE)
    return [dedent(block) for _, block in found]


PAGES = [page for page in (DOCS.parent / "README.rst", *sorted(DOCS.glob("*.rst"))) if blocks(page)]


def test_the_pages_with_code_are_found():
    found = {page.name for page in PAGES}
    assert found >= {"README.rst", "cache.rst", "howto.rst", "lock.rst", "migration.rst", "start.rst"}


def run(codes: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(codes),
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.processes
def test_the_code_of_the_pages_runs(redis_url):
    run(
        {
            page.name: "\n".join([*blocks(page), AFTER.get(page.name, "")])
            for page in PAGES
            if page.name not in ELSEWHERE
        }
    )


@pytest.mark.long
@pytest.mark.processes
def test_each_block_runs_alone(redis_url):
    """So a reader may begin anywhere on a page: each block has its imports, and what it uses."""
    alone = {f"{page.name}, block {n}": code for page in PAGES for n, code in enumerate(blocks(page), 1)}
    of_newer_django = {name for name, code in alone.items() if "django.tasks" in code and django.VERSION < (6, 0)}
    endless = {name for name, code in alone.items() if "candidate.run()" in code}
    assert len(endless) == 1
    run({name: code for name, code in alone.items() if name not in of_newer_django | endless})
