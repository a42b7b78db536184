"""Complete a claim's record in the session's transaction, mark early commits, and find out if a failed commit was done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.orm import SessionTransaction as SessionSavepoint

from flask_idempotency.engine import errors
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record, State, StoredPayload
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.store import Writing
from flask_idempotency.stores.sql.database import refuse_inherited
from flask_idempotency.stores.sql.errors import is_refusal, is_retryable
from flask_idempotency.stores.sql.statements import COMMITTED_EARLY
from flask_idempotency.stores.sql.transactional import listeners
from flask_idempotency.stores.sql.transactional.records import SessionRecords, is_unsaved, refuse_autocommit

_log = logging.getLogger("flask_idempotency")


class SessionTransaction:
    """Implements `engine.store.Transaction`."""

    def __init__(
        self,
        records: SessionRecords,
        keys: tuple[StorageKey, ...],
        token: bytes,
        *,
        operation: str,
        on_early_commit: Callable[[], None],
    ) -> None:
        self.session: Session = records.session()
        self.over: bool = False
        """True once this claim ignores the events of the session."""
        self.factory: Any
        self.factory, self._listener = records.listen()
        """The latter calls `before_commit` of the transaction that this context has joined."""
        self._records = records
        self._keys = keys
        self._token = token
        self._operation = operation
        self._on_early_commit = on_early_commit
        self._early = False
        self._in_doubt = False
        """True if the view sent a COMMIT and its outcome is unknown."""
        self._marked = False
        self._committing: Session | None = None
        """The session whose commit by the view is on its way."""
        self._ending: Session | None = None
        """The session that this claim commits or has committed itself."""
        self._before_last_commit: Callable[[Session], None] | None = None
        """Call this before that commit. None: the session does."""
        self._going_out = False
        """True once all writes before that commit are done. A failure before that point leaves no row committed."""
        self._committed = False
        """True once the session has reported that commit as done."""
        self._to_several = False
        """Whether that commit may be several, one for each database."""
        self._connections: WeakSet[Connection] = WeakSet()
        self._pools: set[int] = set()
        self._outer: listeners.JoinedSession | None = listeners.joined_here()

    @property
    def committed_early(self) -> bool:
        self.look_at_commits()
        return self._early or self._in_doubt

    def look_at_commits(self) -> None:
        """Find out if a commit that the view sent was done. If the store does not respond, the outcome stays unknown.

        End its session, which may hold SQLite's one write lock.
        """
        if not self._in_doubt:
            return
        if self._committing is not None:
            # The COMMIT failed, so the session is unusable, and it may still hold the lock of the record.
            undo(self._committing)
            self._committing = None
        try:
            done = self._is_marked()
        except errors.IdempotencyError:
            return
        self._in_doubt = self._marked = False
        if done:
            self._has_committed()

    def settle(
        self,
        writing: Writing,
        *,
        keep: float,
        otherwise: Callable[[StorageKey], None],
        remember: float | None = None,
    ) -> None:
        self.over = True
        session = self._records.session()
        completed: list[tuple[StorageKey, Record | None]] = []

        def complete(payloads: Sequence[StoredPayload]) -> None:
            # The flush and the session's listeners may have ended the transaction.
            same = begun is not None and begun is session.get_transaction() and begun.is_active
            connection = connected if same else self._records.connection(session)
            several = len(self._keys) > 1
            if several:
                # Check all before the first is completed: only a rollback of the application's rows could undo that.
                self._records.refuse_without_keys(connection, self._keys, self._token, payloads)
            completed[:] = [
                (key, self._records.complete(connection, key, self._token, payload, keep, remember, checked=several))
                for key, payload in zip(self._keys, payloads, strict=True)
            ]

        try:
            connected = self._records.connection(session)
            begun = session.get_transaction()
            refuse_autocommit(connected)
            self._commit(session, lambda: writing(complete))
        except errors.LeaseLost as error:
            undo(session)
            if not self._is_held():
                raise
            _log.warning(
                "a session that keeps its snapshot did not see its own claim: its work is rolled back, and may be retried. "
                "Use READ COMMITTED for views with effects='transactional', and on Galera wsrep_sync_wait = 7."
            )
            self._decide(error, otherwise, again=True)
        except errors.ConfigurationError as error:
            undo(session)
            # No COMMIT was sent.
            for key in reversed(self._keys):
                otherwise(key)
            raise errors.NotCommitted(str(error), retryable=False) from error
        except Exception as error:
            role = self._records.role(session)
            undo(session)
            if isinstance(error, errors.StoreUnavailable) and not isinstance(error, errors.InheritedConnection):
                # The codec could not seal the response again.
                raise
            # Only the record shows whether the commit was done.
            self._decide(error, otherwise, again=is_retryable(error), role=role)
        else:
            self._records.notify_committed(completed)

    def commit(self, *, to_several: bool = False) -> None:
        self.over = True
        self._to_several = to_several
        session = self._records.session()
        try:
            if session.in_transaction():
                # Raises if another process opened the connection.
                self._records.connection(session)
            self._commit(session, self._refuse_aborted)
        except Exception as error:
            role = self._records.role(session)
            undo(session)
            if self._going_out and not is_refusal(error):
                raise errors.StoreUnavailable(f"the commit may be done or not ({cause_of(error)})") from error
            _log_fault(error, "so nothing is committed")
            raise errors.NotCommitted(self._failed(error, role), retryable=is_retryable(error)) from error

    def _refuse_aborted(self) -> None:
        """Raise if PostgreSQL has aborted the transaction, and the view let the error pass: no record is written that would.

        It answers such a COMMIT with a rollback, and with no error.
        """
        session = self._records.session()
        if session.in_transaction():
            self._records.has_written(self._records.connection(session))

    def _commit(self, session: Session, write_last: Callable[[], None]) -> None:
        """Commit the session. `write_last` writes in its transaction, right before the COMMIT.

        The application's `before_commit` listeners come first. They see `session.new`, `dirty` and `deleted`, because the
        session is flushed after them. The rows are flushed before `write_last`: what they violate shows before the record
        is touched, and locked.
        """

        # A view may leave a savepoint open. Then the listeners run for it first, and for the transaction last. A test suite may
        # begin another savepoint whenever one ends, so the session does not say which of them it is.
        to_come = max(1, len(list(listeners.levels_of(session))))

        def before_commit(session: Session) -> None:
            nonlocal to_come
            to_come -= 1
            if to_come == 0:
                session.flush()
                if not self._to_several:
                    self._records.refuse_other_databases(session)
                write_last()
                self._going_out = True

        heard = session.dispatch.before_commit
        if listeners.joined_here() is self and len(heard) == 1 and self._listener in heard:
            # Ours is the last one, because there is no other. To add and remove one would cost more than a statement.
            self._before_last_commit = before_commit
        else:
            # On the session itself, and not before now: its listeners run after those of its class, in their order.
            event.listen(session, "before_commit", before_commit)
        self._ending = session
        try:
            session.commit()
        except Exception:
            if not self._committed:
                raise
            # A session in this state cannot roll back. Its connections go back to their pools.
            session.reset()
            _log.exception(
                "a listener on after_commit failed: the rows are committed, and the client gets the response"
            )
        finally:
            if self._before_last_commit is None:
                event.remove(session, "before_commit", before_commit)
            self._before_last_commit = None

    def has_written(self) -> bool:
        try:
            session = self._records.session()
            if is_unsaved(session):
                return True
            if not session.in_transaction():
                return False
            connection = self._records.connection(session)
            # Writes to another database cannot be seen here.
            return len(self._pools) > 1 or self._records.has_written(connection)
        except Exception:  # noqa: BLE001 - assume that it has written
            return True

    def roll_back(self) -> None:
        self.over = True
        undo(self._records.session())

    def leave(self) -> None:
        self.over = True
        if listeners.joined_here() is self:
            listeners.join_here(self._outer)

    def is_retryable(self, error: BaseException) -> bool:
        return is_retryable(error)

    def before_mark(self) -> None:
        session = self._records.session()
        if conflict := self._records.conflict(session):
            raise errors.ConfigurationError(
                f"point_of_no_return(): db.session has begun a transaction, and {conflict}. Call it before the first "
                "flush, and on PostgreSQL use READ COMMITTED."
            )

    def begun(self, connection: Connection) -> None:
        """Note that the session has begun to use this connection."""
        self._pools.add(id(connection.engine.pool))
        if not self.over and self._records.is_base(connection.engine):
            refuse_inherited(connection)
            self._connections.add(connection)
            refuse_autocommit(connection)

    def before_commit(self, session: Session) -> None:
        """Mark the record in the commit that the view is about to send.

        Raises `LeaseLost` if another worker owns the claim. The view then commits no row.
        """
        if self._before_last_commit is not None and session is self._ending:
            self._before_last_commit(session)
            return
        if self.over or not self._keys or session.in_nested_transaction() or not self._records.is_ours(session):
            return
        connection = self._records.connection(session)
        self._records.refuse_other_databases(session)
        if is_unsaved(session) or self._records.has_written(connection):
            self._mark(connection)
            self._committing = session

    def before_connection_commit(self, connection: Connection) -> None:
        """Mark the record before a COMMIT of the session or of its connection, as in `db.session.connection().commit()`."""
        if self.over or not self._keys or connection not in self._connections:
            return
        if self._committing is None and self._records.has_written(connection):
            self._mark(connection)
        self._in_doubt = self._marked

    def after_commit(self, session: Session) -> None:
        if session is self._ending and not session.in_nested_transaction():
            self._committed = True
        if session is self._committing and not self.over:
            self._committing, self._in_doubt, self._marked = None, False, False
            self._has_committed()

    def after_rollback(self, session: Session) -> None:
        # A commit failed. Only the record shows whether it was done.
        if session is self._committing:
            self._committing = None

    def _mark(self, connection: Connection) -> None:
        for key in self._keys:
            self._records.mark_point_of_no_return(connection, key, self._token)
        self._marked = True

    def _has_committed(self) -> None:
        if not self._early:
            self._early = True
            self._records.report(self._operation)
            self._on_early_commit()

    def _is_marked(self) -> bool:
        """Ask the store for the mark that a commit by the view leaves."""
        record = self._records.final_record(self._keys[0], self._token)
        if record is None or record.token != self._token:
            return False
        # The janitor may have quarantined the record since, with another reason.
        return record.reason == COMMITTED_EARLY or record.state is State.QUARANTINED

    def _failed(self, error: Exception, role: str | None) -> str:
        """Return why the session did not commit, and what to grant if `role` may not use our tables."""
        if isinstance(error, errors.ConfigurationError):
            return str(error)
        what = "the commit failed" if self._going_out else "a statement before the commit failed"
        return "; ".join(filter(None, (f"{what} ({cause_of(error)})", self._records.remedy(role, error))))

    def _decide(
        self, error: Exception, otherwise: Callable[[StorageKey], None], *, again: bool, role: str | None = None
    ) -> None:
        """Find out whether a failed commit was done: write to the record, and read it.

        Raises `NotCommitted` if it was not.
        """
        lost: errors.LeaseLost | None = None
        try:
            # This write waits for the lock of a transaction that the server still ends.
            for key in reversed(self._keys):
                otherwise(key)
        except errors.LeaseLost as refused:
            lost = refused
        if not self._records.is_completed(self._keys[0], self._token):
            if lost is not None:
                raise lost
            _log_fault(error, "so nothing is committed")
            raise errors.NotCommitted(self._failed(error, role), retryable=again) from error
        if isinstance(error, SQLAlchemyError):
            _log.warning("a commit was done, although its reply was lost (%s)", cause_of(error))
        else:
            _log.error("a commit was done, and a listener of the session failed afterwards", exc_info=error)
        if len(self._pools) > 1:
            # SQLAlchemy commits databases one after the other, and that of the record was not the last.
            _log.error(
                "the session has committed to one database, and failed to commit to another (%s)", cause_of(error)
            )
            raise errors.StoreUnavailable("a commit failed on one of the session's databases") from error

    def _is_held(self) -> bool:
        record = self._records.final_record(self._keys[0], self._token)
        return record is not None and record.state is State.PROCESSING and record.token == self._token


def _log_fault(error: Exception, outcome: str) -> None:
    """Log the traceback of an error in the application's code. Leave out database errors, whose text quotes rows."""
    if not isinstance(error, SQLAlchemyError | errors.IdempotencyError):
        _log.error("a listener of the session failed, %s", outcome, exc_info=error)


def undo(session: Session) -> None:
    """Roll back. If that fails, close the connection, so that the server rolls back."""
    savepoint: SessionSavepoint | None = session.info.pop(listeners.SAVEPOINT, None)
    try:
        if savepoint is not None and savepoint in listeners.levels_of(session):
            savepoint.rollback()
        else:
            session.rollback()
    except Exception as error:  # noqa: BLE001 - after any error the connection is unusable
        _log.warning("a session could not be rolled back (%s): its connection is closed", cause_of(error))
        session.invalidate()
