"""The code blocks of the pages run: each page's blocks one after another, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ELSEWHERE = {"celery.rst", "migration-cache.rst", "recipes.rst", "run-once.rst", "start.rst"}
"""Pages whose code other tests run; that of ``start.rst`` is the README's."""
BEFORE = {
    "cache.rst": """
from functools import partial
from django.core.cache import cache
from django.db import transaction
from django_redislock.cache import cached, refreshable
@cached(60, key="r{shop_id}")
def report(shop_id): return shop_id
shop_id, build, refresh = 1, (lambda *shop: "built"), cache.get_or_set
build.__module__, build.__qualname__ = "shop", "build"
cache.get_or_set = lambda *args, **options: (print("asked", *args[:1]), options.get("refresh") == "celery" or refresh(*args, **options))
""",
    "testing.rst": """
import pytest
from celery import shared_task
from django_redislock import locked
@locked("invoice:{number}")
def charge(number): return number
def build(): return "built"
""",
}
AFTER = {
    "choosing.rst": """
from django_redislock import lock
assert pay(None, 1).status_code == 200
with lock("pay:1"):
    import threading
    answers = []
    thread = threading.Thread(target=lambda: answers.append(pay(None, 1).status_code))
    thread.start(); thread.join()
assert answers == [409]
first, again = handle_event.delay("e1", {}), handle_event.delay("e1", {})
assert first.id == again.id
assert handle_event.apply(("e2", {})).get() == "handled e2"
assert export.apply((1, ["a", "b"])).state == "SUCCESS"
""",
    "howto.rst": "assert invoice(None, 42).status_code == 200",
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
            exec(compile(code, page, "exec"), {"__name__": "docs"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.wait()[1]:
        failed.append(page)
sys.exit(f"failed: {failed}" if failed else 0)
"""


def blocks(page: Path) -> list[str]:
    found = re.findall(r"^\.\. code-block:: python\n\n((?:    .*\n|\n)+)", page.read_text(), re.MULTILINE)
    return ["\n".join(line[4:] for line in block.splitlines()) for block in found]


PAGES = sorted(page.name for page in DOCS.glob("*.rst") if blocks(page) and page.name not in ELSEWHERE)


def test_the_pages_with_code_are_found():
    assert {"cache.rst", "choosing.rst", "howto.rst", "lock.rst", "migration.rst", "testing.rst"} <= set(PAGES)


@pytest.mark.processes
def test_the_code_of_the_pages_runs(redis_url):
    codes = {page: "\n".join([BEFORE.get(page, ""), *blocks(DOCS / page), AFTER.get(page, "")]) for page in PAGES}
    run = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(codes),
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
