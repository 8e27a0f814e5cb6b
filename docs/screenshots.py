"""Make the pictures of the pages: ``python docs/screenshots.py``.

It needs the dependency groups ``demo`` and ``test``, and Chromium. The example site runs for it, with a worker that
rebuilds reports and locks that this program holds.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "example_project")]

from playwright.sync_api import Page, sync_playwright  # noqa: E402

from demo import LOGIN, Demo  # noqa: E402
from django_redislock import AcquireTimeout  # noqa: E402
from processes import end_all, wait_until  # noqa: E402

PICTURES = HERE / "pictures"
LARGEST = 150_000
LIST = "/admin/django_redislock/heldlock/"
WIDE, PHONE = {"width": 1280, "height": 700}, {"width": 390, "height": 780}


def keep_busy() -> list:
    """Have locks held and waited for; return those of this program, which end when nobody refers to them any more."""
    from clock_changes.tasks import rebuild_report
    from django_redislock import lock

    held = [
        lock("invoice:4711", label="billing.send", expire=60),
        lock("import:prices", label="nightly import", expire=3600, auto_renewal=False),
        lock("warehouse:berlin", expire=60),
    ]
    for each in held:
        each.acquire()
        time.sleep(2)  # of different ages
    waiting = [lock(name, label="waits") for name in ("invoice:4711", "invoice:4711", "warehouse:berlin")]
    for each in waiting:
        threading.Thread(target=each.acquire, daemon=True).start()
    for year in (1999, 2011):
        rebuild_report.delay(year, step_minutes=1)
    wait_until(lambda: len(names()) >= 5, 60, "the worker has begun")
    return held + waiting


def contend(urls: list[str]) -> None:
    """Have what the contention page shows: waits that end, waits given up, duplicates refused, values waited for."""
    from clock_changes.tasks import rebuild_report
    from django_redislock import lock
    from django_redislock.connections import get_client
    from django_redislock.core.listing import contention

    def wait_for(name: str, timeout: float) -> None:
        with suppress(AcquireTimeout), lock(name, timeout=timeout):
            time.sleep(0.3)

    patience = {"invoice:4711": 20, "warehouse:berlin": 20, "import:prices": 0.7}
    with lock("import:prices"):
        threads = [
            threading.Thread(target=wait_for, args=(name, seconds))
            for name, seconds in patience.items()
            for _ in range(5)
        ]
        threads += [threading.Thread(target=get, args=(f"{url}/{year}.json",)) for year in (1987, 2030) for url in urls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for _ in range(6):
        rebuild_report.delay(1990, step_minutes=20)

    def counted() -> bool:
        found = contention(get_client()).names.values()
        return sum(counts.duplicates for counts in found) > 0 and not names()

    wait_until(counted, 120, "duplicates were refused")


def get(url: str) -> None:
    with urlopen(url) as response:  # noqa: S310
        response.read()


def names() -> set[str]:
    from django_redislock.inventory import read

    return {row.info.name for row in read().rows}


def save(page: Page, name: str, whole: bool = False) -> None:
    path = PICTURES / f"{name}.png"
    page.screenshot(path=path, full_page=whole)
    if path.stat().st_size > LARGEST:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {LARGEST}.")


def take(url: str) -> None:
    program = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(base_url=url, viewport=WIDE)
        page.goto(LIST)
        page.get_by_label("Username").fill(LOGIN)
        page.get_by_label("Password").fill(LOGIN)
        page.get_by_role("button", name="Log in").click()
        page.locator("#result_list").wait_for()
        save(page, "list")
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size(PHONE)
        save(page, "list-phone")
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(WIDE)
        page.get_by_role("link", name="invoice:4711").click()
        page.get_by_text("View held lock").wait_for()
        save(page, "lock", whole=True)
        page.get_by_role("button", name="Force-release…").click()
        page.get_by_role("button", name="Yes, force-release").wait_for()
        save(page, "force-release")
        page.goto(f"{LIST}contention/")
        page.locator(".redislock-plot").wait_for()
        save(page, "contention")
        browser.close()


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="redislock-pictures-") as directory:
        logging.basicConfig(filename=Path(directory) / "log")
        demo = Demo(Path(directory))
        try:
            demo.start(0)
            urls = [f"http://{host}:{port}" for host, port in demo.addresses]
            contend(urls)
            locks = keep_busy()
            take(urls[0])
            for lock in locks:
                lock.reset()
        finally:
            end_all(demo.processes)


if __name__ == "__main__":
    main()
