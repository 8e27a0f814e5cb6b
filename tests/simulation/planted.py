"""Defects that are planted, one at a time: the simulation must find each of them."""

from __future__ import annotations

from typing import Any

from django_redislock.cache.lease import obtain, single_flight, store
from django_redislock.cache.lease.request import ValueRequest
from django_redislock.celery import execution_lock
from django_redislock.core import attempt, base, keys, lease, operations, scripts, semaphore
from django_redislock.core.driver import janitor

from .patches import Defect
from .planted_aio import ASYNCIO, NOT_FOUND as NOT_FOUND_IN_TASKS
from .planted_calls import CALLS, CALLS_OF_CACHES, CALLS_OF_RLOCKS, CALLS_OF_TASKS
from .planted_limits import LIMITS, NOT_FOUND as NOT_FOUND_IN_LIMITS
from .planted_wide import CLUSTER, QUORUM, REPLICAS


def _late_deadline(self: lease.Lease, sent: float, life: float) -> None:
    self.failures = 0
    now = lease.monotonic()
    self.deadline, self.next_renewal = now + life, now + life / 3


def _earlier_deadline(self: lease.Lease, sent: float, life: float) -> None:
    self.failures = 0
    life = min(life, self.expire)
    self.deadline, self.next_renewal = sent + life, sent + life / 3


_call = operations.AcquireRequest.call


def _enters_anew(self: base.BaseLock, lease: Any, acquirer: Any, timeout: float | None) -> Any:
    return self._acquire_anew(acquirer, None)


def _leaves_at_once(self: base.BaseLock, lease: Any) -> Any:
    return self._release_last(lease)


def _never_leaves(self: base.BaseLock, lease: Any) -> Any:
    yield from ()


def _asks_for_three(self: semaphore.Slots, acquirer: Any, timeout: float | None) -> Any:
    request = _new_request(self, acquirer, timeout)
    request.lease.keys = keys.slots_keys("redislock", self.name, 3)
    request.more_keys, request.more_args = request.lease.keys.others, (b"3",)
    return request


_new_request = semaphore.Slots._new_request


def _ignore(self: attempt.Attempt, value: bool) -> None:
    pass


def _new_ticket(self: operations.AcquireRequest, channel: bytes, join: bool, ticket: bytes) -> Any:
    return _call(self, channel, join, b"")


Lock, Lease, Request = base.BaseLock, lease.Lease, operations.AcquireRequest
SLOT = scripts.ACQUIRE_SLOT
A, R, N, X = scripts.ACQUIRE, scripts.RELEASE, scripts.RENEW, scripts.RESET
U = scripts.UNDO
L, S, INV = obtain.LEASE, store.SETTLE, store.INVALIDATE
START, FINISH, PUBLISH = execution_lock.START, execution_lock.FINISH, execution_lock.PUBLISH

