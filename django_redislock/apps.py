from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register
from django.utils.translation import gettext_lazy as _


class DjangoRedislockConfig(AppConfig):
    name = "django_redislock"
    verbose_name = _("Redis locks")

    def ready(self) -> None:
        """Register the system checks; opens no connection."""
        from .checks import CHECKS, NETWORK_CHECKS, TAG

        for check in CHECKS:
            register(check, TAG)
        for check in NETWORK_CHECKS:
            register(check, TAG, deploy=True)
