"""Runs scripts and commands in the Redis that a store is in, and waits for its replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.store import Clock
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.client import Errors, connection_for
from flask_idempotency.stores.redis.cluster import primaries
from flask_idempotency.stores.redis.connection import RETRIES, UNREACHABLE, Argument, Command, RetryBudget, Tries, words
from flask_idempotency.stores.redis.scripts import Script

WAIT_SECONDS: Final = 0.5
"""A replica nearby takes a millisecond. Where the client gives up on a reply before this, the wait is shorter than that."""

_SHARE: Final = 0.6
"""Of the time in which a reply must have come: the rest is for its way."""


class Replication:
    """How many replicas must have the effect of a durable script: WAIT, in the same round trip. 0: it waits for none.

    This is no consensus. WAIT counts the replicas that have a write, and does not say which of them will be promoted: with
    fewer than there are, a fail-over may choose another. It counts a write of its own connection, and a script that is
    repeated may write nothing. So the store always writes one key behind the script, and waits for that.
    """

    def __init__(self, replicas: int, *, reply_seconds: float | None = None) -> None:
        if replicas < 0:
            raise ValueError("the number of replicas must not be negative")
        self.replicas = replicas
        longest = WAIT_SECONDS if reply_seconds is None else min(WAIT_SECONDS, _SHARE * reply_seconds)
        self._ms = max(round(longest * 1000), 1)

    def row(self, key: bytes, *, known: bool) -> tuple[Command, Command]:
        """What follows a script that touched this key, on the same connection. `known`: the server knows our scripts."""
        script = scripts.TOUCH
        run = ("EVALSHA", script.sha) if known else ("EVAL", script.text)
        return (*run, "2", *layout.followed(key), ""), words(("WAIT", self.replicas, self._ms))

    def lacking(self, answer: Any, followed: Any, acknowledged: Any) -> bool:
        """Whether too few have what was promised. Whoever was refused, or told what is known, was promised nothing."""
        promised = answer == b"DONE" or (isinstance(answer, list) and answer[:1] == [b"CLAIMED"])
        if not promised:
            return False
        return followed != b"DONE" or not isinstance(acknowledged, int) or acknowledged < self.replicas


def reply_seconds_of(client: Any) -> float | None:
    """How long this client waits for a reply, as far as it tells. None: for ever, or it does not."""
    for holder in (getattr(client, "any_pool", None), getattr(client, "connection_pool", None)):
        if holder is not None:
            return _number(holder.connection_kwargs.get("socket_timeout"))
    options: dict[str, Any] = getattr(client, "get_connection_kwargs", dict)()
    return _number(options.get("socket_timeout"))


def _number(seconds: Any) -> float | None:
    return float(seconds) if isinstance(seconds, int | float) else None


_DIGITS: Final = 20


class Call(NamedTuple):
    """One run of a script. The time goes before its arguments."""

    keys: Sequence[bytes]
    arguments: Sequence[Argument] = ()


class ScriptExecutor:
    """Runs scripts in Redis' own time, or a test's. Every method raises `StoreUnavailable` when Redis cannot decide.

    What is of another type than ours raises `CorruptRecord`.
    """

    def __init__(self, client: Any, *, owned: bool, clock: Clock | None = None, replicas: int = 0) -> None:
        self.client = client
        self.errors = Errors(client)
        self._clock = clock
        self._owned = owned
        self._line = connection_for(client, owned=owned)
        self.replication = Replication(replicas, reply_seconds=reply_seconds_of(client) if replicas else None)

    def run(self, script: Script, keys: Sequence[bytes], *arguments: Argument, tries: Tries | None = None) -> Any:
        """Return what this script returns. Its first argument is the time: of a test, or none for that of Redis.

        If this raises, `tries` tells whether the script was sent more than once.
        """
        now = b"" if self._clock is None else self._now()
        rest = words((len(keys), *keys, now, *arguments))
        if script.durable and self.replication.replicas:
            return self._kept(script, keys[0], rest, tries)
        try:
            try:
                return self._line("EVALSHA", script.sha, *rest, tries=tries)
            except self.errors.no_script:
                # EVAL and not SCRIPT LOAD: the server may restart, or a fail-over happen, between two commands.
                return self._line("EVAL", script.text, *rest, tries=tries)
        except self.errors.unavailable as error:
            raise self._told(error) from error

    def run_all(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """What this script returns of each of these. Sent together; they are not one step, and may be of many slots."""
        now = b"" if self._clock is None else self._now()
        rests = [words((len(call.keys), *call.keys, now, *call.arguments)) for call in calls]
        told = self._together([("EVALSHA", script.sha, *rest) for rest in rests])
        missed = [at for at, answer in enumerate(told) if isinstance(answer, self.errors.no_script)]
        # All of them in full: on a Cluster each may be for another node.
        again = self._together([("EVAL", script.text, *rests[at]) for at in missed])
        for at, answer in zip(missed, again, strict=True):
            told[at] = answer
        return self._checked(told)

    def now(self) -> float:
        """Seconds since the epoch: of a Cluster, by the node that keeps the notes on tasks."""
        return int(self.run(scripts.SERVER_TIME, (layout.TASKS,))) / 1_000_000

    def ask_all(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """What each of these commands returns. They are sent together, and are not one step."""
        return self._checked(self._together([words(command) for command in commands]))

    def ask(self, *command: Argument) -> Any:
        """What this command returns."""
        try:
            return self._line(*words(command))
        except self.errors.unavailable as error:
            raise self._told(error) from error

    def scan(self, cursor: int, pattern: bytes, count: int, *, node: Any = None) -> tuple[int, list[bytes]]:
        """Some keys of this pattern, on this node of a Cluster, and where to go on; 0 when these were the last."""
        command = words(("SCAN", cursor, "MATCH", pattern, "COUNT", count))
        try:
            if node is None:
                after, keys = self._line(*command)
            else:
                after, keys = self.directly(self.client.execute_command, *command, node=node, NEVER_DECODE=True)
        except self.errors.unavailable as error:
            raise self._told(error) from error
        # A Cluster's client tells of every node that it was to ask: here of one.
        return int(next(iter(after.values())) if isinstance(after, dict) else after), keys

    def primaries(self) -> list[tuple[bytes, Any]]:
        """Whom to ask for all keys, by name: the primaries of a Cluster, else one without either."""
        try:
            return primaries(self.client)
        except self.errors.unavailable as error:
            raise self._told(error) from error

    def directly(self, ask: Callable[..., Any], *arguments: Any, node: Any = None, **options: Any) -> Any:
        """What this method of the client tells, of this node of a Cluster. Raises what the client's library raises."""
        where = {} if node is None else {"target_nodes": node}
        patience = RetryBudget(RETRIES if self._owned else 0)
        while True:
            try:
                return ask(*arguments, **where, **options)
            except UNREACHABLE as error:
                patience.failed(error)

    def _now(self) -> bytes | int:
        seconds = None if self._clock is None else self._clock()
        return b"" if seconds is None else round(seconds * 1_000_000)

    def _kept(self, script: Script, key: bytes, rest: Command, tries: Tries | None) -> Any:
        """What this script returns, once as many replicas have its effect as must."""
        try:
            row = [("EVALSHA", script.sha, *rest), *self.replication.row(key, known=True)]
            told = self._line.pipeline_one_node(row, tries=tries)
            if any(isinstance(answer, self.errors.no_script) for answer in told):
                row = [("EVAL", script.text, *rest), *self.replication.row(key, known=False)]
                told = self._line.pipeline_one_node(row, tries=tries)
        except self.errors.unavailable as error:
            raise self._told(error) from error
        answer: Any
        answer, followed, acknowledged = told
        if isinstance(answer, Exception):
            raise self._told(answer) from answer
        if self.replication.lacking(answer, followed, acknowledged):
            # It may have been done all the same: who owns it asks again, and who claimed gives it up.
            raise StoreUnavailable(
                f"fewer replicas have it than must (IDEMPOTENCY_REPLICAS = {self.replication.replicas})"
            )
        return answer

    def _together(self, commands: Sequence[Command]) -> list[Any]:
        if not commands:
            return []
        try:
            return self._line.pipeline(commands)
        except self.errors.unavailable as error:
            raise self._told(error) from error

    def _checked(self, told: list[Any]) -> list[Any]:
        for error in told:
            if isinstance(error, Exception):
                raise self._told(error) from error
        return told

    def _told(self, error: Exception) -> Exception:
        if "WRONGTYPE" in str(error):
            return corrupt()
        return StoreUnavailable(f"Redis cannot decide ({type(error).__name__})")


def whole_number(text: object) -> int:
    """Return the number in this text. Raise `CorruptRecord` for what is not one to 20 ASCII digits.

    Python takes quadratic time for thousands of digits, and refuses them with an error of its own.
    """
    if not isinstance(text, bytes) or not 0 < len(text) <= _DIGITS or not text.isdigit():
        raise corrupt()
    return int(text)


def corrupt() -> CorruptRecord:
    return CorruptRecord("what Redis holds for this key was not written by this release, or not by us")
