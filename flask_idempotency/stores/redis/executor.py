"""Run scripts and commands in the Redis that a store is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from flask_idempotency.engine.errors import CorruptRecord, DataKeyMissing, LeaseLost, StoreUnavailable
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.client import Errors, connection_for
from flask_idempotency.stores.redis.connection import (
    RETRIES,
    UNREACHABLE,
    Argument,
    Command,
    RetryBudget,
    Tries,
    primaries,
    words,
)
from flask_idempotency.stores.redis.scripts import Script

if TYPE_CHECKING:
    from flask_idempotency.engine.store import Clock

_DIGITS: Final = 20
_WORDS: Final = frozenset({bytes, str})


class Call(NamedTuple):
    """One run of a script. The executor puts the time before its arguments."""

    keys: Sequence[bytes]
    arguments: Sequence[Argument] = ()


class ScriptExecutor:
    """Run scripts and commands in Redis. Scripts use the server's clock, or a test's.

    Every method raises `StoreUnavailable` if Redis cannot decide, and `CorruptRecord` if a key has the wrong type.
    """

    replicas = 0
    """How many replicas must have the effect of a durable script."""

    def __init__(self, client: Any, *, owned: bool, clock: Clock | None = None, retries: int = RETRIES) -> None:
        """`retries` counts only if the client is `owned`: made from a URL."""
        self.client = client
        self.errors: Errors = Errors(client)
        self._clock = clock
        self._owned = owned
        self._connection = connection_for(client, owned=owned, retries=retries)

    def run(self, script: Script, keys: Sequence[bytes], *arguments: Argument, tries: Tries | None = None) -> Any:
        """Return what this script returns. Its first argument is a test's time, or empty for that of Redis.

        If this raises, `tries` shows whether the script was sent more than once.
        """
        now = b"" if self._clock is None else self._now()
        given = b"%d" % len(keys), *keys, now, *arguments
        # What every request sends is bytes already.
        rest = cast(Command, given) if _WORDS.issuperset(map(type, given)) else words(given)
        try:
            try:
                return self._connection("EVALSHA", script.sha, *rest, tries=tries)
            except self.errors.no_script:
                # EVAL and not SCRIPT LOAD: the server may restart, or a fail-over happen, between two commands.
                return self._connection("EVAL", script.text, *rest, tries=tries)
        except self.errors.unavailable as error:
            raise self._store_error(error) from error

    def run_all(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Return the result of each call, in order. The calls share a round trip, but are not atomic. Any slots are allowed."""
        now = self._now()
        rests = [words((len(call.keys), *call.keys, now, *call.arguments)) for call in calls]
        by_name = [("EVALSHA", script.sha, *rest) for rest in rests]
        replies = self._pipeline(by_name)
        for _ in calls:
            missed = [at for at, reply in enumerate(replies) if isinstance(reply, self.errors.no_script)]
            if not missed:
                break
            # The first call brings the text, and the others of this round trip find it on the same server: a text with each
            # of 1,024 calls would be 9 MB. In a Cluster the others may be on other nodes, and each turn serves one node.
            first, *rest_missed = missed
            again = [("EVAL", script.text, *rests[first]), *(by_name[at] for at in rest_missed)]
            for at, reply in zip(missed, self._pipeline(again), strict=True):
                replies[at] = reply
        return self._checked(replies)

    def now(self) -> float:
        """Return seconds since the epoch. In a Cluster, this is the clock of the node that keeps the task log."""
        return int(self.run(scripts.SERVER_TIME, (layout.TASKS,))) / 1_000_000

    def execute_all(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Return the result of each command, in order. The commands share a round trip, but are not atomic."""
        return self._checked(self._pipeline([words(command) for command in commands]))

    def execute(self, *command: Argument) -> Any:
        """Return what this command returns."""
        with self._converted_errors():
            return self._connection(*words(command))

    def scan(self, cursor: int, pattern: bytes, count: int, *, node: Any = None) -> tuple[int, list[bytes]]:
        """Return the next cursor and some keys of this pattern. A cursor of 0 ends the scan. `node` selects a Cluster node."""
        command = words(("SCAN", cursor, "MATCH", pattern, "COUNT", count))
        with self._converted_errors():
            if node is None:
                after, keys = self._connection(*command)
            else:
                after, keys = self.directly(self.client.execute_command, *command, node=node, NEVER_DECODE=True)
        # A Cluster's client returns a cursor for each node that it scanned: here there is one.
        return int(next(iter(after.values())) if isinstance(after, dict) else after), keys

    def primaries(self) -> list[tuple[bytes, Any]]:
        """Return the name and node of each primary of a Cluster. A single server has neither name nor node."""
        with self._converted_errors():
            return primaries(self.client)

    def directly(self, method: Callable[..., Any], *arguments: Any, node: Any = None, **options: Any) -> Any:
        """Call this method of the client, on this node of a Cluster. Raise the errors of the client's library."""
        where = {} if node is None else {"target_nodes": node}
        budget = RetryBudget(RETRIES if self._owned else 0)
        while True:
            try:
                return method(*arguments, **where, **options)
            except UNREACHABLE as error:
                budget.failed(error)

    def _now(self) -> bytes | int:
        seconds = None if self._clock is None else self._clock()
        return b"" if seconds is None else round(seconds * 1_000_000)

    def _pipeline(self, commands: Sequence[Command]) -> list[Any]:
        if not commands:
            return []
        with self._converted_errors():
            return self._connection.pipeline(commands)

    def _checked(self, replies: list[Any]) -> list[Any]:
        for error in replies:
            if isinstance(error, Exception):
                raise self._store_error(error) from error
        return replies

    @contextmanager
    def _converted_errors(self) -> Iterator[None]:
        """Convert the errors of the client to those of the store. `run` does so itself: this costs each request less."""
        try:
            yield
        except self.errors.unavailable as error:
            raise self._store_error(error) from error

    def _store_error(self, error: Exception) -> Exception:
        if "WRONGTYPE" in str(error):
            return corrupt()
        return StoreUnavailable(f"Redis cannot decide ({cause_of(error)})")


class RedisCapability:
    """What a store on Redis can do beside the `Store` protocol, on the same server."""

    def __init__(self, server: ScriptExecutor) -> None:
        self._server = server


def whole_number(text: object) -> int:
    """Return the number in this text. Raise `CorruptRecord` for what is not one to 20 ASCII digits.

    Python takes quadratic time for thousands of digits, and then raises a `ValueError`.
    """
    if not isinstance(text, bytes) or not 0 < len(text) <= _DIGITS or not text.isdigit():
        raise corrupt()
    return int(text)


def text_in(data: bytes) -> str:
    """Return this text. Raise `CorruptRecord` if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise corrupt() from error


def milliseconds(seconds: float) -> int:
    """Return a time as records keep it. A time that was read from a record is the same again."""
    return round(seconds * 1_000_000) // 1000


def corrupt() -> CorruptRecord:
    return CorruptRecord("this release did not write the value that Redis holds for this key")


def refusal(result: Any) -> Exception:
    """Return the error for a script that refused to change a record."""
    match result:
        case b"ABSENT":
            return LeaseLost("the record is gone")
        case b"DOUBT":
            return StoreUnavailable("Redis restarted, and no process has checked yet whether it lost this claim")
        case b"LOST":
            return LeaseLost("the record belongs to another worker, or is completed")
        case b"ERASED" | b"KEYLESS":
            return DataKeyMissing(erased=result == b"ERASED")
        case _:
            return corrupt()
