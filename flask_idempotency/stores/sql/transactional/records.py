"""Complete and mark records in the transaction of the application's session, and find out what became of that transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import Connection, Engine, RootTransaction, TwoPhaseTransaction
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, UnboundExecutionError
from sqlalchemy.orm import Session, object_mapper, scoped_session

from flask_idempotency.engine.errors import ConfigurationError, IdempotencyError, LeaseLost
from flask_idempotency.engine.journal import JournalWrite
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record, StoredPayload
from flask_idempotency.stores.sql import statements
from flask_idempotency.stores.sql.capability import Make
from flask_idempotency.stores.sql.completion import answer_of, facts_of
from flask_idempotency.stores.sql.database import refuse_inherited
from flask_idempotency.stores.sql.dialects import MYSQL, POSTGRESQL, SQLITE, commits_each_statement, kind_of, made
from flask_idempotency.stores.sql.driver import SessionConnection, SessionCursor
from flask_idempotency.stores.sql.engines import without_logging
from flask_idempotency.stores.sql.errors import forbidden, lacks_grants
from flask_idempotency.stores.sql.journals import parameters_of
from flask_idempotency.stores.sql.mysql import beside_snapshot
from flask_idempotency.stores.sql.naming import NamedConnection
from flask_idempotency.stores.sql.rows import completed_row, is_condemned
from flask_idempotency.stores.sql.schema import ANSWERED, PROCESSING, QUARANTINED
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.stores.sql.transactional import listeners
from flask_idempotency.stores.sql.transactional.joining import Joining

SHORTEST_SECONDS: Final = 0.001
"""Lease of a renewal that only waits for a lock. It does not shorten the lease."""

_PLAIN_OPTIONS: Final = frozenset({"isolation_level"})
"""SQLAlchemy applies these execution options to the connection, and to no statement."""

_log = logging.getLogger("flask_idempotency")


class SessionRecords:
    """The records of a store, as the transactions of a `scoped_session` write to them."""

    def __init__(
        self,
        sessions: Callable[[], scoped_session[Any]],
        store: SqlStore,
        binds: Callable[[], Mapping[str | None, Any]],
        joining: Joining,
    ) -> None:
        self._sessions = sessions
        self._store = store
        self._binds = binds
        self._joining = joining
        self._on_committed: Callable[[StorageKey, Record], None] | None = None
        self._reported: set[str] = set()
        self._locked: set[bytes] = set()
        """On SQLite, the ids of records whose transactional step runs in this process, and holds the one write lock."""
        self._snapshots: dict[str, bool] = {}

    def listen(self) -> tuple[Any, Callable[[Session], None]]:
        """Listen to the sessions of this context. Return their factory, and our `before_commit` listener of it."""
        factory = self._sessions().session_factory
        return factory, listeners.listen(factory, self._store.database.base)

    def session(self) -> Session:
        """Return the session that views of this context write with."""
        session: Session = self._sessions()()
        return session

    def connection(self, session: Session) -> Connection:
        """Return the session's connection to the database of the records, in its transaction.

        Raises `InheritedConnection` if another process opened it.
        """
        bind = self._joining.bind_of(session) or self._store.database.base
        connection = session.connection(bind_arguments={"bind": bind})
        refuse_inherited(connection)
        return connection

    def conflict(self, session: Session) -> str | None:
        """Return why the transaction of this session prevents writes to the record. None if it does not.

        On SQLite, end it and begin it again if it keeps a snapshot and has only read, as after an explicit BEGIN.
        """
        if not session.in_transaction():
            return None
        connection = self.connection(session)
        refuse_autocommit(connection)
        if self._joining.shares(session):
            return None
        if connection.dialect.name == SQLITE:
            if not listeners.is_reading(connection):
                return None
            if listeners.has_written(connection) or is_unsaved(session):
                return "on SQLite the claim cannot be written beside it"
            if session.in_nested_transaction():
                return "on SQLite it cannot write any more once the claim is written"
            self.renew_snapshot()
            return None
        if kind_of(connection.dialect.name) == MYSQL:
            # Our writes and locking reads see what was committed since its snapshot: see `beside_snapshot`.
            return None
        # The driver's level, or None for the role's default. Query the server once for each.
        level = str(getattr(connection.connection.dbapi_connection, "isolation_level", None))
        if level not in self._snapshots:
            self._snapshots[level] = connection.get_isolation_level() in ("REPEATABLE READ", "SERIALIZABLE")
        return "at its isolation level it would never see the claim" if self._snapshots[level] else None

    def renew_snapshot(self) -> None:
        """Let the session of this context write after a write of ours, although it has read before.

        SQLite refuses every write of a transaction that began to read before another connection wrote. So this ends
        one that has only read, and begins it again. Its objects stay as they are.
        """
        session = self._begun_on_sqlite()
        for connection in () if session is None else begun_by(session):
            if connection.invalidated or connection.in_nested_transaction() or not self.is_base(connection.engine):
                continue
            if listeners.is_reading(connection) and not listeners.is_locking(connection):
                driver: Any = connection.connection.dbapi_connection
                driver.rollback()
                if not driver.in_transaction:
                    driver.execute("BEGIN")

    def _begun_on_sqlite(self) -> Session | None:
        """Return the session of this context, if it has begun a transaction and the database is SQLite's."""
        if self._store.database.dialect.name != SQLITE:
            return None
        sessions = self._sessions()
        try:
            if not sessions.registry.has():
                return None
        except RuntimeError:
            # A thread without an application context has no session of Flask-SQLAlchemy.
            return None
        session: Session = sessions()
        return session if session.in_transaction() and not self._joining.shares(session) else None

    def complete(
        self,
        connection: Connection,
        key: StorageKey,
        token: bytes,
        payload: StoredPayload,
        keep: float,
        remember: float | None,
        *,
        checked: bool,
    ) -> Record | None:
        """Complete a record in this transaction. Return it if a cache wants it.

        Raises `LeaseLost` if the token lost the record, and `DataKeyMissing` as `Store.complete` does. `checked`:
        `refuse_without_keys` was called for all records of this transaction, because no single one can be undone.
        """
        tells = self._on_committed is not None
        parameters = self._store.parameters(key, token, **answer_of(key, payload, keep, remember))
        driver = self._store.database.driver
        if driver is not None and is_plain(connection):
            with beside_snapshot(connection):
                found = self._write(SessionCursor(driver, connection), parameters, tells=tells, checked=checked)
        else:
            with without_logging(connection), beside_snapshot(connection):
                if isinstance(connection.get_transaction(), TwoPhaseTransaction):
                    # PostgreSQL prepares no transaction that has sent a notification.
                    self._named(connection).execute(self._made(statements.end_wait_silently), parameters)
                found = self._write(self._named(connection), parameters, tells=tells, checked=checked)
        if found is None:
            raise LeaseLost("the record belongs to another worker, or is gone")
        return completed_row(found, payload.data).record() if tells else None

    def _write(
        self, connection: SessionConnection, parameters: dict[str, Any], *, tells: bool, checked: bool
    ) -> Any | None:
        """Complete a record. Return None if the token lost it."""
        completing = self._store.completing
        found = completing.write(connection, parameters, alone=False, tells=tells, checked=checked)
        if found is None and self._is_ours(connection, parameters):
            found = completing.write(connection, parameters, alone=False, tells=tells, checked=checked)
        return found

    def refuse_without_keys(
        self, connection: Connection, keys: Sequence[StorageKey], token: bytes, payloads: Sequence[StoredPayload]
    ) -> None:
        """Raise `DataKeyMissing` if a record may not be completed with its payload, before any is completed."""
        for key, payload in zip(keys, payloads, strict=True):
            parameters = self._store.parameters(key, token, **facts_of(payload, "my"))
            with without_logging(connection), beside_snapshot(connection):
                self._store.completing.refuse_without_key(self._named(connection), parameters)

    def _is_ours(self, connection: SessionConnection, parameters: dict[str, Any]) -> bool:
        """Return True if the write may be repeated. Raise `DataKeyMissing` if that is why it changed no row."""
        standing = connection.execute(self._made(statements.read_state), parameters).one_or_none()
        if standing is None or standing.token != parameters["my_token"]:
            return False
        if standing.state not in (PROCESSING, QUARANTINED):
            return False
        self._store.completing.look_again(connection, parameters, standing)
        return True

    def mark_point_of_no_return(self, connection: Connection, key: StorageKey, token: bytes) -> None:
        """Mark a record in this transaction. Raise `LeaseLost` if the token may no longer mark it."""
        parameters = self._store.parameters(key, token)
        with without_logging(connection), beside_snapshot(connection):
            ours = self._named(connection)
            mark = made(statements.mark_point_of_no_return, self._store.completing.dialect, commits=True)
            try:
                if ours.execute(mark, parameters).one_or_none() is not None:
                    return
            except DBAPIError as error:
                if tables := forbidden(error, self._store.database.schema):
                    raise ConfigurationError(lacks_grants(self.role(self.session()), tables)) from None
                raise
            standing = ours.execute(self._made(statements.read_state), parameters).one_or_none()
        if standing is None or standing.token != token or standing.state != QUARANTINED or is_condemned(standing):
            raise LeaseLost("the record belongs to another worker, or is completed")

    def write_journals(
        self,
        connection: Connection,
        keys: Sequence[StorageKey],
        token: bytes,
        *,
        fences: Sequence[int],
        writes: Sequence[JournalWrite],
        lease: float,
    ) -> None:
        """Change the journal of each key in this transaction.

        Raises `LeaseLost` if the token or a fence lost its record, and `DataKeyMissing` before anything is changed.
        """
        journals, now = self._store.journals, self._store.now()
        given = [
            (parameters_of(key, token, fence=fence, writing=each, lease=lease, now=now), each)
            for key, fence, each in zip(keys, fences, writes, strict=True)
        ]
        with without_logging(connection), beside_snapshot(connection):
            ours = self._named(connection)
            for parameters, writing in given:
                journals.refuse_without_keys(ours, parameters, writing.enter)
            for parameters, writing in given:
                if journals.write_on(ours, parameters, writing) or journals.is_done(ours, parameters, writing):
                    continue
                raise LeaseLost("the record changed while a step was committed")

    def has_reached(self, key: StorageKey, token: bytes, *, fence: int, number: int) -> bool:
        """Return True if this write is in the journal, after every transaction that wrote to it has ended."""
        if self._store.database.dialect.name != SQLITE:
            # A write waits for a COMMIT that has not ended; a read would see the row before it.
            self._store.renew(key, token, lease=SHORTEST_SECONDS, later=1)
        return self._store.journals.recall(key, token, fence=fence).write >= number

    def end_step(self, keys: Sequence[StorageKey]) -> None:
        """Let other threads write to these journals again."""
        self._locked.difference_update(key.rid for key in keys)

    def _named(self, connection: Connection) -> NamedConnection:
        """Return this connection for our statements: no search path or translate map of a tenant reaches them."""
        return NamedConnection(connection, self._store.database.options)

    def _made(self, make: Make) -> Any:
        return made(make, self._store.completing.dialect)

    def role(self, session: Session) -> str | None:
        """Return the role that the application has set in this transaction, as far as the listeners know."""
        held = (each for each in begun_by(session) if not each.invalidated and self.is_base(each.engine))
        return next(map(listeners.role_of, held), None)

    def remedy(self, role: str | None, error: BaseException) -> str:
        """Return what to grant if the role of a transaction may not use our tables, else nothing."""
        database = self._store.database
        tables = forbidden(error, database.schema)
        if not tables:
            return ""
        if role is None and database.base.pool.dispatch.checkout:
            # Then a listener of the pool may have set it.
            with suppress(IdempotencyError, SQLAlchemyError):
                role = database.role()
        return lacks_grants(role, tables)

    def is_base(self, engine: Engine) -> bool:
        """Return True if connections of this engine lead to the records."""
        return engine.pool is self._store.database.base.pool or self._joining.has(engine)

    def is_ours(self, session: Session) -> bool:
        """Return True if this session writes to the database of the records. Another application may share the factory."""
        try:
            return self.is_base(session.get_bind().engine)
        except UnboundExecutionError:
            return True

    def has_written(self, connection: Connection) -> bool:
        """Return True if the transaction has written. A commit after reads only needs no mark."""
        if connection.dialect.name != POSTGRESQL or self._joining.has(connection.engine):
            return listeners.has_written(connection)
        with without_logging(connection):
            written: bool = self._named(connection).execute(self._made(statements.has_written)).scalar_one()
        return written

    def refuse_other_databases(self, session: Session) -> None:
        """Raise `ConfigurationError` if this session has written to a database that does not hold the records.

        The session would commit the two one after the other, and a crash between would keep one half.
        """
        written = {
            self._bind_of(connection.engine)
            for connection in begun_by(session)
            if not self.is_base(connection.engine)
            and not commits_each_statement(connection)
            and self.has_written(connection)
        }
        # What the view's own commit is about to flush. Where this session writes, it says by the mapper.
        if is_unsaved(session):
            dirty = (each for each in session.dirty if session.is_modified(each))
            for changed in (*session.new, *dirty, *session.deleted):
                bind = session.get_bind(object_mapper(changed))
                if not self.is_base(bind.engine):
                    written.add(self._bind_of(bind.engine))
        if written:
            raise ConfigurationError(
                f"db.session has written to another database ({', '.join(sorted(written))}), or has locked rows there, than "
                "the one that holds the records (the default bind), so these rows and the record would be committed one after "
                "the other, and a crash between would keep one half. Nothing of it is committed. Write all rows of a "
                "transactional view to the default bind and send the rest by an outbox message, or choose another value of "
                "effects."
            )

    def _bind_of(self, engine: Engine) -> str:
        """Return what the application calls this engine. Its URL may name a tenant."""
        names = [name for name, bind in self._binds().items() if bind.engine.pool is engine.pool]
        return f"bind {names[0]!r}" if names else "a bind that get_bind() returned"

    def final_record(self, key: StorageKey, token: bytes) -> Record | None:
        """Return the record after every transaction that wrote to it has ended."""
        if self._store.database.dialect.name != SQLITE:
            # A write waits for a COMMIT that has not ended; a read would see the row before it. On Galera nothing waits for
            # that of another node, but it fails after this write.
            with suppress(LeaseLost):
                self._store.renew(key, token, lease=SHORTEST_SECONDS, later=1)
        return self._store.read(key)

    def is_completed(self, key: StorageKey, token: bytes) -> bool:
        """Return True if this token completed the record, also if it has expired or is corrupt since."""
        parameters = {"my_record_id": key.rid, "now": self._store.now()}
        statement = self._made(statements.read_state)
        found = self._store.database.run(lambda connection: connection.execute(statement, parameters).one_or_none())
        if found is None or found.token != token:
            return False
        return found.state in ANSWERED or (found.state == QUARANTINED and bool(found.answered))

    def notify_committed(self, completed: Sequence[tuple[StorageKey, Record | None]]) -> None:
        for key, record in completed:
            if self._on_committed is None or record is None or self._joining.here():
                # A test rolls the record back, and no cache with it.
                continue
            try:
                self._on_committed(key, record)
            except Exception:  # noqa: BLE001 - the record is committed, whatever the callback does
                _log.exception("the callback for a committed record failed: the cache does not have its response")

    def report(self, operation: str) -> None:
        """Log an early commit, once for each endpoint."""
        if operation not in self._reported:
            self._reported.add(operation)
            _log.warning(
                "%s commits by itself although its effects are transactional. If the worker dies before the response, these "
                "rows stay, and the key is quarantined. Remove the commit (use flush() to see generated values): the "
                "engine commits the rows together with the response.",
                operation,
            )


