"""The app of the beats: its broker and entries, and the server of the locks, are in the environment."""

from __future__ import annotations

import json
import os

from celery import Celery
from celery.schedules import crontab
from django.conf import settings

given = json.loads(os.environ["BEAT_SITE"])
settings.DJANGO_REDISLOCK = {"URL": given["locks"], "EXPIRE": given["expire"], "RETRY_FOR": 0.2}
settings.INSTALLED_APPS = ["django_redislock"]
settings.ROOT_URLCONF = None  # without an admin it starts sooner
if "database" in given:
    settings.DATABASES = {"default": given["database"]}
    settings.INSTALLED_APPS += ["django_celery_beat"]
app = Celery("beat_site")
app.conf.update(
    broker_url=given["broker"],
    beat_enable_remote_control=given.get("remote_control", False),
    beat_schedule={
        name: {
            "task": name,
            "schedule": crontab() if seconds == "crontab" else seconds,
        }
        for name, seconds in given["entries"].items()
    },
)
