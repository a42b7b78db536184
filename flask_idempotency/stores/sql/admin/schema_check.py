"""Whether this database may be trusted with claims, and what to do when not.

Reads only, in statements that need no transaction and leave nothing behind: a pooler may give each of them to another
server connection.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

from sqlalchemy import URL, Connection, Engine, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.sql import errors, migrations
from flask_idempotency.stores.sql.dialects import SQLITE
from flask_idempotency.stores.sql.errors import error_text
from flask_idempotency.stores.sql.migrations import LATEST, version
from flask_idempotency.stores.sql.schema import FENCES, META, SchemaGaps, lacks, metadata

_UPGRADE: Final = "Run `flask idempotency db upgrade`"

_DURABILITY: Final = text("SELECT current_setting('synchronous_commit')")
_ISOLATION: Final = text("SELECT current_setting('default_transaction_isolation')")
_NUMBER_IN_USE: Final = text(
    "SELECT EXISTS (SELECT 1 FROM idempotency_data_keys)"
    " OR EXISTS (SELECT 1 FROM idempotency_meta WHERE name = 'cached_since')"
)
_JOURNAL: Final = text("PRAGMA journal_mode")
_SYNCHRONOUS: Final = text("PRAGMA synchronous")

# PRAGMA synchronous: what EXTRA is more than FULL matters to no log that is written ahead.
FULL: Final = 2

INDEX: Final = "The index "
"""How a sentence begins that is about one."""


def faults(connection: Connection) -> list[str]:
    """Why nobody may claim here: a sentence for each reason, with its remedy. Empty when all is in order."""
    return [*structural(connection), *_durability(connection)]


def structural(connection: Connection) -> list[str]:
    """Those of them that are about tables, what is in them, and the right to use them."""
    lacking = errors.missing_privileges(connection)
    # The schema's version is a fact: whoever may not read it would be refused, and told nothing.
    schema = _schema(connection) if "SELECT" not in lacking.get(META, ()) else ()
    return [*_rights(lacking), *schema]


def advice(connection: Connection) -> list[str]:
    """What does no harm to the promise, and is better otherwise."""
    if connection.dialect.name == "postgresql":
        isolation = connection.scalar(_ISOLATION)
        if isolation != "read committed":
            return [
                f"default_transaction_isolation is {isolation!r} here: of two claims that meet, one may fail and have to "
                "be repeated. Set it to 'read committed' for the role that the application connects as."
            ]
    return []


def _rights(lacking: dict[str, list[str]]) -> Iterator[str]:
    if lacking:
        named = "; ".join(f"{', '.join(found)} on {name}" for name, found in lacking.items())
        yield f"{errors.REMEDY[0].upper()}{errors.REMEDY[1:]}. It lacks {named}."


def _schema(connection: Connection) -> Iterator[str]:
    missing, reached = lacks(connection), version(connection)
    if reached > LATEST:
        yield (
            f"The idempotency tables are at version {reached}, which is newer than this release knows ({LATEST}). "
            "Install the release of flask-idempotency that made them, or a later one."
        )
    elif missing.tables:
        yield _tables(missing.tables)
    elif 0 < reached < LATEST and missing.parts:
        yield (
            f"The idempotency tables are at version {reached} and this release needs {LATEST}. {_UPGRADE}; "
            "where Alembic makes the tables, write a new migration and run it: `flask db migrate`, `flask db upgrade`."
        )
    else:
        yield from _parts(missing)
        # The first claim sets the sequence and adds the number, unless something forbids it.
        if missing.seed and not errors.may_set_sequence(connection):
            yield (
                "The fences of this database count from one: a worker of long ago could pass for a newer one. "
                f"{_UPGRADE} as the owner of the tables, or grant UPDATE on the sequence {FENCES} to the role that the "
                "application connects as: then its first claim sets it to the clock."
            )
        if missing.store and connection.scalar(_NUMBER_IN_USE):
            yield (
                "This database has lost the number that its sealed or cached answers belong to. "
                "Restore the row 'store' of idempotency_meta from a backup. If there is none, "
                f"{_UPGRADE[0].lower()}{_UPGRADE[1:]}: it chooses another number, and no sealed answer can be opened then."
            )


def _tables(names: tuple[str, ...]) -> str:
    remedy = f"{_UPGRADE}, or the migrations of the application where Alembic makes the tables."
    if len(names) == len(metadata.tables):
        return f"The idempotency tables are not in this database. {remedy}"
    if len(names) > 1:
        return f"The tables {', '.join(names)} are not in this database. {remedy}"
    return f"The table {names[0]} is not in this database. {remedy}"


def _parts(missing: SchemaGaps) -> Iterator[str]:
    for column in missing.columns:
        # To add it would not bring back what was in it.
        yield (
            f"The column {column} is not in this database: the table was changed, or is not ours. "
            f"Restore it, or give it another name and then {_UPGRADE.lower()}."
        )
    for index in missing.indexes:
        yield f"{INDEX}{index} is not in this database: the whole table would be read. {_UPGRADE}."
    for sequence in missing.sequences:
        yield f"The sequence {sequence} is not in this database: no claim can be granted. {_UPGRADE}."


def _durability(connection: Connection) -> Iterator[str]:
    if connection.dialect.name == "postgresql":
        if connection.scalar(_DURABILITY) == "off":
            yield (
                "synchronous_commit is off here: a crash could lose a claim that was granted, and the payment would run "
                "again. Set it to on for the role that the application connects as."
            )
    elif connection.dialect.name == "sqlite":
        journal = connection.scalar(_JOURNAL)
        if journal != "wal":
            yield (
                f"This SQLite database has journal_mode {journal}: readers and writers would keep each other waiting. "
                "Run `PRAGMA journal_mode=WAL` on it once."
            )
        if (connection.scalar(_SYNCHRONOUS) or 0) < FULL:
            yield (
                "This SQLite connection has PRAGMA synchronous below FULL: a power failure could lose a claim that was "
                "granted, and the payment would run again. Set it to FULL where connections are made."
            )


class HasEngines(Protocol):
    @property
    def base(self) -> Engine: ...

    @property
    def engine(self) -> Engine: ...


class Place(NamedTuple):
    """Where a database is, without the user or the password."""

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
    """Raises `StoreUnavailable`, with the database's own words for it, when it cannot be asked or changed."""

    def __init__(self, database: HasEngines) -> None:
        self._database = database

    def upgrade(self) -> list[str]:
        # Connections for records give up on what takes its time, such as another upgrade, or an index of a large table.
        with self._told():
            return migrations.upgrade(self._database.base)

    def faults(self) -> list[str]:
        with self._connection() as connection:
            return faults(connection)

    def advice(self) -> list[str]:
        with self._connection() as connection:
            return advice(connection)

    def place(self) -> Place:
        """Where the tables are."""
        return place_of(self._database.engine.url)

    def knows_alembic(self) -> bool:
        """Whether Alembic has ever run a migration in this database."""
        with self._connection() as connection:
            return inspect(connection).has_table("alembic_version")

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        with self._told(), self._database.engine.connect() as connection:
            yield connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            # The cause quotes statements and addresses, and stays out of every log.
            raise StoreUnavailable(error_text(error, self._database.engine.url)) from None
