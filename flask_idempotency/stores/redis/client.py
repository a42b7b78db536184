"""Make a client from a URL: of one server, of a Cluster, or of a primary behind Sentinels. Describe one that you brought."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, HiredisRespSerializer, SSLConnection, parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool
from redis.utils import HIREDIS_AVAILABLE

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import without_password
from flask_idempotency.stores.redis.cluster import Cluster, ClusterConnection
from flask_idempotency.stores.redis.connection import (
    RETRIES,
    ClientClusterConnection,
    ClientConnection,
    PooledConnection,
    RedisConnection,
    words,
)
from flask_idempotency.stores.redis.urls import Address, MultiHostUrl, is_multi_host, parse_multi_host

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


CONNECT_SECONDS = 1.0
REPLY_SECONDS = 1.0
"""A script takes microseconds: a server that is silent for this long is gone. With the retries of a line one that accepts
connections and answers none holds a worker for three of these, once per request."""

CACHE_SECONDS = 0.05
"""What a cache may take to connect, and to answer: a hundred times what one nearby takes. It saves a millisecond, so a
worker must not lose a second by it; one that is slower than this is slower than the system of record."""

_FORMS: Final = (
    "Write redis://host:6379/0, rediss://host:6379/0 for TLS, unix:///path/to/redis.sock?db=0, "
    "redis+cluster://host:6379,host:6379 or redis+sentinel://host:26379,host:26379/service/0 (rediss+… for TLS); in a "
    "password, write / as %2F, ? as %3F, # as %23 and @ as %40."
)

Client: TypeAlias = redis.Redis | Cluster


def make_client(url: str) -> Any:
    """A client for a URL of one Redis, of Sentinels (a `redis.Redis`) or of a `Cluster`. What its query names goes before
    what is set here.

    Raises `ConfigurationError` for a URL that names no server, or an option that there is not.
    """
    times = {"socket_connect_timeout": CONNECT_SECONDS, "socket_timeout": REPLY_SECONDS}
    return _from_url(url, setting="IDEMPOTENCY_STORE", times=times)


def make_cache_client(url: str) -> Any:
    """As `make_client`, for a Redis that one can do without: it is waited for briefly."""
    times = {"socket_connect_timeout": CACHE_SECONDS, "socket_timeout": CACHE_SECONDS}
    return _from_url(url, setting="IDEMPOTENCY_REDIS_URL", times=times)


def line_of(client: Any, *, owned: bool, retries: int = RETRIES) -> RedisConnection:
    """How to send commands to what this client knows. `retries` are for one that was made here."""
    if isinstance(client, Cluster):
        return ClusterConnection(client, retries=retries)
    if owned:
        return PooledConnection(client, retries=retries)
    if not hasattr(client, "get_primaries"):
        return ClientConnection(client)
    names = _library_of(client)
    elsewhere = names.AskError, names.TryAgainError, names.ClusterDownError, names.ConnectionError, names.TimeoutError
    return ClientClusterConnection(client, failure=names.ClusterError, elsewhere=elsewhere)


def _from_url(url: str, *, setting: str, times: dict[str, float]) -> Client:
    options: dict[str, Any] = {
        **times,
        # The line repeats, and knows what may be: a connection that did so too would multiply that.
        "retry": Retry(NoBackoff(), 0),
        # The server says how many are too many. redis-py stops at 100, which a gevent worker passes on a busy day.
        "max_connections": 65536,
        **_no_push_messages(),
        "redis_connect_func": _greet,
        **({"command_packer": _WordPacker()} if HIREDIS_AVAILABLE else {}),
    }
    try:
        client = (
            _make_multi_host(parse_multi_host(url), options)
            if is_multi_host(url)
            else redis.Redis.from_url(url, **options)
        )
        _try_options(client)
    except (ValueError, TypeError, redis.exceptions.RedisError):
        # Not a word of that error, nor the error itself: what it cannot read may be part of the password.
        raise ConfigurationError(
            f"{setting}: {without_password(url)} names no Redis, or has an option that there is not. {_FORMS}"
        ) from None
    return client


def _make_multi_host(named: MultiHostUrl, options: dict[str, Any]) -> Client:
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
        raise ValueError("a Cluster has one database")
    return Cluster(named.addresses, lambda address: _node(address, named.tls, options))


def _node(address: Address, tls: bool, options: dict[str, Any]) -> redis.Redis:
    kind = SSLConnection if tls else Connection
    return redis.Redis.from_pool(ConnectionPool(kind, host=address.host, port=address.port, **options))


def _try_options(client: Client) -> None:
    """Makes a connection and leaves it unconnected. An option that it does not take is found out now, and not by a
    customer."""
    pool: Any = client.any_pool if isinstance(client, Cluster) else client.connection_pool
    pool.connection_class(**pool.connection_kwargs)


_NUMBERS: Final = frozenset({int, bool})


class _WordPacker(HiredisRespSerializer):
    """Packs text and bytes only. redis-py's own greeting has numbers in it: `HELLO 3`, and `SELECT 1` for a database."""

    def pack(self, *args: Any) -> list[bytes]:
        # What the store sends was written as text before.
        texts = args if _NUMBERS.isdisjoint(map(type, args)) else words(args)
        packed: list[bytes] = super().pack(*texts)
        return packed


def _greet(connection: Any) -> None:
    """Log in and select the database, or close the connection.

    redis-py keeps one whose greeting a signal handler has interrupted, and later commands would go to database 0.
    """
    try:
        connection.on_connect()
    except BaseException:
        connection.disconnect()
        raise


def _no_push_messages() -> dict[str, Any]:
    """redis-py 7 and later listen for maintenance messages, and then take an unread answer in the pool for one."""
    try:
        from redis.maint_notifications import MaintNotificationsConfig
    except ImportError:
        return {}
    return {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}


class Errors:
    """The exceptions of whichever library a client belongs to: redis-py, or valkey-py, its fork."""

    def __init__(self, client: Any) -> None:
        names = _library_of(client)
        # All of the library's own, whether or not they have a common root: some of either library's have not.
        own = [kind for kind in vars(names).values() if isinstance(kind, type) and kind.__module__ == names.__name__]
        self.unavailable: tuple[type[Exception], ...] = (
            *(kind for kind in own if issubclass(kind, Exception)),
            OSError,
        )
        self.no_script: type[Exception] = names.NoScriptError
        self.refused: type[Exception] = names.ResponseError
        self.down: type[Exception] = names.ClusterDownError

    def will_not_tell(self, error: Exception) -> bool:
        """Whether the server understood the question and refuses to answer it, now and later."""
        down = isinstance(error, self.down) or str(error).startswith("BUSY ")
        return isinstance(error, self.refused) and not down


def _library_of(client: Any) -> Any:
    if isinstance(client, Cluster):
        return redis.exceptions
    packages = {kind.__module__.partition(".")[0] for kind in type(client).__mro__}
    library = next((package for package in ("redis", "valkey") if package in packages), None)
    if library is None or inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: {type(client).__module__}.{type(client).__name__} is not a client that Flask can use. "
            "Pass a redis.Redis, redis.RedisCluster or valkey.Valkey (not one of their asyncio kin), or a URL."
        )
    return import_module(f"{library}.exceptions")
