"""`@single_instance` for a task of Django's own framework: an error, because its lock would never be taken."""

from __future__ import annotations

from importlib import import_module

import django
import pytest

from django_redislock import locked
from django_redislock.celery import single_instance


@pytest.fixture
def task():
    """Django's ``@task``, or that of the package for older versions."""
    if django.VERSION >= (6, 0):
        return import_module("django.tasks").task
    return pytest.importorskip("django_tasks", reason="django-tasks is not installed").task


def export(customer):
    return customer


@pytest.mark.parametrize("mark", [single_instance, single_instance(scope="run")])
def test_above_and_below_the_task_decorator_of_django_it_says_what_to_write(task, mark):
    """Below it, every run was without a lock, and nothing said so."""
    plain = task(export)
    with pytest.raises(TypeError, match=r"for Celery's tasks; a task of Django's own (.|\n)*@task\n *@locked"):
        mark(plain)
    marked = mark(lambda customer: customer)
    with pytest.raises(TypeError, match=r"for Celery's tasks; a task of Django's own (.|\n)*@task\n *@locked"):
        task(marked)


def test_other_tasks_of_django_are_made_as_before(task):
    assert task(export).call("acme") == "acme"
    assert task(priority=3)(locked("export")(export)).priority == 3
