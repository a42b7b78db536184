"""Whether a tenant may have one more key: looked at from afar while there is plenty of room, and else one at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Protocol, assert_never

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.model import (
    Claimed,
    ClaimRequest,
    Grant,
    InFlight,
    Mismatched,
    OnExpiry,
    OverQuota,
    Replayed,
    Unknown,
)
from flask_idempotency.engine.quota import Quota, window_of
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql import completion, quota, statements
from flask_idempotency.stores.sql.completion import entry
from flask_idempotency.stores.sql.database import TRIES, Database, transaction
from flask_idempotency.stores.sql.dialects import LOCK_TIMEOUT_MS, POSTGRESQL, SQLITE, Dialect
from flask_idempotency.stores.sql.errors import is_lock_timeout, is_serialization_failure
from flask_idempotency.stores.sql.quota import checked, is_narrow, rate, within
from flask_idempotency.stores.sql.rows import Row, escape, row_of, unescape
from flask_idempotency.stores.sql.schema import COMPLETED, FAILED, NEW_KEYS, QUARANTINE, QUARANTINED, RELEASED, TAKEOVER

# How a key is taken, in three ways that end in the same row. No lock is ever the authority: the row's token is.


# What a claim is told, given the row that is there: the same for every strategy.

RETRY_SECONDS = 1.0
"""What a claim is told that could not see to the end who holds the key: whoever does is at it this very moment."""


@dataclass(frozen=True, slots=True)
class ClaimQuery:
    """A claim as statements need it."""

    request: ClaimRequest
    token: bytes
    lease: int
    parameters: dict[str, Any]
    quota: Quota | None = None

    @property
    def must_wait(self) -> bool:
        """Whether no new key can be granted from afar: some limit is no higher than the margin below it."""
        return self.quota is not None and self.parameters["my_margin"] > 0 and is_narrow(self.quota)

    def closely(self) -> ClaimQuery:
        """The same, under the tenant's lock."""
        return replace(self, parameters={**self.parameters, "my_margin": 0})

    def granted(self, fence: int, *, attempt: int) -> Claimed[Grant]:
        return Claimed(Grant(self.token, fence, attempt, self.lease / 1_000_000))


class Move(Enum):
    """What has to be written before there is an answer."""

    RECLAIM = "reclaim"
    TAKE_OVER = "take over"
    QUARANTINE = "quarantine"


def claim_query(
    request: ClaimRequest, token: bytes, *, lease: int, now: int | None, quota: Quota | None = None
) -> ClaimQuery:
    about = request.about
    parameters = {
        "my_record_id": request.key.rid,
        "my_tenant_id": request.key.tid,
        "my_token": token,
        "my_fingerprint": request.fingerprint,
        "my_on_expiry": TAKEOVER if request.on_lapse is OnExpiry.TAKEOVER else QUARANTINE,
        "my_tenant": escape(about.tenant),
        "my_principal": escape(about.principal),
        "my_method": escape(about.method),
        "my_endpoint": escape(about.operation),
        "my_in_quota": 0 if quota is None else 1,
        "lease": lease,
        "now": now,
        **({} if quota is None else within(request.key, quota)),
    }
    return ClaimQuery(request, token, lease, parameters, quota)


def classify(row: Row, asked: ClaimQuery) -> StoreOutcome | Move:
    """In the order that `Store.claim` promises, by the row and the time it was read at."""
    if row.absent:
        if row.token == asked.token and row.state == RELEASED:
            raise StoreUnavailable("this claim came after it was given up")
        return Move.RECLAIM
    if row.fingerprint != asked.request.fingerprint:
        return Mismatched(first_seen=row.requested_at / 1_000_000)
    if row.state in (COMPLETED, FAILED):
        return Replayed(row.record())
    if row.state == QUARANTINED:
        return Unknown(unescape(row.reason or ""))
    if row.token == asked.token:
        return Claimed(Grant(row.token, row.fence, row.attempt, max(row.left, 0) / 1_000_000))
    if not row.lapsed:
        return InFlight(retry_after=row.left / 1_000_000)
    return Move.TAKE_OVER if row.on_expiry == TAKEOVER else Move.QUARANTINE


# Writing what a claim found to be due, if there still is no row, or the row still is what it found.


