"""Every order and form in which a task is made single-instance; each notes its runs under the name that it is given."""

from __future__ import annotations

from typing import Any

from celery import Task, shared_task

from django_redislock.celery import SingleInstanceMixin, SingleInstanceTask, single_instance
from tests.support.celery_site.app import app
from tests.support.celery_site.run_log import RunLog


def stay(name: str, task_id: str | None = None) -> str:
    run_log = RunLog(name)
    with run_log.run(task_id):
        run_log.wait_until_bodies_may_end()
    return "ran"


class ProjectTask(Task):
    """A project's own base."""

    def project_says(self) -> str:
        return "hello"


class ProjectSingleTask(SingleInstanceMixin, ProjectTask):
    single_instance = {"key": ["name"], "expire": 60}


@shared_task
@single_instance
def shared_bare(name: str) -> str:
    return stay(name)


@shared_task()
@single_instance()
def shared_called(name: str) -> str:
    return stay(name)


@shared_task(name="forms.shared_with_options")
@single_instance(key="{name}", expire=60)
def shared_with_options(name: str, other: int = 0) -> str:
    return stay(name)


@shared_task(bind=True)
@single_instance
def shared_bound(self: Any, name: str) -> str:
    self.single_instance.raise_if_lost()
    return stay(name, self.request.id)


@app.task
@single_instance
def app_bare(name: str) -> str:
    return stay(name)


@app.task(bind=True, ignore_result=False)
@single_instance(expire=60)
def app_bound_with_options(self: Any, name: str) -> str:
    self.single_instance.raise_if_lost()
    return stay(name, self.request.id)


@app.task(autoretry_for=(Exception,), default_retry_delay=0)
@single_instance(key=["name"])
def app_autoretry(name: str) -> str:
    return stay(name)


@shared_task(base=SingleInstanceTask)
def shared_base(name: str) -> str:
    return stay(name)


@shared_task(base=SingleInstanceTask, single_instance={"key": "{name}", "expire": 60})
def shared_base_with_options(name: str) -> str:
    return stay(name)


@app.task(base=ProjectSingleTask, bind=True)
def app_mixin(self: Any, name: str) -> str:
    assert self.project_says() == "hello"
    return stay(name, self.request.id)


@shared_task(base=ProjectTask, bind=True)
@single_instance(key="{name}")
def shared_project_base(self: Any, name: str) -> str:
    assert self.project_says() == "hello"
    return stay(name, self.request.id)


class ClassBased(SingleInstanceTask):
    name = "forms.class_based"
    single_instance = {"expire": 60}

    def run(self, name: str) -> str:
        return stay(name, self.request.id)


class_based = app.register_task(ClassBased())

FORMS = {
    "@shared_task @single_instance": shared_bare,
    "@shared_task() @single_instance()": shared_called,
    "@shared_task(name) @single_instance(options)": shared_with_options,
    "@shared_task(bind) @single_instance": shared_bound,
    "@app.task @single_instance": app_bare,
    "@app.task(bind) @single_instance(options)": app_bound_with_options,
    "@app.task(autoretry_for) @single_instance": app_autoretry,
    "@shared_task(base=SingleInstanceTask)": shared_base,
    "@shared_task(base=SingleInstanceTask, single_instance=options)": shared_base_with_options,
    "@app.task(base=a project's class with the mixin)": app_mixin,
    "@shared_task(base=a project's class) @single_instance(options)": shared_project_base,
    "class X(SingleInstanceTask)": class_based,
}
