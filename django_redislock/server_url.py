"""From the URL of the settings to a redis-py client."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.exceptions import RedisError
from redis.sentinel import Sentinel

from .core.driver.kinds import settings_of


class UnknownOption(ValueError):
    """redis-py does not take the options of a URL. The text names the option, and nothing secret."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"redis-py does not take its options: {error}")


SENTINEL_PORT, CLUSTER_PORT = 26379, 6379


def client_from_url(url: str) -> Redis | RedisCluster:
    """Return a new client of the server at this URL, of a Sentinel's service, or of a Cluster; opens no connection.

    ``redis+sentinel://user:password@host1:26379,host2:26379/service/0`` names Sentinels. User and password are those of
    the primary; the Sentinels' own are the options ``sentinel_username`` and ``sentinel_password``.
    ``redis+cluster://user:password@host1:6379,host2:6379`` names nodes of a Cluster, of which one must answer. The
    client of a Cluster is one for asyncio, because redis-py's other one asks a node when it is made.

    ``rediss+sentinel`` and ``rediss+cluster`` use TLS, also for the Sentinels. The other options after a question mark
    are redis-py's. Raises ValueError that says what is wrong, without the URL's password.
    """
    scheme, _, rest = url.partition("://")
    tls, _, kind = scheme.partition("+")
    place, _, query = rest.partition("?")
    netloc, _, path = place.partition("/")
    # A password that begins with one of these ends the host for every parser: the locks of each pod went to a Redis of
    # its own, on localhost.
    if "#" in rest or (scheme != "unix" and (netloc == ":" or "@" in path + query.partition("=")[0])):
        raise ValueError("the user and the password must have / ? # @ and % percent-encoded")
    if tls not in ("redis", "rediss") or kind not in ("sentinel", "cluster"):
        named = unquote(path).strip("/")
        if scheme in ("redis", "rediss") and named and not named.isdigit() and "db" not in parse_qs(query):
            raise ValueError(f"the database after the host must be a number, not {named!r}")
        return checked(Redis.from_url(url))
    credentials, at, hosts = netloc.rpartition("@")
    service, _, database = path.partition("/") if kind == "sentinel" else ("", "", path)
    if kind == "cluster" and database not in ("", "0"):
        raise ValueError(f"a Cluster has no database but 0, so there must be nothing after the hosts, not {database!r}")
    if database and not database.isdigit():
        raise ValueError(f"the database after the service must be a number, not {database!r}")
    options: dict[str, Any] = {**parse_url(f"redis://{credentials}{at}any/{database or 0}?{query}")}
    del options["host"]
    if kind == "cluster":
        del options["db"]
        return _of_cluster(hosts, options, tls == "rediss")
    if not service:
        raise ValueError(f"it names no service: {scheme}://host:26379,host:26379/service/0")
    return _of_sentinels(hosts, unquote(service), options, tls == "rediss")


def _of_cluster(hosts: str, options: dict[str, Any], tls: bool) -> RedisCluster:
    nodes = [ClusterNode(*_host_and_port(host, CLUSTER_PORT, "a node")) for host in hosts.split(",")]
    try:
        return RedisCluster(startup_nodes=nodes, ssl=tls, **options)
    except TypeError as error:
        raise UnknownOption(error) from error


def _of_sentinels(hosts: str, service: str, options: dict[str, Any], tls: bool) -> Redis:
    sentinels = [_host_and_port(host, SENTINEL_PORT, "a Sentinel") for host in hosts.split(",")]
    for_sentinels = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    if tls:
        options["ssl"] = True
        for_sentinels |= {name: value for name, value in options.items() if name.startswith("ssl")}
    manager = Sentinel(sentinels, sentinel_kwargs=for_sentinels)  # type: ignore[no-untyped-call]
    return checked(manager.master_for(service, **options))  # type: ignore[no-untyped-call]


def checked(client: Redis) -> Redis:
    """Return the client if its options and its host are usable.

    redis-py looks at them when it connects, and raises TypeError or UnicodeError then, which no caller expects.
    """
    settings = settings_of(client.connection_pool)
    try:
        client.connection_pool.connection_class(**settings)
    except (TypeError, RedisError) as error:  # the second one: of a wrong value of ssl_cert_reqs or protocol
        raise UnknownOption(error) from error
    str(settings.get("host", "")).encode("idna")  # as `socket` does, which raises UnicodeError, too
    return client


def _host_and_port(text: str, port: int, of: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.hostname.encode("idna") and parts.netloc == text:
            return parts.hostname, parts.port or port
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not host:port of {of}")
