"""Requests as they are packed, and replies as they arrive: at once, in pieces, several together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from redis.exceptions import InvalidResponse

from django_redislock.core.scripts import COUNT
from django_redislock.core.steps import Call
from django_redislock.core.wire import Wire, pack


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
    assert Wire(SimpleNamespace(_sock=source)).receive() == [b"lock"] * 50_000
    assert source.reads <= 9  # 4 kB, then each time as much as there is


@pytest.mark.parametrize("piece", range(1, 12))
def test_numbers_are_read_in_whatever_pieces_they_arrive(piece: int) -> None:
    numbers = [1_795_321_234_567_890, 1, -12, 0, 7]
    wire = Wire(SimpleNamespace(_sock=Source(b"".join(b":%d\r\n" % number for number in numbers), piece)))
    assert [wire.receive() for _ in numbers] == numbers


@pytest.mark.parametrize("reply", [b":1a\r\n", b":\r\n", b"1\r\n"])
def test_what_is_no_reply_is_told(reply: bytes) -> None:
    with pytest.raises(InvalidResponse):
        Wire(SimpleNamespace(_sock=Source(reply))).receive()


@pytest.mark.parametrize("many", [0, 1, 12])
def test_a_call_is_packed_as_any_command(many: int) -> None:
    parts = tuple(b"p" * number for number in range(many))
    assert pack(b"GET", b"k\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\nk\r\n\r\n"
    assert Call(COUNT, (b"k", *parts), parts).request == pack(
        b"EVALSHA", COUNT.sha, b"%d" % (1 + many), b"k", *parts, *parts
    )
