"""Send commands over a connection from our own pool."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, Final, Protocol, TypeAlias

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.sentinel import SentinelConnectionPool
from redis.utils import HIREDIS_AVAILABLE

Command: TypeAlias = Sequence[bytes | str]
"""A command as a client's library gets it. It contains no numbers: see `words`."""

Argument: TypeAlias = bytes | str | int

RETRIES: Final = 2
"""Every script may be repeated with the same token. The first retry covers a lost reply, the second a restarting server.

More retries would only delay the 503."""

PATIENCE_SECONDS: Final = 2.5
"""No try begins later than this after the call. It covers the connection, its greeting and the reply."""

_BACKOFF: Final = ExponentialWithJitterBackoff(base=0.02, cap=0.2)

_hiredis: Any = import_module("hiredis") if HIREDIS_AVAILABLE else None

_PUSH: Any = getattr(_hiredis, "PushNotification", None)
_NOT_YET: Final = object()
_BUFFER_BYTES: Final = 16 * 1024
_USUAL: Final = frozenset({Connection, SSLConnection, UnixDomainSocketConnection})

FRESH_SECONDS: Final = 1.0
"""A connection that was used so lately is not checked before its next use. A check costs a tenth of a command."""

UNREACHABLE: Final = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)


class NoCluster(redis.exceptions.ClusterError):
    """The server is not part of a Cluster."""


class RedisConnection(Protocol):
    """Send one command and return its reply in bytes. Repeat the command if the reply was lost."""

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any: ...

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Send several commands in one round trip. Return the reply of each, or the exception if the server refused it.

        The commands are not atomic: other clients' commands may run in between. If this raises, some may have run.
        """
        ...

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        """Like `pipeline`, over one connection to the node that holds the first command's key."""
        ...


def words(arguments: Iterable[Argument]) -> list[bytes | str]:
    """Write numbers as text before a client's library packs them.

    hiredis (measured: 2.4 to 3.5) crashes the process if a signal handler raises while it packs a number: SIGALRM, or
    the soft time limit of a Celery task.
    """
    return [b"%d" % each if isinstance(each, int) else each for each in arguments]


class Tries:
    """Pass one to learn how often a call was sent."""

    repeated = False
    """True if a command was sent more than once. The first one may still arrive."""


