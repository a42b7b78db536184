"""The strategy that needs no lock: whoever inserts the row has the key."""

from __future__ import annotations

from sqlalchemy import Connection

from flask_idempotency.engine.model import InFlight, OverQuota
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql import completions, ledger_statements, statements
from flask_idempotency.stores.sql.claims.gate import Crowded, Gate, refusal
from flask_idempotency.stores.sql.claims.moves import Moves
from flask_idempotency.stores.sql.claims.verdict import RETRY_SECONDS, Asked, Move, judge
from flask_idempotency.stores.sql.completing import entry
from flask_idempotency.stores.sql.database import together
from flask_idempotency.stores.sql.dialects import POSTGRESQL, SQLITE, Dialect
from flask_idempotency.stores.sql.limits import checked
from flask_idempotency.stores.sql.rows import Row, row_of
from flask_idempotency.stores.sql.schema import NEW_KEYS


class Insert:
    """PostgreSQL in one statement, which commits by itself; a row that has to be changed takes a second."""

    dialects = (POSTGRESQL,)

    def __init__(self, dialect: Dialect) -> None:
        self._claim_or_read = statements.claim_or_read(dialect)
        self._read = statements.read(dialect)
        self._moves = Moves(dialect)
        self._gate = Gate(dialect, self._moves)

    def claim(self, connection: Connection, asked: Asked) -> StoreOutcome | Crowded:
        if asked.quota is not None:
            return self._gate.claim(connection, asked, lambda: self._look_first(connection, asked))
        return self._gate.until_answered(connection, asked, lambda alone: self._once(alone, asked))

    def _once(self, connection: Connection, asked: Asked) -> StoreOutcome | None:
        fence, *found = connection.execute(self._claim_or_read, asked.parameters).one()
        if fence is not None:
            return asked.granted(fence, attempt=1)
        if found[0] is None:
            # Somebody inserted the row after our snapshot was taken, so we neither made it nor see it.
            return None
        return self._moves.carry_out(connection, row_of(found), asked)

    def _look_first(self, connection: Connection, asked: Asked) -> StoreOutcome | None:
        """With a quota the statement that inserts is long, and a replay must not pay for having it planned."""
        found = connection.execute(self._read, asked.parameters).one_or_none()
        if found is None:
            return self._moves.insert(connection, asked)
        return self._moves.carry_out(connection, row_of(found), asked)


class InsertIntoFile:
    """SQLite: looking takes one statement and no lock. Writing takes the one lock there is, and looks again first."""

    dialects = (SQLITE,)

    def __init__(self, dialect: Dialect) -> None:
        self._read = statements.read(dialect)
        self._next_fence = statements.next_fence(dialect)
        self._standing = ledger_statements.standing(dialect)
        self._book = completions.book(dialect)
        self._moves = Moves(dialect)

    def claim(self, connection: Connection, asked: Asked) -> StoreOutcome:
        row = self._look(connection, asked)
        verdict = None if row is None else judge(row, asked)
        if verdict is not None and not isinstance(verdict, Move):
            return verdict
        with together(connection):
            return self._write(connection, asked)

    def _look(self, connection: Connection, asked: Asked) -> Row | None:
        found = connection.execute(self._read, asked.parameters).one_or_none()
        return None if found is None else row_of(found)

    def _write(self, connection: Connection, asked: Asked) -> StoreOutcome:
        row = self._look(connection, asked)
        verdict = Move.RECLAIM if row is None else judge(row, asked)
        if not isinstance(verdict, Move):
            return verdict
        refused = self._admit(connection, asked) if verdict is Move.RECLAIM and asked.quota is not None else None
        if refused is not None:
            return refused
        risen = None if verdict is Move.QUARANTINE else self._fence(connection, asked)
        if row is None:
            return self._moves.insert(connection, asked, fence=risen) or InFlight(RETRY_SECONDS)
        return self._moves.make(connection, verdict, row, asked, fence=risen) or InFlight(RETRY_SECONDS)

    def _admit(self, connection: Connection, asked: Asked) -> OverQuota | None:
        """Why this new key must not be granted; else it is counted. Nobody else writes meanwhile, so this is exact."""
        standing = checked(connection.execute(self._standing, asked.parameters).one())
        refused = refusal(standing)
        if refused is None and standing.max_new_keys is not None:
            bucket_end = (standing.now // standing.max_window_length + 1) * standing.max_window_length
            counted = entry(
                kind=NEW_KEYS, bucket_end=bucket_end, window_length=standing.max_window_length, records=1, stored=0
            )
            connection.execute(self._book, {**asked.parameters, **counted})
        return refused

    def _fence(self, connection: Connection, asked: Asked) -> int:
        fence: int = connection.execute(self._next_fence, asked.parameters).scalar_one()
        return fence
