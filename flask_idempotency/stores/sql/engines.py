"""Open the engines of a store: that of the application, and one for records with a pool of its own.

An application passes a URL or an Engine. Records get a separate pool, which bounds every wait and logs no row.
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from sqlalchemy import URL, Connection, Engine, Pool, StaticPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import SingletonThreadPool, reset_none

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.passwords import without_password
from flask_idempotency.stores.sql import dialects
from flask_idempotency.stores.sql.dialects import Dialect, kind_of
from flask_idempotency.stores.sql.driver import DRIVERS, Driver
from flask_idempotency.stores.sql.mysql import Numbers
from flask_idempotency.stores.sql.naming import PATH, READ_PATH

EngineT = TypeVar("EngineT", bound=Engine)
AnswerT = TypeVar("AnswerT")


def hide_parameters(engine: EngineT) -> EngineT:
    """Stop this engine from logging result rows. It still logs its statements. Return the engine."""
    engine._should_log_debug = lambda: False  # type: ignore[method-assign]
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

    def with_deadline(generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        # Without a reply, psycopg resumes it with 0 several times a second.
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

    connection.wait = lambda generator, *arguments, **options: wait(with_deadline(generator), *arguments, **options)


def is_read_timeout(error: BaseException | None) -> bool:
    """Return True if a driver waited for READ_TIMEOUT_SECONDS. Do not try again: it would take as long again."""
    return any(each in str(text) for text in getattr(error, "args", ()) for each in (_READ_TIMED_OUT, "(timed out)"))


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
    preparing: Preparing | None = None
    """What lets psycopg prepare statements. None with other drivers."""


ON_A_CONNECTION: Final = (
    "db.session, or the engine in db.engines, stands on a connection with a transaction of its own, as in a test suite that "
    "rolls back after each test. A record that is committed with it would be gone when that transaction is rolled back. "
    "In tests set TESTING = True; elsewhere use an Engine."
)


class Joining(Protocol):
    """Runs work on the connection that the application's session stands on, in tests: see `transactional/joining.py`."""

    def here(self) -> bool: ...

    def run(self, work: Callable[[Connection], AnswerT]) -> AnswerT: ...


def open_engines(
    bind: Bind, numbers: Numbers, *, driver_cursor: bool = True, joining: Joining | None = None
) -> Engines:
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
    dialect = dialects.dialect_of(base.dialect.name)
    if is_in_memory(base):
        if not joined:
            raise _in_memory()
        return Engines(base, base, dialect, ours, None)
    preparing = Preparing(from_url=ours) if base.driver == "psycopg" else None
    records = hide_parameters(_engine_for_records(base, dialect, preparing, numbers))
    driver = Driver(records) if driver_cursor and records.driver in DRIVERS else None
    return Engines(base, records, dialect, ours, driver, preparing)


def _engine_from(bind: str | URL) -> Engine:
    # Do not quote or chain the original errors: they may contain the password.
    written = without_password(bind if isinstance(bind, str) else bind.render_as_string(hide_password=True))
    try:
        url = make_url(bind)
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: {written} names no database. "
            "Write postgresql+psycopg://user:password@host/name, mysql+pymysql://… or "
            "sqlite:////path/to/file.db; in a password, write / as %2F, @ as %40 and % as %25."
        ) from None
    if names_memory(url):
        raise _in_memory()
    try:
        engine = create_engine(url, connect_args=_connect_args(url), pool_timeout=POOL_SECONDS, hide_parameters=True)
    except (NoSuchModuleError, ModuleNotFoundError):
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: there is no driver for {url.drivername} ({written}). "
            "Write postgresql+psycopg://… and install psycopg, mysql+pymysql://… and PyMySQL, or sqlite:///…, which needs "
            "nothing."
        ) from None
    if engine.driver == "psycopg":
        # The pool for records copies the listeners of this one.
        event.listen(engine, "connect", _never_prepare)
    return engine


def _connect_args(url: URL, *, for_records: bool = False) -> dict[str, Any]:
    if kind_of(url.get_backend_name()) == dialects.MYSQL and url.get_driver_name() in ("pymysql", "mysqldb"):
        waits = {"connect_timeout": CONNECT_SECONDS}
        if for_records:
            waits |= dict.fromkeys(("read_timeout", "write_timeout"), int(READ_TIMEOUT_SECONDS))
        return {name: value for name, value in waits.items() if name not in url.query}
    if url.get_backend_name() != dialects.POSTGRESQL or url.get_driver_name() not in ("psycopg", "psycopg2"):
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
    if url.get_backend_name() != dialects.SQLITE:
        return False
    name = url.database or ""
    return name in ("", ":memory:") or "memory" in (url.query.get("mode"), *name.split("=")) or ":memory:" in name


