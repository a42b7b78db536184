"""Open connections for records, separate from those of the application's sessions.

An application passes a URL or an Engine. Records get a separate pool, which bounds every wait and logs no row. A forked
child neither uses nor closes connections that its parent opened. Both would write to one socket, and read each other's
results. `Connection.close()` in the child would end the parent's session at the server. SQLAlchemy also sends ROLLBACK when
it collects a checked-out connection. Source: SQLAlchemy, "Using Connection Pools with Multiprocessing or os.fork()".
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeAlias, TypeVar, TypeVarTuple
from weakref import WeakSet

from sqlalchemy import URL, Connection, Engine, Pool, QueuePool, StaticPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import SingletonThreadPool, reset_none

from flask_idempotency.engine.errors import ConfigurationError, InheritedConnection, StoreUnavailable
from flask_idempotency.engine.escape import without_password
from flask_idempotency.engine.forks import after_fork, before_fork, notice
from flask_idempotency.stores.sql.dialects import POSTGRESQL, SQLITE, Dialect, dialect_of, refuse_relative
from flask_idempotency.stores.sql.driver import DRIVERS, Driver, DriverConnection, RecordConnection
from flask_idempotency.stores.sql.errors import (
    explained,
    forbidden,
    is_missing_table,
    is_serialization_failure,
    lacks_grants,
)
from flask_idempotency.stores.sql.naming import PATH, READ_PATH, SCHEMA, find, options
from flask_idempotency.stores.sql.schema import metadata

if TYPE_CHECKING:
    from sqlalchemy.orm import Session  # a large part of SQLAlchemy, which only applications with its sessions need

EngineT = TypeVar("EngineT", bound=Engine)
AnswerT = TypeVar("AnswerT")


def hide_parameters(engine: EngineT) -> EngineT:
    """Stop this engine from logging result rows. It still logs its statements. Return the engine."""
    engine._should_log_debug = _never  # type: ignore[method-assign]
    return engine


@contextmanager
def without_logging(connection: Connection) -> Iterator[None]:
    """Log no statement of this connection. The engine of the application may log parameters too."""
    echo = connection._echo
    connection._echo = False
    try:
        yield
    finally:
        connection._echo = echo


def _never() -> bool:
    return False


READ_TIMEOUT_SECONDS: Final = 5.0
"""How long psycopg waits for a reply: longer than the lock timeout, and than any of our statements takes.

No setting of the server or of the kernel gives this bound. A server process that is stopped, or a pooler that holds the
statement, runs no `statement_timeout`, and its host still acknowledges our bytes and keepalives: `tcp_user_timeout` does not
pass. libpq would wait for ever. psycopg2 waits inside libpq, so it notices only a host that is gone.
"""

_READ_TIMED_OUT: Final = "the server did not answer in time"


def set_read_timeout(connection: Any, record: object) -> None:
    """Make this psycopg connection close and raise if a reply takes too long. The outcome is then unknown."""
    wait = connection.wait

    def wait_with_timeout(generator: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
        return wait(_with_deadline(generator, connection), *arguments, **options)

    connection.wait = wait_with_timeout


def is_read_timeout(error: BaseException | None) -> bool:
    """Return True for the error of `set_read_timeout`. Do not try again: it would take as long again."""
    return _READ_TIMED_OUT in getattr(error, "args", ())


def _with_deadline(generator: Generator[Any, Any, Any], connection: Any) -> Generator[Any, Any, Any]:
    """Run this generator while the server replies. Without a reply, psycopg resumes it with 0 several times a second."""
    deadline = time.monotonic() + READ_TIMEOUT_SECONDS
    try:
        wanted = next(generator)
        while True:
            ready = yield wanted
            if ready == 0 and time.monotonic() >= deadline:
                from psycopg import OperationalError

                # The reply may still come, and the next statement would take it as its result.
                connection.close()
                raise OperationalError(_READ_TIMED_OUT)
            wanted = generator.send(ready)
    except StopIteration as done:
        return done.value


CONNECT_SECONDS: Final = 3
UNANSWERED_MS: Final = 5000
"""How long the kernel waits for a network that drops our packets. Its default is fifteen minutes."""

POOL_SECONDS: Final = 5
"""A statement takes milliseconds. If no connection is free for this long, the database is gone."""

BUSY_MS: Final = 5000
"""SQLite has one writer at a time. This wait is Python's default."""

