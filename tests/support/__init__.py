"""What the tests stand on: real servers, real processes, a proxy that breaks connections, waiting with a deadline."""

from __future__ import annotations

from .clients import AllNodes, async_client_at, client_at
from .clocks import ServerClock, faketime_library
from .clusters import ON_A_CLUSTER, Cluster, ClusterOfLocks, OneNode, OneNodeOfLocks, leave_out
from .counts import command_counts, counting, monitoring, server_of_key, servers_of
from .databases import Config, PostgresServer, create_tables, drop_connections, sqlite_file, using_databases
from .failovers import Deployment
from .interruptions import Interrupted, TimeLimit, interruptions
from .locks import (
    acquire_and_release,
    begin,
    begin_to_wait,
    enter,
    in_thread,
    in_threads,
    key_of,
    listening,
    name_of,
    names_together,
    queue_of,
    queued,
    renew_now,
    side_by_side,
    wait_in_a_thread,
    wait_until_renewed,
    watchdogs_of,
)
from .processes import PythonProcess, fork_in_c, in_a_fork, say
from .programs import find_program
from .proxy import Proxy
from .rabbitmq import RabbitServer
from .scripts import load_scripts
from .servers import RedisServer, Server, free_port, running_sentinel, running_sentinels
from .waiting import (
    BUSY,
    destroy_generators,
    freeze,
    lived,
    until,
    wait_until,
    wait_until_collected,
    within,
)
