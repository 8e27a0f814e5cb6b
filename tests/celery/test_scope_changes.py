"""A deploy that changes the scope, workers first: what the messages of the old code hold is what their headers say."""

from __future__ import annotations

import itertools

import pytest
from celery import Celery, signals
from celery.app.task import Context
from celery.exceptions import WorkerLostError

from django_redislock.celery import DuplicateResult, single_instance
from django_redislock.core import held_locks
from tests.celery.deliveries import trace
from tests.celery.publishing import find_receivers_again

SCOPES = ["run", "queued", "queued+run", "job"]
CHANGES = [(old, new) for old in SCOPES for new in SCOPES if old != new]
CHANGES += [(old, new) for old in SCOPES for new in ("run, limited", "queued+run, limited")]
NUMBERS = itertools.count()


class Deploy:
    """One task, in the code of the publisher and of the worker."""

    def __init__(self, old: str, new: str, **options) -> None:
        name, self.ran, self.publishers, self.workers = f"changed.{next(NUMBERS)}", [], *self._apps()
        self.old = self._task(self.publishers, name, old, **options)
        self.new = self._task(self.workers, name, new, **options)

    def _apps(self):
        return [
            Celery(each, set_as_current=False, broker="memory://", backend="cache+memory://")
            for each in ("publishers", "workers")
        ]

    def _task(self, app, name, scope, **options):
        def body(a=1):
            self.ran.append(a)
            return "ran"

        scope, *limited = scope.split(", ")
        marked = single_instance(scope=scope, limit=2 if limited else None)(body)
        return app.task(name=name, shared=False, lazy=False, **options)(marked)

    def message(self, *args):
        """Publish with the old code; return the message as a worker's request has it."""
        sent = {}
        note = lambda headers, **others: sent.update(headers)  # noqa: E731
        signals.before_task_publish.connect(note)
        find_receivers_again(self.publishers)
        try:
            assert not isinstance(self.old.delay(*args), DuplicateResult)
        finally:
            signals.before_task_publish.disconnect(note)
        return {**sent, "delivery_info": {}, "called_directly": False, "args": args, "kwargs": {}}

    def run(self, request):
        return trace(self.new, request, request["args"], request["kwargs"])


@pytest.fixture(params=CHANGES, ids=lambda change: f"{change[0]} to {change[1]}")
def deploy(request, client):
    return Deploy(*request.param)


def test_a_message_of_the_old_code_runs_once_and_leaves_no_lock(deploy, client):
    request = deploy.message(5)
    deploy.run(request)
    assert list(held_locks(client)) == []
    deploy.run(deploy.message(5))
    assert deploy.ran == [5, 5]
    assert list(held_locks(client)) == []


def test_a_message_of_the_old_code_that_is_revoked_leaves_no_lock(deploy, client):
    request = deploy.message(5)
    signals.task_revoked.send(sender=deploy.new, request=Context(**request), terminated=False)
    assert list(held_locks(client)) == []


def test_a_message_of_the_old_code_whose_child_was_killed_leaves_no_lock(deploy, client):
    request = deploy.message(5)
    deploy.new.request_stack.push(Context(**request))
    try:
        lost = WorkerLostError()
        signals.task_failure.send(sender=deploy.new, task_id=request["id"], exception=lost, args=(5,), kwargs={})
    finally:
        deploy.new.request_stack.pop()
    assert list(held_locks(client)) == []
