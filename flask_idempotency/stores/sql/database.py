"""Connections for records, apart from those that the application's sessions hold."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakSet

from sqlalchemy import URL, Connection, Engine, Pool, SingletonThreadPool, StaticPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.stores.sql.dialects import POSTGRESQL, SQLITE, Dialect, dialect_of
from flask_idempotency.stores.sql.faults import contended, explained

CONNECT_SECONDS: Final = 3
UNANSWERED_MS: Final = 5000
"""A network that swallows what we send is noticed after this long. The kernel's own patience is fifteen minutes."""

POOL_SECONDS: Final = 5
"""A statement takes milliseconds: who waits this long for a connection waits for a database that is gone."""

BUSY_MS: Final = 5000
"""SQLite has one writer at a time. As long as Python's own default."""

TRIES: Final = 5
"""Times that a statement is sent while the database says that others were faster."""

Bind: TypeAlias = str | URL | Engine | Callable[[], Engine]
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class _Engines:
    base: Engine
    records: Engine
    dialect: Dialect
    ours: bool
    """Whether `base` was made here, from a URL."""


class Database:
    """Where records are kept: a URL, an Engine of the application's, or a function that returns one at first use.

    Every record's statement commits by itself, on a connection from a pool of its own. In the application's pool it
    would wait for the very connection that its own request holds.
    """

    def __init__(self, bind: Bind) -> None:
        self._bind = bind
        self._lock = threading.Lock()
        self._engines: _Engines | None = None
        self._inherited: list[Pool] = []
        if not callable(bind):
            self._open()
        _databases.add(self)

    @property
    def known(self) -> bool:
        """Whether it is clear by now which database this is: not yet, for a function that was never asked."""
        return self._engines is not None

    @property
    def base(self) -> Engine:
        """The application's own Engine, or one made from the URL: for work in transactions, such as migrations."""
        return self._open().base

    @property
    def engine(self) -> Engine:
        """For records only: every statement is a transaction, and no session ever holds one of its connections."""
        return self._open().records

    @property
    def dialect(self) -> Dialect:
        return self._open().dialect

    def run(self, work: Callable[[Connection], AnswerT]) -> AnswerT:
        """What `work` returns, given a connection. Done again when others were faster, or the connection was stale.

        So it must be repeatable, as every operation on a record is by its token. Raises `StoreUnavailable` when the
        database cannot decide, and `ConfigurationError` when it lacks our tables.
        """
        stale = False
        for _ in range(TRIES):
            try:
                with self.engine.connect() as connection:
                    return work(connection)
            except DBAPIError as error:
                # After a restart all connections in the pool are stale. SQLAlchemy drops them all at the first.
                if contended(error) or (error.connection_invalidated and not stale):
                    stale = stale or error.connection_invalidated
                    failed: SQLAlchemyError = error
                    continue
                raise (explained(error) or error) from error
            except SQLAlchemyError as error:
                raise (explained(error) or error) from error
        raise StoreUnavailable("others were faster, time after time") from failed

    def close(self) -> None:
        """Close the connections for records. The application's own are left alone."""
        engines = self._engines
        if engines is not None:
            engines.records.dispose()
            if engines.ours:
                engines.base.dispose()

    def after_fork(self) -> None:
        """In a child: the parent's connections are neither used nor closed here, and the lock may never be given back.

        They are kept, because closing a SQLite file takes away locks that the parent still counts on.
        """
        self._lock = threading.Lock()
        engines = self._engines
        if engines is not None:
            for engine in (engines.records, engines.base) if engines.ours else (engines.records,):
                self._inherited.append(engine.pool)
                engine.dispose(close=False)

    def _open(self) -> _Engines:
        if self._engines is None:
            with self._lock:
                if self._engines is None:
                    self._engines = _open(self._bind)
        return self._engines


_databases: WeakSet[Database] = WeakSet()


def _after_fork() -> None:
    for database in _databases:
        database.after_fork()


# Once and not per database: what is registered here stays for as long as the process does.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _open(bind: Bind) -> _Engines:
    ours = isinstance(bind, str | URL)
    base: Any = _engine_from(bind) if isinstance(bind, str | URL) else bind() if callable(bind) else bind
    if not isinstance(base, Engine) or base.dialect.is_async:
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: {type(base).__module__}.{type(base).__name__} is not a database that Flask can use. "
            "Pass an Engine of SQLAlchemy's (none of its asyncio kin), a function that returns one, or a URL."
        )
    dialect = dialect_of(base.dialect.name)
    if dialect.name == SQLITE:
        _refuse_memory(base)
    return _Engines(base, _engine_for_records(base, dialect), dialect, ours)


def _engine_from(bind: str | URL) -> Engine:
    # Not a word of the original errors, nor the errors themselves: what they quote may be the password.
    try:
        url = make_url(bind)
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            "IDEMPOTENCY_STORE: this URL names no database. Write postgresql+psycopg://user:password@host/name or "
            "sqlite:////path/to/file.db; in a password, write / as %2F, @ as %40 and % as %25."
        ) from None
    try:
        # A database in memory has a pool without patience; what is wrong with it is said later.
        patience: dict[str, Any] = {} if _names_memory(url) else {"pool_timeout": POOL_SECONDS}
        return create_engine(url, connect_args=_connect_args(url), hide_parameters=True, **patience)
    except (NoSuchModuleError, ModuleNotFoundError):
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: there is no driver for {url.drivername}. Write postgresql+psycopg://… and install "
            "psycopg, or sqlite:///…, which needs nothing."
        ) from None


def _connect_args(url: URL) -> dict[str, Any]:
    if url.get_backend_name() != POSTGRESQL or url.get_driver_name() not in ("psycopg", "psycopg2"):
        return {}
    wanted = {"connect_timeout": CONNECT_SECONDS, "tcp_user_timeout": UNANSWERED_MS}
    return {name: value for name, value in wanted.items() if name not in url.query}


def _refuse_memory(base: Engine) -> None:
    if _names_memory(base.url) or isinstance(base.pool, StaticPool | SingletonThreadPool):
        raise ConfigurationError(
            "IDEMPOTENCY_STORE: a SQLite database in memory is one connection's own, and records need another. Name a "
            "file, as in sqlite:////path/to/file.db; for tests there is memory://"
        )


def _names_memory(url: URL) -> bool:
    if url.get_backend_name() != SQLITE:
        return False
    name = url.database or ""
    return name in ("", ":memory:") or "memory" in (url.query.get("mode"), *name.split("=")) or ":memory:" in name


def _engine_for_records(base: Engine, dialect: Dialect) -> Engine:
    # A new pool with the same way to connect, and with whatever the application hooked into the old one.
    pool = base.pool.recreate()
    # A stale connection is noticed by its first statement, and that is sent again. A ping would double every call.
    pool._pre_ping = False
    engine = create_engine(base.url, pool=pool, isolation_level="AUTOCOMMIT", hide_parameters=True)
    if dialect.name == SQLITE:
        event.listen(engine, "connect", _prepare_sqlite)
    elif engine.driver == "psycopg":
        event.listen(engine, "connect", _prepare_psycopg)
    return engine


def _prepare_psycopg(connection: Any, record: object) -> None:
    # PgBouncer gives the next statement to another server connection, which has not heard of what was prepared.
    connection.prepare_threshold = None


def _prepare_sqlite(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    waits = cursor.execute("PRAGMA busy_timeout").fetchone()[0]
    cursor.execute(f"PRAGMA busy_timeout={max(waits, BUSY_MS)}")
    cursor.execute("PRAGMA journal_mode=WAL").fetchone()
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
