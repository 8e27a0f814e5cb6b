"""The simulated world: its server answers as a real one does, nothing goes wrong in it, and what is planted is found."""

from __future__ import annotations

import logging
import random

import pytest
import redis

from django_redislock.core import scripts
from django_redislock.core.keys import lock_keys, witness_key
from django_redislock.core.loss import notes_key
from tests.simulation.locks import History, Violation, explore
from tests.simulation.model_server import ModelServer
from tests.simulation.planted import NOT_FOUND, PLANTED

SEEDS = 400


@pytest.fixture(autouse=True)
def _quiet():
    """A history is no news to anybody: it has its own story."""
    log = logging.getLogger("django_redislock")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


def test_nothing_goes_wrong():
    assert explore(range(SEEDS)) == SEEDS


def test_a_history_is_repeated_by_its_seed():
    first, second = History(3), History(3)
    for history in (first, second):
        history.run()
    assert first.world.story == second.world.story
    assert len(first.world.story) > 3


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(name):
    with PLANTED[name](), pytest.raises(Violation):
        explore(range(SEEDS))


@pytest.mark.parametrize("name", NOT_FOUND)
def test_a_defect_that_is_not_found_yet_can_still_be_planted(name):
    with NOT_FOUND[name]():
        explore(range(1))


CHANNELS = [b"", b"one", b"two"]
KINDS = ["acquire", "acquire", "acquire", "release", "renew", "reset", "read", "queue"]


def _steps(chance):
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
                reply = yield (
                    scripts.ACQUIRE,
                    (*keys[:4], *more),
                    (id, life, name, b"{}", channel, joins, ticket),
                )
                tickets[name, id, channel] = reply[1] if isinstance(reply, list) else b""
            case "release":
                args = (id, name, channel, chance.choice([b"", b"1"]))
                yield scripts.RELEASE, (keys.lock, keys.held, keys.queue, keys.receipts), args
            case "renew":
                yield scripts.RENEW, (keys.lock, keys.held), (chance.choice([b"0", b"1"]), id, life, name)
            case "reset":
                call_id = b"%d" % chance.randrange(3)
                notes = notes_key(keys, name.decode())
                reset = (*keys[:2], keys.queue, keys.receipts, notes, witness_key(keys, name.decode()))
                yield scripts.RESET, reset, (name, b"", call_id, b"olga\nwhy")
            case "read":
                yield scripts.READ, (keys.lock, keys.queue), ()
            case "queue":
                yield scripts.QUEUE, (keys.queue,), (b"10",)


def _alike(mine, real):
    """Whether two replies are the same, but for the milliseconds that are left of a life."""
    if isinstance(mine, list) and isinstance(real, list):
        return len(mine) == len(real) and all(map(_alike, mine, real))
    if isinstance(mine, dict) and isinstance(real, dict):
        return mine.keys() == real.keys() and all(_alike(mine[key], real[key]) for key in mine)
    if isinstance(mine, bytes) and isinstance(real, bytes) and b" " in mine:
        return _alike([*map(int, mine.split())], [*map(int, real.split())])
    if isinstance(mine, (int, float)) and isinstance(real, (int, float)) and mine > 100:
        return abs(mine - real) < 20_000
    return mine == real


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
@pytest.mark.parametrize("seed", range(8))
def test_the_model_answers_as_a_server_does(client, listen, seed):
    """The same calls, with the time written into them, get the same replies and leave the same behind."""
    listen("one")
    chance = random.Random(seed)
    time = [1_700_000_000_000_000]
    model = ModelServer(lambda: time[0])
    model.subscribers[b"one"] = {"somebody": lambda message: None}
    steps = _steps(chance)
    call = next(steps)
    for _ in range(150):
        time[0] += chance.choice([1, 7, 1000])
        script, keys, args = call
        given = b"{'%d', '%d'}" % divmod(time[0], 1_000_000)
        text = script.text.replace(b"redis.call('TIME')", given)
        assert given in text or b"now_us()" not in script.text
        mine = model.run(script.text, keys, args)
        real = client.eval(text, len(keys), *keys, *args)
        assert _alike(mine, real), (script, keys, args)
        there = _content(client)
        model.live_keys()
        assert model.data.keys() == there.keys()
        assert all(_alike(model.data[key], there[key]) for key in there)
        for key in there:
            assert (client.pttl(key) == -1) == (key not in model.ends)
            if key in model.ends:
                assert abs(model.ends[key] - time[0] // 1000 - client.pttl(key)) < 20_000
        call = steps.send(real)


def test_the_model_refuses_what_a_server_refuses(client):
    model = ModelServer(lambda: 0)
    client.set("a", "text")
    model.command(b"SET", b"a", b"text")
    for command in (("ZCARD", "a"), ("HGET", "a", "b"), ("PEXPIRE", "a", "soon"), ("RENAME", "b", "c")):
        with pytest.raises(redis.ResponseError) as theirs:
            client.execute_command(*command)
        with pytest.raises(redis.ResponseError) as ours:
            model.command(*(word.encode() for word in command))
        assert str(ours.value).split()[-3:] == str(theirs.value).split()[-3:]
