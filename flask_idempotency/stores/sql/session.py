"""The application's own session: where a view's rows and its record are committed in one transaction.

Nothing is patched and the view needs to know nothing: it writes with its session as ever, and leaves the commit to
whoever settles its claim. A view that commits by itself is noticed before its commit goes out, and the record is marked in
that same commit: what it has written is never there without the record knowing of it.

Only what is written through this session, on the database that holds the records, is in the transaction. What a second
bind or a connection of the view's own writes is an effect like any other.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet, ref

from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session

from flask_idempotency.engine.clock import Clock, store_time
from flask_idempotency.engine.errors import ConfigurationError, LeaseLost, NotCommitted
from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.record import Payload, Record, State
from flask_idempotency.stores.sql.dialects import SQLITE
from flask_idempotency.stores.sql.faults import sqlstate
from flask_idempotency.stores.sql.rows import completed_row
from flask_idempotency.stores.sql.schema import QUARANTINED
from flask_idempotency.stores.sql.store import SqlStore, answer_of

_log = logging.getLogger("flask_idempotency")

_AGAIN = frozenset({"40001", "40P01", "55P03"})
"""Serialization failure, deadlock, lock not available: the database chose between transactions, and not this one. A
connection that broke says the same: nothing of its transaction is left."""

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})

_joined: ContextVar[ref[SessionTransaction] | None] = ContextVar("flask_idempotency_joined", default=None)
"""Weak: a worker thread's context outlives its requests, and must not remember the claim of one that went astray."""

_watched: WeakSet[Any] = WeakSet()


class SessionTransactions:
    """Implements `ports.Transactions` on a `scoped_session`, such as Flask-SQLAlchemy's `db.session`.

    `sessions` returns it when it is needed: an application may set up its database after this.
    """

    def __init__(
        self,
        sessions: Callable[[], scoped_session[Any]],
        store: SqlStore,
        *,
        clock: Clock = store_time,
    ) -> None:
        self._sessions = sessions
        self._store = store
        self._clock = clock
        self._told: Callable[[StorageKey, Record], None] | None = None
        self._reported: set[str] = set()
        self._keeps_snapshot: bool | None = None

    def on_committed(self, told: Callable[[StorageKey, Record], None]) -> None:
        self._told = told

    def prepare(self) -> None:
        """Raises `ConfigurationError` when a transaction that the session has begun stands in the way of the claim.

        On SQLite there is one writer at a time, and the claim would wait for the one that waits for it. On PostgreSQL a
        transaction that keeps its snapshot would never see the claim, and so could not complete it.
        """
        session: Session = self._sessions()()
        if session.in_transaction() and (hindrance := self._hindrance(self.connection(session))):
            raise ConfigurationError(
                f"db.session has begun a transaction before the view, and {hindrance}. A before_request hook that uses it "
                "must end it: db.session.commit(), or rollback()."
            )

    def _hindrance(self, connection: Connection) -> str | None:
        if connection.dialect.name == SQLITE:
            writes = getattr(connection.connection.dbapi_connection, "in_transaction", False)
            return "on SQLite the view's claim cannot be written beside it" if writes else None
        if self._keeps_snapshot is None:
            # Asked once: it is the engine's or the role's own setting.
            self._keeps_snapshot = connection.get_isolation_level() in ("REPEATABLE READ", "SERIALIZABLE")
        return "at its isolation level it would never see the view's claim" if self._keeps_snapshot else None

    def join(
        self, keys: Sequence[StorageKey], token: bytes, *, operation: str, told: Callable[[], None]
    ) -> SessionTransaction:
        """Watch over the session in this context, until the transaction is left."""
        sessions = self._sessions()
        _watch(sessions.session_factory)

        def early() -> None:
            self._report(operation)
            told()

        transaction = SessionTransaction(self, tuple(keys), token, factory=sessions.session_factory, early=early)
        _joined.set(ref(transaction))
        return transaction

    def commit(self) -> None:
        session = self._sessions()()
        try:
            session.commit()
        except Exception as error:
            _undo(session)
            raise NotCommitted(f"the commit failed ({type(error).__name__})", again=asks_again(error)) from error

    def roll_back(self) -> None:
        _undo(self._sessions()())

    def complete(self, connection: Connection, key: StorageKey, token: bytes, payload: Payload, keep: float) -> Record:
        """Complete a record in this transaction. Raises `LeaseLost` when it is no longer the token's."""
        parameters = {"my_rid": key.rid, "my_token": token, "now": self._now(), **answer_of(payload, keep=keep)}
        found = connection.execute(self._store.statements.complete_and_tell, parameters).one_or_none()
        if found is None:
            raise LeaseLost("the record belongs to somebody else, or is gone")
        return completed_row(found, payload.data).record()

    def mark(self, connection: Connection, key: StorageKey, token: bytes) -> None:
        """Mark a record in this transaction. Raises `LeaseLost` when it is no longer the token's to be marked."""
        parameters = {"my_rid": key.rid, "my_token": token, "now": self._now()}
        if connection.execute(self._store.statements.mark, parameters).one_or_none() is not None:
            return
        standing = connection.execute(self._store.statements.standing, parameters).one_or_none()
        if standing is None or standing.token != token or standing.state != QUARANTINED:
            raise LeaseLost("the record belongs to somebody else, or is settled")

    def read(self, key: StorageKey) -> Record | None:
        return self._store.read(key)

    def tell(self, completed: Sequence[tuple[StorageKey, Record]]) -> None:
        if (told := self._told) is None:
            return
        for key, record in completed:
            try:
                told(key, record)
            except Exception:  # noqa: BLE001 - it is committed, whatever becomes of the news
                _log.exception("who was told of a committed record failed")

    def connection(self, session: Session) -> Connection:
        """The one on which the session writes to the database of the records, in its transaction."""
        return session.connection(bind_arguments={"bind": self._store.database.base})

    def _now(self) -> int | None:
        told = self._clock()
        return None if told is None else round(told * 1_000_000)

    def _report(self, operation: str) -> None:
        """Once for each operation."""
        if operation not in self._reported:
            self._reported.add(operation)
            _log.warning(
                "%s commits by itself although its effects are transactional. What it has committed stays when its worker "
                "vanishes before it answers: then its key is quarantined, and not recovered. Remove the commit (use "
                "flush() to see generated values): the rows are committed together with the answer.",
                operation,
            )


