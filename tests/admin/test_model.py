"""The model behind the admin page: permissions without a table, and no surprise for those who look at every model."""

from __future__ import annotations

import io
import json

import pytest
from django.contrib.auth.models import Permission
from django.core import checks
from django.core.management import call_command
from django.db import connection

from django_redislock.models import HeldLock
from django_redislock.texts import visible

pytestmark = pytest.mark.django_db


def test_migrate_makes_two_permissions_and_no_table() -> None:
    permissions = Permission.objects.filter(content_type__app_label="django_redislock")
    assert sorted(permission.codename for permission in permissions) == ["force_release_heldlock", "view_heldlock"]
    assert not [table for table in connection.introspection.table_names() if "redislock" in table]


def test_makemigrations_has_nothing_to_do() -> None:
    output = io.StringIO()
    call_command("makemigrations", check=True, dry_run=True, stdout=output)
    assert "No changes" in output.getvalue()


@pytest.mark.parametrize("options", [{}, {"use_base_manager": True}, {"use_natural_foreign_keys": True}])
def test_dumpdata_of_everything(options: dict[str, bool]) -> None:
    output = io.StringIO()
    call_command("dumpdata", stdout=output, **options)
    models = {row["model"] for row in json.loads(output.getvalue())}
    assert "auth.permission" in models
    assert "django_redislock.heldlock" not in models
    call_command("dumpdata", "django_redislock", stdout=output, **options)


def test_the_database_has_no_held_locks_and_the_checks_are_content() -> None:
    assert not HeldLock.objects.exists()
    assert list(HeldLock.objects.filter(name="a")) == []
    assert not [message for message in checks.run_checks(databases=["default"]) if "HeldLock" in str(message.obj)]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain: Grüße 世界 🔒", "plain: Grüße 世界 🔒"),
        ("a\nb\0\x1b[31m", r"a\nb\x00\x1b[31m"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("  ", "'  '"),
    ],
)
def test_what_does_not_show_is_made_visible(name: str, shown: str) -> None:
    assert visible(name) == shown
    assert str(HeldLock(name=name)) == shown
