"""The strategy that locks the row before it writes to it: for tables that other tools of the house lock as well."""

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
    """One short transaction for each claim. A row that is locked is not waited for, and may be read all the same.

    So absent and locked are told apart, which `SKIP LOCKED` by itself does not; and a replay writes nothing.
    """

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
        found = connection.execute(self._read, asked.parameters).one_or_none()
        if found is None:
            fence = connection.execute(self._insert, asked.parameters).scalar_one_or_none()
            return None if fence is None else asked.granted(fence, attempt=1)
        verdict = judge(row_of(found), asked)
        return self._locked(connection, asked) if isinstance(verdict, Move) else verdict

    def _locked(self, connection: Connection, asked: Asked) -> StoreOutcome | None:
        """What is to be written is written under the row's lock. Who does not get it leaves that to whoever has it."""
        found = connection.execute(self._read_locked, asked.parameters).one_or_none()
        if found is None:
            return None
        row = row_of(found)
        verdict = judge(row, asked)
        return self._moves.make(connection, verdict, row, asked) if isinstance(verdict, Move) else verdict
