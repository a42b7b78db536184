"""`SqlSchema`: the schema port, for whichever database the store keeps its records in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol
from urllib.parse import quote, quote_plus

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.sql import checks, migrations

_HIDDEN: Final = "***"


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
            url = self._database.engine.url
            # The cause quotes statements and addresses, and stays out of every log.
            raise StoreUnavailable(f"{_place(url)}: {_without_secrets(_said(error), url)}.") from None


def _place(url: URL) -> str:
    return f"The database {url.database!r}" if url.host is None else f"The database {url.database!r} on {url.host}"


def _said(error: SQLAlchemyError) -> str:
    """The first line, without its full stop: what follows quotes the statement."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0].rstrip(".")


def _without_secrets(words: str, url: URL) -> str:
    secrets = [str(url.password or ""), *(str(value) for name, value in url.query.items() if "pass" in name)]
    for secret in filter(None, secrets):
        for spelling in (secret, quote(secret, safe=""), quote_plus(secret)):
            words = words.replace(spelling, _HIDDEN)
    return words
