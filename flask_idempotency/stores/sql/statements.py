"""Statements about one record, and the clauses that they share with the statements of other files.

`tests/stores/sql/snapshots/` holds the text of each for each database. Those of the request path are built once for a store,
so that SQLAlchemy compiles each of them once.

Parameters: `my_…` is what the caller brings, `seen_…` what it has read and now compares, `now` the time if a test passes one.
Durations and times are microseconds.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Insert,
    LargeBinary,
    Select,
    String,
    Subquery,
    Text,
    Update,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy import insert as insert_into
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate
from sqlalchemy.sql.selectable import CTE

from flask_idempotency.engine.model import CORRUPT
from flask_idempotency.stores.sql.dialects import POSTGRESQL, SHORT_LOCK_TIMEOUT_MS, Dialect
from flask_idempotency.stores.sql.rows import FINGERPRINT_BYTES, Row
from flask_idempotency.stores.sql.schema import (
    COMPLETED,
    FAILED,
    PROCESSING,
    QUARANTINE,
    QUARANTINED,
    RELEASED,
    TAKEOVER,
    fences,
    meta,
    quota_buckets,
    records,
    tenants,
)

ONE: Final[ColumnElement[int]] = literal_column("1", BigInteger)
ZERO: Final[ColumnElement[int]] = literal_column("0", BigInteger)

_STORED: Final = Row._fields[: Row._fields.index("erased")]
_ADDED: Final = (
    "ON CONFLICT (tenant_id, kind, bucket_end, window_length, shard) DO UPDATE SET"
    " records = idempotency_quota.records + excluded.records, bytes = idempotency_quota.bytes + excluded.bytes"
)
_r = records.c


def columns(*, without: str = "") -> list[ColumnElement[Any]]:
    """Those of a `PolicyRow`, but for `now`: the stored ones, and whether its answer was erased with its tenant's data keys."""
    t = tenants.c
    by_key = case(
        (_r.data_key_number.is_(None), _r.requested_at <= t.erased_at),
        else_=_r.data_key_number <= t.shredded_key_number,
    )
    # Spelt out: SQLAlchemy leaves tables away in what a statement returns on SQLite, and would write tenant_id = tenant_id.
    tid = literal_column("idempotency_records.tenant_id", LargeBinary)
    erased = select(by_key).where(t.tenant_id == tid, t.erased_at.is_not(None)).correlate(records).scalar_subquery()
    return [*(_r[name] for name in _STORED if name != without), erased.label("erased")]


def is_mine() -> ColumnElement[bool]:
    return _r.record_id == bindparam("my_record_id", type_=LargeBinary)


def duration(name: str) -> ColumnElement[int]:
    return bindparam(name, type_=BigInteger)


def word(word: str) -> ColumnElement[str]:
    """One of ours, spelt out: a parameter would tell whoever reads the text nothing."""
    return literal_column(f"'{word}'", String)


def owners(dialect: Dialect, *states: str) -> tuple[Update, ColumnElement[int]]:
    """An update of the token's own row, if it is in one of these states; and what the time is there."""
    owned = and_(_r.token == bindparam("my_token", type_=LargeBinary), _r.state.in_([word(state) for state in states]))
    return _with_lock_timeout(dialect, owned)


def others_update(dialect: Dialect, *conditions: ColumnElement[bool]) -> tuple[Update, ColumnElement[int]]:
    """An update of a row by somebody who is not its owner, if it still is what was met; and what the time is there."""
    return _with_lock_timeout(dialect, is_as_met(), *conditions)


def is_as_met() -> ColumnElement[bool]:
    """Whether a row is the one that a `SeenRecord` tells of. Its state may be spelt in two ways when it is completed."""
    states = (bindparam("seen_state", type_=String), bindparam("seen_other", type_=String))
    return and_(
        _r.state.in_(states),
        _r.token == bindparam("seen_token", type_=LargeBinary),
        func.coalesce(_r.lease_expires_at, _r.expires_at) == bindparam("seen_deadline", type_=BigInteger),
    )


def _with_lock_timeout(dialect: Dialect, *conditions: ColumnElement[bool]) -> tuple[Update, ColumnElement[int]]:
    if dialect.name != POSTGRESQL:
        return update(records).where(is_mine(), *conditions), dialect.now
    rid = bindparam("my_record_id", type_=LargeBinary)
    moment = dialect.moment(bounded=True).add_columns(rid.label("record_id")).subquery("moment")
    return update(records).where(_r.record_id == moment.c.record_id, *conditions), moment.c.now


