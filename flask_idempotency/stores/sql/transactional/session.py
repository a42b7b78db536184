"""Join the application's session, so that a view's rows and its record are committed in one transaction.

The view writes with its session as usual, and leaves the commit to the engine. If the view commits by itself, a listener
marks the record in that same commit. So the view's rows are never committed without a trace in the record.

Only writes through this session, to the database of the records, are in the transaction. Writes through another bind or
connection are effects like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy.orm import Session, scoped_session

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.journal import JournalWrite, StepState
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, Record
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Clock, StoreOutcome
from flask_idempotency.stores.sql.database import Database, abandon_inherited, is_opened_here
from flask_idempotency.stores.sql.dialects import SQLITE
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.stores.sql.transactional import listeners
from flask_idempotency.stores.sql.transactional.joining import Joining
from flask_idempotency.stores.sql.transactional.records import SessionRecords, begun_by, is_unsaved
from flask_idempotency.stores.sql.transactional.steps import SessionStep
from flask_idempotency.stores.sql.transactional.transaction import SessionTransaction, undo


class SessionTransactions(SessionRecords):
    """Implements `Transactions` on a `scoped_session`, such as Flask-SQLAlchemy's `db.session`.

    `sessions` returns it at the time of use, because the application may set up its database later.
    """

    def on_committed(self, callback: Callable[[StorageKey, Record], None]) -> None:
        self._on_committed = callback

    def after_fork(self) -> None:
        """In a forked child: drop the parent's transactions from the copies of its sessions."""
        with suppress(ConfigurationError):
            registry = self._sessions().registry
            held: Any = registry.registry
            here = [registry()] if not isinstance(held, dict) and registry.has() else []
            for session in list(held.values()) if isinstance(held, dict) else here:
                abandon_inherited(session)

    def begin(self) -> None:
        with suppress(ConfigurationError):  # a claim raises it
            self._joining.bind_of(self.session())

    def prepare(self) -> None:
        """Raise `ConfigurationError` if the session has begun a transaction that conflicts with the claim.

        SQLite has one writer at a time: the claim would wait for the session, which waits for the claim. A transaction that
        keeps its snapshot would never see the claim, and could not complete it.
        """
        sessions = self._sessions()
        # A replay needs no session, so it makes none.
        if sessions.registry.has() and (conflict := self.conflict(sessions())):
            raise ConfigurationError(
                f"db.session has begun a transaction before the view, and {conflict}. A before_request hook that uses it "
                "must end it: db.session.commit(), or rollback()."
            )

    def join(
        self, keys: Sequence[StorageKey], token: bytes, *, operation: str, on_early_commit: Callable[[], None]
    ) -> SessionTransaction:
        """Listen to the session of this context until `leave`."""
        session = self._unjoined()
        if session.in_transaction():
            self.connection(session)
            self._joining.keep_apart(session)
        else:
            self._joining.bind_of(session)
        transaction = SessionTransaction(self, tuple(keys), token, operation=operation, on_early_commit=on_early_commit)
        listeners.join_here(transaction)
        return transaction

    def join_step(
        self,
        keys: Sequence[StorageKey],
        token: bytes,
        *,
        fences: Sequence[int],
        lease: float,
        operation: str,
        early: Callable[[], Sequence[JournalWrite]],
        on_early_commit: Callable[[], None],
    ) -> SessionStep:
        """Listen to the session of this context until `leave`, for one step."""
        session = self._unjoined()
        begun = session.in_transaction()
        if is_unsaved(session) or (begun and self.has_written(self.connection(session))):
            raise ConfigurationError(
                "db.session has writes that do not belong to this transactional step. Write them in the step, or commit them "
                "before it."
            )
        if conflict := self.conflict(session):
            raise ConfigurationError(
                f"db.session has begun a transaction before a transactional step, and {conflict}. End it before the step: "
                "db.session.commit(), or rollback()."
            )
        step = SessionStep(
            self,
            tuple(keys),
            token,
            fences=fences,
            lease=lease,
            operation=operation,
            early=early,
            on_early_commit=on_early_commit,
        )
        if self._store.database.dialect.name == SQLITE:
            self._locked.update(key.rid for key in keys)
        listeners.join_here(step)
        return step

    def before_journal(self, key: StorageKey, writing: JournalWrite) -> None:
        """Let a journal be written beside the session of this context.

        Raise `ConfigurationError` if that session holds SQLite's one write lock. While a transactional step of the same
        record holds it in another thread, do so if a step would begin, and raise `StoreUnavailable` for other writes.
        """
        if key.rid in self._locked:
            # It would wait five seconds for the session of that step.
            if any(entry.state is StepState.BEGUN for entry in writing.enter):
                raise ConfigurationError(
                    "a step began in one thread while a transactional step of the same request runs in another. SQLite has "
                    "one writer at a time, so take such steps one after the other, or use PostgreSQL."
                )
            raise StoreUnavailable("a transactional step of the same request holds SQLite's one write lock")
        session = self._begun_on_sqlite()
        if session is not None and listeners.is_locking(self.connection(session)):
            raise ConfigurationError(
                "a step begins while db.session has written, or has begun with BEGIN IMMEDIATE, and on SQLite its journal "
                "cannot be written beside that. Commit before the step: db.session.commit()."
            )
        self.renew_snapshot()

    def flush(self, *, to_several: bool = False) -> None:
        # Not where the application listens to `before_commit`: its listeners look for unsaved objects there. And not on a
        # connection of another process: it takes no byte, and the commit refuses it.
        sessions = self._sessions()
        if not sessions.registry.has():
            return
        session: Session = sessions()
        ours = listeners.listener_of(sessions.session_factory)
        if any(each is not ours for each in session.dispatch.before_commit) or not all(
            each.invalidated or is_opened_here(each) for each in begun_by(session)
        ):
            return
        if isinstance(joined := listeners.joined_here(), SessionTransaction):
            joined.look_at_commits()
        try:
            session.flush()
            if not to_several:
                self.refuse_other_databases(session)
        except Exception:
            undo(session)
            raise

    def unsaved(self) -> bool:
        sessions = self._sessions()
        return sessions.registry.has() and is_unsaved(sessions())

    def _unjoined(self) -> Session:
        """Return the session of this context, which no transactional view may have joined."""
        session, outer = self.session(), listeners.joined_here()
        if isinstance(outer, SessionTransaction) and not outer.over and outer.session is session:
            raise ConfigurationError(
                "a transactional view called another one on the same session, so each would commit or roll back the rows of "
                "both. Call it over HTTP, or in a separate application context."
            )
        return session


