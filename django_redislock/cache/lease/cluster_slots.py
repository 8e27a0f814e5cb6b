"""The keys of leases of values: in cluster mode all keys of one script must be in one slot, that of the value.

Such a server is recognised by its answer CROSSSLOT to the first script that names a value and its lease. From then on
the lease of a value has its keys in the value's slot. Such a server never grants a lease under other keys, so all
processes agree.
"""

from __future__ import annotations

from binascii import crc_hqx
from functools import lru_cache

from ...core.driver import by_slot
from ...core.driver.server import Server
from ...core.driver.slot_table import SLOTS, slot_of
from ...core.keys import BUCKETS, LockKeys, lock_keys
from ...core.slot_locks import keys_in
from ...exceptions import LockBackendError


def is_clustered(server: Server) -> bool:
    """Whether the server is known to be in cluster mode."""
    return server.splits


def is_crossing(error: LockBackendError, server: Server) -> bool:
    """Whether the server refused keys of several slots. If so, leases have other keys from now on."""
    return by_slot.is_crossing(error.__cause__, server)


def lease_keys(server: Server, prefix: str, name: str, key: str) -> LockKeys:
    """Return the keys of the lease of this name, whose value has this key."""
    if not server.splits:
        return lock_keys(prefix, name)
    number = _numbers(prefix)[slot_of(key.encode())]
    return keys_in(b"{%b:%d}" % (prefix.encode(), number), name)


@lru_cache(maxsize=4)
def _numbers(prefix: str) -> dict[int, int]:
    """Return for each slot a number whose hash tag is in that slot; none of them is the number of a bucket."""
    found: dict[int, int] = {}
    start, number = crc_hqx(prefix.encode() + b":", 0), BUCKETS
    while len(found) < SLOTS:
        found.setdefault(crc_hqx(b"%d" % number, start) % SLOTS, number)
        number += 1
    return found
