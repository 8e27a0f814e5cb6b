"""The Celery task of ``refresh="celery"``; a worker that discovers the tasks of the installed apps has it."""

from __future__ import annotations

from typing import Any

from celery import shared_task
from django.core.cache import caches


@shared_task(name="django_redislock.refresh", ignore_result=True)
def refresh(alias: str, order: dict[str, Any]) -> None:
    """Compute a cached value anew; `order` is what the backend of the alias wrote."""
    caches[alias].refresh_ordered(order)  # type: ignore[attr-defined]
