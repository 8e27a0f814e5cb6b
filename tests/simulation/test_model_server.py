"""The model of a server answers as a real one does: the same calls get the same replies, and leave the same behind."""

from __future__ import annotations

import random
from collections.abc import Generator
from time import monotonic
from typing import Any

import pytest
import redis

from django_redislock.cache.lease.obtain import LEASE
from django_redislock.cache.lease.store import INVALIDATE, SETTLE, digest
from django_redislock.celery.execution_lock import FINISH, PUBLISH, START
from django_redislock.core import scripts
from django_redislock.core.keys import counts_key, lock_keys, slots_keys, undone_key, witness_key
from django_redislock.core.lease import notes_key
from tests.simulation.model_server import ModelServer

CHANNELS = [b"", b"one", b"two"]
SOON = 2000
"""Milliseconds. What would end so soon is deleted before a call: while a slow machine carries it out, it would end on
one side only. A lock that was handed over is kept for five seconds."""
KINDS = ["acquire", "acquire", "acquire", "release", "undo", "renew", "reset", "read", "queue"]


def note_of(keys: Any, chance: random.Random, id: bytes) -> bytes:
    """Return the key of the note about one of a few attempts by this id."""
    return undone_key(keys, id + chance.choice([b" 1", b" 2", b" 3"]))


def _lock_steps(chance):
    """Draw script calls on two locks by three ids."""
    ids = [b"x", b"y", b"z"]
    tickets = {}
    while True:
        name = chance.choice([b"a", b"b"])
        keys, id, channel = lock_keys("redislock", name.decode()), chance.choice(ids), chance.choice(CHANNELS)
        life = b"%d" % chance.choice([60_000, 90_000])
        match chance.choice(KINDS):
            case "acquire":
                joins = b"1" if channel else b"0"
                ticket = tickets.get((name, id, channel), b"")
                more = (keys.receipts,) if chance.random() < 0.3 else ()
                more += (counts_key(keys),) if ticket else ()
                reply = yield (
                    scripts.ACQUIRE,
                    (*keys[:4], note_of(keys, chance, id), *more),
                    (id, life, name, b'{"host":"h","expire":60.0}', channel, joins, ticket),
                )
                tickets[name, id, channel] = reply[1] if isinstance(reply, list) else b""
            case "undo":
                note = note_of(keys, chance, id)
                args = (id, name, channel, b"", b"id " + id, *chance.choice([(), (b"no mark",), (b"host",)]))
                yield scripts.UNDO, (keys.lock, keys.held, keys.queue, keys.receipts, note), args
            case "release":
                args = (id, name, channel, chance.choice([b"", b"1"]), chance.choice([b"1", b"1 mark", b"id " + id]))
                yield scripts.RELEASE, (keys.lock, keys.held, keys.queue, keys.receipts), args
            case "renew":
                yield scripts.RENEW, (keys.lock, keys.held), (chance.choice([b"0", b"1"]), id, life, name)
            case "reset":
                call_id = b"%d" % chance.randrange(3)
                notes = notes_key(keys)
                reset = (*keys[:2], keys.queue, keys.receipts, notes, witness_key(keys))
                recalls = chance.choice([(), (b"1",)])
                yield scripts.RESET, reset, (name, b"", call_id, b"olga\nwhy", *recalls)
            case "read":
                yield scripts.READ, (keys.lock, keys.queue), ()
            case "queue":
                yield scripts.QUEUE, (keys.queue,), (b"10",)


