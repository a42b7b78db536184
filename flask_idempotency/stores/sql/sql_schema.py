"""`SqlSchema`: the schema port, for whichever database the store keeps its records in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from sqlalchemy import URL, Connection, Engine, inspect
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.sql import checks, migrations
from flask_idempotency.stores.sql.complaint import complaint
from flask_idempotency.stores.sql.dialects import SQLITE


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
            return checks.faults(connection)

    def advice(self) -> list[str]:
        with self._connection() as connection:
            return checks.advice(connection)

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
            raise StoreUnavailable(complaint(error, self._database.engine.url)) from None
