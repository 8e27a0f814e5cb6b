from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

import redis

from .clients import CLUSTER, nodes_at, url_through
from .waiting import wait_until


@dataclass(eq=False)
class HeldReply:
    """A reply that is held back until the test lets it go."""

    containing: bytes
    held: threading.Event = field(default_factory=threading.Event)
    """Set when the proxy has the reply: the server has executed the request."""
    let_go: threading.Event = field(default_factory=threading.Event)
    """Set it to bring the reply to the client."""

    def let_go_after(self, act: Callable[[], object]) -> None:
        """Wait until the proxy has the reply, call the function, and let the reply go when that returns."""
        try:
            assert self.held.wait(30)
            act()
        finally:
            self.let_go.set()


@dataclass(eq=False)
class Link:
    """One client's connection and the one to the server behind it."""

    client: socket.socket
    server: socket.socket
    target: tuple[str | None, int | None]
    drop: bool = False
    """The next bytes from the server are swallowed and the connection is closed."""
    to_hold: HeldReply | None = None
    """The next bytes from the server are held back."""
    damaged: bool = False
    """A black hole swallowed bytes of it."""
    subscribed: bool = False
    """The client has subscribed over it."""
    forgotten: bool = False
    """It is left open towards the client, although the server has closed it."""
    tail: bytes = field(default=b"", repr=False)
    """The end of what the client sent last, since a request may arrive in pieces."""

    def close(self) -> None:
        for sock in (self.client, self.server):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
            sock.close()


@dataclass(eq=False)
class LateRequest:
    """A request that is brought to the server after its connection was closed towards the client."""

    containing: bytes
    held: threading.Event = field(default_factory=threading.Event)
    """Set when the proxy has the request, and has closed the connection."""
    deliver: threading.Event = field(default_factory=threading.Event)
    """Set it to bring the request to the server."""
    delivered: threading.Event = field(default_factory=threading.Event)
    """Set when the server has read all of it, and has closed the connection, too."""


def commands_in(data: bytes) -> Iterator[list[bytes]]:
    """Yield the commands of a piece of a client's stream that begins and ends with whole ones."""
    while data:
        head, _, data = data.partition(b"\r\n")
        parts = []
        for _ in range(int(head[1:])):
            size, _, data = data.partition(b"\r\n")
            parts.append(data[: int(size[1:])])
            data = data[int(size[1:]) + 2 :]
        yield parts


