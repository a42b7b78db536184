"""Runs scripts and commands in the Redis that a store is in, and waits for its replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
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

ItemT = TypeVar("ItemT")

WAIT_SECONDS: Final = 0.5
"""A replica nearby takes a millisecond. If the client has a shorter `socket_timeout`, the wait is shorter than that."""

_PROMISES: Final = (b"DONE", b"PAUSED", b"HELD")

_SHARE: Final = 0.6
"""Share of the client's timeout that WAIT may take. The rest is for the network."""


class Replication:
    """Wait until enough replicas have the effect of a durable script: WAIT, in the same round trip. 0 waits for none.

    This is no consensus. WAIT counts replicas that have a write. If it counts fewer than there are, a fail-over may promote
    another one. WAIT covers only writes of the same connection, and a repeated script may write nothing. So the store
    always writes one key after the script, and waits for that write.
    """

    def __init__(self, replicas: int, *, reply_seconds: float | None = None) -> None:
        if replicas < 0:
            raise ValueError("the number of replicas must not be negative")
        self.replicas = replicas
        longest = WAIT_SECONDS if reply_seconds is None else min(WAIT_SECONDS, _SHARE * reply_seconds)
        self._ms = max(round(longest * 1000), 1)

    def row(self, key: bytes, *, known: bool) -> tuple[Command, Command]:
        """Return the commands to send after a script on this key. Pass `known` if the server has loaded our scripts."""
        script = scripts.TOUCH
        run = ("EVALSHA", script.sha) if known else ("EVAL", script.text)
        return (*run, "2", *layout.followed(key), ""), words(("WAIT", self.replicas, self._ms))

    def lacking(self, result: Any, touched: Any, acknowledged: Any) -> bool:
        """Return True if too few replicas have a new promise. Refusals and replays promise nothing new."""
        promised = result in _PROMISES or (
            isinstance(result, list) and (result[:1] == [b"CLAIMED"] or isinstance(result[0], int))
        )
        if not promised:
            return False
        return touched != b"DONE" or not isinstance(acknowledged, int) or acknowledged < self.replicas


