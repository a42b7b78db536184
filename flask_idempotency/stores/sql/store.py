"""The store that keeps records in a SQL database."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from flask_idempotency.engine import model
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey, paused_token
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Clock, StoreOutcome
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.sql import claiming, journal_statements, rows, statements
from flask_idempotency.stores.sql.activity import SqlActivity, SqlAuditTrail, SqlObservations
from flask_idempotency.stores.sql.admin.data_keys import SqlDataKeys, SqlResponses
from flask_idempotency.stores.sql.admin.health import SqlHealth
from flask_idempotency.stores.sql.admin.janitor import SqlExpiry, SqlRecovery, SqlTaskLog
from flask_idempotency.stores.sql.admin.schema_check import SqlSchema
from flask_idempotency.stores.sql.capability import Make
from flask_idempotency.stores.sql.completion import CompletionWriter, answer_of
from flask_idempotency.stores.sql.database import TRIES, Database, transaction
from flask_idempotency.stores.sql.dialects import POSTGRESQL, SQLITE, Dialect, made
from flask_idempotency.stores.sql.driver import RecordConnection
from flask_idempotency.stores.sql.errors import is_lock_timeout
from flask_idempotency.stores.sql.identity import identity, prepare
from flask_idempotency.stores.sql.journals import SqlJournals
from flask_idempotency.stores.sql.notifications import SqlNotifier
from flask_idempotency.stores.sql.quota import SqlLedger
from flask_idempotency.stores.sql.schema import ANSWERED, QUARANTINED, RELEASED, SEEDED, meta
from flask_idempotency.stores.sql.writes import upserted

_NAME: Final[sa.ColumnElement[str]] = sa.literal_column("'cached_since'")


def has_cache(_: Dialect) -> sa.Select[Any]:
    """Select 1 if any host has noted that it caches responses of this database, else 0. Every host must know."""
    return sa.select(sa.func.count()).select_from(meta).where(meta.c.name == _NAME)


def note_cache(dialect: Dialect) -> Any:
    """Note that a host caches responses from now on. The first note counts."""
    return upserted(dialect, meta, {"name": _NAME, "value": dialect.now}, ("name",))


class SqlStore:
    """Keep the store's contract for as long as the database keeps committed data.

    Replays, conflicts and mismatches take one statement, and so does every write of an owner. `strategy` selects how a
    claim takes a free key: `insert` (the default), `row_lock` or `advisory`. Workers of all three may run side by side.
    The server's clock counts; pass another `clock` in tests.
    """

    remembers = True

    def __init__(self, database: Database, *, strategy: str = "insert", clock: Clock | None = None) -> None:
        self.database = database
        self._strategy_name = strategy
        self._clock = clock
        self._built: tuple[CompletionWriter, claiming.Strategy] | None = None
        self._prepared = False
        """True if this process has added the rows that a migration tool does not write."""
        self._low = False
        """True if the last fence was counted from one, and not from the clock."""
        self.data_keys: SqlDataKeys = SqlDataKeys(database, now=self.now)
        self.responses: SqlResponses = SqlResponses(database, lambda: self.completing, now=self.now)
        self.ledger: SqlLedger = SqlLedger(database, now=self.now)
        self.recovery: SqlRecovery = SqlRecovery(database, lambda: self.completing, now=self.now)
        self.expiry: SqlExpiry = SqlExpiry(database, now=self.now)
        self.task_log: SqlTaskLog = SqlTaskLog(database, now=self.now)
        self.health: SqlHealth = SqlHealth(database, now=self.now)
        self.activity: SqlActivity = SqlActivity(database, now=self.now)
        self.observations: SqlObservations = SqlObservations(database, now=self.now)
        self.audit: SqlAuditTrail = SqlAuditTrail(database, now=self.now)
        self.notifier: SqlNotifier = SqlNotifier(database)
        self.journals: SqlJournals = SqlJournals(database, lambda: self.completing, now=self.now)
        if database.known:
            self._ready()

    @property
    def completing(self) -> CompletionWriter:
        return (self._built or self._ready())[0]

    @property
    def schema(self) -> SqlSchema:
        """The store's tables, to create, check and migrate them."""
        return SqlSchema(self.database)

    def identity(self) -> bytes:
        """Query the bytes that identify this database among all others."""
        return self.database.run(identity)

    def note_cache(self) -> None:
        """Note in the database that this host caches responses from now on. The note stays."""
        if not self.has_cache():
            statement, parameters = note_cache(self.database.dialect), {"now": self.now()}
            self.database.run(lambda connection: connection.execute(statement, parameters))

    def has_cache(self) -> bool:
        """Return True if any host has noted that it caches responses of this database."""
        statement = has_cache(self.database.dialect)
        return bool(self.database.run(lambda connection: connection.scalar(statement)))

    def close(self) -> None:
        """Close the connections for records. The connections of an Engine that you passed stay open."""
        self.notifier.close()
        self.database.close()

    def claim(
        self, request: model.ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None
    ) -> StoreOutcome:
        query, strategy = self._query(request, token, lease, quota)
        try:
            outcome: StoreOutcome | claiming.NearLimit | None
            locked: BaseException | None = None
            try:
                outcome = self.database.send(strategy.claim, query)
            except StoreUnavailable as error:
                if not (isinstance(error.__cause__, DBAPIError) and is_lock_timeout(error.__cause__)):
                    raise
                outcome, locked = None, error.__cause__
            if isinstance(outcome, claiming.NearLimit):
                outcome = claiming.wait_for_tenant(self.database, outcome)
            if outcome is None:
                outcome = self.database.send(self._claim_without_lock, query, locked)
        except CorruptRecord:
            self.responses.mark_unreadable(request.key)
            raise
        except ConfigurationError:
            # A table or the sequence of fences is gone: the next claim prepares the database again.
            self._prepared = False
            raise
        if isinstance(outcome, model.Grant):
            low = outcome.fence < SEEDED
            if low and not self._low and self.database.dialect.name == POSTGRESQL:
                # The sequence started again under this process: have the next claim prepare the database again. One
                # time only, until fences are high again: not every role may set the sequence.
                self._prepared = False
            self._low = low
        return outcome

    def void(
        self, request: model.ClaimRequest, *, token: bytes, keep: float, quota: Quota | None = None
    ) -> model.Voided | model.Mismatched | model.OtherCaller | model.OverQuota:
        query, _ = self._query(request, token, keep, quota)
        voided = self.parameters(request.key, token, **answer_of(request.key, model.VOID, keep))
        voiding = claiming.voiding_of(self.database.dialect)

        def void(connection: RecordConnection) -> model.Voided | model.Mismatched | model.OtherCaller | model.OverQuota:
            # Claim a free key and complete it as voided, in one transaction. What the claim finds otherwise, stays.
            for _ in range(TRIES):
                with transaction(connection):
                    outcome = voiding.within(connection, query)
                    if isinstance(outcome, model.Grant):
                        row = self.completing.write(connection, voided, alone=False, tells=True)
                        if row is None:
                            raise StoreUnavailable("the row changed in the transaction that voids it")
                        return model.Voided(first_seen=row.requested_at / 1_000_000)
                if isinstance(outcome, model.Voided | model.Mismatched | model.OtherCaller | model.OverQuota):
                    return outcome
            raise StoreUnavailable(f"the row changed between read and write {TRIES} times")

        try:
            return self.database.send(void)
        except CorruptRecord:
            self.responses.mark_unreadable(request.key)
            raise

    def _query(
        self, request: model.ClaimRequest, token: bytes, duration: float, quota: Quota | None
    ) -> tuple[claiming.ClaimQuery, claiming.Strategy]:
        """Encode a claim, and prepare the database for its first one."""
        if len(token) != rows.TOKEN_BYTES or len(request.fingerprint) != rows.FINGERPRINT_BYTES:
            raise ValueError(f"a token has {rows.TOKEN_BYTES} bytes and a fingerprint {rows.FINGERPRINT_BYTES}")
        now = None if self._clock is None else self.now()
        query = claiming.claim_query(request, token, lease=microseconds(duration), now=now, quota=quota)
        completing, strategy = self._built or self._ready()
        if quota is not None:
            completing.counts = True
        if not self._prepared or self.database.numbers.due:
            self.database.numbers.due = False
            # The first two threads may both do this: the second time has no effect.
            self.database.run(prepare)
            # In a test the rows may be rolled back again.
            self._prepared = self.database.joining is None or not self.database.joining.here()
        return query, strategy

    def renew(self, key: StorageKey, token: bytes, *, lease: float, later: int = 0) -> None:
        """Do as the protocol says. `later`: on MySQL, let the lease end this many microseconds later at least.

        On Galera a write is put in order with those of other nodes only if it changes its row.
        """
        parameters = self.parameters(key, token, lease=microseconds(lease), later=later)
        self.database.send(self._write, statements.renew, parameters, (QUARANTINED, *ANSWERED))

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        parameters = self.parameters(key, token)
        self.database.send(self._write, statements.mark_point_of_no_return, parameters, (QUARANTINED,))

    def complete(
        self, key: StorageKey, token: bytes, payload: model.StoredPayload, *, keep: float, remember: float | None = None
    ) -> None:
        parameters = self.parameters(key, token, **answer_of(key, payload, keep, remember))
        completing, _ = self._built or self._ready()
        self.database.send(completing.complete, parameters)

    def release(self, key: StorageKey, token: bytes) -> model.State | None:
        parameters = self.parameters(key, token, my_paused_token=paused_token(token))
        written = self.database.send(self._release, parameters)
        if written is None:
            return None
        if written.state == RELEASED:
            if written.step_write:
                # Its journal has no effect, and no retry reads it.
                self.journals.drop(key, written.requested_at)
            return None
        paused = written.token == parameters["my_paused_token"]
        return model.State.PROCESSING if paused else model.State.QUARANTINED

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        parameters = self.parameters(key, token, my_reason=rows.escape(reason))
        self.database.send(self._write, statements.quarantine, parameters, (QUARANTINED,))

    def read(self, key: StorageKey) -> model.Record | None:
        parameters = {"my_record_id": key.rid, "now": self.now()}
        statement = made(statements.read, self.database.dialect)
        found = self.database.run(lambda connection: connection.execute(statement, parameters).one_or_none())
        if found is None:
            return None
        row = rows.row_of(found)
        return None if rows.is_gone(row) else row.record()

    def mark_corrupt(self, key: StorageKey, payload: model.StoredPayload) -> None:
        self.responses.mark_corrupt(key, payload)

    def now(self) -> int | None:
        """Return a test's time, in microseconds. None leaves it to the server."""
        seconds = None if self._clock is None else self._clock()
        return None if seconds is None else round(seconds * 1_000_000)

    def _ready(self) -> tuple[CompletionWriter, claiming.Strategy]:
        if self._built is None:
            # The first two threads may both do this: both build the same.
            dialect = self.database.dialect
            self._built = CompletionWriter(dialect), claiming.strategy_of(self._strategy_name, dialect)
        return self._built

    def _claim_without_lock(
        self, connection: RecordConnection, query: claiming.ClaimQuery, locked: BaseException | None
    ) -> StoreOutcome:
        """Return what the row alone says. Another worker holds a lock, and does not move."""
        found = connection.execute(made(statements.read, self.completing.dialect), query.parameters).one_or_none()
        if found is None and (connection.dialect.name == SQLITE or query.quota is not None):
            # That lock is on the whole file, or on the tenant: its worker need not be at this key.
            raise StoreUnavailable("another worker has been writing to the database for too long") from locked
        outcome = claiming.Move.RECLAIM if found is None else claiming.classify(rows.row_of(found), query)
        return model.InFlight(claiming.RETRY_SECONDS) if isinstance(outcome, claiming.Move) else outcome

    def parameters(self, key: StorageKey, token: bytes, **more: Any) -> dict[str, Any]:
        """Return what every write of an owner passes, and `more`."""
        now = None if self._clock is None else self.now()
        return {"my_record_id": key.rid, "my_tenant_id": key.tid, "my_token": token, "now": now, **more}

    def _write(
        self, connection: RecordConnection, make: Make, parameters: dict[str, Any], done: tuple[str, ...]
    ) -> None:
        """Send an owner's write. If it changes no row, read the row's state: one in `done` means that it was applied."""
        dialect = (self._built or self._ready())[0].dialect
        for _ in range(TRIES):
            written = connection.execute(made(make, dialect), parameters).one_or_none()
            if written is not None:
                return
            found = connection.execute(made(statements.read_state, dialect), parameters).one_or_none()
            if rows.is_settled(found, parameters["my_token"], done):
                return
        raise StoreUnavailable(f"the row changed between read and write {TRIES} times")

    def _release(self, connection: RecordConnection, parameters: dict[str, Any]) -> Any | None:
        """Release a record, and return what became of it. None: the key is free already.

        If the key has no row, insert one: a claim with this token may still arrive, and must fail.
        """
        dialect = (self._built or self._ready())[0].dialect
        for _ in range(TRIES):
            written = connection.execute(made(journal_statements.release, dialect), parameters).one_or_none()
            if written is not None:
                return written
            found = connection.execute(made(statements.read_state, dialect), parameters).one_or_none()
            if found is None:
                if connection.execute(made(statements.cancel, dialect), parameters).one_or_none() is not None:
                    return None
                continue
            rows.check_standing(found)
            if found.token == parameters["my_paused_token"]:
                return found
            if rows.is_gone(found) or rows.is_settled(found, parameters["my_token"], ()):
                return None
        raise StoreUnavailable(f"the row changed between read and write {TRIES} times")
