"""The application's own session: where a view's rows and its record are committed in one transaction.

Nothing is patched and the view needs to know nothing: it writes with its session as ever, and leaves the commit to
whoever settles its claim. A view that commits by itself is noticed before its commit goes out, and the record is marked in
that same commit: what it has written is never there without the record knowing of it.

Only what is written through this session, on the database that holds the records, is in the transaction. What a second
bind or a connection of the view's own writes is an effect like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from flask_idempotency.engine.errors import ConfigurationError, LeaseLost
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record, StoredPayload
from flask_idempotency.engine.store import Clock
from flask_idempotency.stores.sql.completion import answer_of, facts_of
from flask_idempotency.stores.sql.database import Database, abandon_inherited, refuse_inherited, without_logging
from flask_idempotency.stores.sql.dialects import SQLITE
from flask_idempotency.stores.sql.rows import completed_row, is_condemned
from flask_idempotency.stores.sql.schema import COMPLETED, FAILED, PROCESSING, QUARANTINED
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.stores.sql.transactional.listeners import join_here, joined_here, listen
from flask_idempotency.stores.sql.transactional.transaction import SessionTransaction, is_writing, refuse_autocommit

SHORTEST_SECONDS: Final = 0.001
"""Of a renewal that is not meant to renew anything: a lease is never shortened."""

_log = logging.getLogger("flask_idempotency")


class SessionTransactions:
    """Implements `engine.store.Transactions` on a `scoped_session`, such as Flask-SQLAlchemy's `db.session`.

    `sessions` returns it when it is needed: an application may set up its database after this.
    """

    def __init__(
        self,
        sessions: Callable[[], scoped_session[Any]],
        store: SqlStore,
    ) -> None:
        self._sessions = sessions
        self._store = store
        self._told: Callable[[StorageKey, Record], None] | None = None
        self._reported: set[str] = set()
        self._snapshots: dict[str, bool] = {}
        # After the database's own: by then the pools are new.
        after_fork(self.after_fork)

    def on_committed(self, told: Callable[[StorageKey, Record], None]) -> None:
        self._told = told

    def after_fork(self) -> None:
        """In a child: end what its copies of the parent's sessions hold. The transactions are the parent's."""
        with suppress(ConfigurationError):
            registry = self._sessions().registry
            held: Any = registry.registry
            here = [registry()] if not isinstance(held, dict) and registry.has() else []
            for session in list(held.values()) if isinstance(held, dict) else here:
                abandon_inherited(session)

    def prepare(self) -> None:
        """Raises `ConfigurationError` when a transaction that the session has begun stands in the way of the claim.

        On SQLite there is one writer at a time, and the claim would wait for the one that waits for it. On PostgreSQL a
        transaction that keeps its snapshot would never see the claim, and so could not complete it.
        """
        session = self.session()
        if session.in_transaction() and (hindrance := self.hindrance(self.connection(session))):
            raise ConfigurationError(
                f"db.session has begun a transaction before the view, and {hindrance}. A before_request hook that uses it "
                "must end it: db.session.commit(), or rollback()."
            )

    def hindrance(self, connection: Connection) -> str | None:
        """Why the record cannot be written to beside what the session has begun on this connection."""
        refuse_autocommit(connection)
        if connection.dialect.name == SQLITE:
            return "on SQLite the claim cannot be written beside it" if is_writing(connection) else None
        return "at its isolation level it would never see the claim" if self._keeps_snapshot(connection) else None

    def _keeps_snapshot(self, connection: Connection) -> bool:
        # What the driver was told, or None for the role's own setting: each is asked for once.
        told = str(getattr(connection.connection.dbapi_connection, "isolation_level", None))
        if told not in self._snapshots:
            self._snapshots[told] = connection.get_isolation_level() in ("REPEATABLE READ", "SERIALIZABLE")
        return self._snapshots[told]

    def join(
        self, keys: Sequence[StorageKey], token: bytes, *, operation: str, told: Callable[[], None]
    ) -> SessionTransaction:
        """Watch over the session in this context, until the transaction is left."""
        sessions = self._sessions()
        session: Session = sessions()
        self._refuse_inner(session)
        if session.in_transaction():
            self.connection(session)
        listen(sessions.session_factory, self._store.database.base)

        def early() -> None:
            self._report(operation)
            told()

        transaction = SessionTransaction(
            self, tuple(keys), token, session=session, factory=sessions.session_factory, early=early
        )
        join_here(transaction)
        return transaction

    def unsaved(self) -> bool:
        sessions = self._sessions()
        if not sessions.registry.has():
            return False
        session: Session = sessions()
        return bool(session.new or session.dirty or session.deleted)

    def session(self) -> Session:
        """The one that views write with, here and now."""
        session: Session = self._sessions()()
        return session

    def _refuse_inner(self, session: Session) -> None:
        outer = joined_here()
        if isinstance(outer, SessionTransaction) and not outer.over and outer.session is session:
            raise ConfigurationError(
                "a transactional view was called from within another one, on the same session: what one commits or rolls "
                "back would be the other's. Call it over HTTP, or in an application context of its own."
            )

    def complete(
        self,
        connection: Connection,
        key: StorageKey,
        token: bytes,
        payload: StoredPayload,
        keep: float,
        *,
        checked: bool,
    ) -> Record | None:
        """Complete a record in this transaction, and tell what it is then if anybody wants to know.

        Raises `LeaseLost` when it is no longer the token's, and `DataKeyMissing` as `Store.complete` does, unless that
        was `checked` for all that are to be completed together: the first could not be taken back.
        """
        completing, tells = self._store.statements.completing, self._told is not None
        parameters = self._store.parameters(key, token, **answer_of(key, payload, keep))
        with without_logging(connection):
            found = completing.write(connection, parameters, alone=False, tells=tells, checked=checked)
            if found is None and self._is_ours(connection, parameters):
                found = completing.write(connection, parameters, alone=False, tells=tells, checked=checked)
        if found is None:
            raise LeaseLost("the record belongs to somebody else, or is gone")
        return completed_row(found, payload.data).record() if tells else None

    def refuse_without_keys(
        self, connection: Connection, keys: Sequence[StorageKey], token: bytes, payloads: Sequence[StoredPayload]
    ) -> None:
        """Raises `DataKeyMissing` when a record may not be completed with its payload, before any is."""
        for key, payload in zip(keys, payloads, strict=True):
            brought = self._store.parameters(key, token, **facts_of(payload, "my"))
            with without_logging(connection):
                self._store.statements.completing.refuse_without_key(connection, brought)

    def _is_ours(self, connection: Connection, parameters: dict[str, Any]) -> bool:
        """Whether it may be tried once more. Raises `DataKeyMissing` when that is why nothing was changed."""
        standing = connection.execute(self._store.statements.standing, parameters).one_or_none()
        if standing is None or standing.token != parameters["my_token"]:
            return False
        if standing.state not in (PROCESSING, QUARANTINED):
            return False
        self._store.statements.completing.look_again(connection, parameters, standing)
        return True

    def mark_point_of_no_return(self, connection: Connection, key: StorageKey, token: bytes) -> None:
        """Mark a record in this transaction. Raises `LeaseLost` when it is no longer the token's to be marked."""
        parameters = self._store.parameters(key, token)
        with without_logging(connection):
            if connection.execute(self._store.statements.mark_early, parameters).one_or_none() is not None:
                return
            standing = connection.execute(self._store.statements.standing, parameters).one_or_none()
        if standing is None or standing.token != token or standing.state != QUARANTINED or is_condemned(standing):
            raise LeaseLost("the record belongs to somebody else, or is settled")

    def is_base(self, engine: Engine) -> bool:
        """Whether connections of this engine lead to the records."""
        return engine.pool is self._store.database.base.pool

    def is_ours(self, session: Session) -> bool:
        """Whether this session writes to the database of the records: another application may share the factory."""
        try:
            return self.is_base(session.get_bind().engine)
        except UnboundExecutionError:
            return True

    def has_written(self, connection: Connection) -> bool:
        """Whether there is anything to commit here. A view that only ends what it has read commits nothing."""
        if connection.dialect.name == SQLITE:
            return is_writing(connection)
        written: bool = connection.execute(self._store.statements.has_written).scalar_one()
        return written

    def settled(self, key: StorageKey, token: bytes) -> Record | None:
        """The record, once no transaction is on its way any more that has written to it."""
        if self._store.database.dialect.name != SQLITE:
            # A write waits for one whose COMMIT has arrived and not ended; a read would see what was before it.
            with suppress(LeaseLost):
                self._store.renew(key, token, lease=SHORTEST_SECONDS)
        return self._store.read(key)

    def is_completed(self, key: StorageKey, token: bytes) -> bool:
        """Whether this token has completed the record, though its life may be over by now, or nobody can read it."""
        parameters = {"my_record_id": key.rid, "now": self._store.now()}
        statement = self._store.statements.standing
        found = self._store.database.run(lambda connection: connection.execute(statement, parameters).one_or_none())
        if found is None or found.token != token:
            return False
        return found.state in (COMPLETED, FAILED) or (found.state == QUARANTINED and bool(found.answered))

    def tell(self, completed: Sequence[tuple[StorageKey, Record | None]]) -> None:
        for key, record in completed:
            if self._told is None or record is None:
                continue
            try:
                self._told(key, record)
            except Exception:  # noqa: BLE001 - it is committed, whatever becomes of the news
                _log.exception("who was told of a committed record failed")

    def connection(self, session: Session) -> Connection:
        """The one on which the session writes to the database of the records, in its transaction.

        Raises `InheritedConnection` if another process opened it.
        """
        connection = session.connection(bind_arguments={"bind": self._store.database.base})
        refuse_inherited(connection)
        return connection

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


class TransactionalSqlStore(SqlStore):
    """A `SqlStore` with `transactions`: what `effects="transactional"` needs.

    `sessions` returns the `scoped_session` that views write with, on the very database that `database` names.
    """

    def __init__(
        self,
        database: Database,
        *,
        sessions: Callable[[], scoped_session[Any]],
        strategy: str = "insert",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(database, strategy=strategy, clock=clock)
        self.transactions = SessionTransactions(sessions, self)
