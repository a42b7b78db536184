"""The strategy that needs no lock: whoever inserts the row has the key."""

from __future__ import annotations

from sqlalchemy import Connection

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.outcome import InFlight
from flask_idempotency.engine.ports import StoreOutcome
from flask_idempotency.stores.sql import statements
from flask_idempotency.stores.sql.claims.moves import Moves
from flask_idempotency.stores.sql.claims.verdict import RETRY_SECONDS, Asked, Move, judge
from flask_idempotency.stores.sql.database import TRIES
from flask_idempotency.stores.sql.dialects import POSTGRESQL, SQLITE, Dialect
from flask_idempotency.stores.sql.rows import Row, row_of


class Insert:
    """PostgreSQL in one statement, which commits by itself; a row that has to be changed takes a second."""

    dialects = (POSTGRESQL,)

    def __init__(self, dialect: Dialect) -> None:
        self._claim_or_read = statements.claim_or_read(dialect)
        self._moves = Moves(dialect)

    def claim(self, connection: Connection, asked: Asked) -> StoreOutcome:
        for _ in range(TRIES):
            fence, *found = connection.execute(self._claim_or_read, asked.parameters).one()
            if fence is not None:
                return asked.granted(fence, attempt=1)
            if found[0] is None:
                # Somebody inserted the row after our snapshot was taken, so we neither made it nor see it.
                continue
            row = row_of(found)
            verdict = judge(row, asked)
            if not isinstance(verdict, Move):
                return verdict
            outcome = self._moves.make(connection, verdict, row, asked)
            if outcome is not None:
                return outcome
        return InFlight(RETRY_SECONDS)


class InsertIntoFile:
    """SQLite: looking takes one statement and no lock. Writing takes the one lock there is, and looks again first."""

    dialects = (SQLITE,)

    def __init__(self, dialect: Dialect) -> None:
        self._read = statements.read(dialect)
        self._next_fence = statements.next_fence(dialect)
        self._moves = Moves(dialect)

    def claim(self, connection: Connection, asked: Asked) -> StoreOutcome:
        row = self._look(connection, asked)
        verdict = None if row is None else judge(row, asked)
        if verdict is not None and not isinstance(verdict, Move):
            return verdict
        # Begun as a reader, a transaction that comes to write is refused at once when somebody else has written.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        outcome = self._write(connection, asked)
        connection.exec_driver_sql("COMMIT")
        return outcome

    def _look(self, connection: Connection, asked: Asked) -> Row | None:
        found = connection.execute(self._read, asked.parameters).one_or_none()
        return None if found is None else row_of(found)

    def _write(self, connection: Connection, asked: Asked) -> StoreOutcome:
        row = self._look(connection, asked)
        if row is None:
            fence = self._fence(connection, asked)
            return self._moves.insert(connection, asked, fence=fence) or InFlight(RETRY_SECONDS)
        verdict = judge(row, asked)
        if not isinstance(verdict, Move):
            return verdict
        risen = None if verdict is Move.QUARANTINE else self._fence(connection, asked)
        return self._moves.make(connection, verdict, row, asked, fence=risen) or InFlight(RETRY_SECONDS)

    def _fence(self, connection: Connection, asked: Asked) -> int:
        fence: int | None = connection.execute(self._next_fence, asked.parameters).scalar_one_or_none()
        if fence is None:
            raise ConfigurationError("the database has no last fence: run `flask idempotency db upgrade`")
        return fence
