"""Fixtures of the tests of Django's part."""

from __future__ import annotations

import logging

import pytest

from django_redislock import transactions


@pytest.fixture
def warnings(caplog, monkeypatch):
    """The texts of what was logged as a warning or worse."""
    monkeypatch.setattr(transactions, "_places_warned", set())
    caplog.set_level(logging.WARNING, "django_redislock")
    return lambda: [record.getMessage() for record in caplog.records]
