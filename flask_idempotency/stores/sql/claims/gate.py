"""Whether a tenant may have one more key: looked at from afar while there is plenty of room, and else one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from flask_idempotency.engine.model import OverQuota
from flask_idempotency.engine.quota import window_of
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql import ledger_statements, statements
from flask_idempotency.stores.sql.claims.moves import Moves
from flask_idempotency.stores.sql.claims.turns import turn, until_answered
from flask_idempotency.stores.sql.claims.verdict import Asked
from flask_idempotency.stores.sql.dialects import Dialect
from flask_idempotency.stores.sql.faults import contended
from flask_idempotency.stores.sql.limits import checked, rate
from flask_idempotency.stores.sql.rows import row_of


@dataclass(frozen=True, slots=True)
class Crowded:
    """There is room, but so little that only who has the tenant for itself can say for how many: `queue.in_turn`."""

    closely: Callable[[Connection], StoreOutcome]
    """Raises when somebody else has the tenant for a moment: that is no time to keep a connection."""


class Gate:
    """PostgreSQL. Every way to take a key passes it, if it is a new one and there is a quota."""

    def __init__(self, dialect: Dialect, moves: Moves) -> None:
        self._lock = ledger_statements.tenant_lock(dialect)
        self._read = statements.read(dialect)
        self._standing = ledger_statements.standing(dialect)
        self._wait_to_reclaim = statements.wait_to_reclaim(dialect)
        self._moves = moves

    def claim(
        self, connection: Connection, asked: Asked, from_afar: Callable[[], StoreOutcome | None]
    ) -> StoreOutcome | Crowded:
        """What came of it from afar; if that was nothing, whatever the reason, a refusal where there is no room at all."""
        try:
            outcome = from_afar()
        except DBAPIError as error:
            # Of two that met in the ledger, where the role's isolation is stricter than is needed.
            if not contended(error):
                raise
            outcome = None
        if outcome is None:
            outcome = self._refused(connection, asked)
        if outcome is not None:
            return outcome
        closely = asked.closely()
        return Crowded(lambda again: self._in_transactions(again, closely, self._closely))

    def in_turns(
        self, connection: Connection, asked: Asked, once: Callable[[Connection, Asked], StoreOutcome | None]
    ) -> StoreOutcome | Crowded:
        """For strategies that work in short transactions: `once` in one of them, past the gate if there is a quota."""

        if asked.quota is not None:
            return self.claim(connection, asked, lambda: turn(connection, lambda transaction: once(transaction, asked)))
        return self._in_transactions(connection, asked, once)

    def until_answered(
        self, connection: Connection, asked: Asked, once: Callable[[Connection], StoreOutcome | None]
    ) -> StoreOutcome:
        """The first answer of `once`. A row that is being removed is waited for, briefly: then its key is a new one."""
        return until_answered(
            connection, once, wait=lambda alone: alone.execute(self._wait_to_reclaim, asked.parameters).all()
        )

    def _in_transactions(
        self, connection: Connection, asked: Asked, once: Callable[[Connection, Asked], StoreOutcome | None]
    ) -> StoreOutcome:
        def in_one(alone: Connection) -> StoreOutcome | None:
            return turn(alone, lambda transaction: once(transaction, asked))

        return self.until_answered(connection, asked, in_one)

    def _refused(self, connection: Connection, asked: Asked) -> StoreOutcome | None:
        """What is said without a lock: who floods a tenant that is full makes nobody wait. None: it is not full.

        What others have not committed yet is not seen, and would only make it fuller.
        """
        standing = checked(connection.execute(self._standing, asked.parameters).one())
        refused = refusal(standing)
        if refused is None or not standing.known:
            return refused
        # Whoever took the last place may have taken it for this very key, and a known key is not refused.
        found = connection.execute(self._read, asked.parameters).one_or_none()
        row = None if found is None else row_of(found)
        return refused if row is None or row.absent else self._moves.carry_out(connection, row, asked)

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
        return refusal(checked(connection.execute(self._standing, asked.parameters).one()))


def refusal(standing: Any) -> OverQuota | None:
    """Why one more key must not be granted, by `ledger_statements.standing`."""
    now = standing.now
    ends = (standing.first_bucket_end or now) - now
    if standing.max_records is not None and standing.unsettled + standing.records >= standing.max_records:
        return OverQuota("records", standing.max_records, ends / 1_000_000)
    if standing.max_bytes is not None and standing.bytes >= standing.max_bytes:
        return OverQuota("bytes", standing.max_bytes, ends / 1_000_000)
    if standing.max_in_flight is not None and standing.in_flight >= standing.max_in_flight:
        left = (standing.first_lease or now) - now
        return OverQuota("in-flight", standing.max_in_flight, left / 1_000_000)
    new_keys = rate(standing.max_new_keys, standing.max_window_length)
    if new_keys is not None and standing.new_keys >= new_keys.count:
        _, left = window_of(now, new_keys)
        return OverQuota("new-keys", new_keys.count, left / 1_000_000, new_keys.seconds)
    return None
