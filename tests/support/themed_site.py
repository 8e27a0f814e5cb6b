"""A site whose admin has the look of another package: its settings, and the function that serves it.

A theme replaces Django's templates, and some replace the admin's site object, so each runs in a process of its own.
"""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as APPS

from .processes import say

THEMES: dict[str, list[str]] = {"django": [], "unfold": ["unfold"], "grappelli": ["grappelli"], "jazzmin": ["jazzmin"]}
"""By theme: the apps that must stand before those of Django."""

INSTALLED_APPS = [*THEMES[os.environ.get("THEME", "django")], *APPS]
ALLOWED_HOSTS = ["127.0.0.1"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("THEME_DATABASE", "")}}
DJANGO_REDISLOCK = {"URL": os.environ.get("THEME_REDIS", "")}


def serve() -> None:
    """Say where the site is, with the superuser `root`; serve it until a line comes in."""
    from django.contrib.auth.models import User
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.management import call_command
    from django.test.testcases import LiveServerThread

    call_command("migrate", verbosity=0)
    User.objects.create_superuser("root", password="secret")
    server = LiveServerThread("127.0.0.1", StaticFilesHandler)
    server.start()
    server.is_ready.wait()
    assert server.error is None, server.error
    say(url=f"http://127.0.0.1:{server.port}")
    input()
    server.terminate()
    server.join()
