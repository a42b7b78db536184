"""Decide and write a claim, with one of three strategies that end in the same row.

`classify` returns what the row of a key means for a claim. A strategy reads that row, and writes the grant. A lock only saves
work: every write compares the token of the row, so strategies may run side by side.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, Final, TypeAlias

from sqlalchemy.exc import DBAPIError

from flask_idempotency.engine import model
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.keys import paused_token
from flask_idempotency.engine.quota import Quota, window_of
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql import completion, dialects, quota, statements
from flask_idempotency.stores.sql.completion import entry
from flask_idempotency.stores.sql.database import TRIES, Database, transaction
from flask_idempotency.stores.sql.dialects import MYSQL, POSTGRESQL, SQLITE, Dialect, made
from flask_idempotency.stores.sql.driver import RecordConnection
from flask_idempotency.stores.sql.errors import is_lock_timeout, is_serialization_failure
from flask_idempotency.stores.sql.mysql import NUMBERED
from flask_idempotency.stores.sql.quota import MARGIN, checked, rate, within
from flask_idempotency.stores.sql.rows import Row, escape, is_gone, row_of, unescape
from flask_idempotency.stores.sql.schema import ANSWERED, NEW_KEYS, QUARANTINE, QUARANTINED, RELEASED, TAKEOVER

RETRY_SECONDS: Final = 1.0
"""The `retry_after` of a claim that could not see who holds the key. Another worker is writing to the row right now."""

_LEAVING: Final = model.InFlight(RETRY_SECONDS)
"""The key is free, and another transaction has its row: it removes it, or claims the key."""

PAUSE_SECONDS: Final = (0.01, 0.04)
"""Pause between two tries to get a lock. It is random, so that two processes do not collide each time."""


@dataclass(frozen=True, slots=True)
class ClaimQuery:
    """A claim as statements need it."""

    request: model.ClaimRequest
    token: bytes
    lease: int
    """In microseconds."""
    parameters: dict[str, Any]
    quota: Quota | None = None

    @property
    def must_wait(self) -> bool:
        """True if a new key needs the tenant's lock, because a limit of the quota is no higher than its margin."""
        given = self.parameters
        if self.quota is None or not given["my_margin"]:
            return False
        limits = (given[f"my_max_{name}"] for name in ("records", "in_flight", "new_keys"))
        return any(limit is not None and limit <= MARGIN for limit in limits)


def claim_query(
    request: model.ClaimRequest, token: bytes, *, lease: int, now: int | None, quota: Quota | None = None
) -> ClaimQuery:
    """Encode a claim. `lease` and `now` are microseconds; without `now` the server's clock counts."""
    about = request.info
    parameters: dict[str, Any] = {
        "my_record_id": request.key.rid,
        "my_tenant_id": request.key.tid,
        "my_token": token,
        "my_fingerprint": request.fingerprint,
        "my_on_expiry": TAKEOVER if request.on_expiry is model.OnExpiry.TAKEOVER else QUARANTINE,
        "my_tenant": escape(about.tenant),
        "my_principal": escape(about.principal),
        "my_method": escape(about.traced_method if about.trace else about.method),
        "my_endpoint": escape(about.operation),
        "my_in_quota": 0 if quota is None else 1,
        "my_awaited": 1 if request.notify_on_completion else None,
        "lease": lease,
        "now": now,
    }
    if quota is not None:
        parameters.update(within(request.key, quota))
    return ClaimQuery(request, token, lease, parameters, quota)


class Move(Enum):
    """What the store has to write before there is an outcome."""

    RECLAIM = "reclaim"
    TAKE_OVER = "take over"
    QUARANTINE = "quarantine"


