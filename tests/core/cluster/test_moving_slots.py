"""Slots that move to another node, under held locks and waiters."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, TimeoutError

from django_redislock.core import Lock, scripts
from django_redislock.core.driver.cluster.routes import route, route_each
from django_redislock.core.driver.cluster.table import NotNow
from django_redislock.core.driver.effects import At, ScriptCall
from django_redislock.core.driver.registry import replicated, server_of
from django_redislock.core.keys import lock_keys
from django_redislock.core.listing import read_queue
from django_redislock.exceptions import LockLost
from tests.support import BUSY, Cluster, begin, enter, renew_now, wait_until, wait_until_renewed


def slot_of(name: str) -> int:
    return key_slot(lock_keys("redislock", name).lock)


def other_node(cluster: Cluster, slot: int):
    owner = cluster.owner_of(slot)
    return next(node for node in cluster.nodes if node is not owner)


def test_a_held_lock_stays_held_when_its_slot_has_moved_and_the_next_fence_is_larger(make_lock, cluster, client):
    lock = make_lock(client, "a", expire=20)
    with lock:
        fence = lock.fence
        cluster.move(slot_of("a"), other_node(cluster, slot_of("a")))
        lock.extend(30)
        assert lock.owner().fence == fence
        assert not make_lock(client, "a").acquire(blocking=False)
    assert not lock.locked()
    cluster.move(slot_of("a"), other_node(cluster, slot_of("a")))
    assert enter(lock) > fence


def test_a_lock_of_a_slot_that_is_moving_is_acquired_when_the_move_ends(make_lock, cluster, client):
    slot = slot_of("a")
    with make_lock(client, "b"):  # so that the slots are known
        pass
    to = other_node(cluster, slot)
    owner = cluster.begin_move(slot, to)
    waiter = begin(make_lock(client, "a").acquire, timeout=20)
    assert not wait([waiter], 0.3).done  # its keys do not exist, so that the next owner asks to try again
    cluster.end_move(slot, owner, to)
    assert waiter.result(1 + BUSY)


def test_a_release_that_a_moving_slot_stops_half_way_is_repeated_until_the_move_ends(make_lock, cluster, client):
    """It removed the last waiter, who was gone, and with it the key of the queue, which it then read."""
    slot, keys, lock = slot_of("a"), lock_keys("redislock", "a"), make_lock(client, "a", expire=60)
    enter(lock)  # it leaves a receipt: with a key missing from the beginning, the script would not run
    with ThreadPoolExecutor(1) as holder:
        holder.submit(lock.acquire).result(20)
        client.zadd(keys.queue, {b"channel of nobody\nid": 1})
        to = other_node(cluster, slot)
        owner = cluster.begin_move(slot, to)
        releasing = holder.submit(lock.release)
        wait_until(lambda: cluster.ask(owner, "CLUSTER COUNTKEYSINSLOT", slot) == 3, message="it began")
        cluster.end_move(slot, owner, to)
        releasing.result(20)
    assert not lock.locked()


def test_a_lock_that_ended_does_not_stop_the_renewals_of_others_while_their_slot_moves(make_lock, cluster, client):
    """One call renews all locks of a slot; a node that lacks one of their keys refuses it."""
    slot = slot_of("lock-0")
    twin = next(name for name in map("lock-{}".format, range(1, 10**5)) if slot_of(name) == slot)
    held, ended = make_lock(client, "lock-0", expire=60), make_lock(client, twin, expire=60)
    with held:
        assert ended.acquire()
        to = other_node(cluster, slot)
        owner = cluster.begin_move(slot, to)
        cluster.ask(owner, "DEL", lock_keys("redislock", twin).lock)
        renew_now(ended)
        wait_until_renewed(held)
        cluster.end_move(slot, owner, to)
    with pytest.raises(LockLost):
        ended.release()


def test_no_grant_that_replicas_must_confirm_is_sent_to_the_next_owner_of_a_slot_that_is_moving(client):
    server = replicated(server_of(client), 1)
    server.all_nodes()  # so that the slots are known
    sending = route(server.table, ScriptCall(scripts.ACQUIRE, lock_keys("redislock", "a")[:4], (b"id",)))
    assert isinstance(next(sending), At)
    with pytest.raises(NotNow):
        sending.throw(AskError(f"{slot_of('a')} 127.0.0.1:1"))


def test_a_silent_node_to_which_many_slots_moved_costs_a_batch_one_timeout(client):
    """With one timeout for each slot, the renewals that other nodes had answered were noted too late."""
    server, asked = server_of(client), 0
    server.all_nodes()  # so that the slots are known
    names = [f"lock-{number}" for number in range(20)]
    calls = tuple(ScriptCall(scripts.COUNT, (lock_keys("redislock", name).held,), ()) for name in names)
    moved = [MovedError(f"{slot_of(name)} 127.0.0.1:1") for name in names]
    sending = route_each(server.table, calls, 5.0)
    nodes = next(sending).effects
    with pytest.raises(StopIteration) as ended:
        effect = sending.send([[moved[calls.index(call)] for call in each.effect.calls] for each in nodes])
        while True:
            if effect.node.address == ("127.0.0.1", 1):
                asked += 1
                effect = sending.throw(TimeoutError("no reply"))
            else:
                effect = sending.throw(moved[calls.index(effect.effect)])
    server.all_nodes()
    assert [type(reply) for reply in ended.value.value] == [TimeoutError] * 20
    assert asked == 1


def test_waiters_of_a_slot_that_moves_get_the_lock_soon_and_keep_their_order(make_lock, cluster, client):
    held, server, order = make_lock(client, "a", expire=30), server_of(client), []
    held.acquire()

    def take(number: int) -> None:
        with make_lock(client, "a", expire=30):
            order.append(number)

    waiters = []
    for number in range(5):
        waiters.append(begin(take, number))
        wait_until(lambda number=number: len(read_queue(server, "a", "redislock")) == number + 1)
    to = other_node(cluster, slot_of("a"))
    cluster.move(slot_of("a"), to)
    (entry,) = client.zrange(lock_keys("redislock", "a").queue, 0, 0)
    channel = entry.partition(b"\n")[0]
    wait_until(lambda: cluster.ask(to, "PUBSUB NUMSUB", channel)[0][1], message="the process listens at the new owner")
    began = time.monotonic()
    held.release()
    for waiter in waiters:
        waiter.result(20)
    assert order == list(range(5))
    assert time.monotonic() - began < 1 + BUSY


RENEWED = [f"renewed-{number}" for number in range(200)]
CONTENDED = [f"contended-{number}" for number in range(10)]
WAITERS = 10  # of each


@pytest.mark.slow
def test_no_lock_is_lost_and_each_waiter_follows_within_a_second(make_lock, cluster, client):
    """Slots are moved one by one, under 200 renewed locks and 100 waiters."""
    server = server_of(client)
    locks = [make_lock(client, name, expire=3) for name in RENEWED]
    for lock in locks:
        assert lock.acquire()
    holders = {name: Lock(client, name, expire=30) for name in CONTENDED}
    for holder in holders.values():
        assert holder.acquire()
    released: dict[str, float] = {}

    def hand_over(name: str) -> float:
        lock = make_lock(client, name, expire=30)
        assert lock.acquire(timeout=60)
        gap = time.monotonic() - released[name]
        time.sleep(0.02)
        released[name] = time.monotonic()
        lock.release()
        return gap

    waiters = [begin(hand_over, name) for name in CONTENDED for _ in range(WAITERS)]
    wait_until(lambda: all(len(read_queue(server, name, "redislock")) == WAITERS for name in CONTENDED))
    names: dict[int, list[str]] = {}
    for name in (*CONTENDED, *RENEWED):
        names.setdefault(slot_of(name), []).append(name)
    owners = {slot: cluster.owner_of(slot) for slot in names}
    # To one node: two that import slots in turn, faster than they hear of each other, may name each other for ever.
    to = min(cluster.nodes, key=list(owners.values()).count)
    for slot, its_names in names.items():
        if owners[slot] is not to:
            cluster.move(slot, to)
        for name in set(its_names) & set(CONTENDED):
            released[name] = time.monotonic()
            holders[name].release()
    gaps = [waiter.result(60) for waiter in waiters]
    assert [lock.name for lock in locks if lock.lost] == []
    assert all(lock.locked() for lock in locks)
    assert max(gaps) < 1 + BUSY
    for lock in locks:
        lock.release()
