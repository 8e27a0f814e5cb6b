"""What must never be seen in histories of one lock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from django_redislock.core import scripts
from django_redislock.core.driver.effects import ScriptCall
from django_redislock.core.driver.wakeups import POLL_INTERVAL
from django_redislock.core.keys import lock_keys
from django_redislock.core.lease import Lease
from django_redislock.exceptions import LockError

from .beliefs import RECALLED, Belief
from .driver import Thread
from .history import History
from .world import SOCKET_TIMEOUT, Plan, Process

NAME = "a"
KEYS = lock_keys("redislock", NAME)
QUIET = 0.3
"""Seconds within which a free lock is held by somebody who waits for it, when nothing goes wrong."""
PROMISED = 2.0
"""The same while something is wrong with others: a reservation that nobody claims, one for nobody, two polls, and
what packets take."""
LOOK = 0.25
GONE = 0.3
"""Seconds after which nothing is left of a call that acquired nothing, when nothing goes wrong."""
WOKEN = 0.2
"""Seconds after the expiry of a lock within which its waiter tries, when nothing goes wrong: polling may hide that it
slept for too long."""
LATEST = 8.0
"""Seconds that a renewal may be late at the server."""


class LockRules(History):
    """What is seen of the lock, and judged."""

    keys: Any = KEYS
    locks = (KEYS.lock,)
    acquires = scripts.ACQUIRE
    patience = 3 * SOCKET_TIMEOUT
    """Seconds: a socket timeout may pass before the last try is sent, one in it, and one in its repetition."""

    slack = 0.5
    """Seconds that the packets of one call may take when nothing goes wrong."""
    written_slack = slack
    """The same in the histories that are written, where a slow replica is no fault."""

    def __init__(self, plan: Plan) -> None:
        self.beliefs: dict[Thread, Belief] = {}
        self.waiting: dict[Thread, tuple[float | None, float]] = {}  # the timeout, and since when
        self.last_fence = 0
        self.fence_known = 0.0  # when somebody heard of it: who had asked before may hear of an earlier one later
        self.begun: set[tuple[str, int]] = set()
        """The owner id and the fence of each acquisition."""
        self.released: set[int] = set()
        """The fences of the acquisitions that were released."""
        self.reset: set[int] = set()
        """The fences of those that were force-released."""
        self.recalled: dict[int, int] = {}
        """The ends of the locks that were recalled, in ms, by fence."""
        self.lost = False  # whether a holder's lock ended before it released it
        self.free_since = 0.0
        self.first: dict[bytes, float] = {}  # when each id first had a place, perhaps by a try without an answer
        self.joined: dict[bytes, int] = {}  # when each waiter joined the queue, by the server's clock in us
        self.asked: dict[bytes, int] = {}
        """The longest expiry in ms that was asked for, by fence: that of a thread, or of an extension."""
        self.held_until = 0.0
        """When the lock was free, or will be unless somebody renews it."""
        self.orphans: dict[int, float] = {}
        """Since when nobody believes to hold the acquisition with this fence, though the lock is still its own."""
        self.resets: set[tuple[bytes, int]] = set()
        """The forced releases that have ended an acquisition, and the epoch: a server that lost its data lost their
        receipts, too (seed 41018098)."""
        self.looks: list[Process] = []
        """The processes in which something is still to come: a look at what acquired nothing, the end of a loop."""
        self.reserved: dict[bytes, int] = {}  # when each reservation was made, by the same clock
        super().__init__(plan)
        self.world.at(LOOK, self._look)

    def _is_quiet(self, process: Process, since: float) -> bool:
        """Whether neither the process nor the server has suffered from a fault since then."""
        single = self.world.single and not process.frozen
        return self.plan.calm or (single and process.troubled < since and self.world.troubled < since)

    def _see_answer(self, thread: Thread, outcome: str, timeout: float | None, asked: float) -> None:
        """See that who comes back with nothing waited for its limit, and that a call without a wait takes a free lock.

        Nothing is raised while nothing is wrong.
        """
        world, quiet = self.world, self._is_quiet(thread.process, asked)
        if outcome == "raised" and quiet:
            self.fail(f"{thread} got an error, though nothing was wrong")
        if outcome != "raised" and quiet and timeout is not None and world.time > asked + timeout + self.slack:
            self.fail(f"{thread} came back after {world.time - asked:.3f} s, though its timeout is {timeout} s")
        if outcome == "empty" and timeout is not None:
            took = world.time - asked
            if took < timeout - 0.001:
                self.fail(f"{thread} came back with nothing after {took:.3f} s, though its timeout is {timeout} s")
            if world.single and self.held_until < asked and not world.clock_stepped:
                self.fail(f"{thread} was refused a lock that was free since {self.held_until:.3f}")

    def _see_expiry(self) -> None:
        """Note until when the lock is held; see that its only waiter tries then, if nobody has released it before."""
        world, value = self.world, self.server.peek(KEYS.lock)
        if value is None:
            self.held_until = min(self.held_until, world.time)
            return
        # Redis keeps a key until the millisecond of its expiry is over (asyncio, seed 43129325).
        ends = self.held_until = (self.server.ends.get(KEYS.lock, math.inf) + 1) / 1000 - world.server_clock

        def look() -> None:
            waiting = [(thread, since) for thread, (timeout, since) in self.waiting.items() if timeout is None]
            if self.held_until == ends and len(self.waiting) == len(waiting) == 1 and waiting[0][1] < ends - QUIET:
                self.fail(f"{waiting[0][0]} was not woken when the lock expired at {ends:.3f}")

        if self.plan.calm and world.single and ends < math.inf:
            # A waiter that asked while the lock was reserved polls half a second later; packets take milliseconds.
            world.at(max(ends + WOKEN, world.time + POLL_INTERVAL + 0.05), look)

    def _see_orphan(self, value: bytes | None) -> None:
        """See that the lock expires after nobody believes to hold it."""
        world, fence = self.world, int(value.split(b"\n", 2)[1]) if value else 0
        believed = any(each.lease.fence == fence and each.stands for each in self.beliefs.values())
        self.orphans = {} if not fence or believed else {fence: self.orphans.get(fence, world.time)}
        longest = self.asked.get(b"%d" % fence, 3000) / 1000 + (QUIET if self.plan.calm else LATEST)
        if self.orphans and world.time > self.orphans[fence] + longest + LOOK and not world.clock_stepped:
            self.fail(f"fence {fence} holds the lock, though nobody believed so for {longest} s")

    def record(self, number: int) -> list[dict[str, Any]]:
        head = {"history": number, "source": f"{self.kind} {self.plan.seed}", "holders": 1, "fences": True}
        head |= {"slack": self.written_slack, "free": PROMISED, "late": self.patience + self.written_slack}
        self.world.notes = [{"event": "history", **head}]
        self.run()
        for thread, belief in self.beliefs.items():  # of those who were killed
            self._note_belief(thread, belief, self._until(belief), False)
        return self.world.notes

    def _note_call(self, thread: Thread, lock: Any, outcome: str, timeout: float | None, asked: float) -> None:
        """Write how a call of acquire ended; it waits until its process is killed, or the history ends."""
        at = min(self.world.time, thread.process.killed_at)
        shared = lock._given_id is not None
        values = {"who": str(thread), "name": NAME, "asked": asked, "timeout": timeout, "shared": shared}
        self.world.note(outcome, **values | {"at": at})

    def _until(self, belief: Belief) -> float:
        """Return until when a belief lasted that ends now, or ended when its process was killed."""
        world, lease, process = self.world, belief.lease, belief.process
        noted = world.losses.get(lease, math.inf)
        return min(world.time, noted, lease.deadline - process.offset, process.killed_at)

    def _note_belief(self, thread: Thread, belief: Belief, until: float, released: bool) -> None:
        lease = belief.lease
        values = {"who": str(thread), "name": NAME, "id": lease.id, "fence": lease.fence, "from": belief.began}
        values |= {"until": until, "released": released, "expires": lease.deadline - belief.process.offset}
        self.world.note("believed", **values, clock=belief.process.offset)

    def see_error(self, thread: Thread, timeout: float | None, error: LockError) -> None:
        """See whether acquire may raise this."""

    def begins(self, thread: Thread, lease: Lease) -> None:
        """Note that the thread believes to hold the lock."""
        belief = Belief(lease, self.world.epoch_now(), self.world.time)
        if lease.fence in self.released:
            belief.forced_at = self.world.time
        self.world.tell(thread, f"holds it, fence {lease.fence}, for {lease.expire} s")
        self._see_overlap(thread, belief)
        again = (lease.id, lease.fence) in self.begun  # entered again, or by somebody who uses the same id
        early = belief.forced_at is not None  # it came earlier, and was released before its holder heard of it
        asked = lease.acquired - thread.process.offset
        if lease.fence <= self.last_fence and belief.stands and not again and not early and asked >= self.fence_known:
            self.fail(f"fence {lease.fence} came after {self.last_fence}")
        if lease.fence > self.last_fence:
            self.last_fence, self.fence_known = lease.fence, self.world.time
        self.begun.add((lease.id, lease.fence))
        self.beliefs[thread] = belief

    def _see_overlap(self, thread: Thread, belief: Belief) -> None:
        """See that nobody else believes to hold the lock, unless data was lost, or a user ended the acquisition."""
        lease = belief.lease
        if not belief.excludes:
            return
        for other, theirs in self.beliefs.items():
            if other is thread or theirs.epoch != belief.epoch or not theirs.excludes:
                continue
            if theirs.lease.id != lease.id or theirs.lease.fence != lease.fence:
                self.fail(
                    f"{thread} (fence {lease.fence}) and {other} (fence {theirs.lease.fence}) hold the lock at once"
                )

    def _see_loss(self, thread: Thread, belief: Belief) -> None:
        """See that a loss that was told is one: the answers of the server allowed no further belief."""
        lease, process = belief.lease, belief.process
        promised = process.watchdog.promised.get(lease, 0.0)
        forced = belief.forced_at is not None or lease.fence in self.reset
        # Its own release may arrive after that of another holder by the same id.
        forced = forced or (lease.id == "given" and lease.fence in self.released)
        forced = forced or lease.fence in self.recalled
        excused = forced or belief.shortened or belief.epoch != self.world.epoch
        if lease._losses and process.clock() < promised and not excused:
            self.fail(f"{thread} was told of a loss that there was not, {promised - process.clock():.3f} s too early")

    def executed(self, process: Process, what: Any, before: Any, reply: Any) -> None:
        """See whose turn it was, and who was force-released."""
        self._see_expiry()
        if not isinstance(what, ScriptCall):
            return
        self._see_recalled()
        self._note_places(self.server.peek(KEYS.lock) or b"")
        if what.script is scripts.ACQUIRE and isinstance(reply, int) and reply > 0:
            self._see_turn(what, before)
        elif what.script is scripts.RENEW and reply == [1]:
            self._see_end(what, before)
        elif what.script in (scripts.RESET, scripts.RELEASE) and reply == 1 and before is not None:
            self._see_release(process, what, before)

    def _see_recalled(self) -> None:
        """See that nothing makes the end of a recalled lock later, and that it is nobody else's before."""
        for key in self.locks:
            value, ends = self.server.peek(key) or b"", self.server.ends.get(key, 0)
            if value.startswith(RECALLED):
                fence = int(value.split(b"\n", 2)[1])
                if ends > self.recalled.setdefault(fence, ends) + 1:
                    self.fail(f"the end of fence {fence} was made later after its recall")

    def _note_places(self, *values: bytes) -> None:
        """Note who has a place in the queue, and which of the values is a reservation."""
        queue = self.server.data.get(self.keys.queue) or {}
        self.joined = {entry: self.joined.get(entry, self.server._us) for entry in queue}
        self.first = {entry.partition(b"\n")[2]: joined for entry, joined in self.joined.items()} | self.first
        for value in values:
            if value.split(b"\n", 2)[1:2] == [b"0"]:
                self.reserved.setdefault(value, self.server._us)

    def _see_release(self, process: Process, call: ScriptCall, before: bytes) -> None:
        """Note which acquisition ended by a call that released or reset its lock."""
        id, fence = before.removeprefix(RECALLED).split(b"\n")[:2]
        left = (self.server.peek(call.keys[0]) or b"").removeprefix(RECALLED)
        if left.startswith(id + b"\n" + fence):  # an earlier call did it, or it is recalled
            return
        if len(call.args) > 4 and call.script is scripts.RESET:
            self.fail(f"a recall ended fence {fence.decode()}")
        if call.script is scripts.RESET:
            if call.args[1] not in (b"", fence):
                self.fail(f"a reset of fence {call.args[1].decode()} released fence {fence.decode()}")
            if (call.args[2], self.world.epoch) in self.resets:
                self.fail(f"a repeated reset released fence {fence.decode()}, too")
            self.resets.add((call.args[2], self.world.epoch))
            self.world.tell(process, f"force-released fence {fence.decode()}")
            self.lost = True
            self.reset.add(int(fence))
        elif call.args[0] != id or call.args[3] not in (b"", fence):
            return
        self.released.add(int(fence))
        self.world.note("freed", name=NAME, fence=int(fence), who=str(process))
        for belief in self.beliefs.values():  # whoever uses the same id may release it, too
            if belief.lease.fence == int(fence) and belief.forced_at is None:
                belief.forced_at = self.world.time

    def _see_end(self, call: ScriptCall, before: bytes | None) -> None:
        """See that the lock ends no later than after the longest expiry that its holders asked for."""
        if before is None:
            self.fail("a renewal was confirmed of a lock that nobody held")
            return
        fence = before.split(b"\n", 2)[1]
        asked = self.asked[fence] = max(self.asked.get(fence, 3000), int(call.args[2]))
        if self.server.ends.get(KEYS.lock, 0) > self.server.time_ms + asked:
            self.fail(f"a renewal left the lock an end later than {asked} ms, which is the longest that was asked for")

    def _see_turn(self, call: ScriptCall, before: bytes | None, what: str = "the lock") -> None:
        """See that nobody who is well waited for longer, of those who were in the queue when it was reserved."""
        world, (id, _, _, _, channel, _, ticket) = self.world, call.args[:7]
        queue = self.server.data.get(call.keys[3])
        if not queue or id == b"given" or world.clock_stepped or world.troubled + PROMISED > world.time:
            return
        if not channel and id in self.first:  # its first try arrives late, and takes what is reserved for its place
            return
        asked = float(ticket) if ticket else self.server._us
        mine = min(asked, self.first.get(id, math.inf))
        reserved = self.reserved.get(before, math.inf) if before and before.startswith(id + b"\n") else math.inf
        for entry, score in self._rivals(call, queue):
            if self.joined[entry] > reserved:
                continue
            process = world.processes[int(entry.split(b"\n")[0].rpartition(b":")[2])]
            well = process.alive and not process.frozen and process.troubled + PROMISED < world.time
            if score < mine and (well or self.plan.calm) and entry != channel + b"\n" + id:
                self.fail(f"{id!r} got {what} before {entry!r}, who came earlier")

    def _rivals(self, call: ScriptCall, queue: dict[bytes, float]) -> Iterable[tuple[bytes, float]]:
        """Return those who wait for the same, and since when."""
        return queue.items()

    def _look_for_remains(self, thread: Thread, lease: Lease) -> None:
        """See that nothing is left of a call that acquired nothing, as soon as its process and the server are well."""
        process, world = thread.process, self.world
        id, data = lease.id.encode(), self._data()

        def look() -> None:
            well = max(process.troubled, world.troubled) + GONE
            if process.alive and (process.frozen or world.time < well):
                world.at(max(well, world.time + GONE), look)
                return
            self.looks.remove(process)
            if not process.alive or id == b"given" or data != self._data():
                return
            queue = self.server.peek(self.keys.queue) or ()
            values = [(self.server.peek(key) or b"").removeprefix(RECALLED) for key in self.locks]
            held = any(value.startswith(id + b"\n") for value in values)
            if held or any(entry.endswith(b"\n" + id) for entry in queue):
                self.fail(f"{id!r} of {thread} acquired nothing, and is still there")

        self.looks.append(process)
        world.at(world.time + GONE, look)

    def _over(self) -> bool:
        return super()._over() and not any(process.alive for process in self.looks)

    def _is_free(self, fence: int) -> None:
        """See that somebody who waits for the lock gets it."""
        world = self.world
        # Waiters of one process and one given id share a place in the queue, and the first of them takes it along.
        plans = zip(self.threads, self.plan.threads, strict=True)
        alone = [thread for thread, plan in plans if "id" not in plan.options]
        waiting = [thread for thread in alone if self.waiting.get(thread, (0.0, 0.0))[0] is None]
        if not self.plan.calm or not waiting:
            return

        def look() -> None:
            if self.last_fence == fence and all(thread in self.waiting for thread in waiting):
                self.fail(f"{waiting} waited for a lock that was free for {QUIET} s")

        world.at(world.time + QUIET, look)

    def _look(self) -> None:
        """Look now and then whether losses are told, and whether the lock is free for too long."""
        self.world.at(self.world.time + LOOK, self._look)
        self._look_at_waiters()
        self._look_at_beliefs()

    def _look_at_waiters(self) -> None:
        world = self.world
        value = self.server.peek(KEYS.lock)
        if value is not None and value.split(b"\n", 2)[1] != b"0":
            self.free_since = world.time
        self._see_orphan(value)
        for thread, (_, since) in self.waiting.items():
            process = thread.process
            if process.alive and not process.frozen:
                free = world.time - max(self.free_since, since, process.troubled, world.troubled)
                if free > PROMISED:
                    self.fail(f"{thread} waits for a lock that is free for {free:.3f} s")

    def _look_at_beliefs(self) -> None:
        world = self.world
        for thread, belief in list(self.beliefs.items()):
            lease, process = belief.lease, belief.process
            value = self.server.peek(lease.keys.lock)
            if not process.alive or process.frozen:
                continue
            self._see_overlap(thread, belief)
            self._see_loss(thread, belief)
            if lease.deadline < process.watchdog.promised[lease] - 0.001 and not belief.shortened:
                self.fail(f"{thread} believes less than the answers of the server allow")
            if not lease._losses and process.troubled < world.time:
                if process.clock() > lease.deadline + LOOK:
                    self.fail(f"{thread} was not told that its lock has ended")
                asked = (value or b"").startswith(RECALLED + lease.value_prefix)
                belief.asked_since = None if not asked else belief.asked_since or world.time
                if belief.asked_since is not None and lease.renewing:
                    untold = world.time - max(belief.asked_since, process.troubled, world.troubled)
                    if untold > max(belief.expire, lease.expire) / 3 + LOOK:
                        self.fail(f"{thread} was not told for {untold:.3f} s that it was asked for its lock")
                undone = belief.epoch != world.epoch and (value or b"").startswith(lease.value_prefix)  # by a failover
                belief.undone_at = world.time if undone else belief.undone_at
                if belief.forced_at is not None and lease.renewing and not undone:
                    since = max(belief.forced_at, belief.undone_at)  # it may be released again: lock, seed 43137551
                    untold = world.time - max(since, process.troubled, world.troubled)
                    if untold > max(belief.expire, lease.expire) / 3 + LOOK:
                        self.fail(
                            f"{thread} was not told for {untold:.3f} s that its lock was released by somebody else"
                        )

    def look_at_the_end(self) -> None:
        world = self.world
        if self.plan.calm and world.time > 45:
            self.fail(f"it took {world.time} s")
        if self.plan.calm and not self.lost:
            self.see_nothing_left(self.server)