class ClaimWriter:
    """Compare-and-set on state, token and fence, with the condition once more by the server's clock."""

    def __init__(self, dialect: Dialect) -> None:
        self._insert = statements.insert(dialect)
        self._reclaim = statements.reclaim(dialect)
        self._take_over = statements.take_over(dialect)
        self._quarantine = statements.quarantine(dialect)
        self._within = dialect.name == POSTGRESQL
        if self._within:
            self._insert_within = quota.insert_within(dialect)
            self._reclaim_within = quota.reclaim_within(dialect)

    def insert(self, connection: Connection, asked: ClaimQuery, *, fence: int | None = None) -> StoreOutcome | None:
        """The first claim of a key that has no row. None: somebody else was faster, or it is not within the quota."""
        if self._within and asked.must_wait:
            return None
        statement = self._insert_within if self._within and asked.quota is not None else self._insert
        granted = connection.execute(statement, {**asked.parameters, "my_fence": fence}).scalar_one_or_none()
        return None if granted is None else asked.granted(granted, attempt=1)

    def apply(self, connection: Connection, row: Row, asked: ClaimQuery) -> StoreOutcome | None:
        """What this row means for who asks, written where that has to be. None as for `write`."""
        verdict = classify(row, asked)
        return self.write(connection, verdict, row, asked) if isinstance(verdict, Move) else verdict

    def write(
        self, connection: Connection, move: Move, row: Row, asked: ClaimQuery, *, fence: int | None = None
    ) -> StoreOutcome | None:
        """What came of it. None: somebody else was faster, or has the row locked, or a new key is not within the quota; nothing
        was written.

        `fence` is needed where the database has no sequence to take one from.
        """
        if self._within and move is Move.RECLAIM and asked.must_wait:
            return None
        match move:
            case Move.RECLAIM:
                statement = self._reclaim_within if self._within and asked.quota is not None else self._reclaim
            case Move.TAKE_OVER:
                statement = self._take_over
            case Move.QUARANTINE:
                statement = self._quarantine
            case unexpected:
                assert_never(unexpected)
        seen = {"seen_state": row.state, "seen_token": row.token, "seen_fence": row.fence, "my_fence": fence}
        written = connection.execute(statement, {**asked.parameters, **seen}).one_or_none()
        if written is None:
            return None
        if move is Move.QUARANTINE:
            return Unknown(statements.LEASE_EXPIRED)
        return asked.granted(written.fence, attempt=written.attempt)


# Trying again, until there is an answer.

Once = Callable[[Connection], StoreOutcome | None]


def retry_loop(connection: Connection, once: Once, *, wait: Callable[[Connection], object]) -> StoreOutcome:
    """The first answer of `once`. Where there is none for some tries it is waited, once: `wait` may raise that it was in
    vain."""
    answer = _some_tries(connection, once)
    if answer is not None:
        return answer
    try:
        wait(connection)
    except DBAPIError as error:
        if not is_lock_timeout(error):
            raise
        return InFlight(RETRY_SECONDS)
    return _some_tries(connection, once) or InFlight(RETRY_SECONDS)


def in_transaction(connection: Connection, once: Once) -> StoreOutcome | None:
    """In a short transaction, at READ COMMITTED: one that began before somebody else's commit must not be the one that looks
    for it."""
    with transaction(connection):
        return once(connection)


def _some_tries(connection: Connection, once: Once) -> StoreOutcome | None:
    for _ in range(TRIES):
        outcome = once(connection)
        if outcome is not None:
            return outcome
    return None


@dataclass(frozen=True, slots=True)
class NearLimit:
    """There is room, but so little that only who has the tenant for itself can say for how many: `queue.wait_for_tenant`."""

    closely: Callable[[Connection], StoreOutcome]
    """Raises when somebody else has the tenant for a moment: that is no time to keep a connection."""


