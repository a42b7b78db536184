"""Connections for records, apart from those that the application's sessions hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn, TypeVar

from sqlalchemy import Connection, Engine, QueuePool
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.forks import after_fork, before_fork, notice
from flask_idempotency.stores.sql.dialects import SQLITE, Dialect
from flask_idempotency.stores.sql.discretion import keep_rows_to_itself
from flask_idempotency.stores.sql.engines import Bind, Engines, names_memory, open_engines
from flask_idempotency.stores.sql.faults import contended, explained
from flask_idempotency.stores.sql.inherited import leave_to_parent
from flask_idempotency.stores.sql.silence import unanswered
from flask_idempotency.stores.sql.turnstile import Turnstile

TRIES: Final = 5
"""Times that a statement is sent while the database says that others were faster."""

AnswerT = TypeVar("AnswerT")


class Database:
    """Where records are kept: a URL, an Engine of the application's, or a function that returns one at first use.

    Every record's statement commits by itself, on a connection from a pool of its own. In the application's pool it
    would wait for the very connection that its own request holds.

    A forked child gets new pools: for records, and for the application's Engine. `shared` returns the other engines
    that the application's sessions use by now, such as those of further binds; they get new pools too.
    """

    def __init__(self, bind: Bind, *, shared: Callable[[], Iterable[Engine]] = tuple) -> None:
        self._bind = bind
        self._shared = shared
        self._lock = threading.Lock()
        self._engines: Engines | None = None
        self._opens_in_child = False
        self.turnstile = Turnstile()
        """For who would keep a connection only to wait for others of the same tenant."""
        if not callable(bind):
            self._open()
        before_fork(self.before_fork)
        after_fork(self.after_fork)

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
        return self._run(work, lambda: self.engine)

    def take_time(self, work: Callable[[Connection], AnswerT]) -> AnswerT:
        """The same for chores that read whole tables: connections for records give up on what takes so long."""
        return self._run(work, lambda: keep_rows_to_itself(self.base.execution_options(isolation_level="AUTOCOMMIT")))

    def _run(self, work: Callable[[Connection], AnswerT], engine: Callable[[], Engine]) -> AnswerT:
        failed: DBAPIError | None = None
        for _ in range(TRIES):
            try:
                with engine().connect() as connection:
                    return work(connection)
            except DBAPIError as error:
                if not _may_be_repeated(error, failed):
                    _give_up(error)
                failed = error
            except SQLAlchemyError as error:
                _give_up(error)
        raise StoreUnavailable("others were faster, time after time") from failed

    def close(self) -> None:
        """Close the connections for records. The application's own are left alone."""
        engines = self._engines
        if engines is not None:
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
        """In a child: use and close none of the parent's connections. The lock may never be given back.

        The application's pools are replaced as well: its rows and our records are committed on one connection.
        """
        self._lock = threading.Lock()
        self.turnstile.after_fork()
        self._opens_in_child = self._engines is None
        for engine in self._used():
            _renew(engine)

    def _used(self) -> list[Engine]:
        """All engines that are known by now, once each."""
        engines = self._engines
        known = () if engines is None else (engines.records, engines.base)
        return list(dict.fromkeys((*known, *self._shared())))

    def _open(self) -> Engines:
        notice()
        if self._engines is None:
            with self._lock:
                if self._engines is None:
                    engines = open_engines(self._bind)
                    if self._opens_in_child and engines.base not in self._shared():
                        _renew(engines.base)
                    self._engines = engines
        return self._engines


def _renew(engine: Engine) -> None:
    # SQLite in memory has no file to share: the child has a copy of it, and only in this connection.
    if not names_memory(engine.url):
        leave_to_parent(engine)


@contextmanager
def together(connection: Connection) -> Iterator[None]:
    """In here statements of a connection that commits each by itself are one transaction, and each sees what was committed
    before it."""
    if connection.dialect.name == SQLITE:
        # Begun as a reader, a transaction that comes to write is refused at once when somebody else has written.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with suppress(SQLAlchemyError):
                connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")
        return
    # What SQLAlchemy takes for a transaction is none here: nothing is sent for its end.
    connection.rollback()
    with connection.execution_options(isolation_level="READ COMMITTED").begin():
        yield


def _give_up(error: SQLAlchemyError) -> NoReturn:
    told = explained(error)
    if told is None:
        raise error
    if isinstance(told, ConfigurationError):
        # The remedy is the last line of a log. Above it would be the statement, which says nothing more.
        raise told from None
    raise told from error


def _may_be_repeated(error: DBAPIError, before: DBAPIError | None) -> bool:
    """Others were faster; or the connection was stale, as all are after a restart. At the first, SQLAlchemy drops all."""
    if contended(error):
        return True
    stale_before = before is not None and before.connection_invalidated
    return error.connection_invalidated and not stale_before and not unanswered(error.orig)
