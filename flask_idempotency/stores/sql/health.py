"""How the database is, for whoever asks: its tables, what it does with a commit, and what stands in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from sqlalchemy import Connection

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql import chore_statements, expiry_statements, inspections, pooling
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.dialects import SQLITE

OVERDUE_SECONDS: Final = 3600
"""A janitor that is behind by less is at work."""

Look: TypeAlias = Callable[[Connection], Finding]

_EVERYWHERE: Final[tuple[tuple[str, Look], ...]] = (
    ("schema", inspections.schema),
    ("indexes", inspections.indexes),
    ("durability", inspections.durability),
)
_ON_POSTGRESQL: Final[tuple[tuple[str, Look], ...]] = (
    ("isolation", inspections.isolation),
    ("dead-rows", inspections.dead_rows),
    ("storage", inspections.storage),
)


class SqlHealth:
    """Implements `health.Health`. `now` as for `SqlDataKeys`."""

    def __init__(self, database: Database, *, now: Callable[[], int | None]) -> None:
        self._database = database
        self._now = now

    def findings(self) -> Sequence[Finding]:
        if self._database.dialect.name == SQLITE:
            # Whoever connects for records first has the file log ahead from then on.
            self._database.run(lambda connection: None)
            return [*self._all(_EVERYWHERE), self._found("expiry", self._expiry)]
        return [
            *self._all(_EVERYWHERE),
            self._found("pooling", self._pooling),
            *self._all(_ON_POSTGRESQL),
            self._found("expiry", self._expiry),
        ]

    def _all(self, looks: Sequence[tuple[str, Look]]) -> list[Finding]:
        return [self._found(check, look) for check, look in looks]

    def _found(self, check: str, look: Look) -> Finding:
        try:
            return self._database.take_time(look)
        except ConfigurationError:
            return Finding(
                check,
                Verdict.UNKNOWN,
                "This could not be looked at: tables are missing, or the database's role may not read them.",
                "Do what `schema` and `durability` say, and ask again.",
            )

    def _pooling(self, connection: Connection) -> Finding:
        return self._database.run(lambda another: pooling.inspect_pooling(connection, another))

    def _expiry(self, connection: Connection) -> Finding:
        dialect, told = self._database.dialect, {"now": self._now()}
        now = connection.execute(chore_statements.time(dialect), told).scalar_one()
        horizon = now - OVERDUE_SECONDS * 1_000_000
        if connection.execute(expiry_statements.is_overdue(dialect), {**told, "my_horizon": horizon}).scalar_one():
            return Finding(
                "expiry",
                Verdict.ADVICE,
                "Records that were over an hour ago are still there: nobody removes them, or not fast enough.",
                "Have the janitor expire, or run `flask idempotency expire` now and then; see that IDEMPOTENCY_EXPIRE_RATE is "
                "above what comes in.",
            )
        return Finding("expiry", Verdict.FINE, "What is over is removed within the hour.")
