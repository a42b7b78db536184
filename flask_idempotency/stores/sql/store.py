"""The store that keeps records in a SQL database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import sqlalchemy
from sqlalchemy import ColumnElement, Connection, Insert, Select, func, literal_column, select
from sqlalchemy.exc import DBAPIError

from flask_idempotency.engine.errors import CorruptRecord, LeaseLost, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Claimed, ClaimRequest, InFlight, Record, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Clock, StoreOutcome, store_time
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.sql import statements
from flask_idempotency.stores.sql.admin.data_keys import SqlDataKeys, SqlResponses
from flask_idempotency.stores.sql.admin.health import SqlHealth
from flask_idempotency.stores.sql.admin.janitor import SqlExpiry, SqlRecovery, SqlTaskLog
from flask_idempotency.stores.sql.admin.schema_check import SqlSchema
from flask_idempotency.stores.sql.claiming import (
    RETRY_SECONDS,
    ClaimQuery,
    Move,
    NearLimit,
    Strategy,
    claim_query,
    classify,
    strategy_of,
    wait_for_tenant,
)
from flask_idempotency.stores.sql.completion import CompletionWriter, answer_of
from flask_idempotency.stores.sql.database import TRIES, Database
from flask_idempotency.stores.sql.dialects import POSTGRESQL, SQLITE, Dialect
from flask_idempotency.stores.sql.errors import is_lock_timeout
from flask_idempotency.stores.sql.identity import identity, prepare
from flask_idempotency.stores.sql.quota import SqlLedger
from flask_idempotency.stores.sql.rows import (
    FINGERPRINT_BYTES,
    TOKEN_BYTES,
    check_standing,
    condemned,
    escape,
    gone,
    row_of,
)
from flask_idempotency.stores.sql.schema import COMPLETED, FAILED, QUARANTINED, SEEDED, meta
from flask_idempotency.stores.sql.statements import ONE

# Whether answers of this database may be in a cache: every host must know, also one that has none.

_NAME: Final[ColumnElement[str]] = literal_column("'cached_since'")


def noted(_: Dialect) -> Select[Any]:
    """1 where some host has ever noted that it puts answers into a cache, else 0."""
    return select(func.count()).select_from(meta).where(meta.c.name == _NAME)


def note(dialect: Dialect) -> Insert:
    """Some host does from now on. Whoever noted it first is right."""
    source = select(_NAME, dialect.now).where(ONE == ONE).suffix_with("ON CONFLICT (name) DO NOTHING")
    return sqlalchemy.insert(meta).from_select(["name", "value"], source)


# What the store itself sends, built once.


class Statements:
    def __init__(self, dialect: Dialect) -> None:
        self.read = statements.read(dialect)
        self.standing = statements.standing(dialect)
        self.renew = statements.renew(dialect)
        self.mark = statements.mark(dialect)
        self.mark_early = statements.mark_early(dialect)
        self.has_written = statements.has_written(dialect)
        self.release = statements.release(dialect)
        self.give_up = statements.give_up(dialect)
        self.hold = statements.hold(dialect)
        self.completing = CompletionWriter(dialect)


class SqlStore:
    """Keeps the contract for as long as the database keeps what it has committed.

    Replays, conflicts and mismatches are one statement, and so is every write of an owner. `strategy` says how a free
    key is taken: `insert` (the default), `row_lock` or `advisory`; all of them may be at work at once.
    """

    def __init__(self, database: Database, *, strategy: str = "insert", clock: Clock = store_time) -> None:
        self.database = database
        self._strategy_name = strategy
        self._clock = clock
        self._statements: Statements | None = None
        self._strategy: Strategy | None = None
        self._prepared = False
        self._low = False
        """Whether the last fence counts from one, and not from the clock."""
        self.data_keys = SqlDataKeys(database, now=self.now)
        self.answers = SqlResponses(database, lambda: self.statements.completing, now=self.now)
        self.ledger = SqlLedger(database, now=self.now)
        self.unsettled = SqlRecovery(database, lambda: self.statements.completing, now=self.now)
        self.expiry = SqlExpiry(database, self.ledger, now=self.now)
        self.chores = SqlTaskLog(database, now=self.now)
        self.health = SqlHealth(database, now=self.now)
        if database.known:
            self._ready()

    @property
    def statements(self) -> Statements:
        return self._ready()[0]

    @property
    def schema(self) -> SqlSchema:
        """The tables that this store needs, to look after them."""
        return SqlSchema(self.database)

    def identity(self) -> bytes:
        """What tells this database from every other. Asks it."""
        return self.database.run(identity)

    def note_cache(self) -> None:
        """Some of its answers may be cached from now on. Remembered for good."""
        if not self.has_cache():
            statement, parameters = note(self.database.dialect), {"now": self.now()}
            self.database.run(lambda connection: connection.execute(statement, parameters))

    def has_cache(self) -> bool:
        """Whether some may have been, by whatever host."""
        statement = noted(self.database.dialect)
        return bool(self.database.run(lambda connection: connection.scalar(statement)))

    def close(self) -> None:
        """Close the connections for records. Those of an application's own Engine are left alone."""
        self.database.close()

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        if len(token) != TOKEN_BYTES or len(request.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a token has {TOKEN_BYTES} bytes and a fingerprint {FINGERPRINT_BYTES}")
        asked = claim_query(request, token, lease=microseconds(lease), now=self.now(), quota=quota)
        statements, strategy = self._ready()
        if quota is not None:
            statements.completing.counts = True

        def claim(connection: Connection) -> StoreOutcome | NearLimit:
            try:
                return strategy.claim(connection, asked)
            except DBAPIError as error:
                if not is_lock_timeout(error):
                    raise
            return _at_least(connection, statements, asked)

        def claim_in_turn() -> StoreOutcome:
            outcome: StoreOutcome | NearLimit | None = self.database.run(claim)
            if isinstance(outcome, NearLimit):
                outcome = wait_for_tenant(self.database, request.key.tid, outcome)
            if outcome is None:
                return self.database.run(lambda connection: _at_least(connection, statements, asked))
            return outcome

        if not self._prepared:
            # Twice at most, by two threads that are first: it changes nothing the second time.
            self.database.run(prepare)
            self._prepared = True
        try:
            outcome = claim_in_turn()
        except CorruptRecord:
            self.answers.distrust(request.key)
            raise
        if isinstance(outcome, Claimed):
            self._watch_fences(outcome.held.fence)
        return outcome

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        done = (QUARANTINED, COMPLETED, FAILED)
        self._send(self.statements.renew, self._brought(key, token, lease=microseconds(lease)), done)

    def mark(self, key: StorageKey, token: bytes) -> None:
        self._send(self.statements.mark, self._brought(key, token), (QUARANTINED,))

    def complete(self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float) -> None:
        completing = self.statements.completing
        self._write(
            completing.write_alone,
            self._brought(key, token, **answer_of(key, payload, keep)),
            (COMPLETED, FAILED),
            otherwise=completing.look_again,
        )

    def release(self, key: StorageKey, token: bytes) -> None:
        self._send(self.statements.release, self._brought(key, token), (), absent=self.statements.give_up)

    def hold(self, key: StorageKey, token: bytes, reason: str) -> None:
        self._send(self.statements.hold, self._brought(key, token, my_reason=escape(reason)), (QUARANTINED,))

    def read(self, key: StorageKey) -> Record | None:
        parameters = {"my_record_id": key.rid, "now": self.now()}
        statement = self.statements.read
        found = self.database.run(lambda connection: connection.execute(statement, parameters).one_or_none())
        if found is None:
            return None
        row = row_of(found)
        return None if row.absent else row.record()

    def condemn(self, key: StorageKey, payload: StoredPayload) -> None:
        self.answers.condemn(key, payload)

    def now(self) -> int | None:
        """What time a test says it is, in microseconds. None leaves it to the server."""
        told = self._clock()
        return None if told is None else round(told * 1_000_000)

    def _brought(self, key: StorageKey, token: bytes, **brought: Any) -> dict[str, Any]:
        return {"my_record_id": key.rid, "my_tenant_id": key.tid, "my_token": token, "now": self.now(), **brought}

    def _watch_fences(self, fence: int) -> None:
        """Have the next claim prepare the database again if its sequence has begun anew under this process.

        Once, until fences are high again: not every role may set the sequence.
        """
        low = fence < SEEDED and self.database.dialect.name == POSTGRESQL
        if low and not self._low:
            self._prepared = False
        self._low = low

    def _ready(self) -> tuple[Statements, Strategy]:
        # Two threads may both do this at first: what they make is the same.
        if self._statements is None or self._strategy is None:
            self._strategy = strategy_of(self._strategy_name, self.database.dialect)
            self._statements = Statements(self.database.dialect)
        return self._statements, self._strategy

    def _send(
        self, statement: Any, parameters: dict[str, Any], done: tuple[str, ...], *, absent: Any | None = None
    ) -> None:
        def write(connection: Connection, parameters: dict[str, Any]) -> bool:
            return connection.execute(statement, parameters).one_or_none() is not None

        self._write(write, parameters, done, absent=absent)

    def _write(
        self,
        write: Callable[[Connection, dict[str, Any]], bool],
        parameters: dict[str, Any],
        done: tuple[str, ...],
        *,
        absent: Any | None = None,
        otherwise: Callable[[Connection, dict[str, Any], Any], None] = lambda *_: None,
    ) -> None:
        """An owner's write. Where it changed nothing, a second statement tells why: in a state of `done` it is done.

        With `absent` it is done where nobody has the key; that statement is sent where it never had a row. `otherwise` is
        called where nothing stood in its way, before it is tried again.
        """

        def work(connection: Connection) -> None:
            for _ in range(TRIES):
                if write(connection, parameters):
                    return
                found = connection.execute(self.statements.standing, parameters).one_or_none()
                if found is None and absent is not None:
                    if connection.execute(absent, parameters).one_or_none() is not None:
                        return
                    continue
                if _is_settled(found, parameters["my_token"], done, absent_is_done=absent is not None):
                    return
                otherwise(connection, parameters, found)
            raise StoreUnavailable("the row was another one at every look")

        self.database.run(work)


def _is_settled(found: Any | None, token: bytes, done: tuple[str, ...], *, absent_is_done: bool) -> bool:
    """Whether nothing is left to be done. Raises `LeaseLost` where it cannot be done any more."""
    if found is None or _absent(found):
        if absent_is_done:
            return True
        raise LeaseLost("the record is gone")
    if found.token != token:
        raise LeaseLost("the record belongs to somebody else")
    completed = found.state in (COMPLETED, FAILED) or condemned(found.state, found.reason, answered=found.answered)
    if completed and COMPLETED not in done:
        raise LeaseLost("the record is completed")
    return found.state in done


def _absent(found: Any) -> bool:
    check_standing(found.state, found.token, found.completed_at, found.expires_at)
    return gone(found.state, found.expires_at, found.now)


def _at_least(connection: Connection, statements: Statements, asked: ClaimQuery) -> StoreOutcome:
    """What can be said without a lock: somebody holds one, and does not move."""
    found = connection.execute(statements.read, asked.parameters).one_or_none()
    if found is None and (connection.dialect.name == SQLITE or asked.quota is not None):
        # That lock is everybody's, or the whole tenant's: whoever holds it need not be at this key.
        raise StoreUnavailable("somebody else has been writing to the database for too long")
    verdict = Move.RECLAIM if found is None else classify(row_of(found), asked)
    return InFlight(RETRY_SECONDS) if isinstance(verdict, Move) else verdict
