"""Check that a database can keep claims safely, and say what to do if it cannot.

The checks only read, in statements that need no transaction. A pooler may send each of them to another server connection.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeVar

from sqlalchemy import URL, Connection, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.store import MissingGrant
from flask_idempotency.stores.sql import errors, migrations, mysql
from flask_idempotency.stores.sql import schema as tables
from flask_idempotency.stores.sql.admin import grants
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.dialects import MYSQL, SQLITE, kind_of
from flask_idempotency.stores.sql.errors import error_text
from flask_idempotency.stores.sql.migrations import LATEST, version
from flask_idempotency.stores.sql.naming import find, named, options

AnswerT = TypeVar("AnswerT")

_UPGRADE: Final = "Run `flask idempotency db upgrade`"
# `flask db migrate` writes a downgrade that drops the records, so recommend a migration by hand.
_ALEMBIC: Final = (
    "where Alembic creates the tables, write a migration that calls `sql.upgrade(op.get_bind())` (`flask db revision`, see "
    "docs/guides/flask-migrate.md), and run `flask db upgrade`"
)

_CREATE_ALL: Final = "With the store flask-sqlalchemy://, `db.create_all()` makes them too."

_DURABILITY: Final = text("SELECT current_setting('synchronous_commit')")
_ISOLATION: Final = text("SELECT current_setting('default_transaction_isolation')")
_NUMBER_IN_USE: Final = (
    "SELECT EXISTS (SELECT 1 FROM {schema}idempotency_data_keys)"
    " OR EXISTS (SELECT 1 FROM {schema}idempotency_meta WHERE name = 'cached_since')"
)
_JOURNAL: Final = text("PRAGMA journal_mode")
_SYNCHRONOUS: Final = text("PRAGMA synchronous")

FULL: Final = 2
"""PRAGMA synchronous. With a write-ahead log EXTRA adds no safety to FULL."""

INDEX: Final = "The index "
"""Faults about an index start with this."""


def faults(connection: Connection) -> list[str]:
    """Return why the store must refuse claims here: a sentence for each fault, with its remedy. Empty if there is none."""
    found = structural(connection)
    if connection.dialect.name == "postgresql":
        if connection.scalar(_DURABILITY) == "off":
            found.append(
                "synchronous_commit is off here: a crash could lose a claim that was granted, and the payment would run "
                "again. Set it to on for the role that the application connects as."
            )
    elif kind_of(connection.dialect.name) == MYSQL:
        found += mysql.faults(connection.exec_driver_sql(mysql.READ_SETTINGS).one()._mapping)
    elif connection.dialect.name == "sqlite":
        journal = connection.scalar(_JOURNAL)
        if journal != "wal":
            found.append(
                f"This SQLite database has journal_mode {journal}: readers and writers would wait for each other. "
                "Run `PRAGMA journal_mode=WAL` on it once."
            )
        if (connection.scalar(_SYNCHRONOUS) or 0) < FULL:
            found.append(
                "This SQLite connection has PRAGMA synchronous below FULL: a power failure could lose a claim that was "
                "granted, and the payment would run again. Set it to FULL where connections are made."
            )
    return found


def structural(connection: Connection) -> list[str]:
    """Return the faults of the tables, their rows and the role's privileges."""
    lacking = grants.lacking(connection, dict.fromkeys(errors.TABLES, grants.ALL), tables.FENCES)
    # A role that may not read this table would get a bare refusal instead of a fault.
    schema = _schema(connection) if "SELECT" not in lacking.get(tables.meta.name, ()) else ()
    rights = "; ".join(f"{', '.join(found)} on {name}" for name, found in lacking.items())
    return [*([f"{errors.REMEDY[0].upper()}{errors.REMEDY[1:]}. It lacks {rights}."] if rights else []), *schema]


def advice(connection: Connection) -> list[str]:
    """Return what costs speed only, or what the first claim may mend, with the remedies."""
    # The version last: a role that may not read it has been told of that as a fault.
    if migrations.lacks_sequence(connection) and version(connection):
        return [
            f"The sequence {tables.FENCES} is not in this database. The first claim makes it, and is refused if its role may "
            f"not create tables. {_UPGRADE}."
        ]
    if connection.dialect.name == "postgresql":
        isolation = connection.scalar(_ISOLATION)
        if isolation != "read committed":
            return [
                f"default_transaction_isolation is {isolation!r} here: if two claims conflict, one may fail and is "
                "repeated. Set it to 'read committed' for the role that the application connects as."
            ]
    return []


