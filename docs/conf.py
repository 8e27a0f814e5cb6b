"""How the pages are built: ``tox run -e docs``."""

import os
from importlib.metadata import version as version_of

import django

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
django.setup()

project = "django-redislock"
copyright = "the django-redislock developers"
version = release = version_of("django-redislock")
extensions = ["sphinx.ext.autodoc"]
html_theme = "alabaster"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
