"""Run work in the database of the records, and keep the connections of other processes apart.

A forked child neither uses nor closes connections that its parent opened. Both would write to one socket, and read each
other's results. `Connection.close()` in the child would end the parent's session at the server. SQLAlchemy also sends ROLLBACK
when it collects a checked-out connection. Source: SQLAlchemy, "Using Connection Pools with Multiprocessing or os.fork()".
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, TypeVarTuple
from weakref import WeakSet, WeakValueDictionary

from sqlalchemy import Connection, Engine, Pool, QueuePool, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from flask_idempotency.engine.errors import ConfigurationError, InheritedConnection, StoreUnavailable
from flask_idempotency.engine.forks import after_fork, before_fork, notice
from flask_idempotency.stores.sql import engines, errors
from flask_idempotency.stores.sql.dialects import MYSQL, POSTGRESQL, SQLITE, Dialect, kind_of
from flask_idempotency.stores.sql.driver import Driver, DriverConnection, RecordConnection
from flask_idempotency.stores.sql.mysql import RECORDS, Numbers
from flask_idempotency.stores.sql.naming import SCHEMA, find, options
from flask_idempotency.stores.sql.schema import metadata

if TYPE_CHECKING:
    from sqlalchemy.orm import Session  # a large part of SQLAlchemy, which only applications with its sessions need

AnswerT = TypeVar("AnswerT")

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
    """Give this engine a new pool in a forked child. Inherited connections that are checked out become invalid.

    SQLite in memory has no file to share: the child has a copy of it, and only in this connection.
    """
    if engines.names_memory(engine.url):
        return
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
        self._turns: WeakValueDictionary[bytes, Any] = WeakValueDictionary()

    @contextmanager
    def turn(self, tid: bytes, *, timeout: float) -> Iterator[bool]:
        """Hold this tenant's lock inside the context. It yields False if the lock was not free within `timeout` seconds."""
        with self._lock:
            turn = self._turns.setdefault(tid, threading.Lock())
        mine = turn.acquire(timeout=timeout)
        try:
            yield mine
        finally:
            if mine:
                turn.release()

    def __len__(self) -> int:
        return len(self._turns)


TRIES: Final = 5
"""How often to send a statement that meets serialization conflicts."""

MYSQL_TRIES: Final = 25
"""The same on MySQL. On Galera each claim conflicts with those that other nodes grant at that moment, and one of them wins."""