def if_as_seen(dialect: Dialect, condition: ColumnElement[bool]) -> Update:
    """An update of the row if it still is what was read, and this holds by the server's clock.

    On PostgreSQL the row is found by a select that skips what somebody has locked: an update would wait for them.
    """
    seen = and_(
        is_mine(),
        _r.state == bindparam("seen_state", type_=String),
        _r.token == bindparam("seen_token", type_=LargeBinary),
        _r.fence == bindparam("seen_fence", type_=BigInteger),
    )
    if dialect.name != POSTGRESQL:
        return update(records).where(seen, condition)
    free = (
        select(_r.record_id).where(seen, condition).correlate(None).with_for_update(skip_locked=True).scalar_subquery()
    )
    return update(records).where(_r.record_id == free)


def chosen(dialect: Dialect, some: Select[Any]) -> CTE | Subquery:
    """These rows, without those that somebody has locked: on PostgreSQL they are ours until the statement is over."""
    if dialect.name != POSTGRESQL:
        # sqlite3 counts what a statement has changed by its first word, which is not to be WITH.
        return some.subquery("chosen")
    # Chosen once: a subquery with a limit may be run again for each row that is compared with it, and choose others.
    return some.with_for_update(skip_locked=True).cte("chosen")


def has_answer() -> ColumnElement[bool]:
    """In whatever state it is: only what completes a row puts one there, and only a new claim takes it away."""
    return _r.response.is_not(None)


def is_absent(dialect: Dialect) -> ColumnElement[bool]:
    """Of a row that is there: whether it is nobody's any more."""
    # A life that ended before it began is a flipped bit, and says nothing of when it ends.
    over = and_(_r.expires_at <= dialect.now, _r.expires_at >= _r.completed_at)
    expired = and_(_r.state.in_((word(COMPLETED), word(FAILED))), over)
    return or_(_r.state == word(RELEASED), expired)


def has_lapsed(dialect: Dialect, rule: str) -> ColumnElement[bool]:
    return and_(_r.state == word(PROCESSING), _r.on_expiry == word(rule), _r.lease_expires_at <= dialect.now)


def _fence(dialect: Dialect) -> ColumnElement[int]:
    """Taken when the row is written and not before: who waits for a lock must not come out with a smaller number."""
    if dialect.name == POSTGRESQL:
        return fences.next_value()
    return bindparam("my_fence", type_=BigInteger)


def _new(dialect: Dialect) -> dict[str, ColumnElement[Any]]:
    """What every grant writes, whether or not there was a row."""
    brought = ("token", "fingerprint", "on_expiry", "tenant", "principal", "method", "endpoint")
    values: dict[str, ColumnElement[Any]] = {name: bindparam(f"my_{name}", type_=_r[name].type) for name in brought}
    in_quota = bindparam("my_in_quota", type_=_r.in_quota.type)
    return {"state": word(PROCESSING), "fence": _fence(dialect), **values, "in_quota": in_quota}


def regranted(
    dialect: Dialect,
    statement: Update,
    *,
    attempt: ColumnElement[int],
    requested_at: ColumnElement[int],
) -> Update:
    """The same update, that makes the row a claim in flight."""
    response = (
        "completed_at",
        "expires_at",
        "status",
        "response_size",
        "response",
        "wrapping_key_id",
        "data_key_number",
        "succeeded",
    )
    values = _new(dialect)
    if dialect.name == POSTGRESQL:
        # A sequence goes back: a new table has a new one, logical replication leaves it out, and anyone may restart it.
        values["fence"] = func.greatest(values["fence"], _r.fence + ONE)
    return statement.values(
        **values,
        attempt=attempt,
        requested_at=requested_at,
        lease_expires_at=dialect.now + duration("lease"),
        **{name: null() for name in (*response, "reason")},
    )


def inserted(dialect: Dialect, *, within: Select[Any] | None = None) -> Insert:
    """The row of a key that has none, if `within` has a row as well: that is looked at for no other key."""
    # The patience is inside, where a replay does not come by: to set it takes a third as long as a replay.
    moment = dialect.moment(bounded=True).subquery("moment")
    values: dict[str, ColumnElement[Any]] = {
        "record_id": bindparam("my_record_id", type_=LargeBinary),
        "tenant_id": bindparam("my_tenant_id", type_=LargeBinary),
        **_new(dialect),
        "attempt": literal_column("1"),
        "requested_at": moment.c.now,
        "lease_expires_at": moment.c.now + duration("lease"),
    }
    # Without this a key that is there would take a number from the sequence at every replay; SQLite's parser, too,
    # needs some WHERE before ON CONFLICT.
    unless_there = ~exists(select(literal_column("1")).select_from(records).where(is_mine()))
    source = select(*values.values()).select_from(moment).where(unless_there)
    if within is not None:
        source = source.where(exists(within))
    # As a suffix, because SQLAlchemy 2.0 compiles a statement with its own ON CONFLICT anew each time it is executed.
    return sqlalchemy.insert(records).from_select(
        list(values), source.suffix_with("ON CONFLICT (record_id) DO NOTHING")
    )


