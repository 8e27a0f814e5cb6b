"""From the URL of the settings to a redis-py client."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from redis import Redis
from redis.connection import parse_url
from redis.sentinel import Sentinel

SENTINEL_PORT = 26379


def client_from_url(url: str) -> Redis:
    """Return a new client of the server at this URL, or of the primary of a Sentinel's service; opens no connection.

    ``redis+sentinel://user:password@host1:26379,host2:26379/service/0`` names Sentinels, and ``rediss+sentinel`` uses
    TLS for them and for the primary. User and password are those of the primary; the Sentinels' own are the options
    ``sentinel_username`` and ``sentinel_password``. The other options are redis-py's.

    Raises ValueError that says what is wrong, without the URL's password.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("redis+sentinel", "rediss+sentinel"):
        return Redis.from_url(url)
    place, _, query = rest.partition("?")
    netloc, _, path = place.partition("/")
    credentials, at, hosts = netloc.rpartition("@")
    service, _, database = path.partition("/")
    if not service:
        raise ValueError(f"it names no service: {scheme}://host:26379,host:26379/service/0")
    if database and not database.isdigit():
        raise ValueError(f"the database after the service must be a number, not {database!r}")
    sentinels = [_host_and_port(host) for host in hosts.split(",")]
    options = parse_url(f"redis://{credentials}{at}any/{database or 0}?{query}")  # type: ignore[no-untyped-call]
    del options["host"]
    for_sentinels = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    if scheme == "rediss+sentinel":
        options["ssl"] = True
        for_sentinels |= {name: value for name, value in options.items() if name.startswith("ssl")}
    manager = Sentinel(sentinels, sentinel_kwargs=for_sentinels)  # type: ignore[no-untyped-call]
    return manager.master_for(unquote(service), **options)  # type: ignore[no-untyped-call,no-any-return]


def _host_and_port(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.netloc == text:
            return parts.hostname, parts.port or SENTINEL_PORT
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not host:port of a Sentinel")