def _schema(connection: Connection) -> Iterator[str]:
    missing, reached = tables.lacks(connection), version(connection)
    if reached > LATEST:
        yield (
            f"The idempotency tables are at version {reached}, which is newer than this release knows ({LATEST}). "
            "Install the release of flask-idempotency that created them, or a later one."
        )
    elif missing.tables:
        remedy = f"{_UPGRADE}; {_ALEMBIC} instead."
        if len(missing.tables) == len(tables.RECORD_TABLES):
            # An application may call it after the extension has looked at the database.
            yield f"The idempotency tables are not in this database. {remedy} {_CREATE_ALL}"
        elif len(missing.tables) > 1:
            yield f"The tables {', '.join(missing.tables)} are not in this database. {remedy}"
        else:
            yield f"The table {missing.tables[0]} is not in this database. {remedy}"
    elif 0 < reached < LATEST and missing.parts:
        yield (
            f"The idempotency tables are at version {reached} and this release needs {LATEST}. {_UPGRADE}; {_ALEMBIC}."
        )
    else:
        yield from _parts(missing)
        if fault := tables.cache_fault(connection, tables.FENCES, tables.FENCES_DO_NOT_RISE):
            yield fault
        # The first claim sets the sequence and adds the number, if its role may.
        if missing.seed and not grants.may_set_sequence(connection):
            yield (
                "The fences of this database count from one: an old worker could pass for a newer one. "
                f"{_UPGRADE} as the owner of the tables, or grant UPDATE on the sequence {tables.FENCES} to the role that the "
                "application connects as: then its first claim sets it to the clock."
            )
        if missing.store and connection.scalar(named(connection, _NUMBER_IN_USE)):
            yield (
                "This database has lost the number that its encrypted or cached responses belong to. "
                "Restore the row 'store' of idempotency_meta from a backup. If there is none, "
                f"{_UPGRADE[0].lower()}{_UPGRADE[1:]}: it chooses another number, and no encrypted response can be read then."
            )


def _parts(missing: tables.SchemaGaps) -> Iterator[str]:
    for column in missing.columns:
        # A new column would not restore the lost values.
        yield (
            f"The column {column} is not in this database: the table was changed, or belongs to another program. "
            f"Restore it, or give it another name and then {_UPGRADE.lower()}."
        )
    for index in missing.indexes:
        yield f"{INDEX}{index} is not in this database: statements would read the whole table. {_UPGRADE}."
    for sequence in missing.sequences:
        yield f"The sequence {sequence} is not in this database: the store cannot grant a claim. {_UPGRADE}."


class Place(NamedTuple):
    """The address of a database, without user and password."""

    kind: str
    database: str
    host: str | None
    port: int | None


def place_of(url: URL) -> Place:
    database = url.database or ""
    kind = url.get_backend_name()
    if kind == SQLITE:
        return Place(kind, os.path.realpath(database), None, None)
    return Place(kind, database, url.host, url.port)


class SqlSchema:
    """Implements `Schema`. Raises `StoreUnavailable` with the database's message if a statement fails."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._joining = database.joining

    def upgrade(self) -> list[str]:
        # Connections for records time out, and an upgrade may take long: it waits for another one, or builds an index.
        with self._translated_errors():
            if self._joining is not None and self._joining.here():
                return self._joining.run(migrations.upgrade)
            return migrations.upgrade(self._database.base)

    def faults(self) -> list[str]:
        return self._ask(faults)

    def advice(self) -> list[str]:
        if self._joining is not None and self._joining.here():
            return []  # a test's database need not survive a power failure
        return self._ask(advice)

    def missing_grants(self, role: str) -> list[MissingGrant]:
        """Return what this role lacks to complete records, and to claim them if the pool may set it at each checkout."""
        wanted: tuple[Mapping[str, Sequence[str]], str | None] = (grants.IN_A_VIEW, None)
        if self._database.base.pool.dispatch.checkout:
            wanted = grants.IN_A_CLAIM, tables.FENCES
        return self._ask(lambda connection: list(grants.missing(connection, role, *wanted)))

    def place(self) -> Place:
        """Return where the tables are."""
        return place_of(self._database.engine.url)

    def knows_alembic(self) -> bool:
        """Return True if Alembic has ever run a migration in this database."""
        return self._ask(lambda connection: inspect(connection).has_table("alembic_version"))

    def _ask(self, work: Callable[[Connection], AnswerT]) -> AnswerT:
        with self._translated_errors():
            if self._joining is not None and self._joining.here():
                return self._joining.run(work)
            with self._database.engine.connect() as connection:
                _, schema = find(connection, tables.metadata.tables)
                return work(connection.execution_options(**options(schema)))

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            # The cause quotes statements and addresses, which must stay out of logs.
            raise StoreUnavailable(error_text(error, self._database.engine.url)) from None
