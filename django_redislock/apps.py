from __future__ import annotations

from contextlib import suppress

from django.apps import AppConfig
from django.core.checks import register
from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy as _


class DjangoRedislockConfig(AppConfig):
    name = "django_redislock"
    verbose_name = _("Redis locks")

    def ready(self) -> None:
        """Register the system checks, and read the settings, which the core follows in part; opens no connection."""
        from . import conf
        from .checks import CHECKS, NETWORK_CHECKS, TAG

        for check in CHECKS:
            register(check, TAG)
        for check in NETWORK_CHECKS:
            register(check, TAG, deploy=True)
        with suppress(ImproperlyConfigured):  # the checks tell
            conf.get()