class QuotaGate:
    """PostgreSQL. Every way to take a key passes it, if it is a new one and there is a quota."""

    def __init__(self, dialect: Dialect, writer: ClaimWriter) -> None:
        self._lock = quota.tenant_lock(dialect)
        self._read = statements.read(dialect)
        self._standing = quota.standing(dialect)
        self._wait_to_reclaim = statements.wait_to_reclaim(dialect)
        self._writer = writer

    def claim(
        self, connection: Connection, asked: ClaimQuery, from_afar: Callable[[], StoreOutcome | None]
    ) -> StoreOutcome | NearLimit:
        """What came of it from afar; if that was nothing, whatever the reason, a refusal where there is no room at all."""
        try:
            outcome = from_afar()
        except DBAPIError as error:
            # Of two that met in the ledger, where the role's isolation is stricter than is needed.
            if not is_serialization_failure(error):
                raise
            outcome = None
        if outcome is None:
            outcome = self._refused(connection, asked)
        if outcome is not None:
            return outcome
        closely = asked.closely()
        return NearLimit(lambda again: self._in_transactions(again, closely, self._closely))

    def claim_in_transactions(
        self, connection: Connection, asked: ClaimQuery, once: Callable[[Connection, ClaimQuery], StoreOutcome | None]
    ) -> StoreOutcome | NearLimit:
        """For strategies that work in short transactions: `once` in one of them, past the gate if there is a quota."""

        if asked.quota is not None:
            return self.claim(connection, asked, lambda: in_transaction(connection, lambda alone: once(alone, asked)))
        return self._in_transactions(connection, asked, once)

    def retry(
        self, connection: Connection, asked: ClaimQuery, once: Callable[[Connection], StoreOutcome | None]
    ) -> StoreOutcome:
        """The first answer of `once`. A row that is being removed is waited for, briefly: then its key is a new one."""
        return retry_loop(
            connection, once, wait=lambda alone: alone.execute(self._wait_to_reclaim, asked.parameters).all()
        )

    def _in_transactions(
        self, connection: Connection, asked: ClaimQuery, once: Callable[[Connection, ClaimQuery], StoreOutcome | None]
    ) -> StoreOutcome:
        def in_one(alone: Connection) -> StoreOutcome | None:
            return in_transaction(alone, lambda inner: once(inner, asked))

        return self.retry(connection, asked, in_one)

    def _refused(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome | None:
        """What is said without a lock: who floods a tenant that is full makes nobody wait. None: it is not full.

        What others have not committed yet is not seen, and would only make it fuller.
        """
        standing = checked(connection.execute(self._standing, asked.parameters).one())
        refused = refusal(standing)
        if refused is None or not standing.known:
            return refused
        # Whoever took the last place may have taken it for this very key, and a known key is not refused.
        found = connection.execute(self._read, asked.parameters).one_or_none()
        row = None if found is None else row_of(found)
        return refused if row is None or row.absent else self._writer.apply(connection, row, asked)

    def _closely(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome | None:
        connection.execute(self._lock, asked.parameters)
        # In statements of their own: what was committed while this one waited for the lock is seen by the next.
        outcome = self._writer.insert(connection, asked)
        if outcome is not None:
            return outcome
        found = connection.execute(self._read, asked.parameters).one_or_none()
        if found is not None:
            row = row_of(found)
            outcome = self._writer.apply(connection, row, asked)
            if outcome is not None or not row.absent:
                return outcome
        return refusal(checked(connection.execute(self._standing, asked.parameters).one()))


def refusal(standing: Any) -> OverQuota | None:
    """Why one more key must not be granted, by `ledger_statements.standing`."""
    now = standing.now
    ends = (standing.first_bucket_end or now) - now
    if standing.max_records is not None and standing.unsettled + standing.records >= standing.max_records:
        return OverQuota("records", standing.max_records, ends / 1_000_000)
    if standing.max_bytes is not None and standing.bytes >= standing.max_bytes:
        return OverQuota("bytes", standing.max_bytes, ends / 1_000_000)
    if standing.max_in_flight is not None and standing.in_flight >= standing.max_in_flight:
        left = (standing.first_lease or now) - now
        return OverQuota("in-flight", standing.max_in_flight, left / 1_000_000)
    new_keys = rate(standing.max_new_keys, standing.max_window_length)
    if new_keys is not None and standing.new_keys >= new_keys.count:
        _, left = window_of(now, new_keys)
        return OverQuota("new-keys", new_keys.count, left / 1_000_000, new_keys.seconds)
    return None


# The strategy that makes askers queue by the key's number, whether or not there is a row yet.


class Advisory:
    """One short transaction for each claim. Two keys of one number wait for each other, and that is all they do.

    The lock only saves work. Releases that use another strategy do not take it, so every write still compares.
    """

    dialects = (POSTGRESQL,)

    def __init__(self, dialect: Dialect) -> None:
        self._lock = statements.advisory_lock(dialect)
        self._read = statements.read(dialect)
        self._writer = ClaimWriter(dialect)
        self._gate = QuotaGate(dialect, self._writer)

    def claim(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome | NearLimit:
        return self._gate.claim_in_transactions(connection, asked, self._once)

    def _once(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome | None:
        connection.execute(self._lock, {**asked.parameters, "my_number": number_of(asked.request.key.rid)})
        # In a statement of its own: the one that waited for the lock sees what was there before it waited.
        found = connection.execute(self._read, asked.parameters).one_or_none()
        if found is None:
            return self._writer.insert(connection, asked)
        return self._writer.apply(connection, row_of(found), asked)


def number_of(rid: bytes) -> int:
    """Sixty-four of its bits, as PostgreSQL counts: it is a digest, so any will do."""
    return int.from_bytes(rid[:8], "big", signed=True)


# The strategy that needs no lock: whoever inserts the row has the key.


class Insert:
    """PostgreSQL in one statement, which commits by itself; a row that has to be changed takes a second."""

    dialects = (POSTGRESQL,)

    def __init__(self, dialect: Dialect) -> None:
        self._claim_or_read = statements.claim_or_read(dialect)
        self._read = statements.read(dialect)
        self._writer = ClaimWriter(dialect)
        self._gate = QuotaGate(dialect, self._writer)

    def claim(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome | NearLimit:
        if asked.quota is not None:
            return self._gate.claim(connection, asked, lambda: self._look_first(connection, asked))
        return self._gate.retry(connection, asked, lambda alone: self._once(alone, asked))

    def _once(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome | None:
        fence, *found = connection.execute(self._claim_or_read, asked.parameters).one()
        if fence is not None:
            return asked.granted(fence, attempt=1)
        if found[0] is None:
            # Somebody inserted the row after our snapshot was taken, so we neither made it nor see it.
            return None
        return self._writer.apply(connection, row_of(found), asked)

    def _look_first(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome | None:
        """With a quota the statement that inserts is long, and a replay must not pay for having it planned."""
        found = connection.execute(self._read, asked.parameters).one_or_none()
        if found is None:
            return self._writer.insert(connection, asked)
        return self._writer.apply(connection, row_of(found), asked)


class InsertIntoFile:
    """SQLite: looking takes one statement and no lock. Writing takes the one lock there is, and looks again first."""

    dialects = (SQLITE,)

    def __init__(self, dialect: Dialect) -> None:
        self._read = statements.read(dialect)
        self._next_fence = statements.next_fence(dialect)
        self._standing = quota.standing(dialect)
        self._book = completion.book(dialect)
        self._writer = ClaimWriter(dialect)

    def claim(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome:
        row = self._look(connection, asked)
        verdict = None if row is None else classify(row, asked)
        if verdict is not None and not isinstance(verdict, Move):
            return verdict
        with transaction(connection):
            return self._write(connection, asked)

    def _look(self, connection: Connection, asked: ClaimQuery) -> Row | None:
        found = connection.execute(self._read, asked.parameters).one_or_none()
        return None if found is None else row_of(found)

    def _write(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome:
        row = self._look(connection, asked)
        verdict = Move.RECLAIM if row is None else classify(row, asked)
        if not isinstance(verdict, Move):
            return verdict
        refused = self._admit(connection, asked) if verdict is Move.RECLAIM and asked.quota is not None else None
        if refused is not None:
            return refused
        risen = None if verdict is Move.QUARANTINE else self._fence(connection, asked)
        if row is None:
            return self._writer.insert(connection, asked, fence=risen) or InFlight(RETRY_SECONDS)
        return self._writer.write(connection, verdict, row, asked, fence=risen) or InFlight(RETRY_SECONDS)

    def _admit(self, connection: Connection, asked: ClaimQuery) -> OverQuota | None:
        """Why this new key must not be granted; else it is counted. Nobody else writes meanwhile, so this is exact."""
        standing = checked(connection.execute(self._standing, asked.parameters).one())
        refused = refusal(standing)
        if refused is None and standing.max_new_keys is not None:
            bucket_end = (standing.now // standing.max_window_length + 1) * standing.max_window_length
            counted = entry(
                kind=NEW_KEYS, bucket_end=bucket_end, window_length=standing.max_window_length, records=1, stored=0
            )
            connection.execute(self._book, {**asked.parameters, **counted})
        return refused

    def _fence(self, connection: Connection, asked: ClaimQuery) -> int:
        fence: int = connection.execute(self._next_fence, asked.parameters).scalar_one()
        return fence


# Waiting for a tenant's lock without keeping others from the connections.

PAUSE_SECONDS: Final = (0.01, 0.04)
"""Between two looks. Of different lengths, so that processes which met once do not meet each time."""


def wait_for_tenant(database: Database, tid: bytes, crowded: NearLimit) -> StoreOutcome | None:
    """What comes of a claim that must have the tenant for itself. None: nobody could tell while it was good to wait.

    Of one tenant's claims one at a time has a connection for it, and gives that back again and again.
    """
    patience = LOCK_TIMEOUT_MS / 1000
    until = time.monotonic() + patience
    with database.tenant_lock.turn(tid, timeout=patience) as mine:
        while mine and time.monotonic() < until:
            outcome = database.run(lambda connection: _briefly(connection, crowded))
            if outcome is not None:
                return outcome
            time.sleep(random.uniform(*PAUSE_SECONDS))  # noqa: S311 - nobody is kept out by guessing it
    return None


def _briefly(connection: Connection, crowded: NearLimit) -> StoreOutcome | None:
    try:
        return crowded.closely(connection)
    except DBAPIError as error:
        if not is_lock_timeout(error):
            raise
        return None


# The strategy that locks the row before it writes to it: for tables that other tools of the house lock as well.


class RowLock:
    """One short transaction for each claim. A row that is locked is not waited for, and may be read all the same.

    So absent and locked are told apart, which `SKIP LOCKED` by itself does not; and a replay writes nothing.
    """

    dialects = (POSTGRESQL,)

    def __init__(self, dialect: Dialect) -> None:
        self._read_locked = statements.read_locked(dialect)
        self._read = statements.read(dialect)
        self._writer = ClaimWriter(dialect)
        self._gate = QuotaGate(dialect, self._writer)

    def claim(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome | NearLimit:
        return self._gate.claim_in_transactions(connection, asked, self._once)

    def _once(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome | None:
        found = connection.execute(self._read, asked.parameters).one_or_none()
        if found is None:
            return self._writer.insert(connection, asked)
        verdict = classify(row_of(found), asked)
        return self._locked(connection, asked) if isinstance(verdict, Move) else verdict

    def _locked(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome | None:
        """What is to be written is written under the row's lock. Who does not get it leaves that to whoever has it."""
        found = connection.execute(self._read_locked, asked.parameters).one_or_none()
        return None if found is None else self._writer.apply(connection, row_of(found), asked)


# Which strategies there are, and on which databases each can keep its promise.


class Strategy(Protocol):
    """Takes a free key for one of all who ask, and tells the others what `classify` says."""

    def claim(self, connection: Connection, asked: ClaimQuery) -> StoreOutcome | NearLimit:
        """Repeatable: the connection is fresh, and may be the second one."""
        ...


STRATEGIES: Final = {"insert": (Insert, InsertIntoFile), "row_lock": (RowLock,), "advisory": (Advisory,)}


def strategy_of(name: str, dialect: Dialect) -> Strategy:
    """This strategy for this database. Raises `ConfigurationError` where it could not keep its promise."""
    if name not in STRATEGIES:
        raise ConfigurationError(f"IDEMPOTENCY_CLAIM_STRATEGY: {name!r} is none of {', '.join(STRATEGIES)}")
    by_dialect = {which: kind for kind in STRATEGIES[name] for which in kind.dialects}
    if dialect.name not in by_dialect:
        raise ConfigurationError(
            f"IDEMPOTENCY_CLAIM_STRATEGY: {name} works on {' and '.join(by_dialect)}, not on {dialect.name}. "
            "Take insert, which works on all."
        )
    return by_dialect[dialect.name](dialect)
