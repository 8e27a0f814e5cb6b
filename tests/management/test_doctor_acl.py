"""``redislock doctor --acl``: with the printed rights each feature works, and each of them is needed."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from django.core.management import call_command

import django_redislock
from django_redislock import conf, get_client, held_locks, lock
from django_redislock.cache.lease import request
from django_redislock.celery.execution_lock import AfterRelease, Delivery
from django_redislock.celery.options import complete
from django_redislock.core import operations
from django_redislock.core.contention import contention
from django_redislock.core.driver.registry import server_of
from django_redislock.doctor import inspect
from django_redislock.doctor_acl import CACHE, LISTS, LOCKS
from django_redislock.exceptions import LockBackendError
from tests.support import RedisServer, queue_of, wait_until
from tests.support.cache_programs import cache_elsewhere

pytestmark = pytest.mark.processes
USER = "app"
PACKAGE = Path(django_redislock.__file__).parent


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def admin(guarded: RedisServer) -> Iterator[Any]:
    with guarded.client() as admin:
        admin.flushall()
        admin.script_flush()
        yield admin


@pytest.fixture(autouse=True)
def _as_the_user(guarded: RedisServer, settings: Any) -> None:
    url = guarded.url.replace("//", f"//{USER}:secret@").replace("/0", "/1")
    backend = {"BACKEND": "django_redislock.cache.RedisCache", "LOCATION": url, "KEY_PREFIX": "shop[1]"}
    settings.CACHES = {"default": backend}
    settings.DJANGO_REDISLOCK = {}


def lines() -> list[str]:
    output = io.StringIO()
    call_command("redislock", "doctor", "--acl", stdout=output)
    return output.getvalue().splitlines()


def give(admin: Any, rules: list[str]) -> None:
    """Let the user have these rights only."""
    admin.execute_command("ACL", "SETUSER", USER, "reset", "on", ">secret")
    for line in rules:
        command, name, user, *rights = line.split()
        assert (command, name, user) == ("ACL", "SETUSER", USER)
        admin.execute_command("ACL", "SETUSER", USER, *rights)
    request._forbidden.clear()


def in_a_thread(work: Callable[[], object], waits_for: Callable[[], object]) -> Callable[[], None]:
    """Start a thread, wait until it waits, and return the function that ends it; the thread's error is raised."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: failed or waits_for(), message="it waits")

    def join() -> None:
        thread.join(20)
        assert not thread.is_alive()
        if failed:
            raise failed[0]

    return join


def queued(admin: Any, name: str) -> int:
    return int(
        admin.execute_command("EVAL", "redis.call('SELECT', 1) return redis.call('ZCARD', KEYS[1])", 1, queue_of(name))
    )


def use_locks(admin: Any) -> None:
    for expire in (30, 0.05):
        held = lock("a", expire=expire, auto_renewal=False)
        assert held.acquire(timeout=5)
        if expire == 30:
            join = in_a_thread(lambda: lock("a", timeout=20).__enter__().release(), lambda: queued(admin, "a"))
            held.extend()
            assert held.owner().id == held.id
            held.release()
            join()
    assert lock("a", timeout=5).__enter__().reset()


def use_tasks(admin: Any) -> None:
    prepared = complete({}, conf.get()).lock
    delivery = Delivery("task", "task:0:one", known=True)
    assert prepared.with_name("t", id="task").take(fresh=True)
    execution = prepared.with_name("t", delivery=delivery, ending=AfterRelease(processed_for=30))
    assert execution.acquire(blocking=False)
    prepared.with_name("t").count_duplicate()
    execution.release()
    assert not prepared.with_name("t", delivery=delivery).acquire(blocking=False)


