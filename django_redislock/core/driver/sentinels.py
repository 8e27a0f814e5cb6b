"""The search for the primary of a service: all its Sentinels are asked side by side.

redis-py asks one after another, and waits for each as long as its client's timeouts and retries allow. Here a dead
Sentinel costs nothing while most of the others answer, and the newest configuration counts (Redis' documentation,
"Sentinel client spec": its configuration epoch), so that a Sentinel on the wrong side of a partition is outvoted.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

from redis.exceptions import AuthenticationError, ConnectionError, RedisError, ResponseError
from redis.sentinel import Sentinel

from ..clock import monotonic
from . import os_threads
from .connection import Connection, new_connection
from .effects import Pipeline, without_frames
from .kinds import forced_host, identity, inherited_settings, settings_of

ASK_FOR = 0.5
"""Seconds."""


class UnknownService(ResponseError):
    """The Sentinels answer, and know no service of that name."""


class Primary(NamedTuple):
    """The answer of one Sentinel: the later epoch is right."""

    epoch: int
    address: tuple[str, int]


class SentinelService:
    """A service that Sentinels watch. redis-py's connections get it as their pool, and ask it where to connect to.

    Two are equal when their connections would ask the same Sentinels for the same service.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.is_master = pool.is_master
        self.check_connection = pool.check_connection
        self.rotate_slaves = pool.rotate_slaves
        pools = [sentinel.connection_pool for sentinel in pool.sentinel_manager.sentinels]
        limits = {"socket_timeout": ASK_FOR, "socket_connect_timeout": ASK_FOR, "protocol": 2}
        self._sentinels = [(each.connection_class, inherited_settings(settings_of(each)) | limits) for each in pools]
        # Their order changes in redis-py: the one that answered comes first.
        sentinels = frozenset(identity(list(each)) for each in self._sentinels)
        self._identity: Hashable = sentinels, pool.service_name, pool.is_master, pool.check_connection

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SentinelService) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def get_master_address(self) -> tuple[str, int]:
        """Return host and port of the primary, after `ASK_FOR` seconds at most.

        Raises ConnectionError when no Sentinel knows the primary at the moment: another try may succeed. Raises
        ResponseError when no try can succeed.
        """
        manager, name = self._pool.sentinel_manager, self._pool.service_name
        if type(manager).discover_master is not Sentinel.discover_master:  # a subclass with a search of its own
            return manager.discover_master(name)  # type: ignore[no-any-return]
        answers: list[Primary | RedisError | None] = []
        answered = os_threads.event()
        give_up = monotonic() + ASK_FOR
        for kind, settings in self._sentinels:
            ask = partial(_ask, kind, settings, name, manager.min_other_sentinels, answers, answered)
            try:
                os_threads.start_here(ask, "redislock-sentinel")
            except RuntimeError:  # no further thread can be started
                ask()
        while not self._is_decided(answers) and (left := give_up - monotonic()) > 0:
            answered.wait(left)
        found = [answer for answer in answers if isinstance(answer, Primary)]
        if not found:
            raise self._failure(answers)
        host, port = max(found).address
        return forced_host(manager) or host, port

    def _is_decided(self, answers: list[Primary | RedisError | None]) -> bool:
        """Return whether a further answer would change nothing, or nearly so."""
        replies = [answer for answer in answers if not isinstance(answer, RedisError)]
        most = len(replies) > len(self._sentinels) // 2
        return len(answers) == len(self._sentinels) or (most and any(replies))

    def _failure(self, answers: list[Primary | RedisError | None]) -> RedisError:
        name, number = self._pool.service_name, len(self._sentinels)
        errors = [answer for answer in answers if isinstance(answer, RedisError)]
        unknown = sum(isinstance(error, UnknownService) for error in errors)
        if unknown > number // 2:
            return UnknownService(
                f"{unknown} of {number} Sentinels know no service {name!r}: give the name of their line 'sentinel "
                "monitor NAME ...', which SENTINEL MASTERS lists."
            )
        if None in answers:
            return ConnectionError(
                f"The Sentinels know no primary of {name!r} that is up. A failover may be under way; if it does not "
                "end, read the log of the Sentinels."
            )
        reasons = {f"{type(error).__name__}: {error}" for error in errors} or {f"no answer within {ASK_FOR:g} s"}
        refused = [error for error in errors if isinstance(error, (ResponseError, AuthenticationError))]
        return (ResponseError if refused else ConnectionError)(
            f"None of {number} Sentinels of {name!r} answers ({'; '.join(sorted(reasons))}): correct their addresses "
            "or passwords, or start them."
        )


def _ask(
    kind: Any,
    settings: dict[str, Any],
    name: str,
    min_others: int,
    answers: list[Primary | RedisError | None],
    answered: os_threads.OsEvent,
) -> None:
    """Append the answer of one Sentinel: None when it knows no primary that is up."""
    connection = new_connection(kind, settings)
    answer: Primary | RedisError | None
    try:
        answer = _primary(connection, name, min_others)
    except ResponseError as error:
        answer = UnknownService(str(error)) if "No such master" in str(error) else without_frames(error)
    except RedisError as error:
        answer = without_frames(error)
    except Exception as error:  # for example, of a function that provides the password
        answer = ConnectionError(f"{type(error).__name__}: {error}")
    finally:
        connection.close()
    answers.append(answer)
    answered.set()


def _primary(connection: Connection, name: str, min_others: int) -> Primary | None:
    about = (b"SENTINEL", b"MASTER", name.encode()), (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name.encode())
    pairs, (host, port) = connection.execute(Pipeline(about))
    state = dict(zip(pairs[::2], pairs[1::2], strict=True))
    address, epoch = (host.decode(), int(port)), int(state[b"config-epoch"])
    if (host, port) != (state[b"ip"], state[b"port"]):  # promoted just now, and not all replicas know it
        return Primary(epoch + 1, address)
    down = {b"s_down", b"o_down"} & set(state[b"flags"].split(b","))
    return None if down or int(state[b"num-other-sentinels"]) < min_others else Primary(epoch, address)
