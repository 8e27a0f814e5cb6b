"""The lock against a model of it: any steps in any order, with lost replies, lost locks and the dead among them."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from django_redislock.core import AsyncLock, Lock, held_locks
from django_redislock.core.clock import monotonic
from django_redislock.core.keys import lock_keys
from django_redislock.core.watchdog import watchdog
from django_redislock.exceptions import LockLost
from tests.support import BUSY, Proxy, client_at, wait_until

KEYS = lock_keys("redislock", "a")


class Actor:
    """Somebody who takes the lock, in a thread of his own and over connections that lose replies."""

    kind: type = Lock

    def __init__(self, stack, url):
        self.proxy = stack.enter_context(Proxy(url))
        self.client = stack.enter_context(client_at(self.proxy.url))
        self.thread = stack.enter_context(ThreadPoolExecutor(1))
        self.lock = None
        """What he believes to hold, or waits for."""
        self.waiting: Future | None = None

    def start(self, function, *args, **kwargs):
        return self.thread.submit(function, *args, **kwargs)

    def do(self, function, *args, fault=None, **kwargs):
        self.suffer(fault)
        return self.start(function, *args, **kwargs).result(30)

    def suffer(self, fault):
        """Let the next call meet with the fault."""
        if fault == "lost reply":
            self.proxy.drop_next_reply(containing=b"EVAL")
        elif fault == "forgotten scripts":
            self.client.script_flush()

    def new_lock(self):
        self.lock = self.kind(self.client, "a", expire=60)

    @property
    def idle(self):
        return self.lock is None

    @property
    def believes(self):
        return self.lock is not None and self.waiting is None

    @property
    def may_give_up(self):
        return False


class AsyncActor(Actor):
    """Somebody who does it in one task, and may be cancelled while he waits."""

    kind = AsyncLock

    def __init__(self, stack, url):
        super().__init__(stack, url)
        self.jobs: asyncio.Queue = asyncio.Queue()
        self.doing: asyncio.Future | None = None
        begun: Future = Future()
        self.thread.submit(asyncio.run, self.work(begun))
        self.loop = begun.result(30)
        stack.callback(self.loop.call_soon_threadsafe, self.jobs.put_nowait, None)

    async def work(self, begun):
        begun.set_result(asyncio.get_running_loop())
        while job := await self.jobs.get():
            function, done = job
            try:
                result = function()
                if inspect.isawaitable(result):
                    self.doing = asyncio.ensure_future(result)
                    result = await self.doing
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

    def start(self, function, *args, **kwargs):
        done: Future = Future()
        self.loop.call_soon_threadsafe(self.jobs.put_nowait, (partial(function, *args, **kwargs), done))
        return done

    def give_up(self):
        self.loop.call_soon_threadsafe(lambda: self.doing.cancel())

    @property
    def may_give_up(self):
        return self.waiting is not None


@pytest.fixture
def actors(redis_url):
    with ExitStack() as stack:
        yield [kind(stack, redis_url) for kind in (Actor, AsyncActor, Actor, AsyncActor)]


chosen = st.integers(0, 3)
maybe = st.booleans()
faults = st.sampled_from([None, "lost reply", "forgotten scripts"])
DEAD = None
"""Somebody in the queue who does not live any more."""


class Model(RuleBasedStateMachine):
    """Who holds the lock, and who waits for it in which order."""

    actors: list[Actor]
    observer: redis.Redis

    def __init__(self):
        super().__init__()
        self.observer.flushall()
        self.held = False
        self.holder: Actor | None = None
        """Nobody also while it is held by one who is gone."""
        self.queue: list[Actor | None] = []
        self.fence = 0
        self.deaths = 0

    def first(self, number, wanted):
        """Return the first actor from that number on whom the step suits."""
        around = self.actors[number:] + self.actors[:number]
        return next(filter(wanted, around))

    def begin(self, actor):
        """Note that the actor holds the lock now."""
        assert not self.held
        assert actor.lock.lost is None
        fence = actor.do(lambda: actor.lock.fence)
        assert fence > self.fence
        self.held, self.holder, self.fence = True, actor, fence

    def end(self, fickle=False):
        """The lock is free now: it goes to the first living waiter; a `fickle` one gives up while it is handed to him.

        Who gives up may be too late. Then he releases it, so that one history has one end, however fast the machine is.
        """
        self.held, self.holder = False, None
        while any(self.queue) and not self.held:
            heir = self.queue.pop(0)
            if heir is DEAD:
                continue
            gives_up = fickle and heir.may_give_up
            if gives_up:
                heir.give_up()
                fickle = False
            waiting, heir.waiting = heir.waiting, None
            try:
                assert waiting.result(1 + BUSY) is True
            except asyncio.CancelledError:
                heir.lock = None
            else:
                self.begin(heir)
                if gives_up:
                    heir.do(heir.lock.release)
                    heir.lock, self.held, self.holder = None, False, None

    # What they do

    @precondition(lambda self: any(actor.idle for actor in self.actors))
    @rule(number=chosen, fault=faults, timeout=st.sampled_from([0, 0.05]))
    def acquire(self, number, fault, timeout):
        actor = self.first(number, lambda actor: actor.idle)
        actor.new_lock()
        if actor.do(actor.lock.acquire, timeout=timeout, fault=fault):
            self.begin(actor)
            self.queue = []  # of the dead
        else:
            assert self.held
            actor.lock = None

    @precondition(lambda self: self.held and any(actor.idle for actor in self.actors))
    @rule(number=chosen, fault=faults)
    def wait(self, number, fault):
        actor = self.first(number, lambda actor: actor.idle)
        actor.new_lock()
        actor.suffer(fault)
        actor.waiting = actor.start(actor.lock.acquire, timeout=60)
        self.queue.append(actor)
        wait_until(lambda: self.observer.zcard(KEYS.queue) == len(self.queue))

    @precondition(lambda self: any(actor.may_give_up for actor in self.actors))
    @rule(number=chosen)
    def give_up(self, number):
        actor = self.first(number, lambda actor: actor.may_give_up)
        actor.give_up()
        with pytest.raises(asyncio.CancelledError):
            actor.waiting.result(30)
        actor.lock = actor.waiting = None
        self.queue.remove(actor)
        wait_until(lambda: self.observer.zcard(KEYS.queue) == len(self.queue))

    @precondition(lambda self: any(actor.believes for actor in self.actors))
    @rule(number=chosen, fault=faults, fickle=maybe)
    def release(self, number, fault, fickle):
        actor = self.first(number, lambda actor: actor.believes)
        if actor is self.holder:
            actor.do(actor.lock.release, fault=fault)
            actor.lock = None
            self.handed_on(fickle)
        else:
            with pytest.raises(LockLost):
                actor.do(actor.lock.release, fault=fault)
            actor.lock = None

    @precondition(lambda self: any(actor.believes for actor in self.actors))
    @rule(number=chosen, fault=faults, expire=st.sampled_from([30, 60, 90]))
    def extend(self, number, fault, expire):
        actor = self.first(number, lambda actor: actor.believes)
        if actor is self.holder:
            actor.do(actor.lock.extend, expire, fault=fault)
            assert expire - 10 < self.observer.pttl(KEYS.lock) / 1000 <= expire
        else:
            with pytest.raises(LockLost):
                actor.do(actor.lock.extend, expire, fault=fault)

    @precondition(lambda self: any(actor.believes for actor in self.actors))
    @rule(number=chosen, fault=faults)
    def renew(self, number, fault):
        """The watchdog does, ahead of time."""
        actor = self.first(number, lambda actor: actor.believes)
        lease = actor.do(actor.lock._visible_lease)
        if lease.loss is None:
            actor.suffer(fault)
        lease.next_renewal = now = monotonic()
        watchdog.reschedule(lease)
        if actor is self.holder:
            wait_until(lambda: lease.next_renewal > now + 5)
            assert actor.lock.lost is None
        else:
            wait_until(lambda: actor.lock.lost)

    # What happens to them

    @precondition(lambda self: self.holder is not None)
    @rule()
    def vanish(self):
        """The holder is gone, and the lock is held on by nobody."""
        watchdog.remove(self.holder.do(self.holder.lock._visible_lease))
        self.holder.lock = self.holder = None

    @precondition(lambda self: self.held and DEAD not in self.queue)
    @rule()
    def die_waiting(self):
        seconds, microseconds = self.observer.time()
        self.deaths += 1
        self.observer.zadd(KEYS.queue, {f"nobody\n{self.deaths}": seconds * 1_000_000 + microseconds})
        self.observer.expire(KEYS.queue, 120)
        self.queue.append(DEAD)

    @precondition(lambda self: self.held)
    @rule(how=st.sampled_from(["expiry", "eviction"]))
    def run_out(self, how):
        """The lock ends by itself, and nobody tells its holder."""
        if how == "eviction":
            self.observer.delete(KEYS.lock)
        else:
            self.observer.pexpire(KEYS.lock, 20)
            wait_until(lambda: self.fence_in_redis() != self.fence)
        self.end()

    @precondition(lambda self: self.held and any(actor.waiting is None for actor in self.actors))
    @rule(number=chosen, fault=faults, by_fence=maybe, stale=maybe)
    def reset(self, number, fault, by_fence, stale):
        actor = self.first(number, lambda actor: actor.waiting is None)
        freed = actor.do(actor.kind(actor.client, "a").reset, self.fence - stale if by_fence else None, fault=fault)
        assert freed != (by_fence and stale)
        if freed:
            self.handed_on()

    def handed_on(self, fickle=False):
        """The lock was freed on purpose, which clears the queue of the dead."""
        if not any(self.queue):
            self.queue = []
        self.end(fickle)
        if not self.held:
            self.queue = []

    # What always holds

    def fence_in_redis(self):
        value = self.observer.get(KEYS.lock)
        fence = int(value.split(b"\n")[1]) if value else 0
        return fence or None

    @invariant()
    def one_holds_it_at_most(self):
        if self.held:
            assert self.fence_in_redis() == self.fence
            assert 0 < self.observer.pttl(KEYS.lock) <= 90_000
        else:
            wait_until(lambda: not self.observer.exists(KEYS.lock), 1 + BUSY)  # one who gave up may take it back still
        if DEAD not in self.queue:  # whoever asks Redis would clear it of them
            owners = [actor for actor in self.actors if actor.believes and actor.do(actor.lock.owned)]
            assert owners == ([self.holder] if self.holder else [])

    @precondition(lambda self: self.held and DEAD in self.queue)
    @rule()
    def look(self):
        """The list does not count the dead, and they leave the queue."""
        self.queue = [actor for actor in self.queue if actor is not DEAD]
        self.list_them()
        assert self.observer.zcard(KEYS.queue) == len(self.queue)

    @precondition(lambda self: DEAD not in self.queue)
    @invariant()
    def the_list_tells_the_truth(self):
        self.list_them()

    def list_them(self):
        held = [(info.name, info.fence, info.waiting) for info in held_locks(self.observer)]
        assert held == ([("a", self.fence, len(self.queue))] if self.held else [])

    def teardown(self):
        """Whoever waits gets his turn, and nothing is left but what ends by itself."""
        try:
            while self.held:
                Lock(self.observer, "a").reset()
                self.handed_on()
            assert not any(self.queue)
            for actor in filter(lambda actor: actor.believes, self.actors):
                with pytest.raises(LockLost):
                    actor.do(actor.lock.release)
            with Lock(self.observer, "a", timeout=1):
                pass  # clears the queue of the dead
            assert not self.observer.exists(KEYS.lock, KEYS.queue)
            assert all(self.observer.pttl(key) > 0 for key in self.observer.scan_iter())
        finally:
            for actor in self.actors:
                if actor.waiting is not None:  # after a failure
                    wait_until(lambda actor=actor: Lock(self.observer, "a").reset() or actor.waiting.done())
                actor.lock = actor.waiting = None
                actor.proxy.drop_next_reply(0)


@pytest.mark.long
@pytest.mark.slow
def test_any_steps_in_any_order(actors, client):
    Model.actors, Model.observer = actors, client
    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=60,
            stateful_step_count=15,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # a shrunk example would be nicer, but may take longer than a test should
            suppress_health_check=list(HealthCheck),
        ),
    )
