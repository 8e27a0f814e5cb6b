"""Keys begin with the tenant: the page's recipe for a site with a schema for each, and the option without a worker."""

from __future__ import annotations

import gc

import celery
import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from hypothesis import assume, example, given, strategies as st

from django_redislock.celery import DuplicateResult
from django_redislock.celery.key import with_tenant
from django_redislock.celery.message import KEY_HEADER
from django_redislock.checks import TAG
from django_redislock.core import held_locks
from tests.celery.deliveries import deliver, take
from tests.celery.publishing import find_receivers_again
from tests.support import name_of, wait_until
from tests.support.celery_site import tenants
from tests.support.celery_site.app import app as site
from tests.support.celery_site.harness import TaskQueue, ended
from tests.support.celery_site.tenants import connection, recipe

PATH = "tests.support.celery_site.tenants.schema"


@given(*[st.text(st.characters(), max_size=4)] * 4)
@example("a", "b:c", "a:b", "c")
@example("", "a:b", "a", "b")
@example("a", "", "", "a")
@example("a%3Ab", "", "a:b", "")
def test_two_tenants_never_share_a_key(tenant, key, other, other_key):
    assume((tenant, key) != (other, other_key))
    assert with_tenant(lambda: tenant, key) != with_tenant(lambda: other, other_key)


@pytest.mark.parametrize("scope", ["queued", "queued+run", "job"])
@pytest.mark.parametrize("key", [None, [], ["a"], "{a}", lambda a: str(a)])
@pytest.mark.parametrize("tenant", [PATH, tenants.schema])
def test_every_key_begins_with_the_tenant_that_the_settings_tell(client, make, settings, scope, key, tenant):
    task = make(scope=scope, key=key)
    settings.DJANGO_REDISLOCK = {"TENANT": tenant}
    with connection.schema("acme"):
        first = task.delay()
        assert task.delay().id == first.id
        assert task.lock_info().label.endswith(f"[{first.id}]")
    with connection.schema("umbrella"):
        assert task.lock_info() is None
        assert not isinstance(task.delay(), DuplicateResult)
    keys = sorted(info.name.split(":")[2] for info in held_locks(client))
    assert keys == ["acme", "umbrella"]
    with connection.schema("acme"):
        assert task.unlock()
    assert len(list(held_locks(client))) == 1


def test_a_task_may_be_one_for_all_tenants(client, make, settings):
    task = make(scope="job", tenant=None)
    settings.DJANGO_REDISLOCK = {"TENANT": PATH}
    with connection.schema("acme"):
        first = task.delay()
    with connection.schema("umbrella"):
        assert task.delay().id == first.id


