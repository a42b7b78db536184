"""The number by which a database's records are told from those of every other, and so are answers cached before it."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

from flask_idempotency.engine.errors import ConfigurationError

_READ: Final = text("SELECT value FROM idempotency_facts WHERE name = 'store'")


def identity(connection: Connection) -> bytes:
    """The same eight bytes for as long as the database lives. Raises `ConfigurationError` where it has none."""
    found = connection.scalar(_READ)
    if found is None:
        raise ConfigurationError(
            "the database has no number of its own to tell its answers by in Redis: run `flask idempotency db upgrade`"
        )
    # Signed: an operator may have chosen it.
    return int(found).to_bytes(8, "big", signed=True)