def cancelled(dialect: Dialect, keep: ColumnElement[int]) -> Insert:
    """The row of a key that has none, as if its token's claim had come and been released. Nothing is known of that claim."""
    moment = dialect.moment(bounded=True).subquery("moment")
    nothing = {name: literal_column("''", _r[name].type) for name in ("tenant", "principal", "method", "endpoint")}
    values: dict[str, ColumnElement[Any]] = {
        **{name: bindparam(f"my_{name}", type_=LargeBinary) for name in ("record_id", "tenant_id", "token")},
        "fingerprint": bindparam("no_fingerprint", bytes(FINGERPRINT_BYTES), type_=LargeBinary),
        "state": word(RELEASED),
        "on_expiry": word(QUARANTINE),
        **nothing,
        **dict.fromkeys(("fence", "attempt", "in_quota"), ZERO),
        "requested_at": moment.c.now,
        "expires_at": moment.c.now + keep,
    }
    # In need of some WHERE: see `inserted`.
    source = select(*values.values()).select_from(moment).where(moment.c.now.is_not(None))
    return sqlalchemy.insert(records).from_select(
        list(values), source.suffix_with("ON CONFLICT (record_id) DO NOTHING")
    )


def booked(source: Select[Any]) -> Insert:
    """Add what this selects to `idempotency_quota`: tenant, kind, bucket end, window length, shard, records, bytes."""
    names = ["tenant_id", "kind", "bucket_end", "window_length", "shard", "records", "bytes"]
    return sqlalchemy.insert(quota_buckets).from_select(names, source.suffix_with(_ADDED))


LAST_FENCE: Final = "fence"
"""The row of `idempotency_meta` that stands for a sequence where there are none."""

RELEASED_KEEP: Final = 86_400_000_000
"""A released row answers nobody's request; a day is for whoever asks what became of the key."""

LEASE_EXPIRED: Final = "lease-expired"
COMMITTED_EARLY: Final = "committed-early"


def read(dialect: Dialect) -> Select[Any]:
    """The row of a key, and the time it was read at. Takes no lock and waits for none."""
    return select(*columns(), dialect.now.label("now")).where(is_mine())


def read_state(dialect: Dialect) -> Select[Any]:
    """As much of the row as tells an owner why its write found nothing to change."""
    facts: list[ColumnElement[Any]] = [_r.state, _r.token, _r.expires_at, _r.completed_at, _r.in_quota]
    return select(*facts, _r.reason, has_answer().label("answered"), dialect.now.label("now")).where(is_mine())


def renew(dialect: Dialect) -> ReturningUpdate[Any]:
    """The lease ends no sooner than this long from now; never sooner than it did. Also of a row that was quarantined when
    it ended: that stays so, but its owner lives."""
    statement, now = owners(dialect, PROCESSING, QUARANTINED)
    lapsing = or_(_r.state == word(PROCESSING), _r.reason == word(LEASE_EXPIRED))
    longer: ColumnElement[int] = getattr(func, dialect.greatest)(_r.lease_expires_at, now + duration("lease"))
    return statement.where(lapsing).values(lease_expires_at=longer).returning(_r.fence)


def mark_point_of_no_return(dialect: Dialect) -> ReturningUpdate[Any]:
    """From now on a lapse quarantines this row."""
    statement, _ = owners(dialect, PROCESSING)
    return statement.values(on_expiry=word(QUARANTINE)).returning(_r.fence)


def mark_committed_early(dialect: Dialect) -> ReturningUpdate[Any]:
    """The same, in a transaction that its owner's work commits by itself: whether it has is then told by the reason."""
    statement, _ = owners(dialect, PROCESSING)
    return statement.values(on_expiry=word(QUARANTINE), reason=word(COMMITTED_EARLY)).returning(_r.fence)


def release(dialect: Dialect) -> ReturningUpdate[Any]:
    """The key is free again. The row stays for a day: it is absent to everybody but an auditor.

    Not so a condemned one: whether its answer can be read or not, the work was done.
    """
    statement, now = owners(dialect, PROCESSING, QUARANTINED)
    uncondemned = statement.where(~has_answer(), _r.reason.is_distinct_from(word(CORRUPT)))
    return uncondemned.values(
        state=word(RELEASED),
        lease_expires_at=null(),
        expires_at=now + literal_column(str(RELEASED_KEEP), BigInteger),
        reason=null(),
        resolver_due_at=ZERO,
    ).returning(_r.fence)


def cancel(dialect: Dialect) -> ReturningInsert[Any]:
    """The row of a key that has none, released before it was claimed: what was asked with this token may still arrive."""
    return cancelled(dialect, literal_column(str(RELEASED_KEEP), BigInteger)).returning(_r.fence)


