"""The lock against a model of it: any steps in any order, with lost replies and lost locks among them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from django_redislock.core import Lock, held_locks
from django_redislock.core.keys import lock_keys
from django_redislock.exceptions import LockLost
from tests.support import BUSY, Proxy, wait_until

KEYS = lock_keys("redislock", "a")
ACTORS = 4


class Actor:
    """Somebody who takes the lock, in a thread of his own and over connections that lose replies."""

    def __init__(self, proxy, client, thread):
        self.proxy, self.client, self.thread = proxy, client, thread
        self.lock: Lock | None = None
        """What he believes to hold, or waits for."""
        self.waiting: Future | None = None

    def do(self, function, *args, lose=False, **kwargs):
        if lose:
            self.proxy.drop_next_reply(containing=b"EVAL")
        return self.thread.submit(function, *args, **kwargs).result(30)

    @property
    def idle(self):
        return self.lock is None

    @property
    def believes(self):
        return self.lock is not None and self.waiting is None


@pytest.fixture
def actors(redis_url):
    with ExitStack() as stack:
        made = []
        for _ in range(ACTORS):
            proxy = stack.enter_context(Proxy(redis_url))
            client = stack.enter_context(redis.Redis.from_url(proxy.url))
            made.append(Actor(proxy, client, stack.enter_context(ThreadPoolExecutor(1))))
        yield made


chosen = st.integers(0, ACTORS - 1)
lose = st.booleans()


class Model(RuleBasedStateMachine):
    """Who holds the lock, and who waits for it in which order."""

    actors: list[Actor]
    observer: redis.Redis

    def __init__(self):
        super().__init__()
        self.observer.flushall()
        self.holder: Actor | None = None
        self.queue: list[Actor] = []
        self.fence = 0

    def first(self, number, wanted):
        """Return the first actor from that number on whom the step suits."""
        around = self.actors[number:] + self.actors[:number]
        return next(filter(wanted, around))

    def begin(self, actor):
        """Note that the actor holds the lock now."""
        assert self.holder is None
        assert actor.lock.lost is None
        fence = actor.do(lambda: actor.lock.fence)
        assert fence > self.fence
        self.holder, self.fence = actor, fence

    def settle(self):
        """A free lock goes to the first who waits."""
        if self.holder is None and self.queue:
            heir = self.queue.pop(0)
            assert heir.waiting.result(1 + BUSY) is True
            heir.waiting = None
            self.begin(heir)

    # Steps

    @precondition(lambda self: any(actor.idle for actor in self.actors))
    @rule(number=chosen, lose=lose, timeout=st.sampled_from([0, 0.05]))
    def acquire(self, number, lose, timeout):
        actor = self.first(number, lambda actor: actor.idle)
        actor.lock = Lock(actor.client, "a", expire=60, auto_renewal=False)
        if actor.do(actor.lock.acquire, timeout=timeout, lose=lose):
            self.begin(actor)
        else:
            assert self.holder is not None
            actor.lock = None

    @precondition(lambda self: self.holder is not None and any(actor.idle for actor in self.actors))
    @rule(number=chosen, lose=lose)
    def wait(self, number, lose):
        actor = self.first(number, lambda actor: actor.idle)
        actor.lock = Lock(actor.client, "a", expire=60, auto_renewal=False)
        if lose:
            actor.proxy.drop_next_reply(containing=b"EVAL")
        actor.waiting = actor.thread.submit(actor.lock.acquire, timeout=60)
        self.queue.append(actor)
        wait_until(lambda: self.observer.zcard(KEYS.queue) == len(self.queue))

    @precondition(lambda self: any(actor.believes for actor in self.actors))
    @rule(number=chosen, lose=lose)
    def release(self, number, lose):
        actor = self.first(number, lambda actor: actor.believes)
        if actor is self.holder:
            actor.do(actor.lock.release, lose=lose)
            self.holder = None
        else:
            with pytest.raises(LockLost):
                actor.do(actor.lock.release, lose=lose)
        actor.lock = None
        self.settle()

    @precondition(lambda self: any(actor.believes for actor in self.actors))
    @rule(number=chosen, lose=lose, expire=st.sampled_from([30, 60, 90]))
    def extend(self, number, lose, expire):
        actor = self.first(number, lambda actor: actor.believes)
        if actor is self.holder:
            actor.do(actor.lock.extend, expire, lose=lose)
            assert expire - 10 < actor.lock.ttl() <= expire
        else:
            with pytest.raises(LockLost):
                actor.do(actor.lock.extend, expire, lose=lose)

    @precondition(lambda self: self.holder is not None)
    @rule(dies=st.booleans(), how=st.sampled_from(["expiry", "eviction"]))
    def end(self, dies, how):
        """The lock ends by itself, and nobody tells its holder, who may be dead anyway."""
        if dies:
            self.holder.lock = None
        if how == "eviction":
            self.observer.delete(KEYS.lock)
        else:
            self.observer.pexpire(KEYS.lock, 20)
            wait_until(lambda: self.holder_in_redis() != self.fence)
        self.holder = None
        self.settle()

    @rule(number=chosen, lose=lose, by_fence=st.booleans(), stale=st.booleans())
    def reset(self, number, lose, by_fence, stale):
        actor = self.actors[number]
        if actor.waiting is not None:  # his thread is occupied
            return
        fence = self.fence - stale if by_fence else None
        freed = actor.do(Lock(actor.client, "a").reset, fence, lose=lose)
        right = self.holder is not None and not (by_fence and stale)
        assert freed == right
        if right:
            self.holder = None
        self.settle()

    @rule()
    def forget_scripts(self):
        self.observer.script_flush()

    # What always holds

    def holder_in_redis(self):
        value = self.observer.get(KEYS.lock)
        fence = int(value.split(b"\n")[1]) if value else 0
        return fence or None

    @invariant()
    def one_holds_it_at_most(self):
        assert self.holder_in_redis() == (self.fence if self.holder else None)
        owners = [actor for actor in self.actors if actor.believes and actor.do(actor.lock.owned)]
        assert owners == ([self.holder] if self.holder and self.holder.believes else [])

    @invariant()
    def the_list_tells_the_truth(self):
        held = [(info.name, info.fence, info.waiting) for info in held_locks(self.observer)]
        assert held == ([("a", self.fence, len(self.queue))] if self.holder else [])

    def teardown(self):
        """Whoever waits gets his turn, and nothing is left but what ends by itself."""
        try:
            while self.holder is not None:
                Lock(self.observer, "a").reset()
                self.holder = None
                self.settle()
            assert not self.queue
            assert not self.observer.exists(KEYS.lock, KEYS.queue)
            assert all(self.observer.pttl(key) > 0 for key in self.observer.scan_iter())
        finally:
            for actor in self.actors:
                if actor.waiting is not None:  # after a failure
                    wait_until(lambda actor=actor: Lock(self.observer, "a").reset() or actor.waiting.done())
                actor.lock = actor.waiting = None
                actor.proxy.drop_next_reply(0)


def test_any_steps_in_any_order(actors, client):
    Model.actors, Model.observer = actors, client
    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=100,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # a shrunk example would be nicer, but may take longer than a test should
            suppress_health_check=list(HealthCheck),
        ),
    )