def _cache_steps(chance: random.Random) -> Generator[Any, Any, None]:
    """Draw script calls on two values by three ids."""
    ids, fences, values = [b"x", b"y", b"z"], {}, [b"one", b"two", b""]
    while True:
        key, id, channel = chance.choice([b"a", b"b"]), chance.choice(ids), chance.choice(CHANNELS)
        name = b"cache:" + key
        keys = lock_keys("redislock", name.decode())
        tag = keys.held.removesuffix(b"held")
        of_value = (key, witness_key(keys), tag + b"era")
        failures = tag + b"failed:" + name
        old = digest(chance.choice(values)) if chance.random() < 0.3 else b""
        match chance.choice(["lease", "lease", "settle", "invalidate", "release"]):
            case "lease":
                others = (b"cache:c",) if chance.random() < 0.2 else ()
                flags = (channel, b"1" if channel else b"0", old, b"1" if old else b"0")
                lease_keys = (*keys[:4], *of_value, note_of(keys, chance, id), failures)
                reply = yield LEASE, lease_keys, (id, b"60000", name, b"{}", *flags, *others)
                if isinstance(reply, list) and reply[0] == b"compute":
                    fences[name] = reply[1]
            case "settle":
                expire = chance.choice([b"", b"90000", b"90000", b"0", b"!"])
                args = (
                    fences.get(name, b"1"),
                    name,
                    expire,
                    old,
                    b"",
                    chance.choice(values),
                    chance.choice([b"0", b"1"]),
                )
                yield SETTLE, (*keys[:2], keys.queue, *of_value, counts_key(keys), failures), args
            case "invalidate":
                deletes = chance.choice([b"0", b"1"])
                yield INVALIDATE, (keys.lock, keys.held, keys.queue, of_value[1], key), (deletes, name)
            case "release":
                args = (id, name, channel, fences.get(name, b""), fences.get(name, b"id " + id))
                yield scripts.RELEASE, (keys.lock, keys.held, keys.queue, keys.receipts), args


def _task_steps(chance: random.Random) -> Generator[Any, Any, None]:
    """Draw script calls of two messages and their copies on one lock."""
    name, fences, publications = b"celery:a", {}, set[bytes]()
    keys = lock_keys("redislock", name.decode())
    while True:
        message = chance.choice([b"m1", b"m2"])
        id, version = message + b":0:" + chance.choice([b"x", b"y"]), chance.choice([b"0", b"0", b"1"])
        copies, marker = message + b":0", keys.held.removesuffix(b"held") + b"done:" + message
        match chance.choice(["start", "start", "leave", "claim", "done", "publish", "publish", "replace"]):
            case "start":
                channel = chance.choice(CHANNELS)
                args = (id, b"60000", name, b"{}", channel, b"1" if channel else b"0", b"")
                place = lock_keys("redislock", "celery-queue:a")
                of_place: tuple[bytes, ...] = ()
                if chance.random() < 0.5:
                    of_place = place.lock, place.queue, keys.held.removesuffix(b"held") + b"arguments:" + message
                reply = yield (
                    START,
                    (*keys[:4], marker, *of_place, note_of(keys, chance, id)),
                    (*args, b"0", message, b"1", copies, version, (of_place and place.name) or b"", b"90000", b"1"),
                )
                if isinstance(reply, bytes):
                    fences[id] = reply.split()[0]
            case "leave":
                kept = (message, b"90000", b"{}") if chance.random() < 0.3 else (b"", b"0", b"")
                verb = chance.choice([b"done", b"ending", b"keep"])
                args = (verb, b"90000", id, name, fences.get(id, b"1"), *kept)
                yield FINISH, (keys.lock, keys.held, keys.queue, keys.receipts, marker), args
            case "claim":
                place, holder = lock_keys("redislock", "celery-queue:a"), chance.choice([b"", message])
                args = (b"refuse", b"90000", holder, place.name, *[b""] * 4, version, b"c1")
                yield (
                    FINISH,
                    (place.lock, place.held, place.queue, place.receipts, marker, keys.lock),
                    (*args, chance.choice([b"ending", b"done"]), copies),
                )
            case "done":
                args = (chance.choice([b"done", b"again"]), b"90000", *[b""] * 6)
                yield FINISH, (marker,), (*args, chance.choice([b"1", b"2"]), chance.choice([b"", b"1"]))
            case "publish":
                where = chance.choice([keys, lock_keys("redislock", "celery-queue:a")])
                verb, newest = chance.choice([b"new", b"known", b"again"]), chance.choice([b"", b',"newest":"1234"'])
                args = (verb, message, b"60000", where.name, b'{"a":1%b}' % newest)
                of_message = where.receipts, keys.held.removesuffix(b"held") + b"arguments:" + message
                reply = yield PUBLISH, (*where[:4], note_of(keys, chance, message), counts_key(keys), *of_message), args
                if isinstance(reply, int):
                    publications.add(b"%d" % abs(reply))
            case "replace":
                place = lock_keys("redislock", "celery-queue:a")
                fence = chance.choice(sorted(publications) or [b"1"])
                args = (b"replace", message, b"", b"", b"", fence, b"5678", chance.choice([b"r1", b"r2", b"r3"]))
                yield PUBLISH, (place.lock, place.receipts), args


