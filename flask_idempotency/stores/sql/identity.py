"""The number that tells a database's records from those of every other, and the rows that a migration tool does not write.

Alembic's autogenerate writes tables, columns, constraints and indexes. It writes no rows and sets no sequence. So at the first
claim of a process the store adds the schema's version and its own number here, and sets the sequence of fences to the clock.
Every statement is safe in many processes at once, behind a pooler too, and needs no right to create or alter anything.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql import schema, statements
from flask_idempotency.stores.sql.database import transaction
from flask_idempotency.stores.sql.dialects import DIALECTS, POSTGRESQL
from flask_idempotency.stores.sql.schema import FENCES, SEEDED, VERSION

# "idemfenc" in ASCII: the whole application shares one space of advisory locks.
_LOCK: Final = 0x6964656D66656E63

_LOOK: Final = (
    "SELECT NOT EXISTS (SELECT 1 FROM idempotency_meta WHERE name = 'schema_version' AND value >= :version) AS old,"
    " NOT EXISTS (SELECT 1 FROM idempotency_meta WHERE name = 'store') AS nameless, "
)
# Only a role with both rights can set the sequence. `doctor` tells an operator whose role lacks one.
_LIFTABLE: Final = (
    "CASE WHEN has_sequence_privilege(to_regclass(:name), 'USAGE, SELECT')"
    " AND has_sequence_privilege(to_regclass(:name), 'UPDATE')"
    " THEN coalesce(pg_sequence_last_value(to_regclass(:name)) < :seeded, true) ELSE false END AS liftable"
)
_LOOK_POSTGRESQL: Final = text(_LOOK + _LIFTABLE)
_LOOK_SQLITE: Final = text(_LOOK + "0 AS liftable")

_WRITE_VERSION: Final = text(
    "INSERT INTO idempotency_meta (name, value) VALUES ('schema_version', :version)"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE idempotency_meta.value < excluded.value"
)
# Sealed answers are bound to the number, and cached ones are found by it. Where either may exist, only an operator may
# choose a new number: `flask idempotency db upgrade`.
_UNLESS_IN_USE: Final = (
    " WHERE NOT EXISTS (SELECT 1 FROM idempotency_data_keys)"
    " AND NOT EXISTS (SELECT 1 FROM idempotency_meta WHERE name = 'cached_since')"
    " ON CONFLICT (name) DO NOTHING"
)
_NAME_POSTGRESQL: Final = (
    "INSERT INTO idempotency_meta (name, value) SELECT 'store',"  # noqa: S608 - our own words
    " ('x' || left(hex, 12) || right(hex, 4))::bit(64)::bigint & 9223372036854775807"
    " FROM replace(gen_random_uuid()::text, '-', '') AS hex" + _UNLESS_IN_USE
)
_NAME_SQLITE: Final = (
    "INSERT INTO idempotency_meta (name, value) SELECT 'store', random() & 9223372036854775807" + _UNLESS_IN_USE
)
# In a statement of its own, after the lock: `setval` is visible at once, also before its transaction ends.
_LIFT: Final = text(
    "SELECT setval(to_regclass(:name), (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)"
    " WHERE coalesce(pg_sequence_last_value(to_regclass(:name)) < :seeded, true)"
)


def prepare(connection: Connection) -> None:
    """Add what is missing. Takes one statement, and changes nothing, if nothing is missing."""
    postgresql = connection.dialect.name == POSTGRESQL
    parameters = {"version": VERSION, **({"name": FENCES, "seeded": SEEDED} if postgresql else {})}
    look = connection.execute(_LOOK_POSTGRESQL if postgresql else _LOOK_SQLITE, parameters).one()
    if look.nameless:
        name_store(connection)
    # A database at an older version keeps it until a migration has added what this release needs.
    if look.old and not schema.lacks(connection).parts:
        connection.execute(_WRITE_VERSION, {"version": VERSION})
    # Last: afterwards this connection no longer commits each statement by itself.
    if look.liftable:
        _lift(connection)


def name_store(connection: Connection) -> None:
    """Give this database a random number, unless it has one, or has lost one that is still in use."""
    connection.exec_driver_sql(_NAME_POSTGRESQL if connection.dialect.name == POSTGRESQL else _NAME_SQLITE)


def _lift(connection: Connection) -> None:
    """Set the sequence of fences to the clock, so that fences rise even over tables that were dropped and made again.

    Under a lock: without it a second process could set the sequence back below a fence that was already granted.
    """
    with transaction(connection):
        connection.execute(statements.advisory_lock(DIALECTS[POSTGRESQL]), {"my_number": _LOCK, "now": None})
        connection.execute(_LIFT, {"name": FENCES, "seeded": SEEDED})


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