PAUSE_SECONDS: Final = 0.05
"""The longest pause before such a try on MySQL. It is random, so that the nodes do not collide each time."""

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
        bind: engines.Bind,
        *,
        shared: Callable[[], Iterable[Engine]] = tuple,
        joining: engines.Joining | None = None,
        driver_cursor: bool = True,
    ) -> None:
        self._bind = bind
        self.joining = joining
        """Runs all work of tests whose session stands on a connection. None: no session is known."""
        self._driver_cursor = driver_cursor
        self._shared = shared
        self._lock = threading.Lock()
        self._engines: engines.Engines | None = None
        self._opens_in_child = False
        self._on_open: Callable[[Engine], None] | None = None
        self._named = False
        """True if this process knows which schema to name in its statements."""
        self._options = options(None)
        self.numbers: Numbers = Numbers()
        """On MySQL: where the fences come from."""
        self.tenant_lock: TenantLock = TenantLock()
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
            self.run(lambda connection: None)
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
        for tried in range(1, MYSQL_TRIES + 1):
            try:
                if not self._named:
                    # `doctor` looks at a database that refuses records, on the application's own connections.
                    with suppress(*((ConfigurationError,) if long else ())):
                        self._name(self._open())
                if driver is not None:
                    cursor = DriverConnection(driver)
                    try:
                        return work(cursor, *arguments)
                    except BaseException as error:
                        if isinstance(error, DBAPIError) and errors.is_apart(error):
                            # A new connection may lead to another node.
                            cursor.held.invalidate(error)
                        else:
                            cursor.undo()
                        raise
                    finally:
                        cursor.held.close()
                opened = self._open()
                engine = opened.records
                if engine is opened.base:
                    raise StoreUnavailable("the database is in memory, and this thread has no application context")
                if long:
                    if not hasattr(opened.base.dialect, "default_isolation_level"):
                        # The first connection for records also sets up this dialect, and only its pool waits for that: see
                        # `_engine_for_records`. A connection of the other pool would find half of it.
                        engine.connect().close()
                    engine = engines.hide_parameters(opened.base.execution_options(**self._options))
                with engine.connect() as connection:
                    if long:
                        if opened.dialect.name != MYSQL:
                            # A listener of the application's pool may have begun a transaction, and there the mode cannot
                            # change. MySQL commits by itself when it does.
                            connection.connection.commit()
                        connection.execution_options(isolation_level="AUTOCOMMIT")
                    try:
                        return work(connection, *arguments)
                    except DBAPIError as error:
                        if errors.is_apart(error):
                            # A new connection may lead to another node.
                            connection.invalidate(error)
                        raise
            except DBAPIError as error:
                if not (self._prepares_again(error, failed) or _may_be_repeated(error, failed)):
                    # The tables may have moved.
                    self._named = self._named and not errors.is_missing_table(error)
                    # Otherwise it is the role of the URL.
                    tables = errors.forbidden(error, self.schema) if self._open().base.pool.dispatch.checkout else ()
                    if tables:
                        raise ConfigurationError(
                            f"{errors.explained(error)}; {errors.lacks_grants(self._role(), tables)}"
                        ) from None
                    _give_up(error)
                failed = error
                if not self._tries_again(tried):
                    break
            except SQLAlchemyError as error:
                _give_up(error)
        raise StoreUnavailable(
            f"the database refused {tried} tries, each for a conflict with another worker"
        ) from failed

    def _tries_again(self, tried: int) -> bool:
        """Return True if there is another try after so many. On MySQL, pause before it, longer from try to try."""
        if self.dialect.name != MYSQL:
            return tried < TRIES
        time.sleep(random.uniform(0, tried * PAUSE_SECONDS / MYSQL_TRIES))  # noqa: S311 - it is no secret
        return tried < MYSQL_TRIES

    def _within(
        self,
        connection: Connection,
        work: Callable[[Any, *ArgumentTs], AnswerT],
        arguments: tuple[*ArgumentTs],
    ) -> AnswerT:
        """Do the work on the connection of a test. Its own statements name no schema of ours."""
        before = connection._execution_options
        _, schema = find(connection, metadata.tables)
        if not self._named:
            self._options = options(schema)
        try:
            return work(connection.execution_options(**self._options), *arguments)
        finally:
            connection._execution_options = before

    def _name(self, opened: engines.Engines) -> None:
        """Find the schema of our tables, and name it from now on. Look again at the next call if they are not there."""
        with opened.records.connect() as connection:
            there, schema = find(connection, metadata.tables)
        self._options = options(schema)
        opened.records.update_execution_options(**self._options)
        if opened.driver is not None:
            opened.driver.name(schema)
        # Last: another thread that sees it relies on the lines above.
        self._named = there

    def _prepares_again(self, error: DBAPIError, before: DBAPIError | None) -> bool:
        """Return whether to repeat this on a new connection, because a prepared statement is gone or outdated.

        It is gone after a change of the pooler: then prepare none again. It is outdated after a change of a table, and
        behind a pooler it stays so.
        """
        preparing = self._open().preparing
        if preparing is None:
            return False
        gone, outdated = (
            errors.is_unprepared(error),
            errors.is_outdated(error) and (before is None or not errors.is_outdated(before)),
        )
        if outdated or (gone and preparing.works):
            preparing.works = preparing.works and not gone and preparing.direct
            # Later connections are new, and know no statement.
            self._open().records.dispose()
        return gone or outdated

    def _role(self) -> str | None:
        """Return the role that the last statement ran as. A listener of the application's pool may have set it."""
        with suppress(SQLAlchemyError), self._open().records.connect() as connection:
            return str(connection.exec_driver_sql("SELECT current_user").scalar_one())
        return None

    def close(self) -> None:
        """Close the connections for records. The application's own stay open."""
        opened = self._engines
        if opened is not None and opened.records is not opened.base:
            opened.records.dispose()
            if opened.ours:
                opened.base.dispose()

    def before_fork(self) -> None:
        """In the parent: close the idle connections to SQLite.

        A child inherits what SQLite remembers of its locks, and not the locks. With a file open at the fork it believes
        that it holds one. Once the parent closes the file, another process may remove the log that the child commits to.
        """
        for engine in self._used():
            if (
                engine.dialect.name == SQLITE
                and isinstance(engine.pool, QueuePool)
                and not engines.names_memory(engine.url)
            ):
                engine.dispose()

    def after_fork(self) -> None:
        """In a child: use and close none of the parent's connections. Replace the lock, which a lost thread may hold.

        Replace the application's pools as well: one connection commits its rows and our records.
        """
        self._lock = threading.Lock()
        self.tenant_lock.after_fork()
        self._opens_in_child = self._engines is None
        for engine in self._used():
            leave_to_parent(engine)

    def _used(self) -> list[Engine]:
        """Return all engines that are known by now, once each."""
        opened = self._engines
        known = () if opened is None else (opened.records, opened.base)
        return list(dict.fromkeys((*known, *self._shared())))

    def _open(self) -> engines.Engines:
        notice()
        if self._engines is None:
            with self._lock:
                if self._engines is None:
                    opened = engines.open_engines(
                        self._bind, self.numbers, driver_cursor=self._driver_cursor, joining=self.joining
                    )
                    if self._opens_in_child and opened.base not in self._shared():
                        leave_to_parent(opened.base)
                    if self._on_open is not None:
                        self._on_open(opened.base)
                    self._engines = opened
        return self._engines