def test_a_tenant_that_is_no_text_is_a_type_error(client, make):
    task = make(tenant=lambda: None)
    with pytest.raises(TypeError, match="the callable given as tenant must return a str, not NoneType"):
        task.delay()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "tests.support.celery_site.tenants.nothing",
            'Module "tests.support.celery_site.tenants" does not define a "nothing" attribute',
        ),
        ("nowhere.schema", "No module named 'nowhere'"),
        ("tests.support.celery_site.tenants.connection", "is no callable"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_error_of_the_system_check_and_of_publishing(make, settings, path, said):
    task = make()
    settings.DJANGO_REDISLOCK = {"TENANT": path}
    with pytest.raises(ImproperlyConfigured, match=said):
        task.delay()
    gc.collect()
    messages = [message.msg for message in run_checks(tags=[TAG]) if message.id == "redislock.E014"]
    (message,) = [message for message in messages if task.name in message]
    assert message.startswith(f"The task {task.name} has no key. The tenant {path!r} ")
    assert said in message


# The key of a retry


def run_in(tenant, app, message):
    with connection.schema(tenant):
        return deliver(app, message)


@pytest.mark.parametrize("scope", ["run", "queued", "queued+run", "job"])
@pytest.mark.parametrize("given", [{}, {"args": (1,)}, {"kwargs": {"a": 1}, "args": ()}], ids=["", "args", "kwargs"])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_retry_that_is_published_for_another_tenant_keeps_the_key_of_its_message(
    client, app, make, scope, given, is_known
):
    """It had the key of "public": two runs of one tenant overlapped, and the lock of a job stayed for an hour."""

    def body(self, a=1):
        with connection.schema("public"):
            raise self.retry(countdown=0, **given)

    task = make(body, scope=scope, tenant=tenants.schema, key="{a}")
    with connection.schema("acme"):
        task.delay(1) if is_known else app.send_task(task.name, (1,))
    for _ in range(3):  # the second one is made of a message that is a retry
        (message,) = take(app)
        run_in("acme", app, message)
        assert [info.name.split(":")[2:] for info in held_locks(client)] == ([] if scope == "run" else [["acme", "1"]])
    (message,) = take(app)
    assert message.headers[KEY_HEADER] == "acme:1"
    assert run_in("public", app, message)
    with connection.schema("acme"):
        task.unlock(1)


def test_a_retry_with_other_arguments_has_the_key_with_which_it_is_published(client, app, make):
    def body(self, a=1):
        with connection.schema("public"):
            raise self.retry(countdown=0, args=(2,))

    task = make(body, scope="job", tenant=tenants.schema, key="{a}")
    with connection.schema("acme"):
        task.delay(1)
    run_in("acme", app, *take(app))
    (message,) = take(app)
    assert message.headers[KEY_HEADER] == "public:2"
    assert [info.name.split(":")[2:] for info in held_locks(client)] == [["public", "2"]]


def test_a_retry_with_other_arguments_and_the_same_key_of_another_tenant_frees_its_former_key(client, app, make):
    """The worker compared the keys as it saw them, and left the lock of "acme" to a message of "public"."""

    def body(self, a=1, b=1):
        with connection.schema("public"):
            raise self.retry(countdown=0, args=(1, 2))

    task = make(body, scope="job", tenant=tenants.schema, key="{a}")
    with connection.schema("acme"):
        task.delay(1)
    run_in("acme", app, *take(app))
    assert [info.name.split(":")[2:] for info in held_locks(client)] == [["acme", "1"]]
    (message,) = take(app)
    assert message.headers[KEY_HEADER] == "acme:1"


# The recipe, with a worker


@pytest.fixture(scope="module")
def workers(worker_pools):
    env = {"REDISLOCK_TEST_TENANTS": "1"}
    return {pool: worker_pools.start(pool, name=f"tenants-{pool}", env=env) for pool in ("prefork", "threads")}


@pytest.fixture(params=["prefork", "threads"])
def task_queue(workers, request):
    kept = recipe()
    find_receivers_again(site)
    task_queue = TaskQueue([workers[request.param].wait_ready()], blocked=True)
    yield task_queue
    task_queue.run_log.let_bodies_end()
    del kept
    gc.collect()


def publish(task_queue, tenant, task, *args):
    with connection.schema(tenant):
        return task_queue.publish(task, *args)


@pytest.mark.processes
@pytest.mark.usefixtures("no_lock_is_left")
def test_each_tenant_has_its_own_job(task_queue):
    """With the schema in a header alone, the second was given the result of the first."""
    first, second = publish(task_queue, "acme", tenants.job), publish(task_queue, "umbrella", tenants.job)
    assert not isinstance(second, DuplicateResult)
    task_queue.run_log.wait_for("start", 2)
    assert [publish(task_queue, tenant, tenants.job).id for tenant in ("acme", "umbrella")] == [first.id, second.id]
    task_queue.run_log.let_bodies_end()
    assert [ended(result).result[0] for result in (first, second)] == ["acme", "umbrella"]


@pytest.mark.processes
@pytest.mark.usefixtures("no_lock_is_left")
def test_what_is_retried_or_rescheduled_stays_with_its_tenant(task_queue):
    retried = publish(task_queue, "acme", tenants.job, "retry after a second")
    first = publish(task_queue, "umbrella", tenants.rescheduled)
    task_queue.run_log.wait_for("start", 2)
    put_off = publish(task_queue, "umbrella", tenants.rescheduled)
    wait_until(lambda: put_off.state == "RETRY")
    task_queue.run_log.let_bodies_end()
    wait_until(lambda: retried.state == "RETRY")
    assert publish(task_queue, "acme", tenants.job).id == retried.id
    assert [ended(result).result[0] for result in (retried, first, put_off)] == ["acme", "umbrella", "umbrella"]
    assert {event["schema"] for event in task_queue.run_log.events("schema") if event["id"] == retried.id} == {"acme"}


@pytest.mark.processes
@pytest.mark.usefixtures("no_lock_is_left")
def test_a_message_without_our_headers_has_the_tenant_of_its_worker(task_queue):
    result = site.send_task(
        tenants.rescheduled.name, (task_queue.name,), queue=task_queue.queue, headers={"schema": "acme"}
    )
    task_queue.run_log.wait_for("start")
    with connection.schema("acme"):
        assert tenants.rescheduled.lock_info(task_queue.name).label == f"{tenants.rescheduled.name}[{result.id}]"
        assert ":acme:" in name_of(tenants.rescheduled, task_queue.name)
    assert tenants.rescheduled.lock_info(task_queue.name) is None
    task_queue.run_log.let_bodies_end()
    assert ended(result).result[0] == "acme"


@pytest.mark.processes
@pytest.mark.usefixtures("no_lock_is_left")
@pytest.mark.skipif(celery.VERSION < (5, 7), reason="Celery 5.7 has the option retry_on_worker_lost")
def test_the_retry_of_a_killed_child_keeps_the_key_of_its_tenant(workers):
    """The worker's main process publishes it, in no tenant: a second run of the tenant's job began beside it.

    The header of the recipe is that of the main process, too, so that the body runs in another schema.
    """
    task_queue = TaskQueue([workers["prefork"].wait_ready()])
    killed = publish(task_queue, "acme", tenants.killed, "once killed")
    task_queue.kill_child(task_queue.run_log.wait_for("start"))
    wait_until(lambda: killed.state == "RETRY")
    assert publish(task_queue, "acme", tenants.killed, "once killed").id == killed.id
    assert ended(killed).result == ["public", f"ran {killed.id}"]
