"""How Redis is talked to: a client made from a URL, or one that the application brought."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, TypeAlias, TypeVar

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from flask_idempotency.engine.errors import ConfigurationError

CONNECT_SECONDS = 1.0
REPLY_SECONDS = 1.0
"""A script takes microseconds: a server that is silent for this long is gone. With the retries below one that accepts
connections and answers none holds a worker for three of these, once per request."""

RETRIES = 2
"""Every script may be repeated with the same token. Once mends a lost reply, twice a server that is just restarting;
more would keep a worker from answering 503."""

_BACKOFF_SECONDS = 0.02, 0.2

CACHE_SECONDS = 0.05
"""What a cache may take to connect, and to answer: a hundred times what one nearby takes. It saves a millisecond, so a
worker must not lose a second by it; one that is slower than this is slower than the system of record."""


T = TypeVar("T")
Command: TypeAlias = Sequence[bytes | str | int]


class Line(Protocol):
    """Sends one command and returns what came back, in bytes. Repeats it when the answer was lost."""

    def __call__(self, *command: bytes | str | int) -> Any: ...

    def together(self, commands: Sequence[Command]) -> list[Any]:
        """Sends several in one go and returns what came back of each; what the server refused is there as an exception.

        They are not one step: others' come in between, and some may be done when this raises.
        """
        ...


class OwnLine:
    """Commands packed and sent over a connection from the client's pool: `execute_command` without its instrumentation.

    The pool looks after forks, threads and reconnecting. A connection whose answer was not read to its end is closed:
    back in the pool it would give that answer to somebody else's question.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool

    def __call__(self, *command: bytes | str | int) -> Any:
        def ask(connection: Any) -> Any:
            connection.send_packed_command(connection.pack_command(*command))
            return connection.read_response(disable_decoding=True)

        return self._on_some_connection(ask)

    def together(self, commands: Sequence[Command]) -> list[Any]:
        def answer(connection: Any) -> Any:
            try:
                return connection.read_response(disable_decoding=True)
            except redis.exceptions.ResponseError as error:
                if _demoted(error):
                    raise
                return error

        def ask(connection: Any) -> list[Any]:
            connection.send_packed_command(connection.pack_commands(commands))
            return [answer(connection) for _ in commands]

        return self._on_some_connection(ask) if commands else []

    def _on_some_connection(self, ask: Callable[[Any], T]) -> T:
        connection: Any = self._pool.get_connection()
        try:
            told: T = connection.retry.call_with_retry(lambda: ask(connection), lambda _: connection.disconnect())
            return told
        except redis.exceptions.ResponseError as error:
            if _demoted(error):
                # Behind a name or a proxy the next connection finds the new primary; these never would.
                connection.disconnect()
                self._pool.disconnect(inuse_connections=False)
            raise
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)


def _demoted(error: redis.exceptions.ResponseError) -> bool:
    """Whether a node answered that used to be the primary. LOADING needs no mention: redis-py reconnects by itself."""
    if isinstance(error, redis.exceptions.ReadOnlyError | redis.exceptions.MasterDownError):
        return True
    # Redis 6.2 tells what went wrong inside a script in the middle of a sentence.
    return "-READONLY " in str(error) or "-MASTERDOWN " in str(error)


class BorrowedLine:
    """Commands through the application's own client, so that its retries, routing and instrumentation apply."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __call__(self, *command: bytes | str | int) -> Any:
        # With decode_responses=True a client would take a record for text. This asks for the bytes.
        return self._client.execute_command(*command, NEVER_DECODE=True)

    def together(self, commands: Sequence[Command]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command, NEVER_DECODE=True)
            told: list[Any] = pipeline.execute(raise_on_error=False)
            return told


def make_client(url: str) -> redis.Redis:
    """A client for a `redis://`, `rediss://` or `unix://` URL. What the URL's query names goes before what is set here.

    Raises `ConfigurationError` for a URL that names no server.
    """
    backoff = ExponentialWithJitterBackoff(base=_BACKOFF_SECONDS[0], cap=_BACKOFF_SECONDS[1])
    return _from_url(
        url,
        setting="IDEMPOTENCY_STORE",
        socket_connect_timeout=CONNECT_SECONDS,
        socket_timeout=REPLY_SECONDS,
        retry=Retry(backoff, RETRIES),
    )


def make_cache_client(url: str) -> redis.Redis:
    """As `make_client`, for a Redis that one can do without: it is waited for briefly, and asked once."""
    return _from_url(
        url,
        setting="IDEMPOTENCY_REDIS_URL",
        socket_connect_timeout=CACHE_SECONDS,
        socket_timeout=CACHE_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


def _from_url(url: str, *, setting: str, **options: Any) -> redis.Redis:
    # The server says how many are too many. redis-py stops at 100, which a gevent worker passes on a busy day.
    options["max_connections"] = 65536
    try:
        return redis.Redis.from_url(url, **options, **_no_push_messages())
    except ValueError:
        # Not a word of that error, nor the error itself: what it cannot read may be part of the password.
        raise ConfigurationError(
            f"{setting}: this URL names no Redis. Write redis://host:6379/0, rediss://host:6379/0 for TLS, or "
            "unix:///path/to/redis.sock?db=0; in a password, write / as %2F, ? as %3F, # as %23 and @ as %40."
        ) from None


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
    packages = {kind.__module__.partition(".")[0] for kind in type(client).__mro__}
    library = next((package for package in ("redis", "valkey") if package in packages), None)
    if library is None or inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: {type(client).__module__}.{type(client).__name__} is not a client that Flask can use. "
            "Pass a redis.Redis, redis.RedisCluster or valkey.Valkey (not one of their asyncio kin), or a URL."
        )
    return import_module(f"{library}.exceptions")
