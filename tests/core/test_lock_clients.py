"""Lock with every client: the commands that a cycle costs, and the connections and keys that it leaves."""

from __future__ import annotations

import gc

import pytest
from redis.exceptions import NoScriptError

from django_redislock.core.driver.registry import server_of
from tests.support import async_client_at, begin_to_wait, client_at, counting, enter, in_thread, monitoring


@pytest.mark.parametrize("kind", [client_at, async_client_at])
@pytest.mark.parametrize(
    "options",
    [{"decode_responses": True}, {"protocol": 3}, {"protocol": 2}, {"socket_timeout": None}, {"max_connections": 1}],
    ids=repr,
)
def test_every_client_will_do(make_lock, redis_url, kind, options):
    client = kind(redis_url, **options)
    with make_lock(client, "a") as lock:
        assert lock.owner().id == lock.id
        assert not in_thread(lambda: make_lock(client, "a").acquire(timeout=0.1))


@pytest.mark.parametrize("kind", [client_at, async_client_at])
def test_unix_sockets_will_do(make_lock, own_server, kind):
    with make_lock(kind(own_server.unix_url), "a") as lock:
        assert lock.owned()


def test_clients_of_the_same_server_share_its_connections(make_lock, redis_url, client):
    assert server_of(async_client_at(redis_url)) is server_of(client)
    with client_at(redis_url) as one, client_at(redis_url) as two:
        with make_lock(one, "a"), make_lock(two, "b"):
            pass
        before = len(client.client_list())
        for _ in range(5):
            with client_at(redis_url) as another, make_lock(another, "a"):
                pass
        assert len(client.client_list()) <= before


def test_a_subclass_and_a_second_server_work(make_lock, client, own_server):
    class Mine(make_lock):
        pass

    with own_server.client() as other, Mine(other, "a") as there, make_lock(client, "a") as here:
        assert there.owned()
        assert here.owned()
        assert there.fence != here.fence


def test_an_uncontended_cycle_is_two_commands(make_lock, client):
    """Also with a call that looks for the cause of no loss, with counts of waits, and beside another held lock."""
    lock = make_lock(client, "a")
    with lock, make_lock(client, "b"):  # the connection and the scripts are there from now on
        lock.extend()
    with counting(client) as counts, make_lock(client, "b"):
        for _ in range(160):
            with lock:
                pass
    assert counts["evalsha"] == 2 * 161
    assert not {"hmget", "hset", "hdel", "hlen", "zcard"} & counts.keys()
    assert counts.total() < 161 * 14.5
    with monitoring(client) as sent, lock:
        lock.extend()
    assert [line.split()[0] for line in sent] == ["EVALSHA"] * 3


def test_a_contended_cycle_is_at_most_four_commands(make_lock, client):
    rounds = 25

    def cycle():
        for _ in range(rounds):
            enter(make_lock(client, "a"))

    with make_lock(client, "a"):
        cycles = [begin_to_wait(client, "a", cycle) for _ in range(4)]
        evals = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    for each in cycles:
        each.result(30)
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - evals <= 4 * rounds * 4


def test_nothing_is_left_for_ever(make_lock, client):
    with make_lock(client, "a"):
        in_thread(lambda: make_lock(client, "a").acquire(timeout=0.05))
    keys = client.keys("*")
    assert keys
    assert all(client.ttl(key) > 0 for key in keys), {key: client.ttl(key) for key in keys}


def test_scripts_that_the_server_forgot_are_sent_again(make_lock, client):
    with make_lock(client, "a") as lock:
        client.script_flush()
        lock.extend()
        client.script_flush()
    assert not lock.locked()


def test_error_replies_keep_no_connection_open_until_the_garbage_collector_runs(make_lock, client):
    """An error that refers to a frame that refers to it is such a cycle; in it a socket may end before its owner."""

    def errors():
        return [each for each in gc.get_objects() if issubclass(type(each), NoScriptError)]

    lock, before = make_lock(client, "a"), errors()
    gc.disable()
    try:
        client.script_flush()
        with lock:
            pass
        assert [each for each in errors() if each not in before] == []
    finally:
        gc.enable()
