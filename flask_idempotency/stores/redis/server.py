"""The Redis that a store is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flask_idempotency.engine.clock import Clock
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.stores.redis.client import BorrowedLine, Errors, Line, OwnLine
from flask_idempotency.stores.redis.scripts import Script


class Server:
    """Runs scripts in Redis' own time, or a test's. Every method raises `StoreUnavailable` when Redis cannot decide.

    What is of another type than ours raises `CorruptRecord`.
    """

    def __init__(self, client: Any, *, owned: bool, clock: Clock) -> None:
        self.client = client
        self.errors = Errors(client)
        self._clock = clock
        self._line: Line = OwnLine(client) if owned else BorrowedLine(client)

    def run(self, script: Script, keys: Sequence[bytes], *arguments: bytes | int) -> Any:
        """What this script returns. Its first argument is the time."""
        told = self._clock()
        rest = (len(keys), *keys, b"" if told is None else round(told * 1_000_000), *arguments)
        try:
            try:
                return self._line("EVALSHA", script.sha, *rest)
            except self.errors.no_script:
                # EVAL and not SCRIPT LOAD: the server may restart, or a fail-over happen, between two commands.
                return self._line("EVAL", script.text, *rest)
        except self.errors.unavailable as error:
            raise self._told(error) from error

    def ask(self, *command: bytes | str | int) -> Any:
        """What this command returns."""
        try:
            return self._line(*command)
        except self.errors.unavailable as error:
            raise self._told(error) from error

    def scan(self, cursor: int, pattern: bytes, count: int, *, node: Any = None) -> tuple[int, list[bytes]]:
        """Some keys of this pattern, on this node of a Cluster, and where to go on; 0 when these were the last."""
        command = ("SCAN", cursor, "MATCH", pattern, "COUNT", count)
        try:
            if node is None:
                after, keys = self._line(*command)
            else:
                after, keys = self.client.execute_command(*command, target_nodes=node, NEVER_DECODE=True)
        except self.errors.unavailable as error:
            raise self._told(error) from error
        # A Cluster's client tells of every node that it was to ask: here of one.
        return int(next(iter(after.values())) if isinstance(after, dict) else after), keys

    def _told(self, error: Exception) -> Exception:
        if "WRONGTYPE" in str(error):
            return corrupt()
        return StoreUnavailable(f"Redis cannot decide ({type(error).__name__})")


def corrupt() -> CorruptRecord:
    return CorruptRecord("what Redis holds for this key was not written by this release, or not by us")
