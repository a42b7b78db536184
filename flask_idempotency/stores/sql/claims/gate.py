"""Whether a tenant may have one more key: looked at from afar while there is plenty of room, and else one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from flask_idempotency.engine.outcome import OverQuota
from flask_idempotency.engine.ports import StoreOutcome
from flask_idempotency.engine.quota import window_of
from flask_idempotency.stores.sql import ledger_statements, statements
from flask_idempotency.stores.sql.claims.moves import Moves
from flask_idempotency.stores.sql.claims.turns import take_turns
from flask_idempotency.stores.sql.claims.verdict import Asked
from flask_idempotency.stores.sql.dialects import Dialect
from flask_idempotency.stores.sql.faults import contended
from flask_idempotency.stores.sql.limits import rate
from flask_idempotency.stores.sql.rows import row_of


class Gate:
    """PostgreSQL. Every way to take a key passes it, if it is a new one and there is a quota."""

    def __init__(self, dialect: Dialect, moves: Moves) -> None:
        self._lock = ledger_statements.tenant_lock(dialect)
        self._read = statements.read(dialect)
        self._standing = ledger_statements.standing(dialect)
        self._moves = moves

    def claim(self, connection: Connection, asked: Asked, from_afar: Callable[[], StoreOutcome | None]) -> StoreOutcome:
        """What came of it from afar; if that was nothing, whatever the reason, of a look while nobody else may."""
        try:
            outcome = from_afar()
        except DBAPIError as error:
            # Of two that met in the ledger, where the role's isolation is stricter than is needed.
            if not contended(error):
                raise
            outcome = None
        if outcome is not None:
            return outcome
        closely = asked.closely()
        return take_turns(connection, lambda transaction: self._closely(transaction, closely))

    def _closely(self, connection: Connection, asked: Asked) -> StoreOutcome | None:
        connection.execute(self._lock, asked.parameters)
        # In statements of their own: what was committed while this one waited for the lock is seen by the next.
        outcome = self._moves.insert(connection, asked)
        if outcome is not None:
            return outcome
        found = connection.execute(self._read, asked.parameters).one_or_none()
        if found is not None:
            row = row_of(found)
            outcome = self._moves.carry_out(connection, row, asked)
            if outcome is not None or not row.absent:
                return outcome
        return refusal(connection.execute(self._standing, asked.parameters).one())


def refusal(standing: Any) -> OverQuota | None:
    """Why one more key must not be granted, by `ledger_statements.standing`."""
    now = standing.now
    ends = (standing.first_edge or now) - now
    if standing.max_records is not None and standing.unsettled + standing.records >= standing.max_records:
        return OverQuota("records", standing.max_records, ends / 1_000_000)
    if standing.max_bytes is not None and standing.bytes >= standing.max_bytes:
        return OverQuota("bytes", standing.max_bytes, ends / 1_000_000)
    if standing.max_in_flight is not None and standing.in_flight >= standing.max_in_flight:
        left = (standing.first_lease or now) - now
        return OverQuota("in-flight", standing.max_in_flight, left / 1_000_000)
    new_keys = rate(standing.max_new_keys, standing.max_span)
    if new_keys is not None and standing.new_keys >= new_keys.count:
        _, left = window_of(now, new_keys)
        return OverQuota("new-keys", new_keys.count, left / 1_000_000, new_keys.seconds)
    return None
