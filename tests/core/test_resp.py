"""Requests as they are encoded, and replies as they arrive: at once, in pieces, several together."""

from __future__ import annotations

import builtins
from contextlib import suppress
from itertools import combinations_with_replacement
from types import SimpleNamespace

import pytest
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError, TimeoutError

from django_redislock.core.driver import resp
from django_redislock.core.driver.connection import Connection
from django_redislock.core.driver.effects import ScriptCall
from django_redislock.core.driver.resp import Incomplete, NotPrimary, Replies, encode_command
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
    assert Connection(SimpleNamespace(_sock=source)).receive() == [b"lock"] * 50_000
    assert source.reads <= 9  # 4 kB, then each time as much as there is


BULK = b"$9\r\nin\r\ntwo.\n\r\n"
REPLIES = {
    "status": (b"+OK\r\n", b"OK"),
    "number": (b":1795321234567890\r\n", 1_795_321_234_567_890),
    "negative number": (b":-12\r\n", -12),
    "string": (BULK, b"in\r\ntwo.\n"),
    "empty string": (b"$0\r\n\r\n", b""),
    "null": (b"$-1\r\n", None),
    "array": (b"*3\r\n:1\r\n+OK\r\n$-1\r\n", [1, b"OK", None]),
    "empty array": (b"*0\r\n", []),
    "null array": (b"*-1\r\n", None),
    "arrays in an array": (b"*3\r\n*2\r\n" + BULK + b"*0\r\n*-1\r\n*1\r\n:7\r\n", [[b"in\r\ntwo.\n", []], None, [7]]),
    "error": (b"-ERR no such key\r\n", ResponseError("no such key")),
    "unknown script": (b"-NOSCRIPT Use EVAL.\r\n", NoScriptError("Use EVAL.")),
    "replica": (b"-READONLY Not here.\r\n", NotPrimary("READONLY Not here.")),
    "error in an array": (b"*2\r\n-WRONGTYPE It is\r\n:1\r\n", [ResponseError("WRONGTYPE It is"), 1]),
}


def comparable(reply: object) -> object:
    if isinstance(reply, list):
        return [comparable(item) for item in reply]
    return (type(reply), str(reply)) if isinstance(reply, Exception) else reply


class Pieces(Source):
    """A socket from which these pieces arrive, one by one; it may time out between them."""

    def __init__(self, pieces: list[bytes], times_out: bool) -> None:
        super().__init__(b"")
        self.pieces = pieces
        self.times_out = times_out

    def recv(self, size: int) -> bytes:
        if not self.data:
            if self.times_out and self.reads:
                self.reads = 0
                raise builtins.TimeoutError
            self.data = self.pieces.pop(0)
        return super().recv(size)


def read(connection: Connection) -> object:
    while True:
        with suppress(TimeoutError):
            try:
                return connection.receive()
            except ResponseError as error:
                return error
            except NotPrimary as error:
                return error


@pytest.mark.parametrize("times_out", [False, True])
@pytest.mark.parametrize("kind", REPLIES)
def test_every_kind_of_reply_is_read_however_it_is_split_in_three(kind: str, times_out: bool) -> None:
    """The number after it is read as well, whether it arrives together with the reply or not."""
    data, expected = REPLIES[kind]
    data += b":42\r\n"
    for first, second in combinations_with_replacement(range(len(data) + 1), 2):
        pieces = [piece for piece in (data[:first], data[first:second], data[second:]) if piece]
        connection = Connection(SimpleNamespace(_sock=Pieces(list(pieces), times_out)))
        assert comparable(read(connection)) == comparable(expected), pieces
        assert read(connection) == 42, pieces


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_each_part_of_a_reply_is_read_once_in_however_many_pieces_it_arrives(monkeypatch, size) -> None:
    """The parsing of errors is counted."""
    read, error = [], resp.error_of
    monkeypatch.setattr(resp, "error_of", lambda line: read.append(line) or error(line))
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
    numbered = Connection(SimpleNamespace(_sock=Source(b"".join(b":%d\r\n" % number for number in numbers), piece)))
    assert [numbered.receive() for _ in numbers] == numbers


@pytest.mark.parametrize("reply", [b":1a\r\n", b":\r\n", b"1\r\n"])
def test_data_that_is_no_reply_is_an_error(reply: bytes) -> None:
    with pytest.raises(InvalidResponse):
        Connection(SimpleNamespace(_sock=Source(reply))).receive()


@pytest.mark.parametrize("many", [0, 1, 12])
def test_a_call_is_encoded_as_any_command(many: int) -> None:
    parts = tuple(b"p" * number for number in range(many))
    assert encode_command(b"GET", b"k\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\nk\r\n\r\n"
    assert ScriptCall(COUNT, (b"k", *parts), parts).request == encode_command(
        b"EVALSHA", COUNT.sha, b"%d" % (1 + many), b"k", *parts, *parts
    )
