"""One value wanted by many processes: computed by one of them, also when that one is killed, paused, fails or hangs."""

from __future__ import annotations

import time

import pytest

from django_redislock.core import Lock
from tests.support import cache_programs, counting, monitoring, wait_until
from tests.support.cache_programs import cache_at, commands, held, waiters

pytestmark = pytest.mark.processes

LOCK = "cache::1:k"


def waiting(client):
    return waiters(client, "k")


def only(lines, event):
    return [line for line in lines if line["event"] == event]


def computing_of(processes):
    """Wait until one of the processes computes, and return it."""
    (one,) = wait_until(lambda: [process for process in processes if only(process.lines, "computing")])
    return one


@pytest.fixture
def one_computes(client, redis_url, run_python):
    """``one_computes(3, …)`` returns a process that computes "k", and a list of three others that wait for it."""

    def start(others, backend="RedisCache", lock=None):
        first, *rest = [
            run_python(cache_programs.ask, redis_url, backend, "k", f"by {number}", {}, lock)
            for number in range(1 + others)
        ]
        for process in (first, *rest):
            process.wait_for(event="ready")
        first.send("ask")
        first.wait_for(event="computing")
        for process in rest:
            process.send("ask")
        wait_until(lambda: waiting(client) == others)
        return first, rest

    return start


def test_200_clients_in_8_processes_compute_once(client, redis_url, run_python, backend):
    crowds = [run_python(cache_programs.crowd, redis_url, backend, "k", 25) for _ in range(8)]
    for crowd in crowds:
        crowd.wait_for(event="ready")
    for crowd in crowds:
        crowd.send()
    for crowd in crowds:
        crowd.wait_for(event="asked")
    wait_until(lambda: waiting(client) == 7, timeout=30)
    computing = computing_of(crowds)
    computing.send()
    for crowd in crowds:
        assert crowd.wait_for(event="done")["outcomes"] == [{"by": "one"}] * 25
    assert client.get("computed") == b"1"
    assert not held(client)


@pytest.mark.parametrize("tasks", [False, True], ids=["thread", "task"])
def test_a_waiting_process_takes_four_round_trips_at_first_and_two_later(client, redis_url, run_python, tasks):
    """The first time, it subscribes before it joins those who wait."""
    waiter = run_python(cache_programs.wait_for_values, redis_url, tasks)
    waiter.wait_for(event="ready")
    cache = cache_at(redis_url)
    cache.get_or_set("warm", lambda: 1)
    for key, expected in (("a", ["GET", "EVALSHA", "SUBSCRIBE", "EVALSHA"]), ("b", ["GET", "EVALSHA"])):

        def compute(key=key):
            waiter.send(key)
            wait_until(lambda: waiters(client, key) == 1)
            return f"value of {key}"

        with monitoring(client) as sent, counting(client) as counts:
            cache.get_or_set(key, compute, 60, expire=120)
            waiter.wait_for(event="got", value=f"value of {key}")
        own = ["GET", "EVALSHA"], ["EVALSHA"]
        sent = commands(line for line in sent if not line.startswith(("ZCARD", "INFO", "SCAN")))
        assert sent == [*own[0], *expected, *own[1]]
        assert (counts["evalsha"], counts["subscribe"]) == (sent.count("EVALSHA"), sent.count("SUBSCRIBE"))


def test_a_large_value_is_fetched_instead_of_being_sent_to_each(client, one_computes):
    value = "x" * 40_000
    with client.pubsub() as pubsub:
        pubsub.psubscribe("redislock:wake:*")
        first, others = one_computes(2)
        first.send(value)
        for process in (first, *others):
            assert process.wait_for(event="got")["value"] == value
        heard = []
        wait_until(lambda: heard.append(pubsub.get_message()) or sum(m is not None for m in heard) >= 3)
    assert all(len(message["data"]) < 100 for message in heard if message and message["type"] == "pmessage")


@pytest.mark.parametrize("backend", ["RedisCache", "ClusterCache"])
def test_a_killed_computer_is_followed_by_exactly_one(client, one_computes, backend):
    expire = 3
    first, others = one_computes(4, backend=backend, lock={"EXPIRE": expire})
    first.kill()
    killed = time.time()
    wait_until(lambda: any(only(process.lines, "computing") for process in others), timeout=expire + 5)
    (next_one,) = [process for process in others if only(process.lines, "computing")]
    assert only(next_one.lines, "computing")[0]["at"] - killed < expire + 1
    wait_until(lambda: waiting(client) == 3)
    next_one.send("second")
    for process in others:
        assert process.wait_for(event="got")["value"] == "second"
    assert sum(len(only(process.lines, "computing")) for process in others) == 1


@pytest.mark.parametrize("tasks", [False, True], ids=["threads", "tasks"])
def test_those_who_waited_for_a_failure_get_it(client, redis_url, run_python, backend, tasks):
    """In all processes, instead of waiting in line for a failure of their own."""
    crowds = [run_python(cache_programs.crowd, redis_url, backend, "k", 5, tasks) for _ in range(4)]
    for crowd in crowds:
        crowd.wait_for(event="ready")
    for crowd in crowds:
        crowd.send()
    for crowd in crowds:  # a thread that asks after the failure computes anew
        crowd.wait_for(event="asked")
    wait_until(lambda: waiting(client) == 3, timeout=30)
    computing = computing_of(crowds)
    computing.send("raise")
    for crowd in crowds:
        outcomes = crowd.wait_for(event="done")["outcomes"]
        note = ["It was raised in another process, which computed the value for all waiting callers."]
        assert outcomes == [["ValueError", "no value", [] if crowd is computing else note]] * 5, "unwrapped"
    assert client.get("computed") == b"1"
    assert not held(client)


