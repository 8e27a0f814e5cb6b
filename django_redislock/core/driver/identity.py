"""Which clients talk to the same server: those whose settings are equal, as far as they concern our own connections."""

from __future__ import annotations

from typing import Any

from redis.sentinel import SentinelConnectionPoolProxy

# What a client may have configured that ours decide by themselves.
OURS = frozenset(
    {
        *("retry", "retry_on_error", "retry_on_timeout", "health_check_interval"),
        *("socket_timeout", "socket_connect_timeout"),
        *("decode_responses", "encoding", "encoding_errors", "protocol", "legacy_responses"),
        *("maint_notifications_config", "maint_notifications_pool_handler", "oss_cluster_maint_notifications_handler"),
        *("maintenance_state", "maintenance_notification_hash", "event_dispatcher", "himport_registry"),
        *("orig_host_address", "orig_socket_timeout", "orig_socket_connect_timeout"),
        *("driver_info", "lib_name", "lib_version"),  # Django's own backend makes another one for every thread
    }
)


def theirs(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a client that hold for our connections, too."""
    return {key: value for key, value in settings.items() if key not in OURS}


def identity(value: Any) -> Any:
    """Return what is equal, and has a hash, for equal settings: other objects are compared as they compare themselves."""
    if isinstance(value, dict):
        return "dict", frozenset((key, identity(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return "list", tuple(map(identity, value))
    if isinstance(value, SentinelConnectionPoolProxy):  # each `master_for()` makes another one
        # Their order changes: the one that answered comes first.
        sentinels = frozenset(
            identity(theirs(client.connection_pool.connection_kwargs)) for client in value.sentinel_manager.sentinels
        )
        return "sentinel", sentinels, value.service_name, value.is_master, value.check_connection
    try:
        hash(value)
    except TypeError:
        return "object", id(value)  # the id stays unique, because the server keeps the object
    return value
