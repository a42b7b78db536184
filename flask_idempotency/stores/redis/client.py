"""Make a client from a URL: of one server, of a Cluster, or of a primary behind Sentinels. Describe one that you brought."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.retry import Retry
from redis.utils import HIREDIS_AVAILABLE

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.redis.connection import (
    RETRIES,
    PooledConnection,
    RedisConnection,
    words,
)

if TYPE_CHECKING:
    from flask_idempotency.stores.redis.cluster import Cluster  # for the stores on a Cluster

CONNECT_SECONDS = 1.0
REPLY_SECONDS = 1.0
"""A script takes microseconds, so a server that is silent for this long is gone.

With retries, a server that accepts connections and never answers blocks a worker three times as long, per request.
"""

CACHE_SECONDS = 0.05
"""Time-out of a cache: a hundred times the usual reply. A slower cache is slower than the system of record."""

_FORMS: Final = (
    "Write redis://host:6379/0, rediss://host:6379/0 for TLS, unix:///path/to/redis.sock?db=0, "
    "redis+cluster://host:6379,host:6379 or redis+sentinel://host:26379,host:26379/service/0 (rediss+… for TLS); in a "
    "password, write / as %2F, ? as %3F, # as %23 and @ as %40."
)

Client: TypeAlias = "redis.Redis | Cluster"


def make_client(url: str) -> Any:
    """Make a client from a URL: a `redis.Redis` for one server or Sentinels, else a `Cluster`.

    Options in the query of the URL replace the defaults here. Raises `ConfigurationError` if the URL is malformed or has
    an unknown option.
    """
    return _from_url(url, setting="IDEMPOTENCY_STORE", connect=CONNECT_SECONDS, reply=REPLY_SECONDS)


def make_cache_client(url: str, *, patient: bool = False) -> Any:
    """Make a client of a cache like `make_client`: with the short time-outs of a cache, or `patient` as with a store."""
    connect, reply = (CONNECT_SECONDS, REPLY_SECONDS) if patient else (CACHE_SECONDS, CACHE_SECONDS)
    return _from_url(url, setting="IDEMPOTENCY_REDIS_URL", connect=connect, reply=reply)


def connection_for(client: Any, *, owned: bool, retries: int = RETRIES) -> RedisConnection:
    """Return the way to send commands through this client. `retries` counts only if this module made the client."""
    if _is_our_cluster(client):
        from flask_idempotency.stores.redis.cluster import ClusterConnection

        return ClusterConnection(client, retries=retries)
    if owned:
        return PooledConnection(client, retries=retries)
    from flask_idempotency.stores.redis.passed_client import ClientClusterConnection, ClientConnection

    if not hasattr(client, "get_primaries"):
        return ClientConnection(client)
    names = _library_of(client)
    elsewhere = names.AskError, names.TryAgainError, names.ClusterDownError, names.ConnectionError, names.TimeoutError
    return ClientClusterConnection(client, failure=names.ClusterError, elsewhere=elsewhere)


def _from_url(url: str, *, setting: str, connect: float, reply: float) -> Client:
    options: dict[str, Any] = {
        "socket_connect_timeout": connect,
        "socket_timeout": reply,
        # `RetryBudget` repeats commands. Retries of redis-py would multiply its tries.
        "retry": Retry(NoBackoff(), 0),
        # The server limits its connections. redis-py's limit of 100 is too low for a busy gevent worker.
        "max_connections": 65536,
        **_no_push_messages(),
        "redis_connect_func": _greet,
        **({"command_packer": _WordPacker()} if HIREDIS_AVAILABLE else {}),
    }
    try:
        if "+" in url.partition(":")[0]:
            from flask_idempotency.stores.redis.multi_host import make_multi_host  # for a Cluster, or Sentinels

            client: Client = make_multi_host(url, options)
        else:
            client = redis.Redis.from_url(url, **options)
        pool: Any = client.connection_pool if isinstance(client, redis.Redis) else client.any_pool
        # Make a connection without connecting, so that an unknown option fails at start and not in a request.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.exceptions.RedisError):
        from flask_idempotency.engine.passwords import without_password

        # Do not quote or chain the error: it may contain a part of the password.
        raise ConfigurationError(
            f"{setting}: {without_password(url)} is not a Redis URL, or has an unknown option. {_FORMS}"
        ) from None
    return client


_NUMBERS: Final = frozenset({int, bool})


class _WordPacker(HiredisRespSerializer):
    """Convert numbers to text before packing, because redis-py's greeting has some: `HELLO 3` and `SELECT 1`."""

    def pack(self, *args: Any) -> list[bytes]:
        # What the store sends was written as text before.
        texts = args if _NUMBERS.isdisjoint(map(type, args)) else words(args)
        packed: list[bytes] = super().pack(*texts)
        return packed


def _greet(connection: Any) -> None:
    """Log in and select the database, or close the connection.

    If a signal handler interrupts the greeting, redis-py keeps the connection, and later commands go to database 0.
    """
    try:
        connection.on_connect()
    except BaseException:
        connection.disconnect()
        raise


def _no_push_messages() -> dict[str, Any]:
    """Switch maintenance messages off: redis-py 7 and later take an unread reply in the pool for such a message."""
    try:
        from redis.maint_notifications import MaintNotificationsConfig
    except ImportError:
        return {}
    return {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}


class Errors:
    """The exceptions of the library of a client: redis-py or valkey-py."""

    def __init__(self, client: Any) -> None:
        names = _library_of(client)
        # List all: in both libraries some exceptions do not derive from a common class.
        own = [kind for kind in vars(names).values() if isinstance(kind, type) and kind.__module__ == names.__name__]
        self.unavailable: tuple[type[Exception], ...] = (
            *(kind for kind in own if issubclass(kind, Exception)),
            OSError,
        )
        self.no_script: type[Exception] = names.NoScriptError
        self.refused: type[Exception] = names.ResponseError
        self.down: type[Exception] = names.ClusterDownError

    def is_refusal(self, error: Exception) -> bool:
        """Return whether the server refuses this command, now and later, for example by its ACL."""
        down = isinstance(error, self.down) or str(error).startswith("BUSY ")
        return isinstance(error, self.refused) and not down


def _is_our_cluster(client: Any) -> bool:
    return f"{__package__}.cluster" in {kind.__module__ for kind in type(client).__mro__}


def _library_of(client: Any) -> Any:
    if _is_our_cluster(client):
        return redis.exceptions
    packages = {kind.__module__.partition(".")[0] for kind in type(client).__mro__}
    library = next((package for package in ("redis", "valkey") if package in packages), None)
    if library is None or inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: {type(client).__module__}.{type(client).__name__} is not a synchronous Redis client. "
            "Pass a redis.Redis, redis.RedisCluster or valkey.Valkey, or a URL; asyncio clients do not work."
        )
    return import_module(f"{library}.exceptions")