class SessionTransaction:
    """Implements `ports.Transaction` for one claim."""

    def __init__(
        self,
        owner: SessionTransactions,
        keys: tuple[StorageKey, ...],
        token: bytes,
        *,
        factory: Any,
        early: Callable[[], None],
    ) -> None:
        self.committed_early = False
        self.factory = factory
        self._owner = owner
        self._keys = keys
        self._token = token
        self._early = early
        self._settling = False
        self._marked = False
        self._outer = _joined.get()

    def settle(self, payload: Payload, *, keep: float, otherwise: Callable[[StorageKey], None]) -> None:
        self._settling = True
        session = self._owner._sessions()()
        try:
            # The application's rows first: what they violate shows before the record is touched, and locked.
            session.flush()
            connection = self._owner.connection(session)
            completed = [(key, self._owner.complete(connection, key, self._token, payload, keep)) for key in self._keys]
            session.commit()
        except LeaseLost as error:
            _undo(session)
            if not self._is_held():
                raise
            # Nobody has taken it: this transaction's snapshot is older than the claim.
            self._decide(error, otherwise)
        except Exception as error:  # noqa: BLE001 - whatever it is, only the record knows whether the commit was done
            _undo(session)
            self._decide(error, otherwise)
        else:
            self._owner.tell(completed)

    def roll_back(self) -> None:
        self._settling = True
        _undo(self._owner._sessions()())

    def leave(self) -> None:
        if _here() is self:
            _joined.set(self._outer)

    def asks_again(self, error: BaseException) -> bool:
        return asks_again(error)

    def before_commit(self, session: Session) -> None:
        """Somebody is about to commit: unless it is us, the record must know of it in the same commit.

        Raises `LeaseLost` when the claim is no longer this one's: then nothing is committed.
        """
        if self._settling or session.in_nested_transaction():
            return
        connection = self._owner.connection(session)
        for key in self._keys:
            self._owner.mark(connection, key, self._token)
        self._marked = True

    def after_commit(self) -> None:
        if self._marked and not self._settling:
            self._marked = False
            self.committed_early = True
            self._early()

    def after_rollback(self) -> None:
        self._marked = False

    def _decide(self, error: Exception, otherwise: Callable[[StorageKey], None]) -> None:
        """The commit failed, or its reply was lost. The record knows, and whoever changes it next learns which it was."""
        try:
            # Waits for a transaction that is still being ended: whatever it held of the record is decided then.
            for key in reversed(self._keys):
                otherwise(key)
        except LeaseLost:
            if not self._is_completed():
                raise
            return
        raise NotCommitted(f"the commit failed ({type(error).__name__})", again=asks_again(error)) from error

    def _is_held(self) -> bool:
        record = self._owner.read(self._keys[0])
        return record is not None and record.state is State.PROCESSING and record.token == self._token

    def _is_completed(self) -> bool:
        record = self._owner.read(self._keys[0])
        return record is not None and record.state is State.COMPLETED and record.token == self._token


def asks_again(error: BaseException) -> bool:
    """Whether this error is a database's way of saying that the same work may succeed if it is only repeated."""
    while not isinstance(error, DBAPIError):
        if error.__cause__ is None:
            return False
        error = error.__cause__
    if error.connection_invalidated:
        return True
    if isinstance(error.orig, sqlite3.Error):
        # The low byte: SQLITE_BUSY_SNAPSHOT and its like are kinds of it.
        return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _BUSY
    return sqlstate(error) in _AGAIN


def _watch(factory: Any) -> None:
    """Have every commit and rollback of these sessions told to the transaction that is joined where it happens.

    Of every session of the factory and not of one: a view may take another one, and must not escape by that.
    """
    if factory in _watched:
        return
    _watched.add(factory)

    def here() -> SessionTransaction | None:
        joined = _here()
        return joined if joined is not None and joined.factory is factory else None

    def before_commit(session: Session) -> None:
        if (joined := here()) is not None:
            joined.before_commit(session)

    def after_commit(session: Session) -> None:
        if (joined := here()) is not None:
            joined.after_commit()

    def after_rollback(session: Session) -> None:
        if (joined := here()) is not None:
            joined.after_rollback()

    event.listen(factory, "before_commit", before_commit)
    event.listen(factory, "after_commit", after_commit)
    event.listen(factory, "after_rollback", after_rollback)


def _here() -> SessionTransaction | None:
    """The transaction that the code which runs here has joined."""
    joined = _joined.get()
    return None if joined is None else joined()


def _undo(session: Session) -> None:
    """Roll back. A connection that cannot even do that is thrown away, and its server rolls back by itself."""
    try:
        session.rollback()
    except Exception as error:  # noqa: BLE001 - whatever it is, the connection is of no use any more
        _log.warning("a session could not be rolled back (%s): its connection is closed", type(error).__name__)
        session.invalidate()