def _slot_steps(chance: random.Random) -> Generator[Any, Any, None]:
    """Draw script calls of executions and other callers on a semaphore of two or three slots."""
    keys = slots_keys("redislock", "a", 3)
    fences: dict[bytes, tuple[bytes, bytes]] = {}
    while True:
        message, limit, channel = chance.choice([b"m1", b"m2", b"m3"]), chance.choice([2, 3]), chance.choice(CHANNELS)
        id = b"%b:0:%b/%d" % (message, chance.choice([b"x", b"y"]), limit)
        copies, note = message + b":0", note_of(keys, chance, id)
        several = (*keys[:4], *keys.others[: limit - 1], note)
        args = (id, b"60000", keys.name, b"{}", channel, b"1" if channel else b"0", b"", b"%d" % limit)
        slot, fence = fences.get(id, (keys.slot(1).lock, b"1"))
        match chance.choice(["acquire", "start", "start", "leave", "claim", "release", "undo"]):
            case "acquire" | "start" as what:
                of_message = (message, b"1", copies, b"0", b"", b"0", b"") if what == "start" else ()
                if of_message:
                    marker = keys.held.removesuffix(b"held") + b"done:" + copies
                    several = (*keys[:4], marker, *keys.slots(2), note)
                reply = yield START if of_message else scripts.ACQUIRE_SLOT, several, (*args, *of_message)
                if isinstance(reply, bytes):
                    granted, number, *_ = reply.removeprefix(b"-").split()
                    fences[id] = keys.slot(int(number)).lock, granted
            case "leave":
                marker = keys.held.removesuffix(b"held") + b"done:" + copies
                verb = chance.choice([b"done", b"keep"])
                args = (verb, b"90000", id, keys.name + slot[-1:], fence, b"", b"0", b"")
                yield FINISH, (slot, keys.held, keys.queue, keys.receipts, marker), args
            case "claim":
                marker = keys.held.removesuffix(b"held") + b"done:" + copies
                args = (b"refuse", b"90000", b"", keys.name, *[b""] * 4, b"0", b"c1", b"ending", copies)
                of_lock = keys.lock, keys.held, keys.queue, keys.receipts
                yield FINISH, (*of_lock, marker, keys.lock, *keys.slots(2)), args
            case "undo":
                args = (id, keys.name, channel, b"", b"id " + id)
                yield scripts.UNDO, (keys.lock, keys.held, keys.queue, keys.receipts, note, *keys.others), args
            case "release":
                args = (id, keys.name, channel, chance.choice([b"", fence]), b"id " + id)
                yield scripts.RELEASE, (keys.lock, keys.held, keys.queue, keys.receipts, *keys.others), args


STEPS = {"lock": _lock_steps, "cache": _cache_steps, "tasks": _task_steps, "slots": _slot_steps}


