"""Give a database its own number, and add the rows that a migration tool does not write.

Alembic's autogenerate writes tables, columns, constraints and indexes. It writes no rows and sets no sequence. So at the first
claim of a process the store adds the schema's version and its own number here, and sets the sequence of fences to the clock.
Every statement is safe in many processes at once, behind a pooler too, and needs no right to create or alter anything.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql import schema, statements
from flask_idempotency.stores.sql.database import transaction
from flask_idempotency.stores.sql.dialects import DIALECTS, MYSQL, POSTGRESQL, kind_of
from flask_idempotency.stores.sql.errors import is_missing_sequence
from flask_idempotency.stores.sql.mysql import NUMBERED, Numbers
from flask_idempotency.stores.sql.naming import named, prefix
from flask_idempotency.stores.sql.schema import FENCES, SEEDED, VERSION

# "idemfenc" in ASCII: the whole application shares one space of advisory locks.
_LOCK: Final = 0x6964656D66656E63

_MISSING: Final = (
    "SELECT NOT EXISTS (SELECT 1 FROM {schema}idempotency_meta WHERE name = 'schema_version' AND value >= :version) AS old,"
    " NOT EXISTS (SELECT 1 FROM {schema}idempotency_meta WHERE name = 'store') AS nameless, "
)
# Only a role with both rights can set the sequence. `doctor` tells an operator whose role lacks one.
_FENCES_LOW: Final = (
    "CASE WHEN has_sequence_privilege(to_regclass(:name), 'USAGE, SELECT')"
    " AND has_sequence_privilege(to_regclass(:name), 'UPDATE')"
    " THEN coalesce(pg_sequence_last_value(to_regclass(:name)) < :seeded, true) ELSE false END AS low_fences"
)
_MISSING_POSTGRESQL: Final = _MISSING + _FENCES_LOW
_MISSING_OTHERS: Final = _MISSING + "0 AS low_fences"

# Encrypted responses are bound to the number, and cached ones are found by it. If either may exist, only an operator may
# choose a new number: `flask idempotency db upgrade`.
_NOT_IN_USE: Final = (
    "NOT EXISTS (SELECT 1 FROM {schema}idempotency_data_keys)"
    " AND NOT EXISTS (SELECT 1 FROM {schema}idempotency_meta WHERE name = 'cached_since')"
)
_META: Final = "{schema}idempotency_meta"
_LAST_FENCE: Final = (
    f"SELECT greatest({DIALECTS[MYSQL].clock},"  # noqa: S608 - our own words
    " coalesce((SELECT value FROM {schema}idempotency_meta WHERE name = 'fence'), 0))"
)
# It reads the whole table, so only where the sequence was lost.
_HIGHEST_FENCE: Final = "SELECT coalesce(max(fence), 0) FROM {schema}idempotency_records"
# In a statement of its own, after the lock: `setval` is visible immediately, also before its transaction ends.
_RAISE_FENCES: Final = text(
    "SELECT setval(to_regclass(:name), (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)"
    " WHERE coalesce(pg_sequence_last_value(to_regclass(:name)) < :seeded, true)"
)


def prepare(connection: Connection) -> None:
    """Add what is missing, and change nothing if nothing is missing.

    Raises `ConfigurationError` if the fences of this database do not rise.
    """
    postgresql = connection.dialect.name == POSTGRESQL
    if fault := schema.cache_fault(connection, FENCES, schema.FENCES_DO_NOT_RISE):
        raise ConfigurationError(fault)
    parameters = {"version": VERSION, **(_fences(connection) if postgresql else {})}
    statement = named(connection, _MISSING_POSTGRESQL if postgresql else _MISSING_OTHERS)
    missing = connection.execute(statement, parameters).one()
    if missing.nameless:
        name_store(connection)
    # A database at an older version keeps it until a migration has added what this release needs.
    if missing.old and not schema.lacks(connection).parts:
        write_version(connection)
    if NUMBERED in connection.info:
        raise_sequence(connection)
        numbers: Numbers = connection.info[NUMBERED]
        numbers.raised, numbers.due = True, False
    # Last: afterwards this connection no longer commits each statement by itself.
    if missing.low_fences:
        # Fences rise even over tables that were dropped and created again. Under a lock: without it a second process could
        # set the sequence back below a fence that was already granted.
        with transaction(connection):
            connection.execute(statements.advisory_lock(DIALECTS[POSTGRESQL]), {"my_number": _LOCK, "now": None})
            connection.execute(_RAISE_FENCES, _fences(connection))


def raise_sequence(connection: Connection) -> None:
    """MariaDB: set the sequence of fences to the clock, and make it if it is missing. It never falls.

    Alembic makes no sequence. In Galera or after a restore, other numbers may be higher: those of the row of the last fence.
    """
    name = f"{prefix(connection)}{FENCES}"
    least = connection.execute(named(connection, _LAST_FENCE)).scalar_one()
    try:
        # SETVAL takes a literal only, and does nothing if the sequence is higher.
        connection.exec_driver_sql(f"SELECT SETVAL({name}, {least})")
    except DBAPIError as error:
        if not is_missing_sequence(error):
            raise
        least = max(least, connection.execute(named(connection, _HIGHEST_FENCE)).scalar_one() + 1)
        connection.exec_driver_sql(f"CREATE SEQUENCE IF NOT EXISTS {name} START WITH {least} ENGINE=InnoDB")


def write_version(connection: Connection) -> None:
    """Note that this database has all that this release needs, unless a later release has noted more."""
    kind = kind_of(connection.dialect.name)
    connection.execute(named(connection, schema.fact(kind, _META, "schema_version", str(VERSION), rises=True)))


def name_store(connection: Connection) -> None:
    """Give this database a random number, unless it has one, or has lost one that is still in use."""
    kind = kind_of(connection.dialect.name)
    connection.execute(named(connection, schema.fact(kind, _META, "store", DIALECTS[kind].random, where=_NOT_IN_USE)))


def _fences(connection: Connection) -> dict[str, Any]:
    return {"name": f"{prefix(connection)}{FENCES}", "seeded": SEEDED}


IDENTITY_BYTES: Final = 8

_READ_NUMBER: Final = "SELECT value FROM {schema}idempotency_meta WHERE name = 'store'"


def identity(connection: Connection) -> bytes:
    """Return the eight bytes of this database's number. Choose the number if the database has none yet.

    Raises `ConfigurationError` if the number was lost and responses still depend on it.
    """
    found = connection.scalar(named(connection, _READ_NUMBER))
    if found is None:
        name_store(connection)
        found = connection.scalar(named(connection, _READ_NUMBER))
    if not isinstance(found, int):
        raise number_lost()
    return identity_bytes(found)


def identity_bytes(number: int) -> bytes:
    # Signed: an operator may have chosen it.
    return number.to_bytes(IDENTITY_BYTES, "big", signed=True)


def number_lost() -> ConfigurationError:
    return ConfigurationError(
        "the database has lost the number that its encrypted or cached responses belong to: restore the row 'store' of "
        "idempotency_meta, or run `flask idempotency db upgrade` to choose another"
    )
