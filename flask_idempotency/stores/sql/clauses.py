"""What statements are made of: conditions on a row, what a grant writes, and the columns that a row is read by.

Parameters: `my_…` is what the asker brings, `seen_…` what it has read and now compares, `now` the time when a test says
it, and durations in microseconds.
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
    update,
)
from sqlalchemy.sql.selectable import CTE

from flask_idempotency.stores.sql.dialects import POSTGRESQL, Dialect
from flask_idempotency.stores.sql.rows import FINGERPRINT_BYTES, Row
from flask_idempotency.stores.sql.schema import (
    COMPLETED,
    FAILED,
    PROCESSING,
    QUARANTINE,
    RELEASED,
    fences,
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
    """Those of a `Row`, but for `now`: the stored ones, and whether its answer was erased with its tenant's data keys."""
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
    return _patiently(dialect, owned)


def others_update(dialect: Dialect, *conditions: ColumnElement[bool]) -> tuple[Update, ColumnElement[int]]:
    """An update of a row by somebody who is not its owner, if it still is what was met; and what the time is there."""
    return _patiently(dialect, is_as_met(), *conditions)


def is_as_met() -> ColumnElement[bool]:
    """Whether a row is the one that a `Found` tells of. Its state may be spelt in two ways when it is completed."""
    states = (bindparam("seen_state", type_=String), bindparam("seen_other", type_=String))
    return and_(
        _r.state.in_(states),
        _r.token == bindparam("seen_token", type_=LargeBinary),
        func.coalesce(_r.lease_expires_at, _r.expires_at) == bindparam("seen_deadline", type_=BigInteger),
    )


def _patiently(dialect: Dialect, *conditions: ColumnElement[bool]) -> tuple[Update, ColumnElement[int]]:
    if dialect.name != POSTGRESQL:
        return update(records).where(is_mine(), *conditions), dialect.now
    rid = bindparam("my_record_id", type_=LargeBinary)
    moment = dialect.moment(patient=True).add_columns(rid.label("record_id")).subquery("moment")
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
    moment = dialect.moment(patient=True).subquery("moment")
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


def given_up(dialect: Dialect, keep: ColumnElement[int]) -> Insert:
    """The row of a key that has none, as if its token's claim had come and been released. Nothing is known of that claim."""
    moment = dialect.moment(patient=True).subquery("moment")
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
