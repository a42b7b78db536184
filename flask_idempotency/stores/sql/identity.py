"""The number by which a database's records are told from those of every other, and so are answers cached before it."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

from flask_idempotency.engine.errors import ConfigurationError

IDENTITY_BYTES: Final = 8

_READ: Final = text("SELECT value FROM idempotency_facts WHERE name = 'store'")


def identity(connection: Connection) -> bytes:
    """The same eight bytes for as long as the database lives. Raises `ConfigurationError` where it has none."""
    found = connection.scalar(_READ)
    if not isinstance(found, int):
        raise nameless()
    return spelt(found)


def spelt(number: int) -> bytes:
    # Signed: an operator may have chosen it.
    return number.to_bytes(IDENTITY_BYTES, "big", signed=True)


def nameless() -> ConfigurationError:
    return ConfigurationError(
        "the database has no number of its own to tell its answers by: run `flask idempotency db upgrade`"
    )