def reply_seconds_of(client: Any) -> float | None:
    """Return how many seconds this client waits for a reply. None if it waits for ever, or does not show it."""
    pool = getattr(client, "any_pool", None) or getattr(client, "connection_pool", None)
    options = getattr(client, "get_connection_kwargs", dict)() if pool is None else pool.connection_kwargs
    seconds = options.get("socket_timeout")
    return float(seconds) if isinstance(seconds, int | float) else None


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

    def __init__(
        self, client: Any, *, owned: bool, clock: Clock | None = None, replicas: int = 0, retries: int = RETRIES
    ) -> None:
        """`retries` counts only if the client is `owned`: made from a URL."""
        self.client = client
        self.errors: Errors = Errors(client)
        self._clock = clock
        self._owned = owned
        self._connection = connection_for(client, owned=owned, retries=retries)
        self.replication: Replication = Replication(
            replicas, reply_seconds=reply_seconds_of(client) if replicas else None
        )

    def run(self, script: Script, keys: Sequence[bytes], *arguments: Argument, tries: Tries | None = None) -> Any:
        """Return what this script returns. Its first argument is a test's time, or empty for that of Redis.

        If this raises, `tries` shows whether the script was sent more than once.
        """
        now = b"" if self._clock is None else self._now()
        given = b"%d" % len(keys), *keys, now, *arguments
        # What every request sends is bytes already.
        rest = cast(Command, given) if _WORDS.issuperset(map(type, given)) else words(given)
        if script.durable and self.replication.replicas:
            return self._run_replicated(script, keys[0], rest, tries)
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
        now = b"" if self._clock is None else self._now()
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
        try:
            return self._connection(*words(command))
        except self.errors.unavailable as error:
            raise self._store_error(error) from error

    def scan(self, cursor: int, pattern: bytes, count: int, *, node: Any = None) -> tuple[int, list[bytes]]:
        """Return the next cursor and some keys of this pattern. A cursor of 0 ends the scan. `node` selects a Cluster node."""
        command = words(("SCAN", cursor, "MATCH", pattern, "COUNT", count))
        try:
            if node is None:
                after, keys = self._connection(*command)
            else:
                after, keys = self.directly(self.client.execute_command, *command, node=node, NEVER_DECODE=True)
        except self.errors.unavailable as error:
            raise self._store_error(error) from error
        # A Cluster's client returns a cursor for each node that it scanned: here there is one.
        return int(next(iter(after.values())) if isinstance(after, dict) else after), keys

    def primaries(self) -> list[tuple[bytes, Any]]:
        """Return the name and node of each primary of a Cluster. A single server has neither name nor node."""
        try:
            return primaries(self.client)
        except self.errors.unavailable as error:
            raise self._store_error(error) from error

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

    def _run_replicated(self, script: Script, key: bytes, rest: Command, tries: Tries | None) -> Any:
        """Return what this script returns, after enough replicas have its effect. Else raise `StoreUnavailable`."""
        try:
            commands = [("EVALSHA", script.sha, *rest), *self.replication.row(key, known=True)]
            replies = self._connection.pipeline_one_node(commands, tries=tries)
            if any(isinstance(reply, self.errors.no_script) for reply in replies):
                commands = [("EVAL", script.text, *rest), *self.replication.row(key, known=False)]
                replies = self._connection.pipeline_one_node(commands, tries=tries)
        except self.errors.unavailable as error:
            raise self._store_error(error) from error
        result: Any
        result, touched, acknowledged = replies
        if isinstance(result, Exception):
            raise self._store_error(result) from result
        if self.replication.lacking(result, touched, acknowledged):
            # The primary may have the effect all the same. An owner repeats the call; a claimant cancels its claim.
            raise StoreUnavailable(
                f"too few replicas confirmed the write (IDEMPOTENCY_REPLICAS = {self.replication.replicas})"
            )
        return result

    def _pipeline(self, commands: Sequence[Command]) -> list[Any]:
        if not commands:
            return []
        try:
            return self._connection.pipeline(commands)
        except self.errors.unavailable as error:
            raise self._store_error(error) from error

    def _checked(self, replies: list[Any]) -> list[Any]:
        for error in replies:
            if isinstance(error, Exception):
                raise self._store_error(error) from error
        return replies

    def _store_error(self, error: Exception) -> Exception:
        if "WRONGTYPE" in str(error):
            return corrupt()
        return StoreUnavailable(f"Redis cannot decide ({cause_of(error)})")


BATCH = 500
"""Keys per SCAN: less than a millisecond of the server's time."""


class Scan:
    """Scan the keys of a server, or of each primary of a Cluster in turn.

    The scan returns each key that exists from its beginning to its end at least once. It may miss keys if a replica
    replaces a primary or slots move during the scan.
    """

    def __init__(self, server: ScriptExecutor) -> None:
        self._server = server

    def page(self, pattern: bytes, *, after: bytes, count: int) -> tuple[list[bytes], bytes | None]:
        """Return the matching keys of about `count` keys, and the cursor of the next page, None after the last."""
        name, _, cursor = after.rpartition(b" ")
        nodes = self._server.primaries()
        names = [each for each, _ in nodes]
        at = names.index(name) if name in names else 0
        begin = int(cursor) if cursor and names[at] == name else 0
        following, keys = self._server.scan(begin, pattern, count, node=nodes[at][1])
        if following == 0:
            at += 1
        return keys, None if at == len(nodes) else b"%b %d" % (names[at], following)

    def all(self, pattern: bytes) -> Iterator[list[bytes]]:
        """Yield all matching keys in batches, each key once. A batch may be empty."""
        after: bytes | None = b""
        seen = set[bytes]()
        while after is not None:
            keys, after = self.page(pattern, after=after, count=BATCH)
            # SCAN may return a key twice.
            fresh = [name for name in dict.fromkeys(keys) if name not in seen]
            seen.update(fresh)
            yield fresh


def batches(items: Iterable[ItemT], size: int, partition: Callable[[ItemT], object]) -> Iterator[list[ItemT]]:
    """Yield batches of neighbours, each of one partition and of no more than this size."""
    for _, group in groupby(items, partition):
        while batch := list(islice(group, size)):
            yield batch


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