def use_cache(admin: Any) -> None:
    cache = caches["default"]
    other = cache_elsewhere(cache._server, "RedisCache")
    other.key_prefix = cache.key_prefix
    computing, end = threading.Event(), threading.Event()

    def compute() -> str:
        computing.set()
        assert end.wait(20)
        return "v" * 600_000

    join = in_a_thread(lambda: cache.get_or_set("k", compute, 60), computing.is_set)
    name = f"cache:{cache.make_key('k')}"
    join_other = in_a_thread(lambda: other.get_or_set("k", compute, 60), lambda: queued(admin, name))
    end.set()
    join()
    join_other()
    assert cache.get_or_set("k", compute, 60, stale=30)
    assert cache.get_or_set("n", lambda: (cache.get_or_set("m", lambda: 1), cache.delete("n"), 5)[-1], 60) == 5
    assert cache.get_or_set_many(["x", "y"], lambda keys: dict.fromkeys(keys, 1)) == {"x": 1, "y": 1}
    cache.set_many({"x": 1, "z": 2}, 60)
    assert cache.get_many(["x", "z"]) == {"x": 1, "z": 2}
    assert cache.incr("x") == 2
    assert cache.touch("x", None)
    assert cache.touch("x", 50)
    assert cache.has_key("x")
    assert cache.ttl("x")
    assert cache.delete_pattern("x*")
    cache.delete_many(["y", "z"])


def use_lists(admin: Any) -> None:
    with lock("a"):
        assert [info.name for info in held_locks()] == ["a"]
        server = server_of(get_client())
        assert server.run(operations.count(server, "redislock")) == 1
        assert contention(get_client()).minutes


def use_doctor(admin: Any) -> None:
    assert not [finding for finding in inspect(server_of(get_client())) if "may not run" in finding.message]


FEATURES = [use_locks, use_tasks, use_cache, use_lists, use_doctor]


@pytest.fixture
def fails(admin: Any, caplog: Any) -> Callable[..., bool]:
    """Return a function that tells whether one of the features fails."""

    def fails(*features: Callable[[Any], None]) -> bool:
        caplog.clear()
        admin.flushall()
        admin.script_flush()
        try:
            for feature in features:
                feature(admin)
        except Exception:
            return True
        return "ermission" in caplog.text

    return fails


def test_with_the_printed_rights_each_feature_works(admin: Any) -> None:
    give(admin, lines())
    for feature in FEATURES:
        feature(admin)


def test_without_one_of_the_lines_its_feature_fails(admin: Any, fails: Any) -> None:
    printed = lines()
    for number, features in enumerate([(use_locks,), (use_cache,), (use_lists,), (use_doctor,)]):
        give(admin, [line for line in printed if line != printed[number]])
        assert fails(*features) is True, printed[number]
    assert len(printed) == 4


def test_the_rights_are_those_of_the_scripts_and_few_more() -> None:
    """Some commands of scripts may fail; then wake-ups come late, or counts are missing: no feature test sees that."""
    of_scripts = {folder: commands_of(folder) for folder in ("core", "celery", "cache/lease")}
    locks, cache, lists = ({word[1:].split("|")[0] for word in rights.split()} for rights in (LOCKS, CACHE, LISTS))
    assert of_scripts["core"] | of_scripts["celery"] <= locks | lists
    assert of_scripts["cache/lease"] <= locks | cache
    assert locks - of_scripts["core"] == {"eval", "evalsha", "subscribe", "ping", "select"}
    assert lists <= of_scripts["core"]
    of_the_cache = {"multi", "exec", "ttl", "getrange", "setrange", "expire", "incrby", "scan", "flushdb"}
    assert cache - of_scripts["cache/lease"] == of_the_cache


def commands_of(folder: str) -> set[str]:
    """Return the commands that the scripts of a folder call."""
    texts = [path.read_text() for path in (PACKAGE / folder / "lua").glob("*.lua")]
    return {name.lower() for text in texts for name in re.findall(r"redis\.p?call\('([A-Z]+)'", text)}


def test_confirmed_locks_need_one_more(admin: Any, settings: Any) -> None:
    settings.DJANGO_REDISLOCK = {"MIN_REPLICAS": 1}
    assert lines()[-1] == f"ACL SETUSER {USER} +wait"


def test_connections_with_a_name_need_one_more(admin: Any, settings: Any) -> None:
    settings.CACHES["default"]["LOCATION"] += "?client_name=web"
    printed = lines()
    assert printed[-1] == f"ACL SETUSER {USER} +client|setname"
    give(admin, printed[:-1])
    with pytest.raises(LockBackendError, match="setname"):
        lock("a").acquire()
    give(admin, printed)
    use_locks(admin)