def classify(row: Row, query: ClaimQuery) -> StoreOutcome | Move:
    """Return what this row means for the claim, in the order that `Store.claim` promises.

    The time is that of the read. Raise `StoreUnavailable` if the claim was cancelled before it reached the store.
    """
    if is_gone(row):
        if row.token == query.token and row.state == RELEASED:
            raise StoreUnavailable("the claim was cancelled before it reached the store")
        return Move.RECLAIM
    callers = query.request.callers
    shown = callers is None or callers.show(model.RequestInfo(unescape(row.tenant), unescape(row.principal)))
    if shown is False:
        return model.OtherCaller(first_seen=row.requested_at / 1_000_000)
    if row.fingerprint == model.VOIDED:
        return model.Voided(first_seen=row.requested_at / 1_000_000)
    if row.fingerprint != query.request.fingerprint:
        return model.Mismatched(first_seen=row.requested_at / 1_000_000)
    if row.state in ANSWERED:
        if row.response_expires_at is not None and row.deadline <= row.now:
            return model.Expired(first_seen=row.requested_at / 1_000_000)
        return row.record()
    if row.state == QUARANTINED:
        return model.Unknown(unescape(row.reason or ""))
    left = row.deadline - row.now
    if row.token == query.token:
        return model.Grant(row.token, row.fence, row.attempt, max(left, 0) / 1_000_000)
    if left > 0:
        return model.InFlight(retry_after=left / 1_000_000)
    if shown is None:
        return model.Unknown(model.CALLER_UNKNOWN)
    if row.token == paused_token(query.token):
        raise StoreUnavailable("the claim was paused before it reached the store")
    return Move.TAKE_OVER if row.on_expiry == TAKEOVER else Move.QUARANTINE


def refusal(standing: Any) -> model.OverQuota | None:
    """Return the refusal of a new key by the counts of `quota.tenant_counts`, or None."""
    now = standing.now
    ends = (standing.first_bucket_end or now) - now
    if standing.max_records is not None and standing.unsettled + standing.records >= standing.max_records:
        return model.OverQuota("records", standing.max_records, ends / 1_000_000)
    if standing.max_bytes is not None and standing.bytes >= standing.max_bytes:
        return model.OverQuota("bytes", standing.max_bytes, ends / 1_000_000)
    if standing.max_in_flight is not None and standing.in_flight >= standing.max_in_flight:
        left = (standing.first_lease or now) - now
        return model.OverQuota("in-flight", standing.max_in_flight, left / 1_000_000)
    new_keys = rate(standing.max_new_keys, standing.max_window_length)
    if new_keys is not None and standing.new_keys >= new_keys.count:
        _, left = window_of(now, new_keys)
        return model.OverQuota("new-keys", new_keys.count, left / 1_000_000, new_keys.seconds)
    return None


_MAKES: Final[Mapping[Move, Callable[[Dialect], Any]]] = {
    Move.RECLAIM: statements.reclaim,
    Move.TAKE_OVER: statements.take_over,
    Move.QUARANTINE: statements.quarantine_expired,
}


Once: TypeAlias = Callable[[RecordConnection, ClaimQuery], StoreOutcome | None]
"""One try to claim. None: the row changed between the read and the write."""


