"""Every statement about records that are not completed, sent by others than their owners.

Parameters as in `clauses.py`. `my_horizon` is a time by somebody else's clock: nothing is done that is not due by the
server's clock as well, which is compared apart, because no index can be searched by a clock that goes on.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    LargeBinary,
    Select,
    Update,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from flask_idempotency.engine.keys import OWNER_BYTES
from flask_idempotency.stores.sql.answer_statements import is_answer
from flask_idempotency.stores.sql.clauses import ONE, ZERO, chosen, columns, is_as_met, is_mine, others_update, word
from flask_idempotency.stores.sql.dialects import POSTGRESQL, SQLITE, Dialect
from flask_idempotency.stores.sql.schema import PROCESSING, QUARANTINE, QUARANTINED, RELEASED, records
from flask_idempotency.stores.sql.statements import LEASE_EXPIRED, RELEASED_KEEP

TWO: Final[ColumnElement[int]] = literal_column("2", BigInteger)

_r = records.c


def stale(dialect: Dialect) -> Select[Any]:
    """Claims whose lease is over, those first that were over first, and what comes behind the last one that was met."""
    first, behind = _number("my_first"), _bytes("my_after")
    met = or_(_r.lease_expires_at > first, and_(_r.lease_expires_at == first, _r.record_id > behind))
    found = select(_r.record_id, _r.tenant_id, *columns(), dialect.now.label("now"))
    over = found.where(
        _r.state == word(PROCESSING), _r.lease_expires_at >= first, met, *_over(dialect, _r.lease_expires_at)
    )
    return over.order_by(_r.lease_expires_at, _r.record_id).limit(_limit())


def lapse(dialect: Dialect) -> ReturningUpdate[Any]:
    """A claim whose lease is over, as it was met, and whose rule says so. On PostgreSQL one that is locked is left alone:
    whoever locks it is its owner, or does the same."""
    wanted = and_(
        is_mine(),
        _r.state == word(PROCESSING),
        is_as_met(),
        _r.on_expiry == word(QUARANTINE),
        *_over(dialect, _r.lease_expires_at),
    )
    statement = _unless_locked(dialect, wanted)
    return statement.values(state=word(QUARANTINED), reason=word(LEASE_EXPIRED)).returning(_r.fence)


def due(dialect: Dialect) -> ReturningUpdate[Any]:
    """Quarantined records whose turn it is, and when the next one is: no two askers are given the same."""
    return _due(dialect)


def due_of_one(dialect: Dialect) -> ReturningUpdate[Any]:
    """The same of one application's. The others keep their turns."""
    begins = func.substr(_r.token, 1, OWNER_BYTES, type_=LargeBinary)
    return _due(dialect, begins == _bytes("my_owner"))


def _due(dialect: Dialect, *meant: ColumnElement[bool]) -> ReturningUpdate[Any]:
    turn = and_(_r.state == word(QUARANTINED), *_over(dialect, _r.resolver_due_at), *meant)
    which = chosen(
        dialect, select(_r.record_id).where(turn).order_by(_r.resolver_due_at, _r.lease_expires_at).limit(_limit())
    )
    age = dialect.now - _lease_expires_at(dialect)
    pause = _the(dialect.least, _the(dialect.greatest, age, _number("least")), _number("most"))
    following = _the(dialect.least, dialect.now, _number("my_horizon")) + pause
    # Odd where there was a turn since the owner was last heard of: what is returned is the row as it is from now on.
    # Asked for once: the next look at the clock would find it gone on.
    half = following.op("/", precedence=8, return_type=BigInteger())(TWO)
    turned = half * TWO + case((_r.resolver_due_at > _r.lease_expires_at, ONE), else_=ZERO)
    taken = update(records).where(_r.record_id.in_(select(which.c.record_id)), turn).values(resolver_due_at=turned)
    asked = (_r.resolver_due_at % TWO).label("asked")
    return taken.returning(_r.record_id, _r.tenant_id, *columns(), dialect.now.label("now"), asked)


def free(dialect: Dialect) -> ReturningUpdate[Any]:
    """The key is free again, in whatever state it was met. No answer is left: who asks for it would be told of one that
    counts no more. The token is nobody's."""
    statement, now = others_update(dialect, *_living(dialect))
    emptied = (
        "lease_expires_at",
        "completed_at",
        "status",
        "response",
        "reason",
        "wrapping_key_id",
        "data_key_number",
        "succeeded",
    )
    freed = statement.values(
        state=word(RELEASED),
        token=_bytes("my_token"),
        expires_at=now + literal_column(str(RELEASED_KEEP), BigInteger),
        resolver_due_at=ZERO,
        **{name: null() for name in emptied},
    )
    # How large the answer was stays: its tenant's ledger has to hear of it.
    return freed.returning(_r.in_quota, _r.response_size)


