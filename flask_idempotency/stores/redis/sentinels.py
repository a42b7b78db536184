"""A client that goes wherever Sentinels say that the primary is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from flask_idempotency.stores.redis.addresses import Address

SENTINEL_SECONDS: Final = 0.3
"""What a Sentinel may take to connect, and to answer. It does so from memory; three silent ones cost what one Redis does."""

_OWN: Final = {"sentinel_username": "username", "sentinel_password": "password"}
_SHARED: Final = "ssl", "protocol", "maint_notifications_config", "redis_connect_func"
"""What begins like this is for both."""


class FollowingPool(SentinelConnectionPool):
    """Asks where the primary is before each new connection, and closes the idle ones when that has changed."""

    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                sentinel.close()


def follow(sentinels: Sequence[Address], service: str, options: Mapping[str, Any], *, tls: bool) -> redis.Redis:
    """A client of this service's primary. Sentinels have users of their own, and the same encryption as Redis."""
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
            # `redis.Redis` has no such argument, and its connections have.
            sentinel.connection_pool.connection_kwargs["command_packer"] = packer
    return redis.Redis.from_pool(FollowingPool(service, known, **of_redis))  # type: ignore[no-untyped-call]
