"""How the pages are built: ``tox run -e docs``."""

from __future__ import annotations

from importlib.metadata import version as version_of

import django
from django.conf import settings

settings.configure(
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.admin", "django_redislock"],
)
django.setup()

project = "django-redislock"
copyright = "the django-redislock developers"
version = release = version_of("django-redislock")
extensions = ["sphinx.ext.autodoc"]
html_theme = "alabaster"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
