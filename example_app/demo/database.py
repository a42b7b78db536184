"""An empty database for one tour: a SQLite file, or a new schema in the PostgreSQL that DATABASE_URL names."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.schema import CreateSchema, DropSchema

from example_app.models import database_url

LIMITS = ("SET lock_timeout = '5s'", "SET statement_timeout = '10s'")
CONNECT_SECONDS = 5


class NoDatabase(Exception):
    """The tour cannot use the database. The message says why, and what to do."""


@contextmanager
def tour_database(given: str | None, *, folder: Path) -> Iterator[str]:
    """Yield the URL of an empty database, and remove the database afterwards.

    `given` is DATABASE_URL. Without it the database is a file in this folder. Raises `NoDatabase`.
    """
    if not given:
        yield f"sqlite:///{folder / 'shop.sqlite3'}"
        return
    url = postgresql(given)
    schema = f"idempotency_demo_{secrets.token_hex(4)}"
    engine = create_engine(url, poolclass=NullPool, connect_args={"connect_timeout": CONNECT_SECONDS})
    create_schema(engine, schema)
    try:
        # The first schema of every connection, so that the tour never reads or writes your tables.
        options = f"{url.query.get('options', '')} -csearch_path={schema}".strip()
        yield url.update_query_dict({"options": options}).render_as_string(hide_password=False)
    finally:
        drop_schema(engine, schema)


def postgresql(given: str) -> URL:
    try:
        url = make_url(database_url(given))
    except (ArgumentError, ValueError):
        # Do not repeat the URL: it may hold a password.
        raise NoDatabase(
            "DATABASE_URL is not the URL of a database. Write postgresql://user:password@host/name"
        ) from None
    if url.get_backend_name() != "postgresql":
        raise NoDatabase("the tour runs on PostgreSQL or, without DATABASE_URL, on a SQLite file that it makes")
    return url


def create_schema(engine: Engine, schema: str) -> None:
    try:
        with limited(engine) as connection:
            connection.execute(CreateSchema(schema))
    except SQLAlchemyError as error:
        raise NoDatabase(
            f"the tour cannot create a schema in the database that DATABASE_URL names: {said(error)}"
        ) from None


def drop_schema(engine: Engine, schema: str) -> None:
    try:
        with limited(engine) as connection:
            connection.execute(DropSchema(schema, cascade=True))
    except SQLAlchemyError as error:
        print(f"demo: cannot drop the schema {schema}, so drop it yourself: {said(error)}", file=sys.stderr)


@contextmanager
def limited(engine: Engine) -> Iterator[Connection]:
    """Yield a transaction that waits for a lock for 5 s at most: a session of yours on our tables must not delay the end."""
    with engine.begin() as connection:
        for limit in LIMITS:
            connection.execute(text(limit))
        yield connection


def said(error: SQLAlchemyError) -> str:
    """Return the message of the database, which never holds a password."""
    return " ".join(str(getattr(error, "orig", None) or type(error).__name__).split())