def quarantine(dialect: Dialect) -> ReturningUpdate[Any]:
    """Nobody knows what happened, its owner included."""
    statement, _ = owners(dialect, PROCESSING)
    return statement.values(state=word(QUARANTINED), reason=bindparam("my_reason", type_=Text)).returning(_r.fence)


def claim_or_read(dialect: Dialect) -> Select[Any]:
    """PostgreSQL, always one row: the new row's fence in `granted`, or the row that is there; and `now`.

    Neither is normal as well. Then somebody else's row was committed after this statement's snapshot was taken: ask
    again. A key that is there costs neither a fence nor an attempt to insert.
    """
    granted = inserted(dialect).returning(_r.fence).cte("granted")
    moment = select(dialect.now.label("now")).subquery("moment")
    both = moment.outerjoin(granted, true()).outerjoin(records, is_mine())
    return select(granted.c.fence.label("granted"), *columns(), moment.c.now).select_from(both)


def insert(dialect: Dialect) -> ReturningInsert[Any]:
    """The row of a key that had none. Returns nothing when somebody else was faster."""
    return inserted(dialect).returning(_r.fence)


def take_over(dialect: Dialect) -> ReturningUpdate[Any]:
    """The next attempt of a claim that has lapsed. When the key was first used stays, and whether it is counted."""
    over = and_(has_lapsed(dialect, TAKEOVER), _r.fingerprint == bindparam("my_fingerprint", type_=LargeBinary))
    update = if_as_seen(dialect, over)
    again = regranted(dialect, update, attempt=_r.attempt + literal_column("1"), requested_at=_r.requested_at)
    return again.values(in_quota=_r.in_quota).returning(_r.fence, _r.attempt)


def reclaim(dialect: Dialect) -> ReturningUpdate[Any]:
    """A first attempt, in the row of a claim that was released or of an answer that has expired."""
    update = if_as_seen(dialect, is_absent(dialect))
    first = regranted(dialect, update, attempt=literal_column("1"), requested_at=dialect.now)
    return first.returning(_r.fence, _r.attempt)


def quarantine_expired(dialect: Dialect) -> ReturningUpdate[Any]:
    """A claim that has lapsed, and must not run again by itself. Its token stays good for `complete`."""
    statement = if_as_seen(dialect, has_lapsed(dialect, QUARANTINE))
    return statement.values(state=word(QUARANTINED), reason=word(LEASE_EXPIRED)).returning(_r.fence, _r.attempt)


def read_locked(dialect: Dialect) -> Select[Any]:
    """PostgreSQL: the row, ours until the transaction ends. Absent and locked by somebody else both give no row."""
    return read(dialect).with_for_update(skip_locked=True)


def wait_to_reclaim(dialect: Dialect) -> Select[Any]:
    """PostgreSQL: when this is over, nobody has the row locked that is nobody's any more; or raises after a moment.

    Whoever has locked such a row removes it, or takes it. Of any other row nothing is found, and nothing is waited for.
    """
    moment = dialect.moment(bounded=True, lock_timeout_ms=SHORT_LOCK_TIMEOUT_MS).subquery("moment")
    absent = select(_r.record_id, moment.c.lock_timeout).select_from(moment.join(records, is_mine()))
    return absent.where(is_absent(dialect)).with_for_update(of=records)


def advisory_lock(dialect: Dialect) -> Select[Any]:
    """PostgreSQL: one asker at a time for keys of this number, until the transaction ends. Read in the NEXT statement.

    This one's snapshot is older than the lock. Never the session's lock: behind a pooler it belongs to strangers.
    """
    moment = dialect.moment(bounded=True).subquery("moment")
    lock = func.pg_advisory_xact_lock(bindparam("my_number", type_=BigInteger))
    return select(lock.label("locked")).select_from(moment)


def has_written(dialect: Dialect) -> Select[Any]:
    """PostgreSQL: whether this transaction has been given a number, as each is that writes."""
    return select(func.txid_current_if_assigned().is_not(None))


def next_fence(dialect: Dialect) -> ReturningInsert[Any]:
    """SQLite: the next number, inside the transaction that grants it. From the clock if that is ahead.

    Where the last one is not written down, it is above every fence of a record: what Alembic made has no rows, and
    somebody may have deleted this one.
    """
    written = select(meta.c.value).where(meta.c.name == literal_column(f"'{LAST_FENCE}'")).scalar_subquery()
    # `coalesce` does not look at the records where one is written.
    last = func.coalesce(written, select(func.max(_r.fence)).scalar_subquery(), ZERO)
    risen = getattr(func, dialect.greatest)(last + literal_column("1"), dialect.now)
    first: Any = select(literal_column(f"'{LAST_FENCE}'"), risen).where(ONE == ONE)
    source = first.suffix_with("ON CONFLICT (name) DO UPDATE SET value = excluded.value")
    return insert_into(meta).from_select(["name", "value"], source).returning(meta.c.value)
