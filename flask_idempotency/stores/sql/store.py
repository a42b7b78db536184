"""The store that keeps records in a SQL database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.dml import ReturningUpdate

from flask_idempotency.engine.clock import Clock, store_time
from flask_idempotency.engine.errors import ConfigurationError, LeaseLost, StoreUnavailable
from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.outcome import InFlight
from flask_idempotency.engine.ports import StoreOutcome
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.record import Payload, Record
from flask_idempotency.engine.request import ClaimRequest
from flask_idempotency.stores.durations import microseconds
from flask_idempotency.stores.sql.claims.strategies import Strategy, strategy_of
from flask_idempotency.stores.sql.claims.verdict import RETRY_SECONDS, Asked, Move, ask, judge
from flask_idempotency.stores.sql.database import TRIES, Database
from flask_idempotency.stores.sql.dialects import SQLITE
from flask_idempotency.stores.sql.faults import waited_in_vain
from flask_idempotency.stores.sql.identity import identity
from flask_idempotency.stores.sql.rows import (
    FINGERPRINT_BYTES,
    TOKEN_BYTES,
    check_standing,
    escape,
    gone,
    row_of,
)
from flask_idempotency.stores.sql.schema import COMPLETED, FAILED, QUARANTINED
from flask_idempotency.stores.sql.sql_schema import SqlSchema
from flask_idempotency.stores.sql.statements import Statements


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

    def close(self) -> None:
        """Close the connections for records. Those of an application's own Engine are left alone."""
        self.database.close()

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        if quota is not None:
            raise ConfigurationError("this store cannot count yet")
        if len(token) != TOKEN_BYTES or len(request.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a token has {TOKEN_BYTES} bytes and a fingerprint {FINGERPRINT_BYTES}")
        asked = ask(request, token, lease=microseconds(lease), now=self._now())
        statements, strategy = self._ready()

        def claim(connection: Connection) -> StoreOutcome:
            try:
                return strategy.claim(connection, asked)
            except DBAPIError as error:
                if not waited_in_vain(error):
                    raise
            return _at_least(connection, statements, asked)

        return self.database.run(claim)

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        done = (QUARANTINED, COMPLETED, FAILED)
        self._write(self.statements.renew, key, token, done, {"lease": microseconds(lease)})

    def mark(self, key: StorageKey, token: bytes) -> None:
        self._write(self.statements.mark, key, token, (QUARANTINED,), {})

    def complete(self, key: StorageKey, token: bytes, payload: Payload, *, keep: float) -> None:
        self._write(self.statements.complete, key, token, (COMPLETED, FAILED), answer_of(payload, keep))

    def release(self, key: StorageKey, token: bytes) -> None:
        self._write(self.statements.release, key, token, (), {}, absent_is_done=True)

    def hold(self, key: StorageKey, token: bytes, reason: str) -> None:
        self._write(self.statements.hold, key, token, (QUARANTINED,), {"my_reason": escape(reason)})

    def read(self, key: StorageKey) -> Record | None:
        parameters = {"my_rid": key.rid, "now": self._now()}
        statement = self.statements.read
        found = self.database.run(lambda connection: connection.execute(statement, parameters).one_or_none())
        if found is None:
            return None
        row = row_of(found)
        return None if row.absent else row.record()

    def condemn(self, key: StorageKey, payload: Payload) -> None:
        """Follows with the next change of this store."""

    def _now(self) -> int | None:
        told = self._clock()
        return None if told is None else round(told * 1_000_000)

    def _ready(self) -> tuple[Statements, Strategy]:
        # Two threads may both do this at first: what they make is the same.
        if self._statements is None or self._strategy is None:
            self._strategy = strategy_of(self._strategy_name, self.database.dialect)
            self._statements = Statements(self.database.dialect)
        return self._statements, self._strategy

    def _write(
        self,
        statement: ReturningUpdate[Any],
        key: StorageKey,
        token: bytes,
        done: tuple[str, ...],
        brought: Mapping[str, Any],
        *,
        absent_is_done: bool = False,
    ) -> None:
        self.database.run(
            lambda connection: self._write_on(
                connection, statement, key, token, done, brought, absent_is_done=absent_is_done
            )
        )

    def _write_on(
        self,
        connection: Connection,
        statement: ReturningUpdate[Any],
        key: StorageKey,
        token: bytes,
        done: tuple[str, ...],
        brought: Mapping[str, Any],
        *,
        absent_is_done: bool = False,
    ) -> None:
        """An owner's write. Where it changed nothing, a second statement tells why: in a state of `done` it is done."""
        parameters = {"my_rid": key.rid, "my_token": token, "now": self._now(), **brought}
        for _ in range(TRIES):
            if connection.execute(statement, parameters).one_or_none() is not None:
                return
            found = connection.execute(self.statements.standing, parameters).one_or_none()
            if found is None or _absent(*found):
                if absent_is_done:
                    return
                raise LeaseLost("the record is gone")
            if found.token != token:
                raise LeaseLost("the record belongs to somebody else")
            if found.state in done:
                return
            if found.state in (COMPLETED, FAILED):
                raise LeaseLost("the record is completed")
        raise StoreUnavailable("the row was another one at every look")


def answer_of(payload: Payload, keep: float) -> dict[str, Any]:
    """The parameters of `statements.complete` and `complete_and_tell`, but for `my_rid`, `my_token` and `now`."""
    return {
        "my_state": COMPLETED if payload.success else FAILED,
        "my_status": payload.status,
        "my_byte_size": payload.byte_size,
        "my_answer": payload.data,
        "keep": microseconds(keep),
    }


def _absent(state: str, token: bytes, expires_at: int | None, now: int) -> bool:
    check_standing(state, token, expires_at)
    return gone(state, expires_at, now)


def _at_least(connection: Connection, statements: Statements, asked: Asked) -> StoreOutcome:
    """What can be said without a lock: somebody holds one, and does not move."""
    found = connection.execute(statements.read, asked.parameters).one_or_none()
    if found is None and connection.dialect.name == SQLITE:
        # Its one lock is everybody's: whoever holds it need not be at this key.
        raise StoreUnavailable("somebody else has been writing to the database for too long")
    verdict = Move.RECLAIM if found is None else judge(row_of(found), asked)
    return InFlight(RETRY_SECONDS) if isinstance(verdict, Move) else verdict
