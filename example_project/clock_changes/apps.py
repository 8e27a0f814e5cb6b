from __future__ import annotations

from django.apps import AppConfig


class ClockChangesConfig(AppConfig):
    name = "clock_changes"

    def ready(self) -> None:
        """Count what happens to the locks of this process, for the page /metrics."""
        from django_redislock import metrics

        metrics.install()