def _engine_for_records(base: Engine, dialect: Dialect, preparing: Preparing | None, numbers: Numbers) -> Engine:
    # The new pool connects in the same way, and keeps the listeners that the application added.
    pool = base.pool.recreate()
    # The first statement notices a stale connection, and is repeated. A ping would double every call.
    pool._pre_ping = False
    # No transaction is open when a connection returns: SQLAlchemy's `Connection` and `send` see to it.
    pool._reset_on_return = reset_none
    _connect_in_time(base, pool)
    # After the application's listeners, and before SQLAlchemy's, which cannot change a transaction that has begun.
    event.listen(pool, "connect", _end_transaction)
    if dialect.name == dialects.POSTGRESQL:
        event.listen(pool, "first_connect", _refuse_relative)
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "hide_parameters": True}
    if dialect.name == dialects.SQLITE and base.driver in DRIVERS:
        # Each driver then takes parameters by name, as the statements have them.
        options["paramstyle"] = "named"
    elif base.driver == "pymysql":
        options["paramstyle"] = "pyformat"
    engine = create_engine(base.url, pool=pool, **options)
    if dialect.name == dialects.MYSQL:
        # Ours is never open when a connection returns. Older SQLAlchemy does not know this, and sends a ROLLBACK.
        engine.dialect.skip_autocommit_rollback = True
        event.listen(engine, "connect", numbers.prepare)
        return engine
    if dialect.name == dialects.SQLITE:
        event.listen(engine, "connect", _prepare_sqlite)
        return engine
    if preparing is not None:
        event.listen(engine, "connect", set_read_timeout)
        event.listen(engine, "connect", preparing)
    event.listen(engine, "connect", _prepare_postgresql)
    return engine


def _connect_in_time(base: Engine, pool: Pool) -> None:
    """Make this pool give up on a server that accepts connections but stays silent, also if the application waits longer.

    The application's connect arguments are in a closure of SQLAlchemy's. So mark our connections while they open.
    """
    wanted = _connect_args(base.url, for_records=True)
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


def _refuse_relative(connection: Any, record: object) -> None:
    """Refuse a relative of PostgreSQL. SQLAlchemy, which is next, fails at some of their versions."""
    cursor = connection.cursor()
    cursor.execute("SELECT version()")
    try:
        dialects.refuse_relative(str(cursor.fetchone()[0]))
    except ConfigurationError:
        connection.close()
        raise
    cursor.close()
    connection.rollback()


def _never_prepare(connection: Any, record: object) -> None:
    """Disable prepared statements: PgBouncer may send the next statement to a server connection that lacks them.

    An application's own Engine keeps its setting: its sessions use the same PgBouncer.
    """
    connection.prepare_threshold = None


PREPARE_AFTER: Final = 5
"""A statement is prepared at this use. It is psycopg's own number, and PostgreSQL keeps a plan from the sixth use on."""

_PREPARED: Final = "SELECT name FROM pg_prepared_statements"


@dataclass(eq=False)
class Preparing:
    """A listener that lets psycopg prepare what repeats where the next statement reaches the same names.

    Half of a statement's time is its plan. A session of our own keeps names, and so does PgBouncer from 1.22 on. An older
    one would send a name to another server connection, which does not know it, or knows another client's by it.
    """

    from_url: bool
    """Whether the store's own URL made the engine. The application's own Engine keeps its setting."""
    works: bool = True
    """False once a server did not know a name: then no later connection prepares anything."""
    direct: bool = True
    """False if the last connection led to a pooler. Its sessions keep outdated statements."""

    def __call__(self, connection: Any, record: object) -> None:
        # No other client's statement has one of our names.
        connection._prepared._prepared_idx = random.getrandbits(62)
        if not self.works:
            connection.prepare_threshold = None
            return
        cursor = connection.cursor()
        cursor.execute("SELECT pg_backend_pid()")
        self.direct = direct = cursor.fetchone()[0] == connection.info.backend_pid
        if self.from_url and (direct or _are_carried(connection)):
            connection.prepare_threshold = PREPARE_AFTER
        if direct and connection.prepare_threshold is not None:
            # Otherwise a plan from when a table was empty reads the whole table, until the server has analyzed it. Before 18
            # a scan without an index then seems dear enough to compile.
            cursor.execute("SET enable_seqscan = off; SET jit = off")
        cursor.close()
        connection.commit()


def _are_carried(connection: Any) -> bool:
    """Return whether a pooler gives prepared statements names of its own, and takes messages that close them."""
    before = connection.prepare_threshold, connection.prepared_max
    # With room for none, psycopg closes the statement at once: by name in SQL with libpq before 17, which then fails.
    connection.prepare_threshold = connection.prepared_max = 0
    try:
        with connection.transaction():
            names = [name for (name,) in connection.execute(_PREPARED, prepare=True)]
    except connection.Error:
        return False
    finally:
        connection.prepare_threshold, connection.prepared_max = before
    return bool(names) and not any(name.startswith("_pg3_") for name in names)


def _prepare_postgresql(connection: Any, record: Any) -> None:
    """Note the search path, before a listener of the application's pool changes it for a checkout. Raise
    `ConfigurationError` if commits do not wait for the disk: then a crash may lose a granted claim.

    Measured: a crash lost two of 10,425 claims (correctness.md, section 3).
    """
    cursor = connection.cursor()
    cursor.execute(f"{READ_PATH}, current_setting('synchronous_commit')")
    record.info[PATH], commits = cursor.fetchone()
    if commits == "off":
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
    # SQLite refuses this during a write, and in a read-only file. Then a later connection tries again.
    with suppress(sqlite3.OperationalError):
        cursor.execute("PRAGMA journal_mode=WAL").fetchone()
    cursor.execute(f"PRAGMA busy_timeout={max(waits, BUSY_MS)}")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