class Strategy(ABC):
    """Grant a free key to one claim, and return the outcome of `classify` to the others.

    Each write compares state, token and fence, and checks its condition again by the server's clock.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._gated = dialect.name == POSTGRESQL
        """Whether the statement that grants a new key also checks the quota of its tenant."""

    @abstractmethod
    def claim(self, connection: RecordConnection, query: ClaimQuery) -> StoreOutcome | NearLimit:
        """Claim the key. The caller may repeat this on a new connection."""

    def insert(
        self, connection: RecordConnection, query: ClaimQuery, *, fence: int | None = None, numbered: bool = False
    ) -> StoreOutcome | None:
        """Insert the first claim of a key that has no row. None: another worker was faster, or the quota is near.

        `numbered`: on MariaDB, take the fence from the sequence.
        """
        if self._gated and query.must_wait:
            return None
        if self._gated and query.quota is not None:
            statement = made(quota.insert_within, self._dialect)
        else:
            statement = made(statements.insert, self._dialect, numbered=numbered)
        granted = connection.execute(statement, {**query.parameters, "my_fence": fence}).scalar_one_or_none()
        return None if granted is None else model.Grant(query.token, fence or granted, 1, query.lease / 1_000_000)

    def apply(self, connection: RecordConnection, row: Row, query: ClaimQuery) -> StoreOutcome | None:
        """Classify this row, and write what is due. None as for `write`."""
        outcome = classify(row, query)
        return self.write(connection, outcome, row, query) if isinstance(outcome, Move) else outcome

    def write(
        self, connection: RecordConnection, move: Move, row: Row, query: ClaimQuery, *, fence: int | None = None
    ) -> StoreOutcome | None:
        """Make this move. None: another worker was faster or has the row locked, or the quota is near; nothing was written.

        Pass `fence` where the database has no sequence to take one from.
        """
        if self._gated and move is Move.RECLAIM and query.must_wait:
            return None
        make = _MAKES[move]
        if self._gated and move is Move.RECLAIM and query.quota is not None:
            make = quota.reclaim_within
        seen = {"seen_state": row.state, "seen_token": row.token, "seen_fence": row.fence, "my_fence": fence}
        written = connection.execute(made(make, self._dialect), {**query.parameters, **seen}).one_or_none()
        if written is None:
            return None
        if move is Move.QUARANTINE:
            return model.Unknown(statements.LEASE_EXPIRED)
        fence = written.fence if fence is None else fence
        # Compared with what was read, so that the attempt is known.
        attempt, trace = 1, ""
        if move is Move.TAKE_OVER:
            attempt, trace = row.attempt + 1, model.method_and_trace(unescape(row.method))[1]
        return model.Grant(query.token, fence, attempt, query.lease / 1_000_000, taken_from=trace)


@dataclass(frozen=True, slots=True)
class NearLimit:
    """The tenant is near a limit of its quota, so the claim needs the tenant's lock: see `wait_for_tenant`."""

    strategy: Insert
    query: ClaimQuery


def wait_for_tenant(database: Database, near: NearLimit) -> StoreOutcome | None:
    """Claim under the tenant's lock. None: the lock was not free in time.

    In this process, one claim of the tenant at a time uses a connection for this, and returns it between its tries.
    """
    timeout = dialects.LOCK_TIMEOUT_MS / 1000
    until = time.monotonic() + timeout
    with database.tenant_lock.turn(near.query.request.key.tid, timeout=timeout) as mine:
        while mine and time.monotonic() < until:
            outcome = database.send(near.strategy.claim_alone, near.query)
            if outcome is not None:
                return outcome
            time.sleep(random.uniform(*PAUSE_SECONDS))  # noqa: S311 - it is no secret
    return None


