"""In tests, work on the connection that the application's session stands on, so that records and rows roll back together.

Many test suites never commit. They begin a transaction on a connection, put the session on it (SQLAlchemy: "Joining a Session
into an External Transaction") or replace the engine in `db.engines` by it, and roll it back after each test. A database in
memory is the same case: all its sessions share one connection. A record on a connection of its own would not be rolled back
with these rows: it would stay for the next test, or wait for a lock that its own request holds.

So each operation on a record runs in a savepoint of that connection. If the session then rolls back, the operation is done
again: outside tests it would have been committed beside the session. Every operation on a record can be repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakSet, ref

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql.dialects import SQLITE
from flask_idempotency.stores.sql.engines import ON_A_CONNECTION, is_in_memory, without_logging
from flask_idempotency.stores.sql.transactional.listeners import SAVEPOINT, aside, levels_of, start, watch

AnswerT = TypeVar("AnswerT")


class Joining:
    """Finds the connection that the session of this context stands on, and runs work on it. Only while `testing()`."""

    def __init__(self, sessions: Callable[[], scoped_session[Any]], testing: Callable[[], bool]) -> None:
        self._sessions = sessions
        self._testing = testing
        self._lock = threading.RLock()
        self._engines: WeakSet[Engine] = WeakSet()
        """Those whose connections sessions of tests stand on."""
        self._last = threading.local()
        """The connection that this thread has joined last: the end of a stream has no application context."""

    def bind_of(self, session: Session) -> Connection | None:
        """Return the connection that this session is bound to, if a test has put it there.

        Raises `ConfigurationError` outside of tests.
        """
        try:
            place = session.get_bind()
        except UnboundExecutionError:
            return None
        bind = place if isinstance(place, Connection) else lent(place)
        if bind is None:
            return None
        if not self._testing():
            raise ConfigurationError(ON_A_CONNECTION)
        self._watch(bind.engine)
        if not session.in_transaction() and session.join_transaction_mode in _ENDS_THE_TESTS:
            session.join_transaction_mode = "create_savepoint"
        return bind

    def keep_apart(self, session: Session) -> None:
        """Let `undo` of this session end at the rows of the work that begins here: what the test has written stays.

        An application may never have rolled back before. By its default mode, the session would roll back the test's own
        transaction, with the rows of its fixtures, and the next commit would be a real one.
        """
        if self.bind_of(session) is not None:
            session.info[SAVEPOINT] = session.begin_nested()

    def shares(self, session: Session) -> bool:
        """Return whether records are written on the connection of this session."""
        return self._testing() and (self.bind_of(session) is not None or _memory_of(session) is not None)

    def has(self, engine: Engine) -> bool:
        """Return whether connections of this engine are joined."""
        return engine in self._engines

    def here(self) -> bool:
        """Return whether work of this context is to be run by `run`."""
        return self._testing() and self._place() is not None

    def run(self, work: Callable[[Connection], AnswerT]) -> AnswerT:
        """Do this work in a savepoint, and again after each rollback of the session that undoes it."""
        with self._lock:
            session, found = self._place() or (None, None)
            if isinstance(found, Engine) and session is not None and session.in_transaction():
                found = session.connection(bind_arguments={"bind": found})
            if isinstance(found, Engine):
                with found.connect() as connection, connection.begin():
                    return _in_savepoint(connection, work)
            if found is None:
                raise ConfigurationError("the test's connection is gone")
            result = _in_savepoint(found, work)
            if session is not None and session.in_transaction():
                session.info.setdefault(_UNDOABLE, []).append((list(levels_of(session)), partial(self.run, work)))
            return result

    def _place(self) -> tuple[Session | None, Connection | Engine] | None:
        """Return the connection of a test, or the engine of a database in memory, and the session of this context."""
        try:
            sessions = self._sessions()
            session: Session = sessions()
        except RuntimeError:
            last: Connection | Engine | None = getattr(self._last, "place", lambda: None)()
            return None if last is None or getattr(last, "closed", False) else (None, last)
        found = self.bind_of(session) or _memory_of(session)
        if found is None:
            return None
        self._last.place = ref(found)
        _hear(sessions.session_factory)
        if isinstance(found, Engine):
            self._watch(found)
        return session, found

    def _watch(self, engine: Engine) -> None:
        if engine not in self._engines:
            self._engines.add(engine)
            watch(engine, always=True)


def lent(bind: Engine) -> Connection | None:
    """Return the connection that a test lends in place of all of this engine's: `test_isolation` of Flask-SQLAlchemy-Lite."""
    # Not called: what instruments an engine may replace the same method, and a call would take a connection.
    lends = getattr(vars(bind).get("connect"), "__defaults__", None) or ()
    return next((each for each in lends if isinstance(each, Connection)), None)


_ENDS_THE_TESTS: Final = ("conditional_savepoint", "rollback_only")
"""The modes of joining in which a session's rollback is one of the test's own transaction."""

_factories: WeakSet[Any] = WeakSet()
"""The session factories that are listened to. One listener for all applications: a test suite makes many."""

_UNDOABLE: Final = "flask_idempotency_undoable"
"""The entry of a session's `info` for work in a transaction that may still be rolled back, with that one and its parents."""

_COMMITTED: Final = "flask_idempotency_committed"
"""The entry for the transaction that has committed last."""


def _hear(factory: Any) -> None:
    """Listen to the transactions of this factory's sessions."""
    if factory in _factories:
        return
    _factories.add(factory)

    @event.listens_for(factory, "after_begin")
    def after_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
        if transaction.parent is None:
            # What the test has written before is not written by this transaction.
            start(connection)

    @event.listens_for(factory, "after_commit")
    def after_commit(session: Session) -> None:
        session.info[_COMMITTED] = next(levels_of(session), None)

    @event.listens_for(factory, "after_transaction_end")
    def after_end(session: Session, transaction: SessionTransaction) -> None:
        """Do again what the end of this transaction has undone. What it has committed, its parent may still undo."""
        committed = session.info.pop(_COMMITTED, None) is transaction
        kept, undone = [], []
        for levels, again in session.info.pop(_UNDOABLE, ()):
            if transaction not in levels:
                kept.append((levels, again))
            elif not committed:
                undone.append(again)
            elif transaction.parent is not None:
                kept.append((levels[levels.index(transaction) + 1 :], again))
        if kept:
            session.info[_UNDOABLE] = kept
        for again in undone:
            again()


def _in_savepoint(connection: Connection, work: Callable[[Connection], AnswerT]) -> AnswerT:
    driver: Any = connection.connection.dbapi_connection
    with aside(connection), without_logging(connection):
        if not connection.in_transaction():
            # The session has rolled back the test's own. The end of the test rolls this one back.
            connection.begin()
        if connection.dialect.name == SQLITE and not driver.in_transaction:
            # Python's sqlite3 begins one before the first write only, and the release of a savepoint would commit.
            connection.exec_driver_sql("BEGIN")
        with connection.begin_nested():
            return work(connection)


def _memory_of(session: Session) -> Engine | None:
    """Return the engine of this session if its database is in memory: one connection for all."""
    try:
        bind = session.get_bind()
    except UnboundExecutionError:
        return None
    return bind if isinstance(bind, Engine) and is_in_memory(bind) else None
