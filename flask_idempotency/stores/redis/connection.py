"""How commands travel: over a connection of ours, or through a client that the application brought."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeAlias

import redis
from redis.backoff import ExponentialWithJitterBackoff

Command: TypeAlias = Sequence[bytes | str]
"""A command as it is handed to a client's library. Never a number: see `words`."""

Argument: TypeAlias = bytes | str | int

RETRIES: Final = 2
"""Every script may be repeated with the same token. Once mends a lost reply, twice a server that is just restarting;
more would keep a worker from answering 503."""

PATIENCE_SECONDS: Final = 2.5
"""No try begins later than this, whatever it was that took so long: a connection, its greeting, or the reply."""

_BACKOFF: Final = ExponentialWithJitterBackoff(base=0.02, cap=0.2)

UNREACHABLE: Final = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)


class RedisConnection(Protocol):
    """Sends one command and returns what came back, in bytes. Repeats it when the answer was lost."""

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any: ...

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Sends several in one go and returns what came back of each; what the server refused is there as an exception.

        They are not one step: others' come in between, and some may be done when this raises.
        """
        ...

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        """As `pipeline`, all of them over one connection, to whoever keeps the key of the first."""
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
    """Pass one to learn what became of a call on its way."""

    repeated = False
    """Whether something of it was sent more than once: the first one may arrive yet."""


class RetryBudget:
    """How often one call may be tried. Our connections never repeat anything by themselves: that would multiply this."""

    def __init__(self, retries: int, tries: Tries | None = None, *, began: float | None = None) -> None:
        """`began` is when the call began, by `time.monotonic`. It is now unless you say so."""
        self._tries = tries
        self._left = retries
        self._tried = 0
        self._began = time.monotonic() if began is None else began

    @property
    def seconds(self) -> float:
        """For how long this call has tried."""
        return time.monotonic() - self._began

    def failed(self, error: Exception) -> None:
        """Returns after a short pause when there is another try, and else raises what was in its way."""
        if self._left <= 0 or self.seconds > PATIENCE_SECONDS:
            raise error
        self._left -= 1
        self._tried += 1
        if self._tries is not None:
            self._tries.repeated = True
        time.sleep(_BACKOFF.compute(self._tried))


class PooledConnection:
    """Commands packed and sent over a connection from the client's pool: `execute_command` without its instrumentation.

    The pool looks after forks, threads and reconnecting, and after a fail-over when it follows Sentinels.
    """

    def __init__(self, client: redis.Redis, *, retries: int = RETRIES) -> None:
        self._pool = client.connection_pool
        self._retries = retries

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        (told,) = self.pipeline_one_node([command], tries=tries)
        if isinstance(told, Exception):
            raise told
        return told

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        return self.pipeline_one_node(commands) if commands else []

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        began, budget = time.monotonic(), None
        while True:
            try:
                answers = exchange(self._pool, commands)
            except UNREACHABLE as error:
                if budget is None:
                    budget = RetryBudget(self._retries, tries, began=began)
                budget.failed(error)
                continue
            for answer in answers:
                if isinstance(answer, redis.exceptions.ResponseError) and demoted(answer):
                    # Behind a name or a proxy the next connection finds the new primary; these never would.
                    self._pool.disconnect(inuse_connections=False)
                    raise answer
            return answers


def exchange(pool: Any, commands: Sequence[Command], *, asking: bool = False) -> list[Any]:
    """Return what these commands were answered over one connection, refusals included. Nothing is tried twice.

    A connection whose answers were not read to their end is closed: the pool would give them to the next call. `asking`
    says before each that a Cluster's other node has sent us.
    """
    sent = [each for command in commands for each in (("ASKING",), command)] if asking else commands
    connection = pool.get_connection()
    answers = list[Any]()
    try:
        packed = connection.pack_command(*sent[0]) if len(sent) == 1 else connection.pack_commands(sent)
        connection.send_packed_command(packed)
        for _ in sent:
            try:
                answers.append(connection.read_response(disable_decoding=True))
            except redis.exceptions.ResponseError as error:
                answers.append(error)
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
    return answers[1::2] if asking else answers


def demoted(answer: Any) -> bool:
    """Whether a node answered that used to be the primary. LOADING needs no mention: to redis-py it is no connection."""
    if isinstance(answer, redis.exceptions.ReadOnlyError | redis.exceptions.MasterDownError):
        return True
    # Redis 6.2 says what went wrong inside a script in the middle of a sentence.
    told = str(answer) if isinstance(answer, redis.exceptions.ResponseError) else ""
    return "-READONLY " in told or "-MASTERDOWN " in told


class ClientConnection:
    """Commands through the application's own client, so that its retries, routing and instrumentation apply. It does not
    tell what it repeats."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        # With decode_responses=True a client would take a record for text. This asks for the bytes.
        return self._client.execute_command(*command, NEVER_DECODE=True)

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        return _piped(self._client, commands)

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        return _piped(self._client, commands)


class ClientClusterConnection:
    """The same through a Cluster's client. One that meets what it has not looked out for, such as a node that it does not
    know yet, raises errors of Python's: here they are `failure`, and the next call finds its way."""

    def __init__(self, client: Any, *, failure: type[Exception], elsewhere: tuple[type[Exception], ...]) -> None:
        self._client = client
        self._failure = failure
        self._elsewhere = elsewhere

    def __call__(self, *command: bytes | str, tries: Tries | None = None) -> Any:
        with self._sorted_out():
            return self._client.execute_command(*command, NEVER_DECODE=True)

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        with self._sorted_out():
            return _piped(self._client, commands)

    def pipeline_one_node(self, commands: Sequence[Command], *, tries: Tries | None = None) -> list[Any]:
        with self._sorted_out():
            told = self._at_keeper(commands)
            if told is not None:
                return told
            # Alone it goes wherever it must, and the client knows from then on.
            self._client.execute_command(*commands[0], NEVER_DECODE=True)
            told = self._at_keeper(commands)
        if told is None:
            raise self._failure("the key is not where the Cluster says")
        return told

    def _at_keeper(self, commands: Sequence[Command]) -> list[Any] | None:
        """None: the node that was asked does not keep the key any more, or does not answer."""
        node = self._client.get_node_from_key(key_of(commands[0]))
        try:
            told = _piped(self._client.get_redis_connection(node), commands)
        except self._elsewhere:
            return None
        return None if isinstance(told[0], self._elsewhere) else told

    @contextmanager
    def _sorted_out(self) -> Iterator[None]:
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._failure("the client of the Cluster has lost its way") from error


def _piped(client: Any, commands: Sequence[Command]) -> list[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command, NEVER_DECODE=True)
        told: list[Any] = pipeline.execute(raise_on_error=False)
        return told


def key_of(command: Command) -> bytes:
    """The first key of a command, or nothing for one without any. Ours begin with theirs, or are scripts."""
    at = 3 if command[0] in ("EVALSHA", "EVAL") else 1
    key = command[at] if len(command) > at and (at == 1 or command[2]) else b""
    return key if isinstance(key, bytes) else str(key).encode()