LOCK: dict[str, Defect] = {
    "a release does not ask whose lock it is": (R, "is_of(value, id .. '\\n' .. fence) and fence)", "fence_of(value))"),
    "whoever tries takes the lock": (
        A,
        "if not (value and is_of(value, id) and",
        "if value and not value and not (is_of(value, id) and",
    ),
    "two may take the lock at once": (A, "if found > 1 then", "if found > 9 then"),
    "the lock is taken over a moment before its end": (
        A,
        "local value = redis.call('GET', lock)",
        "local value = redis.call('PTTL', lock) > 150 and redis.call('GET', lock)",
    ),
    "the deadline is counted from the reply": (Lease, "renewed", _late_deadline),
    "a released lock is handed to nobody": (R, "hand_over(slot, queue, '')", "redis.call('DEL', slot)"),
    "a release forgets the queue": (R, "hand_over(slot, queue, '')", "redis.call('DEL', slot, queue)"),
    "who comes last is served first": (
        R,
        "local first = next_in(queue, lock)",
        "local first = redis.call('ZRANGE', queue, -1, -1)[1]\n    redis.call('ZREM', queue, first or '')",
    ),
    "a newcomer overtakes those who wait": (A, "redis.call('EXISTS', queue) == 1 and hand_over", "false and hand_over"),
    "each try draws a new ticket": (Request, "call", _new_ticket),
    "a release keeps no receipt": (R, "keep_receipt(receipts, receipt, held_fence)", ""),
    "fences do not grow": (A, "local fence = whole(now)", "local fence = whole(1e15 - now % 1000)"),
    "fences come from the clock alone": (A, "if last and tonumber(last) >= now then", "if false then"),
    "a lock has no expiry": (A, "value, 'PX', expire_ms)", "value)"),
    "a queue has no expiry": (A, "redis.call('PEXPIRE', queue, QUEUE_LIFE_MS)", ""),
    "a waiter that gives up stays in the queue": (
        A,
        "redis.call('ZREM', queue, entry)\n    count_waits",
        "count_waits",
    ),
    "a message is sent to nobody": (R, "redis.pcall('PUBLISH', channel, id) ~= 0", "true"),
    "a reservation has no end": (A, "return left, left <= 0 or", "return left, false and"),
    "waiters are called back again and again": (A, "elseif next_channel ~= '' and next", "elseif next"),
    "the lock's life is cut in half": (A, "value, 'PX', expire_ms)", "value, 'PX', math.floor(expire_ms / 2))"),
    "a renewal gives no life": (N, "redis.call('PEXPIRE', lock, expire_ms)", ""),
    "a renewal keeps an end that a step of the clock made late": (
        N,
        "redis.call('PTTL', lock)), longest_ms)",
        "redis.call('PTTL', lock)), math.huge)",
    ),
    "a holder takes the receipt of another release for its own": (
        R,
        "redis.call('ZSCORE', receipts, receipt)",
        "(fence ~= '' and redis.call('ZCOUNT', receipts, fence, fence) > 0)",
    ),
    "a renewal asks for the id only": (Lease, "value_prefix", property(lambda self: self.id.encode())),
    "a renewal does not ask whose lock it is": (N, "and is_of(value, value_prefix)", ""),
    "an attempt gives nothing back": (attempt.Attempt, "give_up", lambda self: None),
    "a call that is repeated counts as answered": (attempt.Attempt, "repeated", property(lambda self: False, _ignore)),
    "the note of an undo is not looked at by who tries first": (
        A,
        "queue, queue, undone, undone, held",
        "queue, queue, held",
    ),
    "the note of an undo is not looked at by who waits": (A, "redis.call('EXISTS', undone) == 1", "false"),
    "the note of an undo ends too early": (U, "'PX', UNDONE_LIFE_MS)", "'PX', 20)"),
    "an undo leaves no note": (U, "redis.call('SET', undone, '1', 'PX', UNDONE_LIFE_MS)", ""),
    "an undo is not sent again": (janitor, "is_unanswered", lambda reply: False),
    "an undo frees whoever holds the lock": (U, "is_of(value, id) and fence_of(value)", "fence_of(value)"),
    "an undo leaves the place in the queue": (U, "redis.call('ZREM', queue, channel .. '\\n' .. id)", ""),
}
RLOCK: dict[str, Defect] = {
    "a re-entrant lock is not re-entrant": (Lock, "_enter_again", _enters_anew),
    "the inner exit releases": (Lock, "_leave_inner", _leaves_at_once),
    "the outer exit does not release": (Lock, "_release_last", _never_leaves),
}
SEMAPHORE: dict[str, Defect] = {
    "a slot is handed to two": (
        SLOT,
        "return false, redis.call('PTTL', lock)",
        "return redis.call('PTTL', lock) < 150, 0",
    ),
    "one caller gets two slots": (SLOT, "elseif is_of(value, id) and", "elseif false and"),
    "a free slot is not handed over": (R, "hand_over(slot, queue, '')", "redis.call('DEL', slot)"),
    "a lowered limit is forgotten": (semaphore.Slots, "_new_request", _asks_for_three),
    "a slot is handed to a waiter whose limit is lower": (R, "if slot <= tonumber(", "if 0 <= tonumber("),
    "a place in the queue is lost": (
        SLOT,
        "redis.call('ZADD', queue, 'NX', drawn, entry)",
        "redis.call('ZADD', queue, whole(now), entry)",
    ),
    "a fence is given twice": (SLOT, "fence = whole(last + 1)", "fence = whole(last)"),
    "who gives up gives back the first slot only": (scripts.UNDO, "for i = 4, #KEYS do", "for i = 4, 4 do"),
}
CACHE: dict[str, Defect] = {
    "every caller computes": (L, "local busy = holder and not mine and not overdue", "local busy = false"),
    "an invalidation ends no lease": (store, "_end_leases", lambda *args: iter(())),
    "an invalidation keeps the witness": (INV, "redis.call('DEL', witness)", ""),
    "an invalidation keeps the lease": (INV, "hand_over(lock, queue, '')", ""),
    "a lease that ended stores all the same": (S, "if not stands then", "if false then"),
    "a computed value is stored over a newer one": (S, "'NX', unpack(expiry)", "unpack(expiry)"),
    "a stored value wakes nobody": (S, "redis.pcall('PUBLISH', channel, id .. message)", ""),
    "the error of a computation wakes nobody": (
        S,
        "for i = 1, #entries, 2 do",
        "for i = 1, failed and 0 or #entries, 2 do",
    ),
    "a settled value leaves its lease": (S, "redis.call('DEL', lock, witness)", ""),
    "a stored value has no expiry": (S, "expire_ms == '' and {} or {'PX', expire_ms}", "{}"),
    "a leader wakes no followers": (single_flight, "close", lambda key, flight, wake=True: None),
    "followers share what was not stored": (
        S,
        "return old_digest == '' and not failed and redis.call('EXISTS', value_key) == 1 and 0 or -1",
        "return 1",
    ),
    "several refresh a stale value at once": (
        L,
        "if busy and has_old == '1' and join",
        "busy = busy and has_old ~= '1'\nif busy and has_old == '1' and join",
    ),
}
NESTED: dict[str, Defect] = {
    "a computation does not wait for another one": (ValueRequest, "is_own", property(lambda self: True)),
}
CELERY: dict[str, Defect] = {
    "a copy does not ask for the marker": (START, "local state = redis.call('GET', marker)", "local state = false"),
    "a quick start does not ask for the marker": (
        START,
        "queue, queue, marker, marker,",
        "queue, queue,",
    ),
    "an execution leaves no marker": (FINISH, "if after then\n  redis", "if false then\n  redis"),
    "a lost execution leaves no marker": (FINISH, "if after then\n  redis", "if after and was_held == 1 then\n  redis"),
    "the end of a late message is not confirmed": (
        FINISH,
        "  if after then\n",
        "  if after and after ~= 'done' then\n",
    ),
    "an execution does not take over from its message": (
        START,
        "values[1] and is_of(values[1], waiting_id) and",
        "false and",
    ),
    "anybody takes over from a message": (START, "and is_of(values[1], waiting_id) and", "and"),
    "a retry's lock is released": (
        FINISH,
        "elseif id ~= '' and keep_id ~= '' then",
        "elseif false then",
    ),
    "a refused message may run": (
        FINISH,
        "  if reply then\n",
        "  if false then\n",
    ),
    "a refused message is not claimed": (
        FINISH,
        "after = state .. ':' .. word",
        "after = nil",
    ),
    "a late call of an execution that has left counts": (
        FINISH,
        "ending = 'EEE-E'",
        "ending = 'EEEEE'",
    ),
    "an execution does not release": (FINISH, "hand_over(lock, queue, fence ~= '' and id or '')", ""),
    "a message runs with its own arguments": (START, "redis.call('SET', arguments, newest, 'PX', keep_ms)", ""),
    "a message runs with the arguments of another one": (
        execution_lock,
        "arguments_key",
        lambda keys, delivery: keys.held.removesuffix(b"held") + b"arguments:",
    ),
    "a duplicate is told that a message has its arguments which has begun": (
        PUBLISH,
        "    return 0\n",
        "    return 1\n",
    ),
    "only the first duplicate replaces arguments": (
        PUBLISH,
        "redis.call('SET', lock, string.sub(before",
        "local _ = string.find(value, 'newest') or redis.call('SET', lock, string.sub(before",
    ),
    "a message that waits on loses the arguments of its duplicates": (
        PUBLISH,
        "record = kept and",
        "record = false and",
    ),
    "a message that begins stays the one that waits": (START, "    elseif before then", "    elseif false then"),
}
PLANTED: dict[str, tuple[str, Defect]] = {
    name: (kind, defect)
    for kind, defects in (
        ("lock", LOCK | CALLS),
        ("rlock", RLOCK | CALLS_OF_RLOCKS),
        ("semaphore", SEMAPHORE),
        ("cache", CACHE | CALLS_OF_CACHES),
        ("nested", NESTED),
        ("celery", CELERY | CALLS_OF_TASKS),
        ("limits", LIMITS),
        ("quorum", QUORUM),
        ("replicas", REPLICAS),
        ("cluster", CLUSTER),
        ("asyncio", ASYNCIO),
    )
    for name, defect in defects.items()
}
"""The kind of histories that show each defect."""

