"""Histories of one re-entrant lock."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

from django_redislock.core.driver.effects import Sleep
from django_redislock.exceptions import LockError, LockLost

from .beliefs import RECALLED, Belief
from .driver import Thread
from .lock_rules import KEYS, NAME, QUIET
from .locks import LockHistory, Round


class RLockHistory(LockHistory):
    """Some processes that want one re-entrant lock, and enter it again."""

    kind = "rlock"

    @classmethod
    def draw_round(cls, chance: random.Random, resets: bool) -> Round:
        return super().draw_round(chance, resets)._replace(depth=chance.randint(1, 3))

    def _hold(self, thread: Thread, lock: Any, step: Round) -> Generator[Any, Any, None]:
        """Enter the lock again through an object of its own, and leave it, before the outer one is left."""
        if step.depth > 1:
            belief, asked, freezes = self.beliefs[thread], self.world.time, thread.process.freezes
            inner = self.lock_kind.of(thread, NAME, expire=lock.expire, reentrant=True)
            try:
                if not (yield from inner._acquire(thread, None)):
                    self.fail(f"{thread} was refused by itself")
            except LockError as error:
                self.world.tell(thread, f"did not enter again: {error}")
                if isinstance(error, LockLost):
                    self._see_loss(thread, belief)
            else:
                yield from self._leave(thread, inner, step, belief)
            took = self.world.time - asked - step.held / 2
            if self.plan.calm and took > QUIET and freezes == thread.process.freezes:
                self.fail(f"{thread} waited {took:.3f} s for itself")
        yield from super()._hold(thread, lock, step)

    def _leave(self, thread: Thread, inner: Any, step: Round, belief: Belief) -> Generator[Any, Any, None]:
        if belief.lease.hold_count != 2:
            self.fail(f"{thread} is in it {belief.lease.hold_count} times")
        yield Sleep(step.held / 2)
        try:
            yield from inner._release(inner._require_lease(thread))
        except LockError as error:
            self.world.tell(thread, f"the inner release raised {error}")
            if isinstance(error, LockLost):
                self._see_loss(thread, belief)
        stands = belief.excludes and belief.epoch == self.world.epoch
        value = (self.server.peek(KEYS.lock) or b"").removeprefix(RECALLED)
        if stands and not value.startswith(belief.lease.value_prefix):
            self.fail(f"{thread} lost the lock when it left the inner block")
