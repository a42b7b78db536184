"""The statement that completes a record, in the eight forms that it needs: no answer pays for what it does not use. And
the one by which somebody else does it in the owner's place.

`sealed`: only while the tenant's data key is there and the tenant was not erased since. `counted`: the ledger, too, in the
same statement; the plain form leaves a counted record alone. `tells`: for the application's transaction, where the patience
that it sets on PostgreSQL lasts until that ends, and whoever is to hear of the commit needs the row.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Insert,
    Integer,
    LargeBinary,
    Select,
    SmallInteger,
    String,
    Text,
    Update,
    and_,
    bindparam,
    case,
    exists,
    func,
    null,
    select,
)
from sqlalchemy.sql.dml import ReturningUpdate

from flask_idempotency.stores.sql.clauses import (
    ONE,
    ZERO,
    booked,
    columns,
    duration,
    is_mine,
    others_update,
    owners,
    word,
)
from flask_idempotency.stores.sql.dialects import POSTGRESQL, Dialect
from flask_idempotency.stores.sql.schema import PROCESSING, QUARANTINED, RESPONSES, data_keys, records, tenants

_r = records.c


def complete(
    dialect: Dialect, *, sealed: bool = False, counted: bool = False, tells: bool = False
) -> ReturningUpdate[Any] | Select[Any]:
    """The answer is there and will be kept this long. Returns the fence; the row but for its answer, if it `tells`."""
    statement, now = owners(dialect, PROCESSING, QUARANTINED)
    return _completed(dialect, statement, now, sealed=sealed, counted=counted, tells=tells)


def settle(dialect: Dialect, *, sealed: bool = False, counted: bool = False) -> ReturningUpdate[Any] | Select[Any]:
    """The same in the owner's place, of a row that is quarantined as it was met. The token is another from now on."""
    statement, now = others_update(dialect, _r.state == word(QUARANTINED))
    mine = statement.values(token=bindparam("my_token", type_=LargeBinary))
    return _completed(dialect, mine, now, sealed=sealed, counted=counted, tells=False)


def book(dialect: Dialect) -> Insert:
    """So much is added to an entry of the ledger, and to none if it is nothing. Negative numbers take away."""
    names = (
        ("my_tenant_id", LargeBinary),
        ("my_kind", String),
        ("my_bucket_end", BigInteger),
        ("my_window_length", BigInteger),
    )
    entry = [bindparam(name, type_=kind) for name, kind in names]
    amounts = [bindparam(name, type_=BigInteger) for name in ("my_records", "my_bytes")]
    # SQLite's parser needs some WHERE before ON CONFLICT.
    selected: list[ColumnElement[Any]] = [*entry, _shard(), *amounts]
    return booked(select(*selected).where(ONE == ONE))


def sealing(dialect: Dialect) -> Select[Any]:
    """Why a sealed answer was not stored: whether its tenant was erased since, and whether its data key seals."""
    told: list[ColumnElement[Any]] = [(~_unerased()).label("erased"), _key_is_there().label("kept")]
    return select(*told).where(is_mine())


def may_be_sealed() -> ColumnElement[bool]:
    """Whether an answer that is sealed with this data key may become a record's."""
    return and_(_key_is_there(), _unerased())


def _completed(
    dialect: Dialect, statement: Update, now: ColumnElement[int], *, sealed: bool, counted: bool, tells: bool
) -> ReturningUpdate[Any] | Select[Any]:
    # By a clock that was set back meanwhile it would be over before it began, as no row of ours is.
    begins: ColumnElement[int] = getattr(func, dialect.greatest)(now, _r.requested_at)
    ends = begins + duration("keep")
    if counted:
        ends = case((_r.in_quota == ONE, _next_bucket_end(ends)), else_=ends)
    else:
        statement = statement.where(_r.in_quota == ZERO)
    if sealed:
        statement = statement.where(may_be_sealed())
    completed = statement.values(
        state=bindparam("my_state", type_=String),
        lease_expires_at=null(),
        completed_at=begins,
        expires_at=ends,
        status=bindparam("my_status", type_=_r.status.type),
        response_size=bindparam("my_response_size", type_=BigInteger),
        response=bindparam("my_response", type_=LargeBinary),
        reason=null(),
        wrapping_key_id=bindparam("my_wrapping_key_id", type_=Text),
        data_key_number=bindparam("my_data_key_number", type_=Integer),
        succeeded=null(),
        resolver_due_at=ZERO,
    )
    told = [*columns(without="response"), now.label("now")] if tells else [_r.fence]
    if not counted:
        return completed.returning(*told)
    entry = [_r.tenant_id, _r.in_quota, _r.expires_at, _r.response_size]
    if dialect.name != POSTGRESQL:
        return completed.returning(*(told if tells else [*told, *entry]))
    done = completed.returning(*told, *(column.label(f"_{column.name}") for column in entry)).cte("done")
    added = select(done.c._tenant_id, word(RESPONSES), done.c._expires_at, ZERO, _shard(), ONE, done.c._response_size)
    into_ledger = booked(added.where(done.c._in_quota == ONE)).cte("into_ledger")
    return select(*(column for column in done.c if not column.name.startswith("_"))).add_cte(into_ledger)


def _key_is_there() -> ColumnElement[bool]:
    k = data_keys.c
    number = bindparam("my_data_key_number", type_=Integer)
    there = (
        select(ONE).where(k.tenant_id == _r.tenant_id, k.number == number, k.disabled_at.is_(None)).correlate(records)
    )
    return exists(there)


def _unerased() -> ColumnElement[bool]:
    t = tenants.c
    return ~exists(select(ONE).where(t.tenant_id == _r.tenant_id, t.erased_at >= _r.requested_at).correlate(records))


def _next_bucket_end(ends: ColumnElement[int]) -> ColumnElement[int]:
    width = bindparam("width", type_=BigInteger)
    return (ends + width - ONE) // width * width


def _shard() -> ColumnElement[int]:
    return bindparam("my_shard", type_=SmallInteger)