_BEGIN: Final = {POSTGRESQL: "BEGIN ISOLATION LEVEL READ COMMITTED", SQLITE: "BEGIN IMMEDIATE"}

_OPEN: Final = "flask_idempotency_open"
"""The entry of a connection's `info` while `transaction` has begun one there by itself."""


@contextmanager
def transaction(connection: RecordConnection, *, joins: bool = False) -> Iterator[None]:
    """Make the statements in this context one transaction of an autocommit connection.

    Each statement sees what other transactions committed before it. `joins`: be part of one that is open on MySQL.
    """
    if isinstance(connection, DriverConnection):
        if joins and connection.open:
            yield
            return
        # SQLite: see below.
        connection.command(_BEGIN.get(connection.dialect.name, "START TRANSACTION"))
        connection.open = True
        try:
            yield
        except BaseException:
            connection.undo()
            raise
        finally:
            connection.open = False
        connection.command("COMMIT")
        return
    if connection.in_nested_transaction():
        # On the connection of a test, whose transaction is not ours to end.
        with connection.begin_nested():
            yield
        return
    kind = kind_of(connection.dialect.name)
    if kind != POSTGRESQL:
        info = connection.info
        if joins and _OPEN in info:
            yield
            return
        if kind == MYSQL and RECORDS not in info:
            # A connection of the application's, whose snapshots may be as old as its transactions.
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        # If it began as a reader, SQLite would refuse its first write after another connection has written.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if kind == SQLITE else "START TRANSACTION")
        info[_OPEN] = True
        try:
            yield
        except BaseException:
            with suppress(SQLAlchemyError):
                connection.exec_driver_sql("ROLLBACK")
            raise
        finally:
            del info[_OPEN]
        connection.exec_driver_sql("COMMIT")
        return
    # SQLAlchemy believes in a transaction, but there is none: this rollback sends no statement.
    connection.rollback()
    with connection.execution_options(isolation_level="READ COMMITTED").begin():
        yield


def _give_up(error: SQLAlchemyError) -> NoReturn:
    explanation = errors.explained(error)
    if explanation is None:
        raise error
    if isinstance(explanation, ConfigurationError):
        # Do not chain the statement's error: the remedy says all, and stays the last line of the log.
        raise explanation from None
    raise explanation from error


def _may_be_repeated(error: DBAPIError, before: DBAPIError | None) -> bool:
    """Return True after a serialization conflict, or for the first stale connection. SQLAlchemy then drops all stale ones.

    On Galera, a connection to a node outside the majority counts as stale.
    """
    if errors.is_serialization_failure(error):
        return True
    stale_before = before is not None and (before.connection_invalidated or errors.is_apart(before))
    return (
        (error.connection_invalidated or errors.is_apart(error))
        and not stale_before
        and not engines.is_read_timeout(error.orig)
    )