def glance(dialect: Dialect) -> Select[Any]:
    """As much of a row as tells why there was nothing to change: whether it is what was met, and whose it is."""
    unchanged = and_(is_as_met(), *_living(dialect))
    return select(_r.state, _r.token, _r.in_quota, unchanged.label("unchanged")).where(is_mine())


def walk_processing(dialect: Dialect) -> Select[Any]:
    """Those in flight, by their keys."""
    return _walk(dialect, columns(), _r.state == word(PROCESSING))


def walk_quarantined(dialect: Dialect) -> Select[Any]:
    """Those whose outcome nobody knows, by their keys, with the answers that could not be opened."""
    return _walk(dialect, columns(), _r.state == word(QUARANTINED))


def walk_completed(dialect: Dialect) -> Select[Any]:
    """Those up to `my_until` that are done and whose life has not ended, without their answers: those may be large."""
    empty = literal_column("''::bytea" if dialect.name == POSTGRESQL else "x''", LargeBinary)
    shown = [empty.label("response") if column is _r.response else column for column in columns()]
    return _walk(dialect, shown, is_answer(dialect), _r.record_id <= _bytes("my_until"), few=False)


def standing(dialect: Dialect) -> Select[Any]:
    """How many are not completed, and when the first lease of each kind ended. Reads indexes that hold nothing else."""
    moment = select(dialect.now.label("now")).cte("moment")
    now = select(moment.c.now).scalar_subquery()
    is_over = _r.lease_expires_at <= now
    in_flight = select(
        func.coalesce(func.sum(case((is_over, ZERO), else_=ONE)), ZERO).label("in_flight"),
        func.coalesce(func.sum(case((is_over, ONE), else_=ZERO)), ZERO).label("lapsed"),
        func.min(case((is_over, _lease_expires_at(dialect)))).label("first_lapsed"),
    )
    processing = in_flight.where(_r.state == word(PROCESSING)).subquery("processing")
    unknown = select(func.count().label("quarantined"), func.min(_lease_expires_at(dialect)).label("first_quarantined"))
    quarantined = unknown.where(_r.state == word(QUARANTINED)).subquery("quarantined")
    p, q = processing.c, quarantined.c
    told = (p.in_flight, p.lapsed, now - p.first_lapsed, q.quarantined, now - q.first_quarantined)
    names = ("in_flight", "lapsed", "lapsed_for", "quarantined", "quarantined_for")
    counts = (column.label(name) for column, name in zip(told, names, strict=True))
    return select(*counts).select_from(processing.join(quarantined, ONE == ONE))


def _walk(
    dialect: Dialect, shown: list[ColumnElement[Any]], *conditions: ColumnElement[bool], few: bool = True
) -> Select[Any]:
    tid = _bytes("my_tenant_id")
    # SQLite takes the keys' index for what is to be in their order, and would go through all that is completed: a sign
    # in front of a column keeps it from using an index of it.
    rid = (
        literal_column("+idempotency_records.record_id", LargeBinary)
        if few and dialect.name == SQLITE
        else _r.record_id
    )
    found = select(_r.record_id, _r.tenant_id, *shown, dialect.now.label("now"))
    of_tenant = found.where(rid > _bytes("my_after"), *conditions, _r.tenant_id == func.coalesce(tid, _r.tenant_id))
    return of_tenant.order_by(rid).limit(_limit())


def _living(dialect: Dialect) -> tuple[ColumnElement[bool], ...]:
    """It is there: neither released nor an answer whose life is over."""
    return _r.state != word(RELEASED), or_(_r.expires_at.is_(None), _r.expires_at > dialect.now)


def _over(dialect: Dialect, when: ColumnElement[Any]) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return when <= _number("my_horizon"), when <= dialect.now


def _lease_expires_at(dialect: Dialect) -> ColumnElement[int]:
    # One flipped bit makes a time that cannot be taken away from now. It is not to keep all others waiting.
    return _the(dialect.greatest, _r.lease_expires_at, ZERO)


def _unless_locked(dialect: Dialect, wanted: ColumnElement[bool]) -> Update:
    if dialect.name != POSTGRESQL:
        return update(records).where(wanted)
    free = select(_r.record_id).where(wanted).correlate(None).with_for_update(skip_locked=True).scalar_subquery()
    return update(records).where(_r.record_id == free)


def _the(function: str, one: ColumnElement[int], other: ColumnElement[int]) -> ColumnElement[int]:
    chosen: ColumnElement[int] = getattr(func, function)(one, other)
    return chosen


def _number(name: str) -> ColumnElement[int]:
    return bindparam(name, type_=BigInteger)


def _bytes(name: str) -> ColumnElement[bytes]:
    return bindparam(name, type_=LargeBinary)


def _limit() -> ColumnElement[int]:
    return bindparam("my_limit", type_=Integer)
