"""The Redis that a store is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.store import Clock
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.client import Errors, line_of
from flask_idempotency.stores.redis.lines import RETRIES, UNREACHABLE, Argument, Command, Patience, Tries, words
from flask_idempotency.stores.redis.replication import Replication, reply_seconds_of
from flask_idempotency.stores.redis.scripts import Script
from flask_idempotency.stores.redis.topology import primaries

_DIGITS: Final = 20


class Call(NamedTuple):
    """One run of a script. The time goes before its arguments."""

    keys: Sequence[bytes]
    arguments: Sequence[Argument] = ()


class Server:
    """Runs scripts in Redis' own time, or a test's. Every method raises `StoreUnavailable` when Redis cannot decide.

    What is of another type than ours raises `CorruptRecord`.
    """

    def __init__(self, client: Any, *, owned: bool, clock: Clock, replicas: int = 0) -> None:
        self.client = client
        self.errors = Errors(client)
        self._clock = clock
        self._owned = owned
        self._line = line_of(client, owned=owned)
        self.replication = Replication(replicas, reply_seconds=reply_seconds_of(client) if replicas else None)

    def run(self, script: Script, keys: Sequence[bytes], *arguments: Argument, tries: Tries | None = None) -> Any:
        """What this script returns. Its first argument is the time."""
        rest = self._rest(Call(keys, arguments))
        if self.replication.concerns(script):
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
        rests = [self._rest(call) for call in calls]
        told = self._together([("EVALSHA", script.sha, *rest) for rest in rests])
        missed = [at for at, answer in enumerate(told) if isinstance(answer, self.errors.no_script)]
        # All of them in full: on a Cluster each may be for another node.
        again = self._together([("EVAL", script.text, *rests[at]) for at in missed])
        for at, answer in zip(missed, again, strict=True):
            told[at] = answer
        return self._checked(told)

    def now(self) -> float:
        """Seconds since the epoch: of a Cluster, by the node that keeps the notes on chores."""
        return int(self.run(scripts.CLOCK, (layout.NOTES,))) / 1_000_000

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
        patience = Patience(RETRIES if self._owned else 0)
        while True:
            try:
                return ask(*arguments, **where, **options)
            except UNREACHABLE as error:
                patience.failed(error)

    def _rest(self, call: Call) -> tuple[bytes | str, ...]:
        told = self._clock()
        now = b"" if told is None else round(told * 1_000_000)
        return words((len(call.keys), *call.keys, now, *call.arguments))

    def _kept(self, script: Script, key: bytes, rest: Command, tries: Tries | None) -> Any:
        """What this script returns, once as many replicas have its effect as must."""
        try:
            row = [("EVALSHA", script.sha, *rest), *self.replication.row(key, known=True)]
            told = self._line.in_a_row(row, tries=tries)
            if any(isinstance(answer, self.errors.no_script) for answer in told):
                row = [("EVAL", script.text, *rest), *self.replication.row(key, known=False)]
                told = self._line.in_a_row(row, tries=tries)
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
            return self._line.together(commands)
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
