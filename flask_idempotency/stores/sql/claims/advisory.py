"""The strategy that makes askers queue by the key's number, whether or not there is a row yet."""

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


class Advisory:
    """One short transaction for each claim. Two keys of one number wait for each other, and that is all they do.

    The lock only saves work. Releases that use another strategy do not take it, so every write still compares.
    """

    dialects = (POSTGRESQL,)

    def __init__(self, dialect: Dialect) -> None:
        self._lock = statements.advisory_lock(dialect)
        self._read = statements.read(dialect)
        self._insert = statements.insert(dialect)
        self._moves = Moves(dialect)

    def claim(self, connection: Connection, asked: Asked) -> StoreOutcome:
        connection = connection.execution_options(isolation_level="READ COMMITTED")
        for _ in range(TRIES):
            with connection.begin():
                connection.execute(self._lock, {**asked.parameters, "my_number": number_of(asked.request.key.rid)})
                # In a statement of its own: the one that waited for the lock sees what was there before it waited.
                outcome = self._locked(connection, asked)
            if outcome is not None:
                return outcome
        return InFlight(RETRY_SECONDS)

    def _locked(self, connection: Connection, asked: Asked) -> StoreOutcome | None:
        found = connection.execute(self._read, asked.parameters).one_or_none()
        if found is None:
            fence = connection.execute(self._insert, asked.parameters).scalar_one_or_none()
            return None if fence is None else asked.granted(fence, attempt=1)
        row = row_of(found)
        verdict = judge(row, asked)
        return self._moves.make(connection, verdict, row, asked) if isinstance(verdict, Move) else verdict


def number_of(rid: bytes) -> int:
    """Sixty-four of its bits, as PostgreSQL counts: it is a digest, so any will do."""
    return int.from_bytes(rid[:8], "big", signed=True)
