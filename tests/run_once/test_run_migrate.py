"""Ten processes start at once, and each wants to migrate the database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from tests.support import PostgresServer, using_databases
from tests.support.managed import MANAGE, Managed


@pytest.mark.usefixtures("locks_by_url")
def test_of_ten_processes_one_migrates_and_all_end_with_success(
    manage: Callable[..., Managed], postgres: PostgresServer, django_db_blocker: Any
) -> None:
    database = postgres.new_database()
    options = {"INSTALLED_APPS": ["django.contrib.auth", "django.contrib.contenttypes", "django_redislock"]}
    migrate = ("--", *MANAGE, "migrate", "--no-color")
    processes = [
        manage("redislock", "run", "migrate", "--once", "v1", *migrate, DATABASES={"default": database}, **options)
        for _ in range(10)
    ]
    assert [process.wait(120) for process in processes] == [0] * 10
    assert sorted("Applying auth.0001_initial" in process.out for process in processes) == [False] * 9 + [True]
    assert sum("Done already" in process.err for process in processes) == 9
    with django_db_blocker.unblock(), using_databases(default=database), connection.cursor() as cursor:
        cursor.execute("SELECT count(*), count(DISTINCT (app, name)) FROM django_migrations")
        applied, different = cursor.fetchone()
    assert applied == different > 10