_for_records: ContextVar[bool] = ContextVar("flask_idempotency_for_records", default=False)
"""True while this thread opens a connection for records."""

Bind: TypeAlias = str | URL | Engine | Callable[[], Engine]


@dataclass(frozen=True, slots=True)
class Engines:
    base: Engine
    records: Engine
    dialect: Dialect
    ours: bool
    """True if this module made `base` from a URL."""
    driver: Driver | None
    """For the statements of the request path. None: send them through SQLAlchemy's `Connection`."""


ON_A_CONNECTION: Final = (
    "db.session, or the engine in db.engines, stands on a connection with a transaction of its own, as in a test suite that "
    "rolls back after each test. A record that is committed with it would be gone when that transaction is rolled back. "
    "In tests set TESTING = True; elsewhere use an Engine."
)


class Joining(Protocol):
    """Runs work on the connection that the application's session stands on, in tests: see `transactional/joining.py`."""

    def here(self) -> bool: ...

    def run(self, work: Callable[[Connection], AnswerT]) -> AnswerT: ...


def open_engines(bind: Bind, *, driver_cursor: bool = True, joining: Joining | None = None) -> Engines:
    ours = isinstance(bind, str | URL)
    base: Any = _engine_from(bind) if isinstance(bind, str | URL) else bind() if callable(bind) else bind
    joined = joining is not None and joining.here()
    if joined and isinstance(base, Connection):
        # A test has put its connection in the engine's place.
        base = base.engine
    if isinstance(base, Connection):
        raise ConfigurationError(ON_A_CONNECTION)
    if not isinstance(base, Engine) or base.dialect.is_async:
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: {type(base).__module__}.{type(base).__name__} is not a database that Flask can use. "
            "Pass an Engine of SQLAlchemy's (none of its asyncio kin), a function that returns one, or a URL."
        )
    dialect = dialect_of(base.dialect.name)
    if is_in_memory(base):
        if not joined:
            raise _in_memory()
        return Engines(base, base, dialect, ours, None)
    records = hide_parameters(_engine_for_records(base, dialect))
    driver = Driver(records) if driver_cursor and records.driver in DRIVERS else None
    return Engines(base, records, dialect, ours, driver)


def _engine_from(bind: str | URL) -> Engine:
    # Do not quote or chain the original errors: they may contain the password.
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
        # The pool for records copies the listeners of this one.
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
        "file, as in sqlite:////path/to/file.db. In tests set TESTING = True: with flask-sqlalchemy:// the records are then "
        "written on the session's own connection. Without a database there is memory://."
    )


def is_in_memory(engine: Engine) -> bool:
    """Return True if all connections of this engine are one: a SQLite database in memory."""
    return names_memory(engine.url) or isinstance(engine.pool, StaticPool | SingletonThreadPool)


def names_memory(url: URL) -> bool:
    """Return True for a SQLite database that lives in a process's memory, and in no file."""
    if url.get_backend_name() != SQLITE:
        return False
    name = url.database or ""
    return name in ("", ":memory:") or "memory" in (url.query.get("mode"), *name.split("=")) or ":memory:" in name


def _engine_for_records(base: Engine, dialect: Dialect) -> Engine:
    # The new pool connects in the same way, and keeps the listeners that the application added.
    pool = base.pool.recreate()
    # The first statement notices a stale connection, and is repeated. A ping would double every call.
    pool._pre_ping = False
    # No transaction is open when a connection returns: SQLAlchemy's `Connection` and `send` see to it.
    pool._reset_on_return = reset_none
    _connect_in_time(base, pool)
    # After the application's listeners, and before SQLAlchemy's, which cannot change a transaction that has begun.
    event.listen(pool, "connect", _end_transaction)
    if dialect.name == POSTGRESQL:
        event.listen(pool, "connect", _know_server())
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "hide_parameters": True}
    if dialect.name == SQLITE and base.driver in DRIVERS:
        # Both drivers then take parameters by name, as the statements have them.
        options["paramstyle"] = "named"
    engine = create_engine(base.url, pool=pool, **options)
    if dialect.name == SQLITE:
        event.listen(engine, "connect", _prepare_sqlite)
        return engine
    if engine.driver == "psycopg":
        event.listen(engine, "connect", set_read_timeout)
    event.listen(engine, "connect", _insist_on_durability)
    event.listen(engine, "connect", _note_path)
    return engine


