"""Listen to the application's sessions and connections, and pass their events to the claim of the current context.

The listeners are on the session factory and on its engine. So they also see a second session of a view, and a commit on the
connection below a session.

Only PostgreSQL says whether a transaction has written. For other databases the listeners note it. (Python's sqlite3 begins
a transaction before the first write, unless the application begins each by itself, as in SQLAlchemy's recipe, or opens
connections with `autocommit=False`: then one is open all the time.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session, SessionTransaction

from flask_idempotency.stores.sql.dialects import POSTGRESQL, SQLITE


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
_watched: WeakSet[Engine] = WeakSet()
_noted: WeakSet[Engine] = WeakSet()
"""Those of which it is noted what each transaction does."""
_of_tests: WeakSet[Engine] = WeakSet()
"""Those whose connections are joined in tests."""

SAVEPOINT: Final = "flask_idempotency_savepoint"
"""The entry of a session's `info` with the savepoint in a test's transaction that `undo` rolls back to."""

_COMMENTS = r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*+"
_READS = re.compile(
    rf"{_COMMENTS}(?:SELECT|VALUES|EXPLAIN|SAVEPOINT|RELEASE|ROLLBACK|BEGIN(?!\s+(?:IMMEDIATE|EXCLUSIVE))"
    r"|PRAGMA\s+(?:\w+\.)?(?:table_|index_|foreign_key|database_list|function_list|collation_list)"
    # A common table expression may lead to a write.
    r"|WITH\b(?!.*\b(?:INSERT|UPDATE|DELETE|REPLACE)\b))",
    re.IGNORECASE | re.DOTALL,
)
_BEGINS = re.compile(rf"{_COMMENTS}BEGIN\b", re.IGNORECASE | re.DOTALL)

_ROLE = re.compile(
    r"\s*(?:SET\s+(?P<local>LOCAL\s+)?(?:SESSION\s+)?(?:ROLE|AUTHORIZATION)\s*(?:TO\s+|=\s*)?"
    r"(?P<name>\"(?:[^\"]|\"\")+\"|'[^']*'|[\w$]+)|RESET\s+(?:ROLE|ALL|SESSION\s+AUTHORIZATION)"
    r"|SELECT\s+(?:pg_catalog\.)?set_config\(\s*'role'\s*,\s*(?:%\((?P<parameter>\w+)\)s|'(?P<literal>[^']*)'))",
    re.IGNORECASE,
)

_ROLE_SET: Final = "flask_idempotency_role"
"""The entry of a PostgreSQL connection's `info` with the role that a statement of the application has set, and the
transaction to which it is local. For the log only."""

_SEEN: Final = "flask_idempotency_seen"
"""The entry of a connection's `info` that holds what its transaction did: `_Seen`."""

_LOCKED: Final = "flask_idempotency_locked"
"""Another entry: whether its last BEGIN took the write lock. A listener of the class `Engine` sends it before ours hear that
a transaction begins."""


@dataclass(slots=True)
class _Seen:
    """What the listeners saw of one transaction."""

    changes: int
    """How many rows the connection had changed when it began. A cursor of the driver has no listener."""
    wrote: bool = False
    """Whether a statement that may write was sent."""


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
    before_commit = listener_of(factory)
    if before_commit is None:
        before_commit = _listen_to_sessions(factory)
        _factories[factory] = ref(before_commit)
    if engine not in _engines:
        _engines.add(engine)

        @event.listens_for(engine, "commit")
        def commits(connection: Connection) -> None:
            if (joined := joined_here()) is not None:
                joined.before_connection_commit(connection)

        if not event.contains(engine, "savepoint", _savepoint_begins):
            event.listen(engine, "savepoint", _savepoint_begins)
        watch(engine)
    return before_commit


def levels_of(session: Session) -> Iterator[SessionTransaction]:
    """Return the transactions that are open in this session, the innermost first."""
    level = session.get_nested_transaction() or session.get_transaction()
    while level is not None:
        yield level
        level = level.parent


def listener_of(factory: Any) -> Callable[[Session], None] | None:
    """Return our own `before_commit` listener of this factory, if there is one."""
    listener = _factories.get(factory)
    return None if listener is None else listener()


def watch(engine: Engine, *, always: bool = False) -> None:
    """Note from now on which role is set, and what each transaction on this engine does. A second call changes nothing.

    PostgreSQL knows the latter, unless others write in the same transaction: then `always`.
    """
    notes = always or engine.dialect.name != POSTGRESQL
    if notes and engine not in _noted:
        _noted.add(engine)
        # First: a listener of the application may send the BEGIN.
        event.listen(engine, "begin", start, insert=True)
        event.listen(engine, "before_cursor_execute", _statement_begins)
    elif engine not in _watched:
        event.listen(engine, "before_cursor_execute", _statement_commits)
    _watched.add(engine)
    if always:
        _of_tests.add(engine)
        if not event.contains(engine, "savepoint", _savepoint_begins):
            event.listen(engine, "savepoint", _savepoint_begins)


