"""``redislock doctor --acl``: with the printed rights each feature works, and each of them is needed."""

from __future__ import annotations

import gc
import io
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django_redis.exceptions import ConnectionInterrupted  # type: ignore[import-untyped]
from redis.exceptions import RedisError, ResponseError

import django_redislock
from django_redislock import conf, get_client, held_locks, lock, semaphore
from django_redislock.cache.backends import cluster_backend
from django_redislock.cache.lease import request
from django_redislock.celery.execution_lock import AfterRelease, Delivery
from django_redislock.celery.options import complete
from django_redislock.core import operations
from django_redislock.core.driver.registry import close_unused, server_of
from django_redislock.core.listing import contention
from django_redislock.doctor import CACHE, LISTS, LOCKS, inspect
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
    with semaphore("a", 1) as slot:
        join = in_a_thread(lambda: semaphore("a", 1, timeout=20).__enter__().release(), slot.locked)
        slot.extend()
    join()


def use_tasks(admin: Any) -> None:
    prepared = complete({}, conf.get()).lock
    delivery = Delivery("task", "task:0:one", known=True)
    assert prepared.with_name("t", id="task").take(fresh=True)
    execution = prepared.with_name("t", delivery=delivery, ending=AfterRelease("done", 30))
    assert execution.acquire(blocking=False)
    prepared.with_name("t").count_duplicate()
    execution.release()
    assert not prepared.with_name("t", delivery=delivery).acquire(blocking=False)
    limited = prepared.with_name("limited", limit=2, delivery=delivery, ending=AfterRelease("done", 30))
    assert limited.claim(30, "ending")
    assert limited.acquire(blocking=False) or limited.refused
    limited.mark_processed(30)


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
    cache.delete_many(["x", "y"])
    use_methods(cache)


def use_methods(cache: Any) -> None:
    """Use each method of the cache, and see that it did what it is for."""
    cache.set_many({"x": 1, "y": 2}, 60)
    assert cache.get_many(["x", "y"]) == {"x": 1, "y": 2}
    assert cache.add("z", 1, 60)
    assert (cache.incr("x"), cache.decr("x")) == (2, 1)
    assert cache.incr_version("z") == 2
    assert cache.has_key("x")
    assert cache.touch("x", 60)
    assert cache.touch("x", None)
    assert cache.get_or_set("large", lambda: "v" * 600_000, 60, stale=30)
    cache.set("brief", 1, 0.2)
    if hasattr(cache, "delete_pattern"):
        later = datetime.now(UTC) + timedelta(minutes=1)
        assert cache.ttl("y")
        assert cache.pttl("y")
        assert all([cache.expire("y", 60), cache.pexpire("y", 6000), cache.expire_at("y", later), cache.persist("y")])
        assert cache.pexpire_at("y", later)
        assert cache.keys("y") == list(cache.iter_keys("y")) == ["y"]
        assert cache.delete_pattern("y*")
    cache.lock("l").acquire()
    assert cache.reset_all()
    assert cache.delete("x")
    cache.set("x", 1)
    cache.clear()
    assert cache.get("x") is None


def use_lists(admin: Any) -> None:
    with lock("a"):
        assert [info.name for info in held_locks()] == ["a"]
        server = server_of(get_client())
        assert server.run(operations.count(server, "redislock")).locks == 1
        assert contention(get_client()).minutes


def use_doctor(admin: Any) -> None:
    assert not [finding for finding in inspect(server_of(get_client())) if "permissions" in finding.check]


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


def commands_of(folder: str) -> set[str]:
    """Return the commands that the scripts of a folder call."""
    texts = [path.read_text() for path in (PACKAGE / folder / "lua").glob("*.lua")]
    return {name.lower() for text in texts for name in re.findall(r"redis\.p?call\('([A-Z]+)'", text)}


