"""What a quorum lock on five servers survives: some are away, slow, stuck or empty, and many want it at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from django_redislock.core import Lock, QuorumLock
from django_redislock.core.clock import monotonic
from django_redislock.core.driver.registry import server_of
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockBackendError, LockLost
from tests.support import Proxy, client_at, in_threads, queued, wait_until, within
from tests.support.locks import held_on

KEYS = lock_keys("redislock", "a")
SERVERS = 5


def test_a_stuck_server_keeps_nobody_out(clients):
    """Somebody else's part there, of a lock that it does not hold, costs a caller that does not wait nothing either."""
    for stuck in range(5):
        with Lock(clients[stuck], "a", expire=20):
            assert QuorumLock(clients, "a").acquire(blocking=False) is True
        for client in clients:
            client.flushall()


def test_a_lost_lock_keeps_nobody_out(clients):
    lost, next_one = QuorumLock(clients, "a", expire=30), QuorumLock(clients, "a", expire=0.6)
    lost.acquire()
    for client in clients[:3]:
        Lock(client, "a").reset()
    assert next_one.acquire(timeout=2)
    with pytest.raises(LockLost):
        lost.extend()
    wait_until(lambda: next_one._visible_lease().held_count == 5, message="the lost one gave its parts back")
    assert {client.get(KEYS.lock)[:32].decode() for client in clients} == {next_one.owner().id}
    next_one.release()


def test_a_paused_server_costs_milliseconds_whatever_its_timeout(servers, clients):
    lock = QuorumLock(clients, "a")
    with lock:
        pass
    servers[0].pause()
    with within(1):  # of five seconds each
        for _ in range(10):
            assert lock.acquire(blocking=False)
            lock.extend()
            assert lock.owned()
            lock.release()


def test_a_server_that_does_not_answer_is_left_out_for_some_seconds(servers, clients, caplog):
    servers[0].stop()
    lock = QuorumLock(clients, "a")
    for _ in range(5):
        with lock:
            pass
        wait_until(lambda: server_of(clients[0]).left_out_until > monotonic())
    failures = [record for record in caplog.records if "did not answer" in record.getMessage()]
    assert len(failures) == 1
    servers[0].start()
    server_of(clients[0]).left_out_until = 0.0  # they are over
    with lock:
        wait_until(lambda: lock._visible_lease().held_count == 5)


def test_servers_that_were_left_out_are_asked_where_the_others_do_not_suffice(servers, clients):
    for client in clients[:3]:
        server_of(client).left_out_until = monotonic() + 60
    with QuorumLock(clients, "a"):
        assert sum(held_on(clients)) >= 3
    for server in servers[2:]:
        server.stop()
    with pytest.raises(LockBackendError, match="3 of 5 servers"):
        QuorumLock(clients, "a").acquire()


def test_a_server_that_was_left_out_is_asked_where_another_one_is_stuck(clients):
    for client in clients[:2]:
        server_of(client).left_out_until = monotonic() + 60
    with Lock(clients[4], "a"):
        assert QuorumLock(clients, "a").acquire(blocking=False)


def test_a_server_that_was_left_out_is_asked_where_another_one_is_silent(servers, clients):
    """Else a call that does not wait would come back after the socket timeout of the silent one."""
    for client in clients[:2]:
        server_of(client).left_out_until = monotonic() + 60
    servers[4].pause()
    with within(2):  # of five seconds
        assert QuorumLock(clients, "a").acquire(blocking=False)


@pytest.mark.slow
def test_a_part_that_a_restarted_server_lost_is_taken_anew(servers, clients):
    lock = QuorumLock(clients, "a", expire=1.5)
    with lock:
        for number in (0, 1, 2, 3):  # one after another: with two of five lost for good, it would end at the third
            servers[number].kill()
            servers[number].start()
            wait_until(lambda number=number: clients[number].exists(KEYS.lock), message=f"server {number} has it again")
            lock.raise_if_lost()
            assert not QuorumLock(clients, "a").acquire(blocking=False)
    wait_until(lambda: held_on(clients) == [0] * 5)


@pytest.mark.slow
def test_a_part_that_was_force_released_is_not_taken_anew(clients):
    with QuorumLock(clients, "a", expire=0.6) as lock:
        Lock(clients[0], "a").reset()
        wait_until(lambda: lock._visible_lease().held_count == 4)
        lease = lock._visible_lease()
        lease.loop.call_soon_threadsafe(lease.mend)
        renewed = [client.info("commandstats")["cmdstat_evalsha"]["calls"] for client in clients]
        wait_until(
            lambda: all(
                client.info("commandstats")["cmdstat_evalsha"]["calls"] > before + 2
                for client, before in zip(clients[1:], renewed[1:], strict=True)
            )
        )
        assert held_on(clients) == [0, 1, 1, 1, 1]


