"""The strategy that makes askers queue by the key's number, whether or not there is a row yet."""

from __future__ import annotations

from sqlalchemy import Connection

from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql import statements
from flask_idempotency.stores.sql.claims.gate import Crowded, Gate
from flask_idempotency.stores.sql.claims.moves import Moves
from flask_idempotency.stores.sql.claims.verdict import Asked
from flask_idempotency.stores.sql.dialects import POSTGRESQL, Dialect
from flask_idempotency.stores.sql.rows import row_of


class Advisory:
    """One short transaction for each claim. Two keys of one number wait for each other, and that is all they do.

    The lock only saves work. Releases that use another strategy do not take it, so every write still compares.
    """

    dialects = (POSTGRESQL,)

    def __init__(self, dialect: Dialect) -> None:
        self._lock = statements.advisory_lock(dialect)
        self._read = statements.read(dialect)
        self._moves = Moves(dialect)
        self._gate = Gate(dialect, self._moves)

    def claim(self, connection: Connection, asked: Asked) -> StoreOutcome | Crowded:
        return self._gate.in_turns(connection, asked, self._once)

    def _once(self, connection: Connection, asked: Asked) -> StoreOutcome | None:
        connection.execute(self._lock, {**asked.parameters, "my_number": number_of(asked.request.key.rid)})
        # In a statement of its own: the one that waited for the lock sees what was there before it waited.
        found = connection.execute(self._read, asked.parameters).one_or_none()
        if found is None:
            return self._moves.insert(connection, asked)
        return self._moves.carry_out(connection, row_of(found), asked)


def number_of(rid: bytes) -> int:
    """Sixty-four of its bits, as PostgreSQL counts: it is a digest, so any will do."""
    return int.from_bytes(rid[:8], "big", signed=True)