class TransactionalSqlStore(SqlStore):
    """A `SqlStore` with `transactions`: what `effects="transactional"` needs.

    `sessions` returns the `scoped_session` that views write with. It must use the database that `database` names. `binds`
    returns the engines of all databases that these sessions may use, by their names. While `testing()`, the store works on the
    connection that a session stands on.
    """

    def __init__(
        self,
        database: Database,
        *,
        sessions: Callable[[], scoped_session[Any]],
        binds: Callable[[], Mapping[str | None, Any]] = dict,
        testing: Callable[[], bool] = bool,
        strategy: str = "insert",
        clock: Clock | None = None,
    ) -> None:
        self.joining: Joining = Joining(sessions, testing)
        database.joining = self.joining
        super().__init__(database, strategy=strategy, clock=clock)
        self._joined: set[bytes] = set()
        """The tokens of claims on the connection of a test. No other thread may use it, so their leases are not renewed."""
        # Before the first transaction that is to be judged.
        database.when_open(listeners.watch)
        self.transactions: SessionTransactions = SessionTransactions(sessions, self, binds, self.joining)
        # After the callback of `Database`, which replaces the pools.
        after_fork(self.transactions.after_fork)
        self.journals.before_write = self.transactions.before_journal

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        self.transactions.renew_snapshot()
        if self.joining.here():
            self._joined.add(token)
        return super().claim(request, token=token, lease=lease, quota=quota)

    def renew(self, key: StorageKey, token: bytes, *, lease: float, later: int = 0) -> None:
        if token not in self._joined:
            super().renew(key, token, lease=lease, later=later)

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        self.transactions.renew_snapshot()
        super().mark_point_of_no_return(key, token)