BACKENDS = ["RedisCache", "DjangoRedisCache"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_method_of_the_cache_works_and_each_right_of_its_line_is_needed(
    admin: Any, settings: Any, backend: str, caplog: Any
) -> None:
    settings.CACHES["default"]["BACKEND"] = f"django_redislock.cache.{backend}"
    printed = lines()
    not_seen = {"strlen", "rename", "unlink", "getrange", "setrange"}  # leases use them
    if backend == "RedisCache":
        not_seen.add("incrby")  # without it, django-redis increments by GET and SET: not atomically
    needed = [None, *(right for right in printed[1].split() if right[0] == "+" and right[1:] not in not_seen)]
    for right in needed:
        give(admin, [printed[0], " ".join(word for word in printed[1].split() if word != right)])
        admin.flushall()
        admin.script_flush()
        caplog.clear()
        try:
            use_methods(caches["default"])
        except (ResponseError, ConnectionInterrupted, LockBackendError):
            assert right
        else:
            assert ("ermission" in caplog.text) == (right is not None), right


@pytest.mark.parametrize("backend", BACKENDS)
def test_clear_with_the_printed_rights_leaves_what_belongs_to_others(admin: Any, settings: Any, backend: str) -> None:
    settings.CACHES["default"]["BACKEND"] = f"django_redislock.cache.{backend}"
    give(admin, lines())
    cache = caches["default"]
    cache.set_many({f"k{number}": 1 for number in range(3000)})
    cache.set("k", 1, version=7)
    admin.select(1)
    try:
        admin.set("other:1:k", "theirs")
        with lock("a") as held:
            cache.clear()
            assert held.owned()
        assert [key for key in admin.scan_iter() if not key.startswith(b"{redislock:")] == [b"other:1:k"]
    finally:
        admin.select(0)


def test_a_site_without_a_user_is_told_to_create_one(admin: Any, settings: Any, capsys: Any, guarded: Any) -> None:
    settings.CACHES["default"]["LOCATION"] = guarded.url.replace("/0", "/1")
    printed = lines()
    assert "uses the user 'default'" in capsys.readouterr().err
    give(admin, printed)  # Redis takes each line: the user has the name of the other tests
    settings.CACHES["default"]["LOCATION"] = guarded.url.replace("//", f"//{USER}:secret@").replace("/0", "/1")
    use_locks(admin)


def test_the_user_of_the_connection_is_told_that_its_other_channels_go(admin: Any, capsys: Any) -> None:
    assert lines()
    assert f"takes all other channels from the user '{USER}'" in capsys.readouterr().err


def test_on_a_cluster_the_printed_rights_are_enough_and_each_line_is_needed(cluster: Any, settings: Any) -> None:
    url = cluster.url.replace("//", f"//{USER}:secret@")
    settings.CACHES = {"default": {"BACKEND": "django_redislock.cache.ClusterCache", "LOCATION": url}}
    printed = lines()
    assert len(printed) == 5
    for left_out in (None, "+command", "+cluster|slots", "+keys"):
        for node in cluster.nodes:
            give(
                cluster.client_of(node),
                [" ".join(word for word in line.split() if word != left_out) for line in printed],
            )
        cluster.empty()
        cluster_backend._known.clear()
        close_unused()
        try:
            use_methods(caches.create_connection("default"))
        except (RedisError, ImproperlyConfigured, ConnectionInterrupted, LockBackendError):
            assert left_out
        else:
            assert left_out is None
    for node in cluster.nodes:
        cluster.ask(node, "ACL DELUSER", USER)


def test_a_user_who_may_not_run_info_is_no_error_of_a_deployment(admin: Any) -> None:
    """``check --deploy`` failed with "The server is too old", and said the same of eviction and replicas."""
    give(admin, [line for line in lines() if "+info" not in line])
    gc.collect()  # functions that earlier tests marked
    messages = run_checks(tags=["redislock"], include_deployment_checks=True)
    assert [message.id for message in messages] == ["redislock.I004"]
    assert "look at version, eviction, persistence and replicas yourself" in str(messages[0].hint)


def test_a_user_who_may_not_ping_is_told_so_and_has_no_other_problem(admin: Any) -> None:
    """It was told to look why its server is slow, and the command failed, though every lock could be acquired."""
    give(admin, lines())
    admin.execute_command("ACL", "SETUSER", USER, "-ping")
    output = io.StringIO()
    call_command("redislock", "doctor", stdout=output)
    assert "permissions (PING)" in output.getvalue()


def test_caches_in_the_database_of_the_locks_get_their_rights_too(admin: Any, settings: Any) -> None:
    """Only the first connection to a database had its lines, so the caches' users were refused at every key."""
    default = settings.CACHES["default"]
    settings.CACHES["more"] = default | {"KEY_PREFIX": "more"}
    settings.DJANGO_REDISLOCK = {"URL": default["LOCATION"]}
    printed = lines()
    give(admin, printed)
    for alias in ("default", "more"):
        use_methods(caches[alias])
    assert len(printed) == len(set(printed)) == 5
    settings.CACHES["wrong"] = default | {"LOCATION": "localhost:1"}
    with pytest.raises(CommandError, match="Connection 'wrong' could not be read"):
        lines()


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
