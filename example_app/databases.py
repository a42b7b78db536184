"""A database for one tour alone: a SQLite file, or a schema of its own in the PostgreSQL that DATABASE_URL names."""

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
    """The database cannot be used; the message says why, and what to do."""


@contextmanager
def tour_database(given: str | None, *, folder: Path) -> Iterator[str]:
    """The URL of an empty database, gone at the end. `given` is DATABASE_URL; without it, a file in this folder."""
    if not given:
        yield f"sqlite:///{folder / 'shop.sqlite3'}"
        return
    url = postgresql(given)
    schema = f"idempotency_demo_{secrets.token_hex(4)}"
    engine = create_engine(url, poolclass=NullPool, connect_args={"connect_timeout": CONNECT_SECONDS})
    make(engine, schema)
    try:
        # Every connection's first schema, so that the tables of others are neither taken for ours nor touched.
        options = f"{url.query.get('options', '')} -csearch_path={schema}".strip()
        yield url.update_query_dict({"options": options}).render_as_string(hide_password=False)
    finally:
        drop(engine, schema)


def postgresql(given: str) -> URL:
    try:
        url = make_url(database_url(given))
    except (ArgumentError, ValueError):
        # None of its words: they may quote a password.
        raise NoDatabase("DATABASE_URL is no URL of a database. Write postgresql://user:password@host/name") from None
    if url.get_backend_name() != "postgresql":
        raise NoDatabase("the tour plays on PostgreSQL or, without DATABASE_URL, on a SQLite file of its own")
    return url


def make(engine: Engine, schema: str) -> None:
    try:
        with limited(engine) as connection:
            connection.execute(CreateSchema(schema))
    except SQLAlchemyError as error:
        raise NoDatabase(
            f"the tour needs to make a schema of its own in the database that DATABASE_URL names, and cannot: {said(error)}"
        ) from None


def drop(engine: Engine, schema: str) -> None:
    try:
        with limited(engine) as connection:
            connection.execute(DropSchema(schema, cascade=True))
    except SQLAlchemyError as error:
        print(f"demo: the schema {schema} is left behind: {said(error)}", file=sys.stderr)


@contextmanager
def limited(engine: Engine) -> Iterator[Connection]:
    """A transaction that waits for nobody for long: whoever looks at our tables must not keep the demo from ending."""
    with engine.begin() as connection:
        for limit in LIMITS:
            connection.execute(text(limit))
        yield connection


def said(error: SQLAlchemyError) -> str:
    """In the database's own words, which name no password."""
    return " ".join(str(getattr(error, "orig", None) or type(error).__name__).split())
