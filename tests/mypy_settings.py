"""The settings that mypy's plugin for Django reads: without the helpers of the tests, which need more packages."""

from __future__ import annotations

from tests.settings import DEFAULT_AUTO_FIELD, INSTALLED_APPS as ALL, SECRET_KEY

__all__ = ["DEFAULT_AUTO_FIELD", "INSTALLED_APPS", "SECRET_KEY"]

INSTALLED_APPS = [app for app in ALL if not app.startswith("tests.")]
