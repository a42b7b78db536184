"""`SqlSchema`: the schema port, for whichever database the store keeps its records in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.sql import checks, migrations
from flask_idempotency.stores.sql.complaint import complaint


class HasEngines(Protocol):
    @property
    def base(self) -> Engine: ...

    @property
    def engine(self) -> Engine: ...


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
