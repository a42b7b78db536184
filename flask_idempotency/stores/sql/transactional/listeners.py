"""Listen to the application's sessions and connections, and pass their events to the claim of the current context.

The listeners are on the session factory and on its engine. So they also see a second session of a view, and a commit on the
connection below a session.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session

from flask_idempotency.stores.sql.dialects import SQLITE


class JoinedSession(Protocol):
    """The events that a claim's transaction handles."""

    factory: Any
    over: bool

    def begun(self, connection: Connection) -> None: ...

    def before_commit(self, session: Session) -> None: ...

    def before_connection_commit(self, connection: Connection) -> None: ...

    def after_commit(self, session: Session) -> None: ...

    def after_rollback(self, session: Session) -> None: ...


_joined: ContextVar[ref[JoinedSession] | None] = ContextVar("flask_idempotency_joined", default=None)
"""Weak: a thread's context outlives its requests, and must not keep the claim of a request that never ended."""

_COMMIT = re.compile(r"\s*(?:COMMIT|END)\b", re.IGNORECASE)

_factories: WeakKeyDictionary[Any, ref[Callable[[Session], None]]] = WeakKeyDictionary()
"""The `before_commit` of each factory. Weak, because it holds the factory; the factory's sessions keep it."""

_engines: WeakSet[Engine] = WeakSet()


def joined_here() -> JoinedSession | None:
    """Return the transaction that this context has joined."""
    joined = _joined.get()
    return None if joined is None else joined()


def join_here(joined: JoinedSession | None) -> None:
    _joined.set(None if joined is None else ref(joined))


def listen(factory: Any, engine: Engine) -> Callable[[Session], None]:
    """Add the listeners. A second call changes nothing, also from another application that shares both.

    Return the one that passes on the `before_commit` of the factory's sessions.
    """
    listener = _factories.get(factory)
    before_commit = None if listener is None else listener()
    if before_commit is None:
        before_commit = _listen_to_sessions(factory)
        _factories[factory] = ref(before_commit)
    if engine not in _engines:
        _engines.add(engine)
        event.listen(engine, "commit", _connection_commits)
        event.listen(engine, "savepoint", _savepoint_begins)
        event.listen(engine, "before_cursor_execute", _statement_commits)
    return before_commit


def hears_statements(connection: Connection) -> bool:
    """Return True if anything but this module listens to the statements of this connection, or of its engine."""
    heard, heard_by_dialect = connection.dispatch, connection.dialect.dispatch
    # One of the first is `_statement_commits`.
    return bool(
        len(heard.before_cursor_execute) > 1
        or heard.after_cursor_execute
        or heard.before_execute
        or heard.after_execute
        or heard_by_dialect.do_execute
        or heard_by_dialect.handle_error
    )


def _listen_to_sessions(factory: Any) -> Callable[[Session], None]:
    def here() -> JoinedSession | None:
        joined = joined_here()
        return joined if joined is not None and joined.factory is factory else None

    def after_begin(session: Session, transaction: Any, connection: Connection) -> None:
        if (joined := here()) is not None:
            joined.begun(connection)

    def before_commit(session: Session) -> None:
        if (joined := here()) is not None:
            joined.before_commit(session)

    def after_commit(session: Session) -> None:
        if (joined := here()) is not None:
            joined.after_commit(session)

    def after_rollback(session: Session) -> None:
        if (joined := here()) is not None:
            joined.after_rollback(session)

    for listener in (after_begin, before_commit, after_rollback):
        event.listen(factory, listener.__name__, listener)
    # First: if a listener of the application raises, SQLAlchemy skips the listeners after it.
    event.listen(factory, "after_commit", after_commit, insert=True)
    return before_commit


def _connection_commits(connection: Connection) -> None:
    if (joined := joined_here()) is not None:
        joined.before_connection_commit(connection)


def _savepoint_begins(connection: Connection, name: str) -> None:
    """Begin a transaction before a savepoint on SQLite. Python's sqlite3 begins one before a write only, and without one the
    release of the savepoint would commit."""
    joined = joined_here()
    if joined is None or joined.over or connection.dialect.name != SQLITE:
        return
    if not getattr(connection.connection.dbapi_connection, "in_transaction", True):
        connection.exec_driver_sql("BEGIN")


def _statement_commits(
    connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
) -> None:
    if _COMMIT.match(statement) and (joined := joined_here()) is not None:
        joined.before_connection_commit(connection)