def test_what_is_lost_is_given_back_at_once(clients):
    told = []
    lock = QuorumLock(clients, "a", expire=30, on_lost=told.append)
    lock.acquire()
    for client in clients[:3]:
        client.delete(KEYS.lock)
        client.set(KEYS.lock, "another\n1\n1\n{}")
    with pytest.raises(LockLost):
        lock.extend()
    wait_until(lambda: told and held_on(clients)[3:] == [0, 0])


@pytest.mark.parametrize("auto_renewal", [False, True])
def test_a_part_that_a_late_renewal_kept_is_released(servers, clients, auto_renewal):
    """It is over for its holder, but its server's clock is slow, and gets what was sent to it before the release."""
    with Proxy(servers[0].url) as proxy, client_at(proxy.url) as behind:
        lock = QuorumLock([behind, *clients[1:]], "a", expire=0.6, auto_renewal=auto_renewal)
        lock.acquire()
        clients[0].pexpire(KEYS.lock, 60_000)
        proxy.stall()
        if not auto_renewal:
            lock.extend(30)
        wait_until(lambda: lock._visible_lease().held_count == 4)
        lock.release()
        proxy.heal()
        wait_until(lambda: not any(held_on(clients)), 20)


def test_a_silent_server_whose_part_is_over_does_not_delay_the_report_of_a_loss(servers, clients):
    lock = QuorumLock(clients, "a", expire=0.6, auto_renewal=False)
    lock.acquire()
    wait_until(lambda: lock._visible_lease().held_count == 5)
    for server in servers[:2]:
        server.pause()
    lock.extend(60)
    wait_until(lambda: lock._visible_lease().held_count == 3)
    Lock(clients[4], "a").reset()
    with within(1), pytest.raises(LockLost):  # of five seconds
        lock.release()


def test_the_belief_ends_before_the_expiry_by_the_drift_of_clocks(clients):
    with QuorumLock(clients, "a", expire=100) as lock:
        for part in lock._visible_lease().parts:
            assert part.lease.deadline - part.lease.acquired == pytest.approx(100 - 1.002, abs=0.1)
        lock.extend(50)
        for part in lock._visible_lease().parts:
            assert part.lease.deadline <= monotonic() + 50 - 0.5


def test_of_many_that_try_once_at_the_same_moment_one_gets_the_lock(clients):
    wins = []
    for _ in range(10):
        barrier = threading.Barrier(8)

        def work(barrier=barrier):
            lock = QuorumLock(clients, "a")
            barrier.wait()
            won = lock.acquire(blocking=False)
            barrier.wait()
            if won:
                lock.release()
            return won

        with ThreadPoolExecutor(8) as pool:
            wins.append(sum(future.result() for future in [pool.submit(work) for _ in range(8)]))
    assert max(wins) == 1
    assert sum(wins) >= 5  # all of them, where the machine is not busy


def test_waiters_get_it_in_the_order_in_which_they_came(clients):
    turns, threads = [], []

    def work(number):
        with QuorumLock(clients, "a"):
            turns.append(number)

    with QuorumLock(clients, "a"):
        for number in range(6):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            wait_until(lambda number=number: [queued(client, "a") for client in clients] == [number + 1] * 5)
    for thread in threads:
        thread.join(60)
    assert turns == list(range(6))


@pytest.mark.parametrize("away", [0, 1])
def test_who_holds_too_few_parts_gives_them_to_who_came_earlier(servers, clients, away):
    """With four servers two may get two each, and with five three may get two, two and one: nobody polls for ever."""
    for server in servers[:away]:
        server.stop()
    turns, start = [], threading.Barrier(6)

    def work(number):
        start.wait()
        for _ in range(10):
            with QuorumLock(clients, "a"):
                turns.append(number)

    in_threads(6, work)
    assert len(turns) == 60
    wait_until(lambda: held_on(clients[away:]) == [0] * (5 - away))


@pytest.mark.slow
def test_a_waiter_does_not_keep_the_parts_that_a_holder_lacks(servers, clients):
    """Otherwise the holder could not replace a part that a server lost, and a second such server would end its lock."""
    servers[4].stop()
    holder = QuorumLock(clients, "a", expire=1.5)
    with holder:
        waiting = threading.Thread(target=lambda: QuorumLock(clients, "a").acquire(timeout=30))
        waiting.start()
        wait_until(lambda: all(queued(client, "a") for client in clients[:4]))
        servers[4].start()
        wait_until(lambda: holder._visible_lease().held_count == 5)
        holder.raise_if_lost()
    waiting.join(60)
    assert not waiting.is_alive()


def test_the_deadline_counts_where_most_servers_are_silent(servers, clients):
    with ExitStack() as stack:
        quick = [stack.enter_context(server.client(socket_timeout=0.5)) for server in servers]
        lock = QuorumLock(quick, "a")
        with lock:
            pass
        for server in servers[:3]:
            server.pause()
        with within(1.5), pytest.raises(LockBackendError):
            lock.acquire(timeout=0.1)
        for server in servers:
            server.resume()
        wait_until(lambda: held_on(clients) == [0] * 5, message="what arrived late was undone")