class Insert(Strategy):
    """PostgreSQL, without a lock: one statement inserts the row or reads it, and commits by itself.

    A row that has to be changed takes a second statement. A new key of a tenant that is near a limit of its quota takes the
    tenant's lock.
    """

    _queues = False
    """Whether claims that insert a row wait for each other by their key's number."""

    def claim(self, connection: RecordConnection, query: ClaimQuery) -> StoreOutcome | NearLimit:
        if query.quota is None:
            outcome = self._try(connection, query)
            return self._retry(connection, query, self._try) if outcome is None else outcome
        try:
            outcome = self._try(connection, query)
        except DBAPIError as error:
            # Two claims collided in the ledger, because the role's isolation is stricter than needed.
            if not is_serialization_failure(error):
                raise
            outcome = None
        return outcome or self._refused(connection, query) or NearLimit(self, query)

    def claim_alone(self, connection: RecordConnection, query: ClaimQuery) -> StoreOutcome | None:
        """Claim under the tenant's lock. None: another worker holds that lock. Do not keep the connection for it."""

        def alone(connection: RecordConnection, query: ClaimQuery) -> StoreOutcome | None:
            with transaction(connection):
                return self.within(connection, query)

        try:
            return self._retry(connection, query, alone)
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            return None

    def within(self, connection: RecordConnection, query: ClaimQuery) -> StoreOutcome | None:
        """Try to claim in the caller's transaction, with a quota under the tenant's lock. None: the row changed between the
        read and the write."""
        if query.quota is None:
            return self._try(connection, query)
        query = replace(query, parameters={**query.parameters, "my_margin": 0})
        connection.execute(made(quota.tenant_lock, self._dialect), query.parameters)
        # In separate statements: the next one sees what others committed while the first waited for the lock.
        outcome = self.insert(connection, query)
        if outcome is not None:
            return outcome
        found = connection.execute(made(statements.read, self._dialect), query.parameters).one_or_none()
        if found is not None:
            row = row_of(found)
            outcome = self.apply(connection, row, query)
            if outcome is not None or not is_gone(row):
                return outcome
        return refusal(checked(connection.execute(made(quota.tenant_counts, self._dialect), query.parameters).one()))

    def _retry(self, connection: RecordConnection, query: ClaimQuery, once: Once) -> StoreOutcome:
        """Return the first outcome of `once`.

        Wait, briefly and one time only, for a row that another worker removes: then its key is a new one.
        """
        for waited in (False, True):
            for _ in range(TRIES):
                outcome = once(connection, query)
                if outcome is not None:
                    return outcome
            if waited:
                break
            try:
                connection.execute(made(statements.wait_to_reclaim, self._dialect), query.parameters).all()
            except DBAPIError as error:
                if not is_lock_timeout(error):
                    raise
                break
        return model.InFlight(RETRY_SECONDS)

    def _refused(self, connection: RecordConnection, query: ClaimQuery) -> StoreOutcome | None:
        """Refuse without a lock, so that a client that floods a full tenant makes no other wait. None: it is not full.

        Uncommitted claims are invisible here. They could only make the tenant fuller.
        """
        standing = checked(connection.execute(made(quota.tenant_counts, self._dialect), query.parameters).one())
        refused = refusal(standing)
        if refused is None or not standing.known:
            return refused
        # The last place may have gone to this very key, and a known key is not refused.
        found = connection.execute(made(statements.read, self._dialect), query.parameters).one_or_none()
        row = None if found is None else row_of(found)
        return refused if row is None or is_gone(row) else self.apply(connection, row, query)

    def _try(self, connection: RecordConnection, query: ClaimQuery) -> StoreOutcome | None:
        """Try to claim. None: the row changed between the read and the write."""
        if query.quota is not None:
            # Read first: with a quota the inserting statement is long, and a replay must not pay for planning it.
            found = connection.execute(made(statements.read, self._dialect), query.parameters).one_or_none()
            if found is None:
                return self.insert(connection, query)
            return self._apply_read(connection, row_of(found), query)
        fence, *found = connection.execute(
            made(statements.claim_or_read, self._dialect, queues=self._queues), query.parameters
        ).one()
        if fence is not None:
            return model.Grant(query.token, fence, 1, query.lease / 1_000_000)
        if found[0] is None:
            # Another worker inserted the row after our snapshot was taken, so we neither made it nor see it.
            return None
        return self._apply_read(connection, row_of(found), query)

    def _apply_read(self, connection: RecordConnection, row: Row, query: ClaimQuery) -> StoreOutcome | None:
        """Do as `apply` does with a row that was read without a lock. Another strategy locks and reads it again first.

        None: it has changed since, or another worker has it locked.
        """
        return self.apply(connection, row, query)


