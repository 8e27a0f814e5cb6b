"""Requests as they are packed, and replies as they arrive: at once, in pieces, several together."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import pytest
from redis.exceptions import InvalidResponse

from django_redislock.core.driver import resp
from django_redislock.core.driver.connection import RespConnection
from django_redislock.core.driver.effects import ScriptCall
from django_redislock.core.driver.resp import Incomplete, Replies, pack
from django_redislock.core.scripts import COUNT


class Source:
    """As a socket from which everything has arrived, or a piece at a time."""

    def __init__(self, data: bytes, piece: int = 1 << 30) -> None:
        self.data = data
        self.piece = piece
        self.reads = 0

    def recv(self, size: int) -> bytes:
        self.reads += 1
        size = min(size, self.piece)
        data, self.data = self.data[:size], self.data[size:]
        return data


def test_the_reads_of_a_large_reply_grow() -> None:
    item = b"$4\r\nlock\r\n"
    source = Source(b"*50000\r\n" + item * 50_000)
    assert RespConnection(SimpleNamespace(_sock=source)).receive() == [b"lock"] * 50_000
    assert source.reads <= 9  # 4 kB, then each time as much as there is


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_each_part_of_a_reply_is_read_once_in_however_many_pieces_it_arrives(monkeypatch, size) -> None:
    """Errors are told from other parts, so they are counted here."""
    read, error = [], resp._error
    monkeypatch.setattr(resp, "_error", lambda line: read.append(line) or error(line))
    words = [f"ERR {number}" for number in range(100)]
    data = b"*102\r\n*0\r\n" + b"".join(b"-%b\r\n" % word.encode() for word in words) + b"*2\r\n$-1\r\n$2\r\n\r\n\r\n"
    replies, got = Replies(), []
    for at in range(0, 2 * len(data), size):
        replies.add((data + data)[at : at + size])
        with suppress(Incomplete):
            while not replies.empty:
                got.append(replies.next())
    assert replies.empty
    assert read == words * 2
    for first, *errors, last in got:
        assert first == []
        assert [str(error) for error in errors] == [word.removeprefix("ERR ") for word in words]
        assert last == [None, b"\r\n"]
    assert len(got) == 2


def test_what_was_read_of_a_large_reply_is_not_kept_twice() -> None:
    replies, piece = Replies(), 10_000
    data = b"*100\r\n" + b"$50000\r\n%b\r\n" % (b"x" * 50_000) * 100
    kept = []
    for at in range(0, len(data), piece):
        replies.add(data[at : at + piece])
        with suppress(Incomplete):
            assert replies.next() == [b"x" * 50_000] * 100
        kept.append(len(replies._data))
    assert max(kept) < 50_000 + 2 * piece
    assert kept[-1] == 0


@pytest.mark.parametrize("piece", range(1, 12))
def test_numbers_are_read_in_whatever_pieces_they_arrive(piece: int) -> None:
    numbers = [1_795_321_234_567_890, 1, -12, 0, 7]
    numbered = RespConnection(SimpleNamespace(_sock=Source(b"".join(b":%d\r\n" % number for number in numbers), piece)))
    assert [numbered.receive() for _ in numbers] == numbers


@pytest.mark.parametrize("reply", [b":1a\r\n", b":\r\n", b"1\r\n"])
def test_what_is_no_reply_is_told(reply: bytes) -> None:
    with pytest.raises(InvalidResponse):
        RespConnection(SimpleNamespace(_sock=Source(reply))).receive()


@pytest.mark.parametrize("many", [0, 1, 12])
def test_a_call_is_packed_as_any_command(many: int) -> None:
    parts = tuple(b"p" * number for number in range(many))
    assert pack(b"GET", b"k\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\nk\r\n\r\n"
    assert ScriptCall(COUNT, (b"k", *parts), parts).request == pack(
        b"EVALSHA", COUNT.sha, b"%d" % (1 + many), b"k", *parts, *parts
    )
