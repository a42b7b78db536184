"""Trying again, until there is an answer."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from flask_idempotency.engine.model import InFlight
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql.claims.verdict import RETRY_SECONDS
from flask_idempotency.stores.sql.database import TRIES, together
from flask_idempotency.stores.sql.faults import waited_in_vain

Once = Callable[[Connection], StoreOutcome | None]


def until_answered(connection: Connection, once: Once, *, wait: Callable[[Connection], object]) -> StoreOutcome:
    """The first answer of `once`. Where there is none for some tries it is waited, once: `wait` may raise that it was in
    vain."""
    answer = _some_tries(connection, once)
    if answer is not None:
        return answer
    try:
        wait(connection)
    except DBAPIError as error:
        if not waited_in_vain(error):
            raise
        return InFlight(RETRY_SECONDS)
    return _some_tries(connection, once) or InFlight(RETRY_SECONDS)


def turn(connection: Connection, once: Once) -> StoreOutcome | None:
    """In a short transaction, at READ COMMITTED: one that began before somebody else's commit must not be the one that looks
    for it."""
    with together(connection):
        return once(connection)


def _some_tries(connection: Connection, once: Once) -> StoreOutcome | None:
    for _ in range(TRIES):
        outcome = once(connection)
        if outcome is not None:
            return outcome
    return None