class InsertInTurn(Strategy):
    """SQLite and MySQL: a read takes one statement and no lock. A write locks, and reads again first.

    SQLite has one lock. On MySQL a claim locks the row of the last fence, which puts all grants in turn, and then that of
    its key. It does not wait for the latter, which a worker's transaction may hold for long.

    MariaDB has sequences: there one statement claims a new key, as on PostgreSQL, and only claims within a quota go in turn.
    Such a fence is taken when its row is written, or under the lock of that row: see `statements._new`.
    """

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(dialect)
        self._in_turn = dialect.name == MYSQL

    def claim(self, connection: RecordConnection, query: ClaimQuery, *, joined: bool = False) -> StoreOutcome:
        """Claim the key. `joined`: in the caller's transaction, which keeps others from writing on SQLite."""
        numbers = connection.info.get(NUMBERED) if self._in_turn else None
        numbered = numbers is not None and numbers.raised
        if numbered and query.quota is None:
            granted = self.insert(connection, query, numbered=True)
            if granted is not None:
                return granted
        found = connection.execute(made(statements.read, self._dialect), query.parameters).one_or_none()
        if found is not None:
            outcome = classify(row_of(found), query)
            if not isinstance(outcome, Move):
                return outcome
        with nullcontext() if joined else transaction(connection):
            fence = None
            if query.quota is not None if numbered else self._in_turn or (found is None and query.quota is None):
                # On MySQL no other claim is granted from here on, so that the counts of a quota stay right.
                fence = connection.execute(made(statements.next_fence, self._dialect), query.parameters).scalar_one()
            if found is None and query.quota is None:
                granted = self.insert(connection, query, fence=fence, numbered=numbered)
                if granted is not None:
                    return granted
                # Another worker was faster.
            read_again = statements.read_locked if self._in_turn else statements.read
            found = connection.execute(made(read_again, self._dialect), query.parameters).one_or_none()
            if found is None and self._in_turn:
                locked = connection.execute(made(statements.read, self._dialect), query.parameters).one_or_none()
                if locked is not None:
                    return _LEAVING if is_gone(row_of(locked)) else model.InFlight(RETRY_SECONDS)
            row = None if found is None else row_of(found)
            outcome = Move.RECLAIM if row is None else classify(row, query)
            if not isinstance(outcome, Move):
                return outcome
            if outcome is Move.RECLAIM and query.quota is not None:
                refused = self._refuse_or_count(connection, query)
                if refused is not None:
                    return refused
            if numbered:
                # The former number was for the turn. Another may have been granted since, and the row is locked now.
                fence = (
                    None
                    if row is None or outcome is Move.QUARANTINE
                    else connection.execute(made(statements.next_number, self._dialect)).scalar_one()
                )
            elif fence is None and outcome is not Move.QUARANTINE:
                fence = connection.execute(made(statements.next_fence, self._dialect), query.parameters).scalar_one()
            if self._in_turn and row is not None and fence is not None:
                # As on PostgreSQL: the source of fences may have changed, or gone back with a backup or a clock.
                fence = max(fence, row.fence + 1)
            if row is None:
                written = self.insert(connection, query, fence=fence, numbered=numbered)
            else:
                written = self.write(connection, outcome, row, query, fence=fence)
            return written or model.InFlight(RETRY_SECONDS)

    def within(self, connection: RecordConnection, query: ClaimQuery) -> StoreOutcome:
        """Claim in the caller's transaction."""
        return self.claim(connection, query, joined=True)

    def _refuse_or_count(self, connection: RecordConnection, query: ClaimQuery) -> model.OverQuota | None:
        """Return why this new key must not be granted; else count it. No other connection writes now, so this is exact."""
        standing = checked(connection.execute(made(quota.tenant_counts, self._dialect), query.parameters).one())
        refused = refusal(standing)
        if refused is None and standing.max_new_keys is not None:
            bucket_end = (standing.now // standing.max_window_length + 1) * standing.max_window_length
            counted = entry(
                kind=NEW_KEYS, bucket_end=bucket_end, window_length=standing.max_window_length, records=1, stored=0
            )
            connection.execute(made(completion.book, self._dialect), {**query.parameters, **counted})
        return refused


class InsertAndWait(InsertInTurn):
    """MySQL: as above. Wait, briefly and without a lock, for a row of a free key that another transaction removes."""

    def claim(self, connection: RecordConnection, query: ClaimQuery, *, joined: bool = False) -> StoreOutcome:
        for _ in range(TRIES):
            outcome = super().claim(connection, query, joined=joined)
            if joined or outcome is not _LEAVING:
                return outcome
            time.sleep(random.uniform(*PAUSE_SECONDS))  # noqa: S311 - it is no secret
        return super().claim(connection, query)


class RowLock(Insert):
    """PostgreSQL: as above, but change a row that exists only under its lock, in one short transaction.

    Use it if other tools of yours lock rows of this table. A claim does not wait for a locked row, but reads it first. So it
    can distinguish an absent row from a locked one, which `SKIP LOCKED` alone cannot. A replay does not write.
    """

    def _apply_read(self, connection: RecordConnection, row: Row, query: ClaimQuery) -> StoreOutcome | None:
        outcome = classify(row, query)
        if not isinstance(outcome, Move):
            return outcome
        with transaction(connection):
            # A claim that does not get the lock leaves the write to the worker that has it.
            found = self._locked(connection, query)
            return None if found is None else self.apply(connection, row_of(found), query)

    def _locked(self, connection: RecordConnection, query: ClaimQuery) -> Any | None:
        return connection.execute(made(statements.read_locked, self._dialect), query.parameters).one_or_none()


class Advisory(RowLock):
    """PostgreSQL: as above, but claims that insert or change a row queue by the key's number. A replay does not queue.

    Two keys of one number only wait for each other. The lock only saves work: workers with another strategy do not take it,
    nor do new keys within a quota, so every write still compares.
    """

    _queues = True

    def _try(self, connection: RecordConnection, query: ClaimQuery) -> StoreOutcome | None:
        numbered = {**query.parameters, "my_number": number_of(query.request.key.rid)}
        return super()._try(connection, replace(query, parameters=numbered))

    def _locked(self, connection: RecordConnection, query: ClaimQuery) -> Any | None:
        connection.execute(made(statements.advisory_lock, self._dialect), query.parameters)
        # In a separate statement: a claim that waited for the lock sees what was there before it waited.
        return connection.execute(made(statements.read, self._dialect), query.parameters).one_or_none()


def number_of(rid: bytes) -> int:
    """Return 64 bits of the digest, as a signed number for PostgreSQL. Any 64 will do."""
    return int.from_bytes(rid[:8], "big", signed=True)


@cache
def voiding_of(dialect: Dialect) -> Insert | InsertInTurn:
    """Return what claims a key in a transaction that also voids it, whatever the strategy of other claims is."""
    return Insert(dialect) if dialect.name == POSTGRESQL else InsertInTurn(dialect)


STRATEGIES: Final[Mapping[str, Mapping[str, Callable[[Dialect], Strategy]]]] = {
    "insert": {POSTGRESQL: Insert, SQLITE: InsertInTurn, MYSQL: InsertAndWait},
    "row_lock": {POSTGRESQL: RowLock, MYSQL: InsertAndWait},
    "advisory": {POSTGRESQL: Advisory},
}
"""The strategies by name and dialect. On MySQL a claim locks the row by either name. `advisory` would be GET_LOCK there, which
belongs to a session, and so to several clients behind a pooler."""


def strategy_of(name: str, dialect: Dialect) -> Strategy:
    """Return this strategy for this database. Raise `ConfigurationError` if it does not work there."""
    if name not in STRATEGIES:
        raise ConfigurationError(f"IDEMPOTENCY_CLAIM_STRATEGY: {name!r} is none of {', '.join(STRATEGIES)}")
    by_dialect = STRATEGIES[name]
    if dialect.name not in by_dialect:
        raise ConfigurationError(
            f"IDEMPOTENCY_CLAIM_STRATEGY: {name} works on {' and '.join(by_dialect)}, not on {dialect.name}. "
            "Use insert, which works on all."
        )
    return by_dialect[dialect.name](dialect)
