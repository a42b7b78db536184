"""Which chores were done, who is at one, and clearing out what is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final

from flask_idempotency.engine.capabilities import Entry
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.stores.durations import microseconds
from flask_idempotency.stores.sql import chore_statements, expiry_statements
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.dialects import SQLITE, Dialect
from flask_idempotency.stores.sql.ledger import SqlLedger
from flask_idempotency.stores.sql.times import in_microseconds

AT_ONCE_IN_A_FILE: Final = 200
"""SQLite has one writer at a time, and every claim waits for it: a thousand rows took a quarter of a second, two hundred a
fiftieth."""


class SqlChores:
    """Implements `chores.ChoreBook`. `now` as for `SqlDataKeys`."""

    def __init__(self, database: Database, *, now: Callable[[], int | None]) -> None:
        self._database = database
        self._now = now

    def now(self) -> float:
        parameters = {"now": self._now()}
        now = self._database.run(lambda connection: connection.execute(self._sent.time, parameters).scalar_one())
        return float(now / 1_000_000)

    def note(self, chore: str, report: str) -> None:
        parameters = {"my_name": chore, "my_report": report, "now": self._now()}
        self._database.run(lambda connection: connection.execute(self._sent.note, parameters))

    def last(self) -> Mapping[str, Entry]:
        parameters = {"now": self._now()}
        found = self._database.run(lambda connection: connection.execute(self._sent.last, parameters).all())
        if not all(isinstance(row.ago, int) and isinstance(row.report, str) for row in found):
            raise CorruptRecord("what the database holds of a janitor's last run cannot be read")
        return {row.name: Entry(max(row.ago, 0) / 1_000_000, row.report) for row in found}

    def take(self, chore: str, token: bytes, *, lease: float) -> bool:
        parameters = {"my_name": chore, "my_locked_by": token, "lease": microseconds(lease), "now": self._now()}
        taken = self._database.run(lambda connection: connection.execute(self._sent.take, parameters).one_or_none())
        return taken is not None

    def give_back(self, chore: str, token: bytes) -> None:
        parameters = {"my_name": chore, "my_locked_by": token}
        self._database.run(lambda connection: connection.execute(self._sent.give_back, parameters))

    @cached_property
    def _sent(self) -> _SentTask:
        return _SentTask(self._database.dialect)


class _SentTask:
    def __init__(self, dialect: Dialect) -> None:
        self.time = chore_statements.time(dialect)
        self.note = chore_statements.note(dialect)
        self.last = chore_statements.last(dialect)
        self.take = chore_statements.take(dialect)
        self.give_back = chore_statements.give_back(dialect)


class SqlExpiry:
    """Implements `chores.Expiry`. `now` as for `SqlDataKeys`."""

    def __init__(self, database: Database, ledger: SqlLedger, *, now: Callable[[], int | None]) -> None:
        self._database = database
        self._ledger = ledger
        self._now = now

    def sweep(self, *, horizon: float, limit: int) -> int:
        if self._database.dialect.name == SQLITE:
            limit = min(limit, AT_ONCE_IN_A_FILE)
        parameters = {"my_horizon": in_microseconds(horizon), "my_limit": limit, "now": self._now()}
        removed = self._database.run(lambda connection: connection.execute(self._sweep, parameters).rowcount)
        if removed >= limit:
            return removed
        # Entries of ledgers have no index by time: they are looked through once, when no record is left.
        return removed + self._ledger.sweep(limit=limit - removed, horizon=horizon)

    @cached_property
    def _sweep(self) -> Any:
        return expiry_statements.sweep(self._database.dialect)
