"""Waiting for a tenant's lock without keeping others from the connections."""

from __future__ import annotations

import random
import time
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql.claims.gate import Crowded
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.dialects import PATIENCE_MS
from flask_idempotency.stores.sql.faults import waited_in_vain

PAUSE_SECONDS: Final = (0.01, 0.04)
"""Between two looks. Of different lengths, so that processes which met once do not meet each time."""


def in_turn(database: Database, tid: bytes, crowded: Crowded) -> StoreOutcome | None:
    """What comes of a claim that must have the tenant for itself. None: nobody could tell while it was good to wait.

    Of one tenant's claims one at a time has a connection for it, and gives that back again and again.
    """
    patience = PATIENCE_MS / 1000
    until = time.monotonic() + patience
    with database.turnstile.turn(tid, patience=patience) as mine:
        while mine and time.monotonic() < until:
            outcome = database.run(lambda connection: _briefly(connection, crowded))
            if outcome is not None:
                return outcome
            time.sleep(random.uniform(*PAUSE_SECONDS))  # noqa: S311 - nobody is kept out by guessing it
    return None


def _briefly(connection: Connection, crowded: Crowded) -> StoreOutcome | None:
    try:
        return crowded.closely(connection)
    except DBAPIError as error:
        if not waited_in_vain(error):
            raise
        return None
