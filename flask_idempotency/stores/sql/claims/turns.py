"""Short transactions, one after the other, until one of them has an answer."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from flask_idempotency.engine.outcome import InFlight
from flask_idempotency.engine.ports import StoreOutcome
from flask_idempotency.stores.sql.claims.verdict import RETRY_SECONDS
from flask_idempotency.stores.sql.database import TRIES, together


def take_turns(connection: Connection, once: Callable[[Connection], StoreOutcome | None]) -> StoreOutcome:
    """The first answer of `once`, each time in a transaction of its own."""
    for _ in range(TRIES):
        outcome = turn(connection, once)
        if outcome is not None:
            return outcome
    return InFlight(RETRY_SECONDS)


def turn(connection: Connection, once: Callable[[Connection], StoreOutcome | None]) -> StoreOutcome | None:
    """At READ COMMITTED: a transaction that began before somebody else's commit must not be the one that looks for it."""
    with together(connection):
        return once(connection)
