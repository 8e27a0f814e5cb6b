"""How the pages are built: ``tox run -e docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import django
from django.conf import settings

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

settings.configure(
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.admin", "django_redislock"],
)
django.setup()

from django_redislock import __version__  # noqa: E402 - the path and the settings come first

project = "django-redislock"
copyright = "the django-redislock developers"
version = release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx_copybutton"]
copybutton_prompt_text = "$ "
default_role = "py:obj"
highlight_language = "none"
html_theme = "furo"
html_title = f"django-redislock {release}"
(home,) = re.findall(r'^HOME = "(.*)"$', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
if home:
    html_theme_options = {"source_repository": home, "source_branch": "main", "source_directory": "docs/"}
autodoc_typehints = "description"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
