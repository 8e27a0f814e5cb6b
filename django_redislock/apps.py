from __future__ import annotations

from contextlib import suppress

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import register
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from django.utils.translation import gettext_lazy as _


class DjangoRedislockConfig(AppConfig):
    name = "django_redislock"
    verbose_name = _("Redis locks")

    def ready(self) -> None:
        """Register the system checks, and read the settings for the core. Opens no connection."""
        from . import conf
        from .checks import CHECKS, TAG, check_servers

        for check in CHECKS:
            register(check, TAG)
        register(check_servers, TAG, deploy=True)
        with suppress(ImproperlyConfigured):  # the checks report it
            conf.get()
        # Once, before a server forks: else the first miss of each of its processes takes the time of the import.
        for backend in (str(cache.get("BACKEND")) for cache in settings.CACHES.values()):
            if backend.startswith(f"{self.name}."):
                with suppress(ImportError, ImproperlyConfigured):  # whoever uses the cache gets the error
                    import_string(backend)