def _alike(mine, real, late=0.0):
    """Whether two replies are the same, but for so many milliseconds in what is left of a life."""
    if isinstance(mine, bytes) and isinstance(real, bytes) and len(mine) == len(real) == 13 and mine.isdigit():
        return _alike(int(mine), int(real), late)
    if isinstance(mine, list) and isinstance(real, list):
        return len(mine) == len(real) and all(_alike(*pair, late) for pair in zip(mine, real, strict=True))
    if isinstance(mine, dict) and isinstance(real, dict):
        return mine.keys() == real.keys() and all(_alike(mine[key], real[key], late) for key in mine)
    if isinstance(mine, bytes) and isinstance(real, bytes) and b" " in mine and not mine.startswith(b"recalled"):
        return _alike(*([*map(int, text.replace(b";", b" ").split())] for text in (mine, real)), late)
    if isinstance(mine, (int, float)) and isinstance(real, (int, float)) and abs(mine) > 100:
        return abs(mine - real) <= late
    return mine == real


def _reply_of(call):
    """Return the reply, or the words of an error: of a call whose attempt was given up before."""
    try:
        return call()
    except redis.ResponseError as error:
        return str(error).removeprefix("ERR ")


def _content(client):
    found = {}
    for key in client.scan_iter():
        kind = client.type(key)
        if kind == b"string":
            found[key] = client.get(key)
        elif kind == b"zset":
            found[key] = dict(client.zrange(key, 0, -1, withscores=True))
        else:
            found[key] = client.hgetall(key)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("seed", range(6))
def test_the_model_answers_as_a_server_does(client, listen, seed, kind):
    """The same calls, with the time written into them, get the same replies and leave the same behind.

    Lives may differ by as many milliseconds as the slowest call took, because the server's own clock goes on meanwhile.
    """
    listen("one")
    chance, began = random.Random(seed), monotonic()
    time = [1_700_000_000_000_000]
    model = ModelServer(lambda: time[0])
    model.subscribers[b"one"] = {"somebody": lambda message: None}
    steps = STEPS[kind](chance)
    call = next(steps)
    late = 2.0
    for _ in range(150):
        started = monotonic()
        time[0] = max(time[0] + 1, 1_700_000_000_000_000 + int(1_000_000 * (started - began)))
        for key in [key for key, end in model.ends.items() if end < time[0] / 1000 + SOON]:
            for each in (model.command, client.execute_command):
                each(b"DEL", key)
        script, keys, args = call
        given = b"{'%d', '%d'}" % divmod(time[0], 1_000_000)
        text = script.text.replace(b"redis.call('TIME')", given)
        assert given in text or b"now_us()" not in script.text
        mine = _reply_of(lambda: model.run(script.text, keys, args))  # noqa: B023 - called at once
        real = _reply_of(lambda: client.eval(text, len(keys), *keys, *args))  # noqa: B023
        late = max(late, 1000 * (monotonic() - started) + 2)
        assert _alike(mine, real, late), (script, keys, args)
        there = _content(client)
        model.live_keys()
        assert model.data.keys() == there.keys()
        for key, value in there.items():
            assert _alike(model.data[key], value, late), (key, model.data[key], value, late)
        for key in there:
            assert (client.pttl(key) == -1) == (key not in model.ends)
            if key in model.ends:
                asked = monotonic()
                left = client.pttl(key)
                now = 1_700_000_000_000 + 1000 * (monotonic() - began)
                more = model.ends[key] - now - max(0, left)  # -2: it has ended meanwhile, perhaps long ago
                assert (more if left == -2 else abs(more)) <= late + 1000 * (monotonic() - asked)
        call = steps.send(real)


def test_the_model_refuses_what_a_server_refuses(client):
    model = ModelServer(lambda: 0)
    client.set("a", "text")
    model.command(b"SET", b"a", b"text")
    for command in (("ZCARD", "a"), ("HMGET", "a", "b"), ("PEXPIRE", "a", "soon"), ("RENAME", "b", "c")):
        with pytest.raises(redis.ResponseError) as theirs:
            client.execute_command(*command)
        with pytest.raises(redis.ResponseError) as ours:
            model.command(*(word.encode() for word in command))
        assert str(ours.value).split()[-3:] == str(theirs.value).split()[-3:]
