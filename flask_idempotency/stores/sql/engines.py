"""The engines that a URL, or an application's own Engine, comes to."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sqlalchemy import URL, Engine, Pool, StaticPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import SingletonThreadPool

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import without_password
from flask_idempotency.stores.sql.dialects import POSTGRESQL, SQLITE, Dialect, dialect_of
from flask_idempotency.stores.sql.discretion import keep_rows_to_itself
from flask_idempotency.stores.sql.silence import give_up_on_silence

CONNECT_SECONDS: Final = 3
UNANSWERED_MS: Final = 5000
"""A network that swallows what we send is noticed after this long. The kernel's own patience is fifteen minutes."""

POOL_SECONDS: Final = 5
"""A statement takes milliseconds: who waits this long for a connection waits for a database that is gone."""

BUSY_MS: Final = 5000
"""SQLite has one writer at a time. As long as Python's own default."""

_for_records: ContextVar[bool] = ContextVar("flask_idempotency_for_records", default=False)
"""Whether the connection that is being made here is one of ours."""

Bind: TypeAlias = str | URL | Engine | Callable[[], Engine]


@dataclass(frozen=True, slots=True)
class Engines:
    base: Engine
    records: Engine
    dialect: Dialect
    ours: bool
    """Whether `base` was made here, from a URL."""


def open_engines(bind: Bind) -> Engines:
    ours = isinstance(bind, str | URL)
    base: Any = _engine_from(bind) if isinstance(bind, str | URL) else bind() if callable(bind) else bind
    if not isinstance(base, Engine) or base.dialect.is_async:
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: {type(base).__module__}.{type(base).__name__} is not a database that Flask can use. "
            "Pass an Engine of SQLAlchemy's (none of its asyncio kin), a function that returns one, or a URL."
        )
    dialect = dialect_of(base.dialect.name)
    if names_memory(base.url) or isinstance(base.pool, StaticPool | SingletonThreadPool):
        raise _in_memory()
    return Engines(base, keep_rows_to_itself(_engine_for_records(base, dialect)), dialect, ours)


def _engine_from(bind: str | URL) -> Engine:
    # Not a word of the original errors, nor the errors themselves: what they quote may be the password.
    try:
        url = make_url(bind)
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: {without_password(_written(bind))} names no database. "
            "Write postgresql+psycopg://user:password@host/name or "
            "sqlite:////path/to/file.db; in a password, write / as %2F, @ as %40 and % as %25."
        ) from None
    if names_memory(url):
        raise _in_memory()
    try:
        engine = create_engine(url, connect_args=_connect_args(url), pool_timeout=POOL_SECONDS, hide_parameters=True)
    except (NoSuchModuleError, ModuleNotFoundError):
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: there is no driver for {url.drivername} ({without_password(_written(bind))}). "
            "Write postgresql+psycopg://… and install "
            "psycopg, or sqlite:///…, which needs nothing."
        ) from None
    if engine.driver == "psycopg":
        # The pool for records is made like this one, and does as this one does.
        event.listen(engine, "connect", _never_prepare)
    return engine


def _written(bind: str | URL) -> str:
    return bind if isinstance(bind, str) else bind.render_as_string(hide_password=True)


def _connect_args(url: URL) -> dict[str, Any]:
    if url.get_backend_name() != POSTGRESQL or url.get_driver_name() not in ("psycopg", "psycopg2"):
        return {}
    wanted = {"connect_timeout": CONNECT_SECONDS, "tcp_user_timeout": UNANSWERED_MS}
    return {name: value for name, value in wanted.items() if name not in url.query}


def _in_memory() -> ConfigurationError:
    return ConfigurationError(
        "IDEMPOTENCY_STORE: a SQLite database in memory is one connection's own, and records need another. Name a "
        "file, as in sqlite:////path/to/file.db; for tests there is memory://"
    )


def names_memory(url: URL) -> bool:
    """Return True for a SQLite database that lives in a process's memory, and in no file."""
    if url.get_backend_name() != SQLITE:
        return False
    name = url.database or ""
    return name in ("", ":memory:") or "memory" in (url.query.get("mode"), *name.split("=")) or ":memory:" in name


def _engine_for_records(base: Engine, dialect: Dialect) -> Engine:
    # A new pool with the same way to connect, and with whatever the application hooked into the old one.
    pool = base.pool.recreate()
    # A stale connection is noticed by its first statement, and that is sent again. A ping would double every call.
    pool._pre_ping = False
    _connect_in_time(base, pool)
    # Behind the application's own and before SQLAlchemy's, which could not change a transaction that has begun.
    event.listen(pool, "connect", _end_transaction)
    engine = create_engine(base.url, pool=pool, isolation_level="AUTOCOMMIT", hide_parameters=True)
    if dialect.name == SQLITE:
        event.listen(engine, "connect", _prepare_sqlite)
        return engine
    if engine.driver == "psycopg":
        event.listen(engine, "connect", _keep_time)
    event.listen(engine, "connect", _insist_on_durability)
    return engine


def _connect_in_time(base: Engine, pool: Pool) -> None:
    """Have this pool give up on a server that accepts connections and says nothing, however long the application waits.

    What the application says of its connections is in a closure of SQLAlchemy's, so ours are told apart as they are made.
    """
    wanted = _connect_args(base.url)
    connect = pool._invoke_creator

    def connect_for_records(rec: Any) -> Any:
        before = _for_records.set(True)
        try:
            return connect(rec)
        finally:
            _for_records.reset(before)

    def in_time(dialect: Any, record: object, arguments: Any, options: Any) -> Any:
        return dialect.connect(*arguments, **{**wanted, **options}) if _for_records.get() else None

    if wanted:
        pool._creator = connect_for_records
        event.listen(base, "do_connect", in_time)


def _end_transaction(connection: Any, record: object) -> None:
    """What the application has set up with a statement, `SET search_path` say, is part of a transaction until now."""
    connection.commit()


def _keep_time(connection: Any, record: object) -> None:
    give_up_on_silence(connection)


def _never_prepare(connection: Any, record: object) -> None:
    """PgBouncer gives the next statement to another server connection, which has not heard of what was prepared.

    An application's own Engine does as the application has chosen for it: its sessions are behind the same PgBouncer.
    """
    connection.prepare_threshold = None


def _insist_on_durability(connection: Any, record: object) -> None:
    """A claim must be on disk when it is granted: of 10,425 that were not, a crash of the server lost two
    (correctness.md, section 3)."""
    cursor = connection.cursor()
    cursor.execute("SELECT current_setting('synchronous_commit')")
    if cursor.fetchone()[0] == "off":
        connection.close()
        raise ConfigurationError(
            "IDEMPOTENCY_STORE: synchronous_commit is off in this database, so a crash of it could lose a claim that was "
            "granted, and run a payment again. Set it to on for the role that the application connects as: "
            "ALTER ROLE … SET synchronous_commit = on."
        )
    cursor.close()
    connection.rollback()


def _prepare_sqlite(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    waits = cursor.execute("PRAGMA busy_timeout").fetchone()[0]
    cursor.execute("PRAGMA busy_timeout=0")
    # Refused as long as somebody writes, or where nobody may: then it stays as it is, and a later connection tries again.
    with suppress(sqlite3.OperationalError):
        cursor.execute("PRAGMA journal_mode=WAL").fetchone()
    cursor.execute(f"PRAGMA busy_timeout={max(waits, BUSY_MS)}")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
