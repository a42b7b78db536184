"""The strategy that locks the row before it writes to it: for tables that other tools of the house lock as well."""

from __future__ import annotations

from sqlalchemy import Connection

from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql import statements
from flask_idempotency.stores.sql.claims.gate import Crowded, Gate
from flask_idempotency.stores.sql.claims.moves import Moves
from flask_idempotency.stores.sql.claims.verdict import Asked, Move, judge
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
        self._moves = Moves(dialect)
        self._gate = Gate(dialect, self._moves)

    def claim(self, connection: Connection, asked: Asked) -> StoreOutcome | Crowded:
        return self._gate.in_turns(connection, asked, self._once)

    def _once(self, connection: Connection, asked: Asked) -> StoreOutcome | None:
        found = connection.execute(self._read, asked.parameters).one_or_none()
        if found is None:
            return self._moves.insert(connection, asked)
        verdict = judge(row_of(found), asked)
        return self._locked(connection, asked) if isinstance(verdict, Move) else verdict

    def _locked(self, connection: Connection, asked: Asked) -> StoreOutcome | None:
        """What is to be written is written under the row's lock. Who does not get it leaves that to whoever has it."""
        found = connection.execute(self._read_locked, asked.parameters).one_or_none()
        return None if found is None else self._moves.carry_out(connection, row_of(found), asked)
