"""The Celery task of ``refresh="celery"``; a worker that discovers the tasks of the installed apps has it."""

from __future__ import annotations

from typing import Any

from celery import shared_task
from django.core.cache import caches

from .core.events import step


@shared_task(name="django_redislock.refresh", ignore_result=True)
def refresh(alias: str, message: dict[str, Any]) -> None:
    """Refresh a cached value; the backend of the alias wrote the message."""
    with step("refresh", message["key"]):
        caches[alias].refresh_from_message(message)  # type: ignore[attr-defined]