def _connect_in_time(base: Engine, pool: Pool) -> None:
    """Make this pool give up on a server that accepts connections but stays silent, also if the application waits longer.

    The application's connect arguments are in a closure of SQLAlchemy's. So mark our connections while they open.
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
    """Commit the settings of the application's listeners, such as `SET search_path`.

    An application may open SQLite with `autocommit=False` (Python 3.12): sqlite3 would then begin a transaction after each
    COMMIT, and commit no statement of ours.
    """
    connection.commit()
    if isinstance(connection, sqlite3.Connection) and getattr(connection, "autocommit", None) is False:
        legacy: Any = sqlite3
        connection.autocommit = legacy.LEGACY_TRANSACTION_CONTROL  # type: ignore[attr-defined, unused-ignore]


def _know_server() -> Callable[[Any, object], None]:
    """Return a listener that refuses a relative of PostgreSQL. SQLAlchemy, which is next, fails at some of their versions."""
    known: list[str] = []

    def know(connection: Any, record: object) -> None:
        if known:
            return
        cursor = connection.cursor()
        try:
            cursor.execute("SELECT version()")
            version = str(cursor.fetchone()[0])
            refuse_relative(version)
        except ConfigurationError:
            connection.close()
            raise
        cursor.close()
        connection.rollback()
        known.append(version)

    return know


def _never_prepare(connection: Any, record: object) -> None:
    """Disable prepared statements: PgBouncer may send the next statement to a server connection that lacks them.

    An application's own Engine keeps its setting: its sessions use the same PgBouncer.
    """
    connection.prepare_threshold = None


def _insist_on_durability(connection: Any, record: object) -> None:
    """Raise `ConfigurationError` if commits do not wait for the disk: then a crash may lose a granted claim.

    Measured: a crash lost two of 10,425 claims (correctness.md, section 3).
    """
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


def _note_path(connection: Any, record: Any) -> None:
    """Note the search path, before a listener of the application's pool changes it for a checkout."""
    cursor = connection.cursor()
    cursor.execute(READ_PATH)
    record.info[PATH] = cursor.fetchone()[0]
    cursor.close()
    connection.rollback()