def test_a_failure_that_cannot_be_sent_is_told_in_words_and_who_comes_later_computes_anew(redis_url, one_computes):
    first, (second,) = one_computes(1)
    first.send("raise unsendable")
    assert first.wait_for(event="failed")["error"] == "Unsendable: never mind"
    assert "Unsendable: never mind" in second.wait_for(event="failed")["error"]
    assert second.lines[-1]["error"].startswith("ComputationFailed: ")
    assert cache_at(redis_url).get_or_set("k", lambda: "v", 60) == "v"


def test_a_value_that_is_set_while_a_computation_fails_is_what_those_who_wait_get(client, redis_url, one_computes):
    first, (second,) = one_computes(1)
    second.pause()
    cache_at(redis_url).set("k", "set")
    first.send("raise")
    first.wait_for(event="failed")
    second.resume()
    assert second.wait_for(event="got")["value"] == "set"


def test_who_is_interrupted_is_followed_by_one_other(one_computes):
    """Celery's soft time limit, say, tells nothing of the value."""
    first, others = one_computes(2)
    first.send("be interrupted")
    first.wait_for(event="failed")
    next_one = computing_of(others)
    next_one.send("v")
    for process in others:
        assert process.wait_for(event="got")["value"] == "v"


@pytest.mark.parametrize("event", ["delete", "all data is lost"])
def test_who_waits_for_a_value_that_is_deleted_computes_anew(client, redis_url, one_computes, event):
    first, others = one_computes(2)
    if event == "delete":
        cache_at(redis_url).delete("k")
    else:
        client.flushall()
    fresh = computing_of(others)
    first.send("stale")
    assert first.wait_for(event="got")["value"] == "stale"
    assert client.get(":1:k") is None, "what was computed before is not stored"
    fresh.send("fresh")
    for process in others:
        assert process.wait_for(event="got")["value"] == "fresh"
    assert cache_at(redis_url).get("k") == "fresh"


def test_who_waits_for_a_value_that_is_set_meanwhile_gets_that(client, redis_url, one_computes):
    first, (second,) = one_computes(1)
    cache_at(redis_url).set("k", "set")
    assert second.wait_for(event="got", timeout=3)["value"] == "set"
    assert waiting(client) == 0, "who found it waits no more"
    first.send("stale")
    assert first.wait_for(event="got")["value"] == "stale"
    assert cache_at(redis_url).get("k") == "set"


def test_a_force_released_computation_goes_on_for_its_caller_alone(client, redis_url, one_computes):
    first, (second,) = one_computes(1)
    assert Lock(client, LOCK).reset()
    second.wait_for(event="computing")
    first.send("old")
    assert first.wait_for(event="got")["value"] == "old"
    second.send("new")
    assert second.wait_for(event="got")["value"] == "new"
    assert cache_at(redis_url).get("k") == "new"


def test_a_recalled_computation_goes_on_and_its_value_is_not_stored(client, redis_url, one_computes):
    first, (second,) = one_computes(1)
    assert Lock(client, LOCK).recall()
    first.send("old")
    assert first.wait_for(event="got")["value"] == "old", "its own, and no exception"
    second.wait_for(event="computing")
    assert cache_at(redis_url).get("k") is None
    second.send("new")
    assert second.wait_for(event="got")["value"] == "new"
    assert cache_at(redis_url).get("k") == "new"


def test_a_computer_that_was_paused_past_its_life_overwrites_nothing(client, redis_url, one_computes):
    first, (second,) = one_computes(1, lock={"EXPIRE": 2.5})
    first.pause()
    second.wait_for(event="computing")
    second.send("new")
    assert second.wait_for(event="got")["value"] == "new"
    first.resume()
    first.send("old")
    assert first.wait_for(event="got")["value"] == "old", "its own, and no exception"
    assert cache_at(redis_url).get("k") == "new"
    assert "Traceback" not in first.errors


def test_who_has_waited_long_enough_settles_for_a_computer_that_hangs(redis_url, one_computes):
    first, (patient,) = one_computes(1)
    cache = cache_at(redis_url)
    assert cache.get_or_set("k", lambda: "mine", 60, wait=0.1) == "mine"
    assert patient.wait_for(event="got")["value"] == "mine", "all others are served with it"
    assert cache.get("k") == "mine"
    first.send("late")
    assert first.wait_for(event="got")["value"] == "late"
    assert cache.get("k") == "mine"


def test_a_child_forked_while_computing_leaves_the_computation_to_its_parent(client, redis_url, run_python):
    lines = run_python(cache_programs.fork_inside, redis_url, "RedisCache").finish()
    assert lines == [
        {"event": "child", "value": "child's"},
        {"event": "after the child", "stored": None, "lease": True},
        {"event": "parent", "value": "parent's", "stored": "parent's"},
    ]