NOT_FOUND: dict[str, tuple[str, Defect]] = {
    # An answer to a renewal must be overtaken by one to extend() between two checks of the rule.
    # Found by test_an_answer_that_comes_late_does_not_shorten_the_belief in core/test_lock.py.
    "an answer that comes late shortens the belief": ("lock", (Lease, "renewed", _earlier_deadline)),
    # The lock is half a second late, when the reservation has ended. Rule d allows two seconds after a fault.
    "who is gone is handed the lock": (
        "lock",
        (R, "redis.pcall('PUBLISH', channel, id) ~= 0", "redis.pcall('PUBLISH', channel, id) ~= -1"),
    ),
    # The lock of the running copy keeps it out, and later the processed marker does.
    "a copy that was published again runs, too": ("celery", (START, "if later and later > version or", "if")),
    # A computation must end within the millisecond between the steps of the delete: see cache/test_invalidation.py.
    "a delete does not delete what was stored in between": ("cache", (INV, "deletes and #KEYS or 0", "0")),
    # The flight in its process tells it, too. A value that was stored meanwhile is another one's: see
    # test_a_key_may_be_wanted_while_it_is_computed of tests/cache.
    "a computation waits for what it computes itself": (
        "nested",
        (ValueRequest, "is_own", property(lambda self: False)),
    ),
    # A value must be set while another process refreshes the stale one; few histories do both.
    "a refreshed value is stored over a newer one": ("cache", (S, "== old_digest then", "~= '' then")),
    # Who comes first overtakes one other waiter, after a fault: the rule of turns allows it then.
    # Found by test_after_an_unclaimed_reservation_those_who_come_back_are_served_in_their_order.
    "who is called back is not waited for": (
        "lock",
        (A, "reserve(lock, '', '', COME_BACK_MS)", "reserve(lock, '', '', 0)"),
    ),
    # Only callers with one given id can have a turn at two slots.
    "who has a slot keeps its turn at another one": (
        "semaphore",
        (SLOT, "if i ~= slot and value and is_of(value, id)", "if false and value and is_of(value, id)"),
    ),
    # The next call ends a reservation of more than a second, as after a step of the clock.
    "a reservation lasts for a minute": ("lock", (R, "local RESERVED_MS = 500 ", "local RESERVED_MS = 60000 ")),
    # It is not stored, but every waiter gets it by a message. Found by cache/test_get_or_set.py.
    "a value has no witness": ("cache", (L, "redis.call('SET', witness, fence, 'NX', 'PX', WITNESS_LIFE_MS)", "")),
    # It must come within the millisecond between the expiry of the slot and the first waiter's look.
    # Found by test_a_newcomer_does_not_overtake_a_waiter_at_a_free_slot in core/test_semaphore.py.
    "a newcomer takes a free slot while others wait": ("semaphore", (SLOT, "lock, lock, queue, queue,", "lock, lock,")),
    # Executions wait by publishing their message again, and not in the queue.
    "an execution that ends wakes nobody": (
        "celery",
        (FINISH, "hand_over(lock, queue, fence ~= '' and id or '')", "redis.call('DEL', lock)"),
    ),
    # Another duplicate must replace the arguments between a call whose reply is lost and its repetition.
    # Found by test_a_replacement_that_is_repeated_does_not_undo_a_newer_one in celery/test_replace.py.
    "a replacement that is repeated undoes a newer one": (
        "celery",
        (PUBLISH, "if redis.call('ZSCORE', receipts, receipt) then", "if false then"),
    ),
    **NOT_FOUND_IN_TASKS,
    **NOT_FOUND_IN_LIMITS,
}
"""What no rule sees in these histories, each with the reason."""
