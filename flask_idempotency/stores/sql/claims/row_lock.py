"""The strategy that locks the row before it looks: for tables that other tools of the house lock as well."""

from __future__ import annotations

from sqlalchemy import Connection

from flask_idempotency.engine.outcome import InFlight
from flask_idempotency.engine.ports import StoreOutcome
from flask_idempotency.stores.sql import statements
from flask_idempotency.stores.sql.claims.moves import Moves
from flask_idempotency.stores.sql.claims.verdict import RETRY_SECONDS, Asked, Move, judge
from flask_idempotency.stores.sql.database import TRIES
from flask_idempotency.stores.sql.dialects import POSTGRESQL, Dialect
from flask_idempotency.stores.sql.rows import row_of


class RowLock:
    """One short transaction for each claim. A row that is locked is not waited for, and may be read all the same."""

    dialects = (POSTGRESQL,)

    def __init__(self, dialect: Dialect) -> None:
        self._read_locked = statements.read_locked(dialect)
        self._read = statements.read(dialect)
        self._insert = statements.insert(dialect)
        self._moves = Moves(dialect)

    def claim(self, connection: Connection, asked: Asked) -> StoreOutcome:
        connection = connection.execution_options(isolation_level="READ COMMITTED")
        for _ in range(TRIES):
            with connection.begin():
                outcome = self._once(connection, asked)
            if outcome is not None:
                return outcome
        return InFlight(RETRY_SECONDS)

    def _once(self, connection: Connection, asked: Asked) -> StoreOutcome | None:
        locked = connection.execute(self._read_locked, asked.parameters).one_or_none()
        if locked is None:
            return self._absent_or_locked(connection, asked)
        row = row_of(locked)
        verdict = judge(row, asked)
        return self._moves.make(connection, verdict, row, asked) if isinstance(verdict, Move) else verdict

    def _absent_or_locked(self, connection: Connection, asked: Asked) -> StoreOutcome | None:
        found = connection.execute(self._read, asked.parameters).one_or_none()
        if found is None:
            fence = connection.execute(self._insert, asked.parameters).scalar_one_or_none()
            return None if fence is None else asked.granted(fence, attempt=1)
        verdict = judge(row_of(found), asked)
        # What would have to be written is for whoever holds the lock to write.
        return None if isinstance(verdict, Move) else verdict
