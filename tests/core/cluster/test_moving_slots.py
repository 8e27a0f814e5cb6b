"""Slots that move to another node, under held locks and waiters."""

from __future__ import annotations

import threading
import time

from redis.crc import key_slot

from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.core.listing import read_queue
from tests.support import BUSY, Cluster, wait_until


def slot_of(name: str) -> int:
    return key_slot(lock_keys("redislock", name).lock)


def other_node(cluster: Cluster, slot: int):
    owner = cluster.owner_of(slot)
    return next(node for node in cluster.nodes if node is not owner)


def test_a_held_lock_stays_held_when_its_slot_has_moved(make_lock, cluster, client):
    lock = make_lock(client, "a", expire=20)
    with lock:
        fence = lock.fence
        cluster.move(slot_of("a"), other_node(cluster, slot_of("a")))
        lock.extend(30)
        assert lock.owner().fence == fence
        assert not make_lock(client, "a").acquire(blocking=False)
    assert not lock.locked()


def test_the_next_holder_gets_a_larger_fence_after_a_move(make_lock, cluster, client):
    with make_lock(client, "a", expire=20) as lock:
        before = lock.fence
    cluster.move(slot_of("a"), other_node(cluster, slot_of("a")))
    with make_lock(client, "a", expire=20) as lock:
        assert lock.fence > before


def test_a_lock_of_a_slot_that_is_moving_is_acquired_when_the_move_ends(make_lock, cluster, client):
    slot = slot_of("a")
    with make_lock(client, "b"):  # so that the slots are known
        pass
    to = other_node(cluster, slot)
    owner = cluster.begin_move(slot, to)
    got = threading.Event()
    waiter = threading.Thread(target=lambda: make_lock(client, "a").acquire(timeout=20) and got.set())
    waiter.start()
    assert not got.wait(0.3)  # its keys do not exist, so that the next owner asks to try again
    cluster.end_move(slot, owner, to)
    assert got.wait(1 + BUSY)
    waiter.join(20)


def test_waiters_of_a_slot_that_moves_get_the_lock_soon_and_keep_their_order(make_lock, cluster, client):
    held, server, order = make_lock(client, "a", expire=30), server_of(client), []
    held.acquire()

    def wait(number: int) -> None:
        with make_lock(client, "a", expire=30):
            order.append(number)

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        wait_until(lambda number=number: len(read_queue(server, "a", "redislock")) == number + 1)
    to = other_node(cluster, slot_of("a"))
    cluster.move(slot_of("a"), to)
    (entry,) = client.zrange(lock_keys("redislock", "a").queue, 0, 0)
    channel = entry.partition(b"\n")[0]
    wait_until(lambda: cluster.ask(to, "PUBSUB NUMSUB", channel)[0][1], message="the process listens at the new owner")
    began = time.monotonic()
    held.release()
    for thread in threads:
        thread.join(20)
    assert order == list(range(5))
    assert time.monotonic() - began < 1 + BUSY