@contextmanager
def aside(connection: Connection) -> Iterator[None]:
    """Let what is done here not count as done by the transaction of this connection."""
    seen: _Seen | None = connection.info.get(_SEEN)
    if seen is None:
        yield
        return
    wrote, changes = seen.wrote, _changes(connection)
    try:
        yield
    finally:
        seen.wrote = wrote
        seen.changes += _changes(connection) - changes


def has_written(connection: Connection) -> bool:
    """Return True if the open transaction of this connection has written, or if this module has not watched it.

    Not for PostgreSQL, whose server knows it.
    """
    seen = _seen(connection)
    return seen is not None and (seen.wrote or seen.changes != _changes(connection))


def is_locking(connection: Connection) -> bool:
    """Return True if this SQLite connection may hold the database's one write lock."""
    seen = _seen(connection)
    return seen is not None and (connection.info.get(_LOCKED, False) or has_written(connection))


def is_reading(connection: Connection) -> bool:
    """Return True if this SQLite connection has an open transaction, so that it keeps its snapshot of the database."""
    return _seen(connection) is not None


def _seen(connection: Connection) -> _Seen | None:
    """Return what the open transaction did. None: the driver has none open."""
    if not getattr(connection.connection.dbapi_connection, "in_transaction", connection.dialect.name != SQLITE):
        return None
    seen: _Seen | None = connection.info.get(_SEEN)
    return _UNKNOWN if seen is None else seen


def _changes(connection: Connection) -> int:
    return getattr(connection.connection.dbapi_connection, "total_changes", 0)


_UNKNOWN: Final = _Seen(0, wrote=True)
"""What a transaction did that began before the listeners were there: assume all."""


def hears_statements(connection: Connection) -> bool:
    """Return True if anything but this module listens to the statements of this connection, or of its engine."""
    heard, heard_by_dialect = connection.dispatch, connection.dialect.dispatch
    # One of the first is `_statement_commits` or `_statement_begins`.
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
        engine = connection.engine
        if engine not in _noted and engine.dialect.name != POSTGRESQL:
            watch(engine)
            start(connection)
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


def _savepoint_begins(connection: Connection, name: str) -> None:
    """Begin a transaction before a savepoint on SQLite. Python's sqlite3 begins one before a write only, and without one the
    release of the savepoint would commit."""
    joined = joined_here()
    ours = (joined is not None and not joined.over) or connection.engine in _of_tests
    if not ours or connection.dialect.name != SQLITE:
        return
    if not getattr(connection.connection.dbapi_connection, "in_transaction", True):
        connection.exec_driver_sql("BEGIN")


def role_of(connection: Connection) -> str | None:
    """Return the role that a statement has set on this connection, as far as the listeners know. None: none is set."""
    role, transaction = connection.info.get(_ROLE_SET, (None, None))
    return role if transaction is None or transaction() is connection.get_transaction() else None


def _statement_commits(
    connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
) -> None:
    if (found := _ROLE.match(statement)) is not None:
        name = found["name"] or found["literal"] or ""
        by_function = bool(found["literal"] or found["parameter"])
        if found["parameter"] and isinstance(parameters, dict):
            name = str(parameters.get(found["parameter"]) or "")
        if name[:1] in ('"', "'"):
            name = name[1:-1].replace('""', '"')
        elif not by_function:
            name = name.lower()
        current = connection.get_transaction() if found["local"] or by_function else None
        transaction = None if current is None else ref(current)
        connection.info[_ROLE_SET] = (None if name in ("", "none", "default") else name, transaction)
    if _COMMIT.match(statement) and (joined := joined_here()) is not None:
        joined.before_connection_commit(connection)


def start(connection: Connection) -> None:
    """Begin to note what a transaction on this connection does."""
    connection.info[_SEEN] = _Seen(_changes(connection))


def _statement_begins(
    connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
) -> None:
    """Do as `_statement_commits`, and note what the statement may do."""
    _statement_commits(connection, cursor, statement, parameters, context, executemany)
    if _BEGINS.match(statement):
        connection.info[_LOCKED] = not _READS.match(statement)
        return
    seen: _Seen | None = connection.info.get(_SEEN)
    if seen is not None and not _READS.match(statement):
        seen.wrote = True
