"""A large reply is not parsed from its beginning for every few kilobytes that arrive."""

from __future__ import annotations

from types import SimpleNamespace

from django_redislock.core.wire import Wire


class Source:
    """As a socket from which everything has arrived."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads = 0

    def recv(self, size: int) -> bytes:
        self.reads += 1
        data, self.data = self.data[:size], self.data[size:]
        return data


def test_the_reads_of_a_large_reply_grow() -> None:
    item = b"$4\r\nlock\r\n"
    source = Source(b"*50000\r\n" + item * 50_000)
    assert Wire(SimpleNamespace(_sock=source)).receive() == [b"lock"] * 50_000
    assert source.reads <= 9  # 4 kB, then each time as much as there is
