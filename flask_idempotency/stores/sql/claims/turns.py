"""Short transactions, one after the other, until one of them has an answer."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from flask_idempotency.engine.outcome import InFlight
from flask_idempotency.engine.ports import StoreOutcome
from flask_idempotency.stores.sql.claims.verdict import RETRY_SECONDS
from flask_idempotency.stores.sql.database import TRIES


def take_turns(connection: Connection, once: Callable[[Connection], StoreOutcome | None]) -> StoreOutcome:
    """The first answer of `once`, each time in a transaction of its own at READ COMMITTED: one that began before somebody
    else's commit must not be the one that looks for it."""
    connection = connection.execution_options(isolation_level="READ COMMITTED")
    for _ in range(TRIES):
        with connection.begin():
            outcome = once(connection)
        if outcome is not None:
            return outcome
    return InFlight(RETRY_SECONDS)