class Proxy:
    """A TCP proxy before a server or each node of a Cluster, that loses replies, delays, swallows or cuts on demand.

    Use it in a with statement and connect to `url`.
    """

    def __init__(self, target_url: str) -> None:
        target = urlsplit(target_url)
        self._of_cluster = target_url.startswith(CLUSTER)
        ports = nodes_at(target_url) if self._of_cluster else [target.port]
        self._targets = [(target.hostname, port) for port in ports]
        self._path = target.path
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._flowing = threading.Event()
        self._flowing.set()
        self._swallowing = False
        self._delay = 0.0
        self._deaf = False
        self.unheard = 0
        """Connections so far that came when it was deaf."""
        self._late: LateRequest | None = None
        self._to_hold: HeldReply | None = None
        self._to_drop = 0
        self._containing = b""
        self._drops_message = False
        self.dropped = 0
        """Replies and messages dropped so far."""
        self._refusal: tuple[bytes, tuple[bytes, ...]] | None = None
        self.refused = 0
        """Requests answered in place of the server so far."""
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in ports]
        for listener in self._listeners:
            listener.settimeout(0.1)
        self._doors: list[int] = [listener.getsockname()[1] for listener in self._listeners]
        self.port = self._doors[0]
        self._acceptors = [self._thread(self._accept, number) for number in range(len(ports))]

    @property
    def url(self) -> str:
        if self._of_cluster:
            return url_through({port: door for (_, port), door in zip(self._targets, self._doors, strict=True)})
        return f"redis://127.0.0.1:{self.port}{self._path}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Faults

    def drop_next_reply(self, n: int = 1, containing: bytes = b"") -> None:
        """Let the server run the next n requests with these bytes, but close the connection instead of replying."""
        with self._lock:
            self._to_drop, self._containing = n, containing

    def drop_next_message(self) -> None:
        """Swallow the next message to a subscriber; the connection stays open."""
        self._drops_message = True

    def delay_replies(self, seconds: float) -> None:
        """Hold back what comes from the server for so long; 0 ends it."""
        self._delay = seconds

    def hold_next_reply(self, containing: bytes) -> HeldReply:
        """Let the server run the next request with these bytes, but hold back the reply until the test lets it go."""
        self._to_hold = held = HeldReply(containing)
        return held

    def deliver_late(self, containing: bytes) -> LateRequest:
        """Close the connection of the next request with these bytes; the server gets it only when the test says so."""
        self._late = late = LateRequest(containing)
        return late

    def forget_subscriptions(self) -> None:
        """Let the connections of subscribers die as in a router that forgot them.

        The server has closed them, and the client hears nothing.
        """
        with self._lock:
            links = [link for link in self._links if link.subscribed]
        self._forget(links)

    def forget_connections(self) -> None:
        """Let all connections that are open now die in the same way."""
        with self._lock:
            links = list(self._links)
        self._forget(links)

    def _forget(self, links: list[Link]) -> None:
        for link in links:
            link.subscribed, link.forgotten = False, True
            with suppress(OSError):  # it is closed already
                link.server.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def refusing(self, reply: str, *containing: bytes) -> Iterator[None]:
        """Answer requests with one of these bytes by an error in place of the server; "" closes their connections."""
        self._refusal = f"-{reply}\r\n".encode() if reply else b"", containing
        try:
            yield
        finally:
            self._refusal = None

    def deafen(self) -> None:
        """Let connections that come from now on wait for ever; those that are there are not concerned."""
        self._deaf = True

    def black_hole(self) -> None:
        """Swallow everything in both directions and keep the connections open, until heal()."""
        self._swallowing = True

    def stall(self) -> None:
        """Forward nothing, but keep it: heal() delivers it late, as the network does after an interruption."""
        self._flowing.clear()

    def heal(self) -> None:
        """End stall(), black_hole() and deafen(); a connection that lost bytes is cut, because its stream is broken."""
        self._swallowing = self._deaf = False
        self._flowing.set()
        self._cut(damaged_only=True)

    def lead_to(self, target_url: str) -> None:
        """Lead all connections to another server from now on, as a failover does."""
        self.lead_new_to(target_url)
        self.cut()

    def lead_new_to(self, target_url: str) -> None:
        """Lead new connections to another server; the open ones stay where they are, as when an address moves."""
        target = urlsplit(target_url)
        self._targets = [(target.hostname, target.port)]

    def cut(self) -> None:
        """Close every connection; new ones are welcome."""
        self._cut(damaged_only=False)

    def _cut(self, damaged_only: bool) -> None:
        with self._lock:
            links = [link for link in self._links if link.damaged or not damaged_only]
        for link in links:
            link.close()

    def close(self) -> None:
        self._closed.set()
        self._flowing.set()
        for acceptor in self._acceptors:
            acceptor.join()
        for listener in self._listeners:
            listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(timeout=10)

    # Forwarding

    def _thread(self, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True, name="proxy")
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self, number: int) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listeners[number].accept()
            except TimeoutError:
                continue
            except OSError:  # it is closed, or the process may open nothing: the cells of a Cluster failed ever after
                self._closed.wait(0.01)
                continue
            target = self._targets[number]
            try:
                server = socket.create_connection(target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            link = Link(client, server, target)
            with self._lock:
                self._links.add(link)
            self._thread(self._pump, link, link.client, link.server)
            self._thread(self._pump, link, link.server, link.client)

    def _pump(self, link: Link, source: socket.socket, sink: socket.socket) -> None:
        try:
            if self._deaf and source is link.client:
                self.unheard += 1
                self._closed.wait()
            while data := source.recv(65536):
                self._flowing.wait()
                if self._swallowing:
                    link.damaged = True
                    continue
                if source is link.client:
                    if self._refuses(link, data):
                        continue
                    self._note_request(link, data)
                elif link.drop:
                    self.dropped += 1
                    return
                elif link.to_hold is not None:
                    self._hold(link.to_hold)
                    link.to_hold = None
                elif self._drops_message and link.subscribed and b"\nmessage\r\n" in data:
                    self._drops_message = False
                    self.dropped += 1
                    continue
                elif self._delay:
                    self._closed.wait(self._delay)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            if not link.forgotten:
                link.close()
                with self._lock:
                    self._links.discard(link)

    def _refuses(self, link: Link, data: bytes) -> bool:
        refusal = self._refusal
        if refusal is None or not any(part in data for part in refusal[1]):
            return False
        self.refused += 1
        if not refusal[0]:
            raise OSError("It is closed.")
        link.client.sendall(refusal[0] * sum(1 for _ in commands_in(data)))
        return True

    def _hold(self, reply: HeldReply) -> None:
        reply.held.set()
        while not (reply.let_go.wait(0.1) or self._closed.is_set()):
            pass

    def _note_request(self, link: Link, data: bytes) -> None:
        link.subscribed |= b"\nSUBSCRIBE" in data
        with self._lock:
            late = self._late if self._late is not None and self._late.containing in data else None
            if late is not None:
                self._late = None
            if self._to_hold is not None and self._to_hold.containing in data:
                link.to_hold, self._to_hold = self._to_hold, None
            if self._to_drop and self._containing in link.tail + data:
                self._to_drop -= 1
                link.drop = True
            link.tail = data[-len(self._containing) :] if self._containing else b""
        if late is not None:
            self._bring_late(late, link, data)
            raise OSError("All is said on this connection.")

    def _bring_late(self, late: LateRequest, link: Link, data: bytes) -> None:
        link.client.shutdown(socket.SHUT_WR)
        while more := link.client.recv(65536):
            data += more
        late.held.set()
        late.deliver.wait(30)
        port = link.server.getsockname()[1]
        link.server.sendall(data)
        with suppress(OSError):  # the answer found nobody, and closed it
            link.server.shutdown(socket.SHUT_WR)
        with redis.Redis(*link.target) as client:
            wait_until(lambda: not any(found["addr"].endswith(f":{port}") for found in client.client_list()))
        late.delivered.set()
