"""The settings of a site whose Celery stores its results in Django's database."""

from __future__ import annotations

import os

USE_TZ = os.environ.get("RESULTS_TIMES") == "aware"
TIME_ZONE = os.environ.get("RESULTS_ZONE", "UTC")
INSTALLED_APPS = ["django_celery_results", "django_redislock"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
DJANGO_REDISLOCK = {"URL": os.environ.get("RESULTS_REDIS", "")}