class RetryBudget:
    """Limit the tries of one call. Our connections have no retries themselves: those would multiply this number."""

    def __init__(self, retries: int, tries: Tries | None = None, *, began: float | None = None) -> None:
        """`began` is the start of the call, by `time.monotonic`. The default is now."""
        self._tries = tries
        self._left = retries
        self._tried = 0
        self._began = time.monotonic() if began is None else began

    @property
    def seconds(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._began

    def failed(self, error: Exception) -> None:
        """Pause briefly if a try is left. Otherwise raise this error."""
        if self._left <= 0 or self.seconds > PATIENCE_SECONDS:
            raise error
        self._left -= 1
        self._tried += 1
        if self._tries is not None:
            self._tries.repeated = True
        time.sleep(_BACKOFF.compute(self._tried))


class DirectConnection:
    """Read and write the socket of an open connection of redis-py. Its own methods take half of a command's time.

    What differs from redis-py: nothing is sent before a command, and a push message closes the connection. Ours ask for
    none, so it could only be the reply to another command.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.is_connected: bool = True
        self._used_at = 0.0
        """When the last reply had been read, by `time.monotonic`."""
        self._socket = connection._sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._reader = _hiredis.Reader(
            protocolError=redis.exceptions.InvalidResponse,
            replyError=connection._parser.parse_error,
            notEnoughData=_NOT_YET,
        )

    @classmethod
    def of(cls, connection: Any) -> Any:
        """Return this connection of redis-py as a direct one, or unchanged if it does more than to send and to read."""
        usual = type(connection) in _USUAL and not connection.health_check_interval
        if _hiredis is None or not usual or getattr(connection, "_sock", None) is None:
            return connection
        return cls(connection)

    def can_read(self) -> bool:
        """Return True if a reply is left over, or the client was closed. Raise if the server closed the connection.

        Ask the socket after a pause only: the server may have restarted. A connection in use finds out as it sends or reads.
        """
        if self.connection._sock is not self._socket or self._reader.has_data():
            return True
        return time.monotonic() - self._used_at > FRESH_SECONDS and bool(self.connection.can_read())

    def send_packed_command(self, packed: Sequence[bytes]) -> None:
        for piece in packed:
            self._socket.sendall(piece)

    def read_response(self, *, disable_decoding: bool) -> Any:
        reply = self._reader.gets(False)
        if reply is _NOT_YET:
            reply = self._received()
        if isinstance(reply, Exception):
            raise reply
        if type(reply) is _PUSH:
            raise redis.exceptions.ConnectionError("the server sent a push message")
        self._used_at = time.monotonic()
        return reply

    def ask(self, command: Command) -> Any:
        """Return the reply to one command, or the refusal as an exception. `_NOT_YET`: not sent, look at it before its use."""
        sock, now = self._socket, time.monotonic()
        if now - self._used_at > FRESH_SECONDS or self.connection._sock is not sock or self._reader.has_data():
            return _NOT_YET
        try:
            sock.sendall(_hiredis.pack_command(command))
            reply = self._received()
            if type(reply) is _PUSH:
                raise redis.exceptions.ConnectionError("the server sent a push message")
            if isinstance(reply, Exception) and not isinstance(reply, redis.exceptions.ResponseError):
                raise reply
        except BaseException:
            self.disconnect()
            raise
        self._used_at = time.monotonic()
        return reply

    def _received(self) -> Any:
        reader, buffer = self._reader, self._buffer
        while True:
            received = self._socket.recv_into(buffer)
            if not received:
                raise redis.exceptions.ConnectionError("the server closed the connection")
            reader.feed(buffer, 0, received)
            reply = reader.gets(False)
            if reply is not _NOT_YET:
                return reply

    def disconnect(self) -> None:
        self.is_connected = False
        self.connection.disconnect()


class IdleConnections:
    """Keep the connections that one process has opened, in front of their pool.

    redis-py's pool takes a lock and reports events for each command. This one pops a list, and checks that a connection is
    open and owes no reply. It does not see a pool that follows Sentinels close its idle connections.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._start_empty()

    def _start_empty(self) -> None:
        # A forked child drops the connections of its parent, and so does its pool. Neither ends them for the parent.
        self._idle: list[Any] = []
        self._pid = os.getpid()

    def ask(self, command: Command) -> Any:
        """Do what `exchange` does for one command, in half of its steps. `_NOT_YET`: not sent, as no connection is ready."""
        if self._pid != os.getpid():
            return _NOT_YET
        try:
            connection = self._idle.pop()
        except IndexError:
            return _NOT_YET
        try:
            return connection.ask(command) if type(connection) is DirectConnection else _NOT_YET
        finally:
            self.release(connection)

    def get_connection(self) -> Any:
        if self._pid != os.getpid():
            self._start_empty()
        try:
            connection = self._idle.pop()
        except IndexError:
            return DirectConnection.of(self._pool.get_connection())
        try:
            if connection.is_connected and not connection.can_read():
                return connection
        except UNREACHABLE:
            pass
        except BaseException:
            # A signal handler raised. The pool must get back what it counts as used.
            self._discard(connection)
            raise
        self._discard(connection)
        return DirectConnection.of(self._pool.get_connection())

    def release(self, connection: Any) -> None:
        if connection.is_connected and self._pid == os.getpid():
            self._idle.append(connection)
        else:
            self._pool.release(getattr(connection, "connection", connection))

    def disconnect(self, *, inuse_connections: bool) -> None:
        """Close the connections that no thread uses, and the others too if you say so."""
        idle, self._idle = self._idle, []
        for connection in idle:
            self._discard(connection)
        self._pool.disconnect(inuse_connections=inuse_connections)

    def _discard(self, connection: Any) -> None:
        connection.disconnect()
        self._pool.release(getattr(connection, "connection", connection))


class PooledConnection:
    """Pack and send commands over a connection from the client's pool: `execute_command` without its instrumentation.

    The pool handles forks, threads and reconnecting. If it follows Sentinels, it also handles a fail-over.
    """

    def __init__(self, client: redis.Redis, *, retries: int = RETRIES) -> None:
        pool = client.connection_pool
        self._pool: Any = pool if isinstance(pool, SentinelConnectionPool) else IdleConnections(pool)
        self._ask: Callable[[Command], Any] = getattr(self._pool, "ask", lambda command: _NOT_YET)
        self._retries = retries

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        began, budget, reply = time.monotonic(), None, _NOT_YET
        try:
            reply = self._ask(command)
        except UNREACHABLE as error:
            budget = RetryBudget(self._retries, tries, began=began)
            budget.failed(error)
        if reply is _NOT_YET:
            (reply,) = self._exchanged([command], budget or RetryBudget(self._retries, tries, began=began))
        if isinstance(reply, Exception):
            self._leave_demoted(reply)
            raise reply
        return reply

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        return self.pipeline_one_node(commands) if commands else []

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        replies = self._exchanged(commands, RetryBudget(self._retries, tries))
        for reply in replies:
            self._leave_demoted(reply)
        return replies

    def _exchanged(self, commands: Sequence[Command], budget: RetryBudget) -> list[Any]:
        while True:
            try:
                return exchange(self._pool, commands)
            except UNREACHABLE as error:
                budget.failed(error)

    def _leave_demoted(self, reply: Any) -> None:
        """Close the connections to a former primary, and raise its reply.

        Behind a DNS name or a proxy, a new connection reaches the new primary. These would not.
        """
        if isinstance(reply, redis.exceptions.ResponseError) and demoted(reply):
            self._pool.disconnect(inuse_connections=False)
            raise reply


def exchange(pool: Any, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
    """Return the replies to these commands over one connection, with refusals as exceptions. Send each command once.

    Close the connection if some replies were not read: otherwise the pool would give them to the next call. With `asking`,
    send ASKING before each command, because another node of the Cluster redirected us here.
    """
    sent = [each for command in commands for each in (("ASKING",), command)] if asking else commands
    connection = pool.get_connection()
    replies = list[Any]()
    try:
        connection.send_packed_command(pack(connection, sent))
        for _ in sent:
            try:
                replies.append(connection.read_response(disable_decoding=True))
            except redis.exceptions.ResponseError as error:
                replies.append(error)
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
    return replies[1::2] if asking else replies


def pack(connection: Any, commands: Sequence[Command]) -> list[bytes]:
    """Return the bytes of these commands. redis-py would check each word again for what `words` has replaced."""
    packed: list[bytes]
    if _hiredis is None:
        packed = connection.pack_commands(commands)
    elif len(commands) == 1:
        packed = [_hiredis.pack_command(tuple(commands[0]))]
    else:
        packed = [b"".join(map(_hiredis.pack_command, map(tuple, commands)))]
    return packed


def demoted(reply: Any) -> bool:
    """Return True if a former primary sent this reply. redis-py treats LOADING as a connection error."""
    if isinstance(reply, redis.exceptions.ReadOnlyError | redis.exceptions.MasterDownError):
        return True
    # Redis 6.2 puts the error code of a failed script in the middle of a sentence.
    text = str(reply) if isinstance(reply, redis.exceptions.ResponseError) else ""
    return "-READONLY " in text or "-MASTERDOWN " in text


def primaries(client: Any) -> list[tuple[bytes, Any]]:
    """Return the primaries of a Cluster, sorted by name; of a single server, one entry without a name or node."""
    if not hasattr(client, "get_primaries"):
        return [(b"", None)]
    return sorted(((str(node.name).encode(), node) for node in client.get_primaries()), key=lambda named: named[0])


def key_of(command: Command) -> bytes:
    """Return the first key of a command, or `b""` if it has none. Our commands start with their keys, or run scripts."""
    at = 3 if command[0] in ("EVALSHA", "EVAL") else 1
    key = command[at] if len(command) > at and (at == 1 or command[2]) else b""
    return key if isinstance(key, bytes) else str(key).encode()
