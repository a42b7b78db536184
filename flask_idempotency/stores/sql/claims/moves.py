"""Writing what a claim found to be due, if there still is no row, or the row still is what it found."""

from __future__ import annotations

from typing import assert_never

from sqlalchemy import Connection

from flask_idempotency.engine.model import Unknown
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql import ledger_statements, statements
from flask_idempotency.stores.sql.claims.verdict import Asked, Move, judge
from flask_idempotency.stores.sql.dialects import POSTGRESQL, Dialect
from flask_idempotency.stores.sql.rows import Row


class Moves:
    """Compare-and-set on state, token and fence, with the condition once more by the server's clock."""

    def __init__(self, dialect: Dialect) -> None:
        self._insert = statements.insert(dialect)
        self._reclaim = statements.reclaim(dialect)
        self._take_over = statements.take_over(dialect)
        self._quarantine = statements.quarantine(dialect)
        self._within = dialect.name == POSTGRESQL
        if self._within:
            self._insert_within = ledger_statements.insert_within(dialect)
            self._reclaim_within = ledger_statements.reclaim_within(dialect)

    def insert(self, connection: Connection, asked: Asked, *, fence: int | None = None) -> StoreOutcome | None:
        """The first claim of a key that has no row. None: somebody else was faster, or it is not within the quota."""
        if self._within and asked.must_wait:
            return None
        statement = self._insert_within if self._within and asked.quota is not None else self._insert
        granted = connection.execute(statement, {**asked.parameters, "my_fence": fence}).scalar_one_or_none()
        return None if granted is None else asked.granted(granted, attempt=1)

    def carry_out(self, connection: Connection, row: Row, asked: Asked) -> StoreOutcome | None:
        """What this row means for who asks, written where that has to be. None as for `make`."""
        verdict = judge(row, asked)
        return self.make(connection, verdict, row, asked) if isinstance(verdict, Move) else verdict

    def make(
        self, connection: Connection, move: Move, row: Row, asked: Asked, *, fence: int | None = None
    ) -> StoreOutcome | None:
        """What came of it. None: somebody else was faster, or has the row locked, or a new key is not within the quota; nothing
        was written.

        `fence` is needed where the database has no sequence to take one from.
        """
        if self._within and move is Move.RECLAIM and asked.must_wait:
            return None
        match move:
            case Move.RECLAIM:
                statement = self._reclaim_within if self._within and asked.quota is not None else self._reclaim
            case Move.TAKE_OVER:
                statement = self._take_over
            case Move.QUARANTINE:
                statement = self._quarantine
            case unexpected:
                assert_never(unexpected)
        seen = {"seen_state": row.state, "seen_token": row.token, "seen_fence": row.fence, "my_fence": fence}
        written = connection.execute(statement, {**asked.parameters, **seen}).one_or_none()
        if written is None:
            return None
        if move is Move.QUARANTINE:
            return Unknown(statements.LEASE_EXPIRED)
        return asked.granted(written.fence, attempt=written.attempt)
