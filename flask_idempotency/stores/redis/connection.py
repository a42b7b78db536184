"""Send commands over a connection from our own pool, or through a client that the application passes in."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeAlias

import redis
from redis.backoff import ExponentialWithJitterBackoff

Command: TypeAlias = Sequence[bytes | str]
"""A command as a client's library gets it. It contains no numbers: see `words`."""

Argument: TypeAlias = bytes | str | int

RETRIES: Final = 2
"""Every script may be repeated with the same token. The first retry covers a lost reply, the second a restarting server.

More retries would only delay the 503."""

PATIENCE_SECONDS: Final = 2.5
"""No try begins later than this after the call. It covers the connection, its greeting and the reply."""

_BACKOFF: Final = ExponentialWithJitterBackoff(base=0.02, cap=0.2)

UNREACHABLE: Final = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)


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
    texts = list[bytes | str]()
    for each in arguments:
        texts.append(b"%d" % each if isinstance(each, int) else each)
    return texts


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


class PooledConnection:
    """Pack and send commands over a connection from the client's pool: `execute_command` without its instrumentation.

    The pool handles forks, threads and reconnecting. If it follows Sentinels, it also handles a fail-over.
    """

    def __init__(self, client: redis.Redis, *, retries: int = RETRIES) -> None:
        self._pool = client.connection_pool
        self._retries = retries

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        (reply,) = self.pipeline_one_node([command], tries=tries)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        return self.pipeline_one_node(commands) if commands else []

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        began, budget = time.monotonic(), None
        while True:
            try:
                replies = exchange(self._pool, commands)
            except UNREACHABLE as error:
                if budget is None:
                    budget = RetryBudget(self._retries, tries, began=began)
                budget.failed(error)
                continue
            for reply in replies:
                if isinstance(reply, redis.exceptions.ResponseError) and demoted(reply):
                    # Behind a DNS name or a proxy, a new connection reaches the new primary. These would not.
                    self._pool.disconnect(inuse_connections=False)
                    raise reply
            return replies


def exchange(pool: Any, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
    """Return the replies to these commands over one connection, with refusals as exceptions. Send each command once.

    Close the connection if some replies were not read: otherwise the pool would give them to the next call. With `asking`,
    send ASKING before each command, because another node of the Cluster redirected us here.
    """
    sent = [each for command in commands for each in (("ASKING",), command)] if asking else commands
    connection = pool.get_connection()
    replies = list[Any]()
    try:
        packed = connection.pack_command(*sent[0]) if len(sent) == 1 else connection.pack_commands(sent)
        connection.send_packed_command(packed)
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


def demoted(reply: Any) -> bool:
    """Return True if a former primary sent this reply. redis-py treats LOADING as a connection error."""
    if isinstance(reply, redis.exceptions.ReadOnlyError | redis.exceptions.MasterDownError):
        return True
    # Redis 6.2 puts the error code of a failed script in the middle of a sentence.
    text = str(reply) if isinstance(reply, redis.exceptions.ResponseError) else ""
    return "-READONLY " in text or "-MASTERDOWN " in text


class ClientConnection:
    """Send commands through the application's own client, with its retries, routing and instrumentation.

    That client does not report its retries.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        # NEVER_DECODE returns bytes even if the client has decode_responses=True.
        return self._client.execute_command(*command, NEVER_DECODE=True)

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        return _piped(self._client, commands)

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        return _piped(self._client, commands)


class ClientClusterConnection:
    """Send commands through the application's Cluster client.

    Such a client raises built-in errors in cases that it does not handle, such as a node that it does not know yet. This
    class raises `failure` instead. The next call works again.
    """

    def __init__(self, client: Any, *, failure: type[Exception], elsewhere: tuple[type[Exception], ...]) -> None:
        self._client = client
        self._failure = failure
        self._elsewhere = elsewhere

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        with self._converted_errors():
            return self._client.execute_command(*command, NEVER_DECODE=True)

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        with self._converted_errors():
            return _piped(self._client, commands)

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        with self._converted_errors():
            replies = self._pipeline_owner(commands)
            if replies is not None:
                return replies
            # The client follows the redirect of a single command, and then knows the new node.
            self._client.execute_command(*commands[0], NEVER_DECODE=True)
            replies = self._pipeline_owner(commands)
        if replies is None:
            raise self._failure("the key is not on the node that the Cluster names")
        return replies

    def _pipeline_owner(self, commands: Sequence[Command]) -> list[Any] | None:
        """Send to the node that holds the first key. Return None if it holds the key no more, or does not answer."""
        node = self._client.get_node_from_key(key_of(commands[0]))
        try:
            replies = _piped(self._client.get_redis_connection(node), commands)
        except self._elsewhere:
            return None
        return None if isinstance(replies[0], self._elsewhere) else replies

    @contextmanager
    def _converted_errors(self) -> Iterator[None]:
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._failure("the Cluster client failed to route the command") from error


def _piped(client: Any, commands: Sequence[Command]) -> list[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command, NEVER_DECODE=True)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies


def key_of(command: Command) -> bytes:
    """Return the first key of a command, or `b""` if it has none. Our commands start with their keys, or run scripts."""
    at = 3 if command[0] in ("EVALSHA", "EVAL") else 1
    key = command[at] if len(command) > at and (at == 1 or command[2]) else b""
    return key if isinstance(key, bytes) else str(key).encode()
