"""Make a client of a Cluster, or of a primary behind Sentinels, from a URL of several hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from flask_idempotency.stores.redis.cluster import Cluster
from flask_idempotency.stores.redis.urls import Address, parse_multi_host

SENTINEL_SECONDS: Final = 0.3
"""Time-out of a Sentinel, which answers from memory. Three silent Sentinels cost as much as one silent Redis."""

_OWN: Final = {"sentinel_username": "username", "sentinel_password": "password"}
_SHARED: Final = "ssl", "protocol", "maint_notifications_config", "redis_connect_func"
"""Options with these prefixes apply to Redis and to the Sentinels."""


class FollowingPool(SentinelConnectionPool):
    """Ask the Sentinels for the primary before each new connection. Close idle connections when it has changed."""

    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                sentinel.close()


def follow(sentinels: Sequence[Address], service: str, options: Mapping[str, Any], *, tls: bool) -> redis.Redis:
    """Return a client of this service's primary. Sentinels have separate users, and the same encryption as Redis."""
    of_redis = {**options, **({"ssl": True} if tls else {})}
    own = {_OWN[name]: of_redis.pop(name) for name in _OWN if name in of_redis}
    of_sentinels = {
        **{name: value for name, value in of_redis.items() if name.startswith(_SHARED)},
        **own,
        "socket_connect_timeout": min(SENTINEL_SECONDS, options["socket_connect_timeout"]),
        "socket_timeout": min(SENTINEL_SECONDS, options["socket_timeout"]),
        "retry": Retry(NoBackoff(), 0),
    }
    known = Sentinel(sentinels, sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
    for sentinel in known.sentinels:
        if (packer := options.get("command_packer")) is not None:
            # The constructor of `redis.Redis` does not take this option, but its connections do.
            sentinel.connection_pool.connection_kwargs["command_packer"] = packer
    return redis.Redis.from_pool(FollowingPool(service, known, **of_redis))  # type: ignore[no-untyped-call]


def make_multi_host(url: str, options: dict[str, Any]) -> redis.Redis | Cluster:
    """Make the client that this URL names. Raises `ValueError` if the URL is malformed."""
    named = parse_multi_host(url)
    options = options | parse_url(named.single)  # type: ignore[no-untyped-call]
    database = int(options.pop("db", 0))
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    if named.kind == "sentinel":
        service, *databases = named.path
        return follow(
            named.addresses, service, options | {"db": int(databases[0]) if databases else database}, tls=named.tls
        )
    if database:
        raise ValueError("a Cluster has only database 0")
    kind = SSLConnection if named.tls else Connection

    def make_client(address: Address) -> redis.Redis:
        return redis.Redis.from_pool(ConnectionPool(kind, host=address.host, port=address.port, **options))

    return Cluster(named.addresses, make_client)