def begun_by(session: Session) -> set[Connection]:
    """Return the connections on which the transaction of this session has begun."""
    begun: Any = session.get_transaction()
    held = () if begun is None else begun._connections
    return {each for each in held if isinstance(each, Connection)}


def is_plain(connection: Connection) -> bool:
    """Return True if a statement may bypass SQLAlchemy's `Connection`, which would do no more than send it.

    Otherwise the statement goes through it: a listener or an option concerns the statement, or the transaction is not a
    plain one, so that SQLAlchemy has to refuse the statement or to begin a transaction for it.
    """
    transaction = connection.get_transaction()
    return (
        type(transaction) is RootTransaction
        and transaction.is_active
        and not connection.in_nested_transaction()
        and not connection.invalidated
        and connection.get_execution_options().keys() <= _PLAIN_OPTIONS
        and not listeners.hears_statements(connection)
    )


def refuse_autocommit(connection: Connection) -> None:
    """Raise `ConfigurationError` if this connection commits each statement, so that no rollback is possible."""
    if commits_each_statement(connection):
        raise ConfigurationError(
            "db.session commits each statement by itself (isolation level AUTOCOMMIT), so its rows cannot be committed "
            "together with a record. Use another isolation level, or another value of effects than transactional."
        )


def is_unsaved(session: Session) -> bool:
    """Return True if this session has objects to write. Its `new`, `dirty` and `deleted` would build a set each."""
    return not session._is_clean()