def _prepare_sqlite(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    waits = cursor.execute("PRAGMA busy_timeout").fetchone()[0]
    cursor.execute("PRAGMA busy_timeout=0")
    # SQLite refuses this during a write, and in a read-only file. Then a later connection tries again.
    with suppress(sqlite3.OperationalError):
        cursor.execute("PRAGMA journal_mode=WAL").fetchone()
    cursor.execute(f"PRAGMA busy_timeout={max(waits, BUSY_MS)}")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


PROCESS: Final = "flask_idempotency_process"
"""The entry of a pooled connection's `info` that holds the id of the process which opened it."""

REMEDY: Final = (
    "db.session holds a database connection that another process opened before this worker was forked. It is not used: "
    "both processes would read each other's results. End the transaction before the fork (db.session.remove()), and "
    "call engine.dispose(close=False) for every engine in the child (gunicorn: post_fork; Celery: "
    "worker_process_init; uWSGI: postfork)."
)

_log = logging.getLogger("flask_idempotency")

_imported_by = os.getpid()
"""A connection without the entry was opened before this module was imported, so by this process or its parents."""

_opened: WeakSet[Any] = WeakSet()
"""The pools' own entries of all connections, to find those that are checked out while the process forks."""

_kept: list[object] = []
"""Inherited pools and connections. A child keeps them: to drop one may close it, and with it the parent's session."""


def leave_to_parent(engine: Engine) -> None:
    """Give this engine a new pool in a forked child. Inherited connections that are checked out become invalid."""
    pool = engine.pool
    _kept.append(pool)
    engine.dispose(close=False)
    for record in list(_opened):
        fairy = None if record.fairy_ref is None else record.fairy_ref()
        if fairy is not None and fairy._pool is pool and not _opened_here(record.info):
            _abandon(fairy)


def abandon_inherited(session: Session) -> None:
    """Roll back what this session's copy in a forked child believes to have begun. No byte of that reaches a server."""
    begun: Any = session.get_transaction()
    if begun is None:
        return
    for connection in list(begun._connections):
        if isinstance(connection, Connection) and not connection.invalidated and not is_opened_here(connection):
            _abandon(connection.connection)
    session.rollback()


def refuse_inherited(connection: Connection) -> None:
    """Raise `InheritedConnection` if another process opened this connection. It becomes invalid first.

    So the application's own ROLLBACK does not reach the server, and its next transaction gets a new connection.
    """
    if is_opened_here(connection):
        return
    _abandon(connection.connection)
    _log.error(REMEDY)
    raise InheritedConnection(REMEDY)


def is_opened_here(connection: Connection) -> bool:
    """Return whether this process has opened the connection."""
    return _opened_here(connection.info)


def _opened_here(info: Any) -> bool:
    process: int = info.get(PROCESS, _imported_by)
    return process == os.getpid()


def _abandon(fairy: Any) -> None:
    record = fairy._connection_record
    _kept.append((fairy, record, fairy.dbapi_connection))
    # SQLAlchemy takes a proxy without a connection for one that was invalidated, and sends nothing for its end.
    fairy.dbapi_connection = None
    if record is not None:
        record.info.setdefault(PROCESS, _imported_by)
        record.dbapi_connection = None


def _remember(connection: Any, record: Any) -> None:
    record.info[PROCESS] = os.getpid()
    _opened.add(record)


event.listen(Pool, "connect", _remember)


class TenantLock:
    """One lock for each tenant in this process. Keep only the locks that a thread holds or waits for."""

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """In a child: drop all locks, because the threads that held them do not exist here."""
        self._lock = threading.Lock()
        self._crowds: dict[bytes, _Queue] = {}

    @contextmanager
    def turn(self, tid: bytes, *, timeout: float) -> Iterator[bool]:
        """Hold this tenant's lock inside the context. It yields False if the lock was not free within `timeout` seconds."""
        with self._lock:
            crowd = self._crowds.setdefault(tid, _Queue())
            crowd.size += 1
        try:
            mine = crowd.turn.acquire(timeout=timeout)
            try:
                yield mine
            finally:
                if mine:
                    crowd.turn.release()
        finally:
            with self._lock:
                crowd.size -= 1
                if crowd.size == 0 and self._crowds.get(tid) is crowd:
                    del self._crowds[tid]

    def __len__(self) -> int:
        return len(self._crowds)


class _Queue:
    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.size = 0


TRIES: Final = 5
"""How often to send a statement that meets serialization conflicts."""

ArgumentTs = TypeVarTuple("ArgumentTs")


class Database:
    """Where records are kept: a URL, an Engine of the application's, or a function that returns one at first use.

    Every record's statement commits by itself, on a connection from a separate pool. In the application's pool, it might
    wait for the connection that its own request holds.

    A forked child gets new pools: for records, and for the application's Engine. `shared` returns the other engines
    that the application's sessions use by now, such as those of further binds; they get new pools too.

    The request path uses the driver's own cursor where it is known (psycopg 3, sqlite3), unless `driver_cursor` is False.
    """

    def __init__(
        self,
        bind: Bind,
        *,
        shared: Callable[[], Iterable[Engine]] = tuple,
        joining: Joining | None = None,
        driver_cursor: bool = True,
    ) -> None:
        self._bind = bind
        self.joining = joining
        """Runs all work of tests whose session stands on a connection. None: no session is known."""
        self._driver_cursor = driver_cursor
        self._shared = shared
        self._lock = threading.Lock()
        self._engines: Engines | None = None
        self._opens_in_child = False
        self._on_open: Callable[[Engine], None] | None = None
        self._named = False
        """True if this process knows which schema to name in its statements."""
        self._options = options(None)
        self.tenant_lock = TenantLock()
        """Lets claims of one tenant wait for each other without a connection."""
        if not callable(bind):
            self._open()
        before_fork(self.before_fork)
        after_fork(self.after_fork)

    def when_open(self, callback: Callable[[Engine], None]) -> None:
        """Call this with the application's own Engine, now or once it is known."""
        self._on_open = callback
        if self._engines is not None:
            callback(self._engines.base)

    @property
    def known(self) -> bool:
        """True if the engine is known. A function as `bind` is called at the first use."""
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

    @property
    def driver(self) -> Driver | None:
        """The driver whose cursor sends the statements of the request path. None: SQLAlchemy's `Connection` sends them."""
        return self._open().driver

    @property
    def options(self) -> dict[str, Any]:
        """Return the execution options that name the schema of our tables, for the connection of a session."""
        if not self._named:
            self.run(_nothing)
        return self._options

    @property
    def schema(self) -> str | None:
        """Return the schema that our statements name. None: they name none, or it is not known yet."""
        schema: str | None = self._options[SCHEMA]
        return schema

    def role(self) -> str:
        """Return the role of the application's connections, with what a listener of its pool makes of it."""
        read = "SELECT current_user"
        return str(self.run(lambda connection: connection.exec_driver_sql(read).scalar_one(), long=True))

    def run(
        self, work: Callable[[Connection, *ArgumentTs], AnswerT], *arguments: *ArgumentTs, long: bool = False
    ) -> AnswerT:
        """Return `work(connection, *arguments)`. Repeat it after a serialization conflict, and on a stale connection.

        So it must be repeatable, as every operation on a record is by its token. Pass `long` for tasks that read whole
        tables: connections for records give up on what takes so long. Raise `StoreUnavailable` if the database cannot
        decide, and `ConfigurationError` if it lacks our tables.
        """
        return self._repeat(None, long, work, arguments)

    def send(self, work: Callable[[RecordConnection, *ArgumentTs], AnswerT], *arguments: *ArgumentTs) -> AnswerT:
        """Return `work(connection, *arguments)` as `run` does, on the driver's own cursor where the driver is known.

        For the request path: the statements must be built once, and `work` needs no more of a `Connection` than
        `DriverConnection` has.
        """
        notice()
        driver = (self._engines or self._open()).driver
        # A listener to the statements of this engine would not hear those of the driver's cursor.
        if driver is None or driver.engine._has_events or driver.dialect._has_events:
            return self.run(work, *arguments)
        return self._repeat(driver, False, work, arguments)

    def _repeat(
        self,
        driver: Driver | None,
        long: bool,
        work: Callable[[Any, *ArgumentTs], AnswerT],
        arguments: tuple[*ArgumentTs],
    ) -> AnswerT:
        """Do the work on the driver's cursor, or without a driver on SQLAlchemy's `Connection`. See `run`."""
        if self.joining is not None and self.joining.here():
            try:
                return self.joining.run(lambda found: self._within(found, work, arguments))
            except SQLAlchemyError as error:
                _give_up(error)
        failed: DBAPIError | None = None
        for _ in range(TRIES):
            try:
                if not self._named:
                    # `doctor` looks at a database that refuses records, on the application's own connections.
                    with suppress(*((ConfigurationError,) if long else ())):
                        self._name(self._open())
                if driver is not None:
                    cursor = DriverConnection(driver)
                    try:
                        return work(cursor, *arguments)
                    except BaseException:
                        cursor.undo()
                        raise
                    finally:
                        cursor.held.close()
                engines = self._open()
                engine = engines.records
                if engine is engines.base:
                    raise StoreUnavailable("the database is in memory, and this thread has no application context")
                if long:
                    if not hasattr(engines.base.dialect, "default_isolation_level"):
                        # The first connection for records also sets up this dialect, and only its pool waits for that: see
                        # `_engine_for_records`. A connection of the other pool would find half of it.
                        engine.connect().close()
                    engine = hide_parameters(engines.base.execution_options(**self._options))
                with engine.connect() as connection:
                    if long:
                        # A listener of the application's pool may have begun a transaction, and there the mode cannot change.
                        connection.connection.commit()
                        connection.execution_options(isolation_level="AUTOCOMMIT")
                    return work(connection, *arguments)
            except DBAPIError as error:
                if not _may_be_repeated(error, failed):
                    # The tables may have moved.
                    self._named = self._named and not is_missing_table(error)
                    # Otherwise it is the role of the URL.
                    tables = forbidden(error, self.schema) if self._open().base.pool.dispatch.checkout else ()
                    if tables:
                        raise ConfigurationError(f"{explained(error)}; {lacks_grants(self._role(), tables)}") from None
                    _give_up(error)
                failed = error
            except SQLAlchemyError as error:
                _give_up(error)
        raise StoreUnavailable(
            f"the database refused {TRIES} tries, each for a conflict with another worker"
        ) from failed

    def _within(
        self,
        connection: Connection,
        work: Callable[[Any, *ArgumentTs], AnswerT],
        arguments: tuple[*ArgumentTs],
    ) -> AnswerT:
        """Do the work on the connection of a test. Its own statements name no schema of ours."""
        before = connection._execution_options
        place = find(connection, list(metadata.tables))
        if not self._named:
            self._options = options(None if place is None else place.schema)
        try:
            return work(connection.execution_options(**self._options), *arguments)
        finally:
            connection._execution_options = before

    def _name(self, engines: Engines) -> None:
        """Find the schema of our tables, and name it from now on. Look again at the next call if they are not there."""
        with engines.records.connect() as connection:
            place = find(connection, list(metadata.tables))
        self._options = options(None if place is None else place.schema)
        engines.records.update_execution_options(**self._options)
        if engines.driver is not None:
            engines.driver.name(None if place is None else place.schema)
        # Last: another thread that sees it relies on the lines above.
        self._named = place is not None

    def _role(self) -> str | None:
        """Return the role that the last statement ran as. A listener of the application's pool may have set it."""
        with suppress(SQLAlchemyError), self._open().records.connect() as connection:
            return str(connection.exec_driver_sql("SELECT current_user").scalar_one())
        return None

    def close(self) -> None:
        """Close the connections for records. The application's own stay open."""
        engines = self._engines
        if engines is not None and engines.records is not engines.base:
            engines.records.dispose()
            if engines.ours:
                engines.base.dispose()

    def before_fork(self) -> None:
        """In the parent: close the idle connections to SQLite.

        A child inherits what SQLite remembers of its locks, and not the locks. With a file open at the fork it believes
        that it holds one. Once the parent closes the file, another process may remove the log that the child commits to.
        """
        for engine in self._used():
            if engine.dialect.name == SQLITE and isinstance(engine.pool, QueuePool) and not names_memory(engine.url):
                engine.dispose()

    def after_fork(self) -> None:
        """In a child: use and close none of the parent's connections. Replace the lock, which a lost thread may hold.

        Replace the application's pools as well: one connection commits its rows and our records.
        """
        self._lock = threading.Lock()
        self.tenant_lock.after_fork()
        self._opens_in_child = self._engines is None
        for engine in self._used():
            _renew(engine)

    def _used(self) -> list[Engine]:
        """Return all engines that are known by now, once each."""
        engines = self._engines
        known = () if engines is None else (engines.records, engines.base)
        return list(dict.fromkeys((*known, *self._shared())))

    def _open(self) -> Engines:
        notice()
        if self._engines is None:
            with self._lock:
                if self._engines is None:
                    engines = open_engines(self._bind, driver_cursor=self._driver_cursor, joining=self.joining)
                    if self._opens_in_child and engines.base not in self._shared():
                        _renew(engines.base)
                    if self._on_open is not None:
                        self._on_open(engines.base)
                    self._engines = engines
        return self._engines


def _nothing(connection: Connection) -> None:
    """Send no statement."""


def _renew(engine: Engine) -> None:
    # SQLite in memory has no file to share: the child has a copy of it, and only in this connection.
    if not names_memory(engine.url):
        leave_to_parent(engine)


@contextmanager
def transaction(connection: RecordConnection) -> Iterator[None]:
    """Make the statements in this context one transaction of an autocommit connection.

    Each statement sees what other transactions committed before it.
    """
    if isinstance(connection, DriverConnection):
        # SQLite: see below.
        in_file = connection.dialect.name == SQLITE
        connection.command("BEGIN IMMEDIATE" if in_file else "BEGIN ISOLATION LEVEL READ COMMITTED")
        try:
            yield
        except BaseException:
            connection.undo()
            raise
        connection.command("COMMIT")
        return
    if connection.in_nested_transaction():
        # On the connection of a test, whose transaction is not ours to end.
        with connection.begin_nested():
            yield
        return
    if connection.dialect.name == SQLITE:
        # If it began as a reader, SQLite would refuse its first write after another connection has written.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with suppress(SQLAlchemyError):
                connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")
        return
    # SQLAlchemy believes in a transaction, but there is none: this rollback sends no statement.
    connection.rollback()
    with connection.execution_options(isolation_level="READ COMMITTED").begin():
        yield


def _give_up(error: SQLAlchemyError) -> NoReturn:
    explanation = explained(error)
    if explanation is None:
        raise error
    if isinstance(explanation, ConfigurationError):
        # Do not chain the statement's error: the remedy says all, and stays the last line of the log.
        raise explanation from None
    raise explanation from error


def _may_be_repeated(error: DBAPIError, before: DBAPIError | None) -> bool:
    """Return True after a serialization conflict, or for the first stale connection. SQLAlchemy then drops all stale ones."""
    if is_serialization_failure(error):
        return True
    stale_before = before is not None and before.connection_invalidated
    return error.connection_invalidated and not stale_before and not is_read_timeout(error.orig)
