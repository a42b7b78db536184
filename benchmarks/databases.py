"""The databases that records are kept in while they are timed: a PostgreSQL of our own or of yours, and a SQLite file."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import NullPool, create_engine, inspect, text

from benchmarks.machine import Cores, pin
from benchmarks.sql_apps import metadata
from flask_idempotency.stores.sql.schema import metadata as records_metadata
from tests.lab.postgres import PostgresServer, installation

POSTGRESQL, SQLITE = "PostgreSQL", "SQLite"
MISSING = (
    "NOT MEASURED: there is no PostgreSQL on this machine. `python3 run.py setup` installs the pinned one; or name one of "
    "yours with --database-url or DATABASE_URL."
)


class NotEmpty(Exception):
    """Somebody's tables are there, and these would be filled and dropped beside them."""


@dataclass(frozen=True, slots=True)
class Database:
    """`about` is what a reader of its figures must know: the version, and what a commit waits for."""

    kind: str
    url: str
    about: str


@contextmanager
def postgresql(url: str | None, cores: Cores) -> Iterator[Database | None]:
    """With our tables, on the store's core; None where there is none. One that was named is left as it was found: empty."""
    if url is not None:
        with _tables(url):
            yield Database(POSTGRESQL, url, f"{_settings(url)}, the one that was named")
        return
    if installation() is None:
        yield None
        return
    with PostgresServer() as server, server.database() as name:
        # Whom it starts from now on inherits this: every connection has a process of its own.
        pin(server.pid, cores.store)
        with _tables(server.url(name)):
            yield Database(POSTGRESQL, server.url(name), f"{_settings(server.url(name))}, that of the tests")


@contextmanager
def sqlite() -> Iterator[Database]:
    """A file with our tables, in WAL mode, where each commit waits for the disk, as the store sees to."""
    with tempfile.TemporaryDirectory(prefix="idempotency-") as folder:
        url = f"sqlite:///{Path(folder) / 'benchmark.sqlite'}"
        with _tables(url):
            yield Database(SQLITE, url, f"SQLite {sqlite3.sqlite_version}, WAL, synchronous=FULL, a file in {folder}")


@contextmanager
def _tables(url: str) -> Iterator[None]:
    engine = create_engine(url, poolclass=NullPool)
    if found := inspect(engine).get_table_names():
        raise NotEmpty(
            f"the database that was named holds tables ({', '.join(found[:3])}…): the benchmarks make their own and drop "
            "them. Name one that nobody needs"
        )
    try:
        for each in (records_metadata, metadata):
            each.create_all(engine)
        if engine.dialect.name == "sqlite":
            with engine.connect() as connection:
                connection.execute(text("PRAGMA journal_mode=WAL"))
        yield
    finally:
        for each in (records_metadata, metadata):
            each.drop_all(engine)


def _settings(url: str) -> str:
    shown: Sequence[str] = ("server_version", "fsync", "synchronous_commit")
    engine = create_engine(url)
    with engine.connect() as connection:
        version, *settings = (connection.execute(text(f"SHOW {name}")).scalar_one() for name in shown)
    engine.dispose()
    return ", ".join([f"PostgreSQL {version}", *map(" ".join, zip(shown[1:], settings, strict=True))])
