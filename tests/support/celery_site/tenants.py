"""A site with a schema for each tenant, as the page about Celery tells to make one; the database's part is left out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import local
from types import SimpleNamespace
from typing import Any

from celery import shared_task

from django_redislock.celery import single_instance
from tests.support.celery_site.run_log import RunLog
from tests.support.celery_site.tasks import act

PAGE = Path(__file__).parents[3] / "docs" / "celery.rst"


class Connection(local):
    """What django-tenants makes of Django's connection, which each thread has of its own."""

    schema_name = "public"

    def set_schema(self, name: str) -> None:
        self.schema_name = name

    @contextmanager
    def schema(self, name: str) -> Iterator[None]:
        """Do as ``schema_context`` does."""
        before = self.schema_name
        self.set_schema(name)
        try:
            yield
        finally:
            self.set_schema(before)


connection = Connection()


def recipe() -> SimpleNamespace:
    """Return the page's module; its receivers are connected as long as it is kept."""
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", PAGE.read_text())
    (block,) = [block for block in blocks if "set_schema" in block]
    code = "\n".join(line[4:] for line in block.splitlines())
    names: dict[str, Any] = {"__name__": "shop.tenants"}
    exec(compile(code, str(PAGE), "exec"), names)
    names["connection"] = connection
    return SimpleNamespace(**names)


def schema() -> str:
    return connection.schema_name


if "REDISLOCK_TEST_TENANTS" in os.environ:
    kept = recipe()


def tenant_task(scope: str, of_celery: dict[str, Any] | None = None, **options: Any) -> Any:
    def body(self: Any, name: str, how: str = "return") -> Any:
        RunLog(name).note("schema", schema=schema(), id=self.request.id)
        return [schema(), act(self, name, how)]

    body.__qualname__ = body.__name__ = f"of_a_tenant_{scope.replace(', ', '_')}"
    given = {"key": "{name}", "expire": 600, "reschedule_delay": 0.2, "tenant": f"{__name__}.schema", **options}
    scope, *_ = scope.split(",")
    task = shared_task(bind=True, name=f"tenants.{body.__name__}")(single_instance(scope=scope, **given)(body))
    for option, value in (of_celery or {}).items():
        setattr(task, option, value)
    return task


job = tenant_task("job")
rescheduled = tenant_task("run", on_conflict="reschedule")
killed = tenant_task("job, killed", {"acks_late": True, "retry_on_worker_lost": True, "default_retry_delay": 1})
