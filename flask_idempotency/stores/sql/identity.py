"""The number by which a database's records are told from those of every other, and so are answers cached before it."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql.first_use import name_store

IDENTITY_BYTES: Final = 8

_READ: Final = text("SELECT value FROM idempotency_meta WHERE name = 'store'")


def identity(connection: Connection) -> bytes:
    """The same eight bytes for as long as the database lives; chosen here if it has none yet.

    Raises `ConfigurationError` where the number was lost and answers still depend on it.
    """
    found = connection.scalar(_READ)
    if found is None:
        name_store(connection)
        found = connection.scalar(_READ)
    if not isinstance(found, int):
        raise nameless()
    return spelt(found)


def spelt(number: int) -> bytes:
    # Signed: an operator may have chosen it.
    return number.to_bytes(IDENTITY_BYTES, "big", signed=True)


def nameless() -> ConfigurationError:
    return ConfigurationError(
        "the database has lost the number that its sealed or cached answers belong to: restore the row 'store' of "
        "idempotency_meta, or run `flask idempotency db upgrade` to choose another"
    )
