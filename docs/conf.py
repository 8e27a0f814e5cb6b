"""How the pages are built: ``tox run -e docs``."""

from __future__ import annotations

import sys
from pathlib import Path

import django
from django.conf import settings

sys.path.insert(0, str(Path(__file__).parents[1]))

settings.configure(
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.admin", "django_redislock"],
)
django.setup()

from django_redislock import __version__  # noqa: E402 - the path and the settings come first

project = "django-redislock"
copyright = "the django-redislock developers"
version = release = __version__
extensions = ["sphinx.ext.autodoc"]
default_role = "py:obj"
highlight_language = "none"
html_theme = "furo"
html_title = f"django-redislock {release}"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
