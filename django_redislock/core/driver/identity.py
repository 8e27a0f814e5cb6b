"""The settings of a client that our own connections inherit; clients for which these are equal share a server."""

from __future__ import annotations

from typing import Any

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
"""Settings that our connections do not inherit, as of redis-py 8.1."""


def inherited_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a client that our connections inherit."""
    return {key: value for key, value in settings.items() if key not in OURS}


def identity(value: Any) -> Any:
    """Return a hashable value that is equal for equal settings; objects are compared by their own ``==``."""
    if isinstance(value, dict):
        return "dict", frozenset((key, identity(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return "list", tuple(map(identity, value))
    try:
        hash(value)
    except TypeError:
        return "object", id(value)  # the id stays unique, because the server keeps the object
    return value
