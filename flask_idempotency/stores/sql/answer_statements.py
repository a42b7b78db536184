"""Every statement about answers that are there already: seen, sealed anew, or found to be unreadable."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    LargeBinary,
    Select,
    String,
    Text,
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

from flask_idempotency.engine.model import CORRUPT
from flask_idempotency.stores.sql.clauses import ONE, ZERO, columns, is_mine, word
from flask_idempotency.stores.sql.completions import may_be_sealed
from flask_idempotency.stores.sql.dialects import POSTGRESQL, Dialect
from flask_idempotency.stores.sql.schema import COMPLETED, FAILED, QUARANTINED, records

_r = records.c


def page_end(dialect: Dialect) -> Select[Any]:
    """The last row of a page, and one more if there is a next page. Nothing when the rest is shorter than the page."""
    rest = select(_r.record_id).where(_r.record_id > _bytes("my_after")).order_by(_r.record_id)
    return rest.offset(bindparam("my_limit", type_=Integer) - literal_column("1")).limit(literal_column("2"))


def page(dialect: Dialect) -> Select[Any]:
    """The live answers up to there; of this tenant, if one is named, and not under that key of the ring, if one is."""
    tenant_id, wrapping_key_id = _bytes("my_tenant_id"), bindparam("my_wrapping_key_id", type_=Text)
    shown = select(_r.record_id, _r.tenant_id, *columns(), dialect.now.label("now"))
    return shown.where(
        _r.record_id > _bytes("my_after"),
        _r.record_id <= _bytes("my_until"),
        is_answer(dialect),
        _r.tenant_id == func.coalesce(tenant_id, _r.tenant_id),
        or_(wrapping_key_id.is_(None), func.coalesce(_r.wrapping_key_id, word("")) != wrapping_key_id),
    ).order_by(_r.record_id)


def count_answers(dialect: Dialect) -> Select[Any]:
    """How many there are under each key of the ring, those included whose life has ended, and not those that were wiped."""
    under = func.coalesce(_r.wrapping_key_id, word("")).label("wrapping_key_id")
    counted: list[ColumnElement[Any]] = [under, func.count().label("responses")]
    is_wiped = func.coalesce(_r.data_key_number, ONE) == ZERO
    return select(*counted).where(_is_completed(), ~is_wiped).group_by(under)


def replace(dialect: Dialect) -> ReturningUpdate[Any]:
    """Another payload in the place of the very one that was seen; its life ends when it would have."""
    statement = update(records).where(is_mine(), is_answer(dialect), _holds_seen())
    return _replaced(statement)


def replace_sealed(dialect: Dialect) -> ReturningUpdate[Any]:
    """The same, while the data key of the new one is there, and unless the tenant was erased since."""
    statement = update(records).where(is_mine(), is_answer(dialect), _holds_seen(), may_be_sealed())
    return _replaced(statement)


def holds(dialect: Dialect) -> Select[Any]:
    """Whether the very payload is there that was seen: with a row. On PostgreSQL it is locked then."""
    entry = (_r.in_quota, _r.expires_at, _r.response_size)
    return _locked(dialect, select(*entry).where(is_mine(), is_answer(dialect), _holds_seen()))


def condemn(dialect: Dialect) -> ReturningUpdate[Any]:
    """A completed row, whose answer nobody can open. All that it holds stays, and time does not end it any more."""
    statement = update(records).where(is_mine(), is_answer(dialect), _holds_seen())
    quarantined = statement.values(
        state=word(QUARANTINED),
        reason=word(CORRUPT),
        lease_expires_at=dialect.now,
        expires_at=null(),
        succeeded=_succeeded(),
    )
    return quarantined.returning(_r.fence)


def unreadable(dialect: Dialect) -> Select[Any]:
    """As much of a row that is none of ours as its ledger needs. On PostgreSQL it is locked then."""
    entry = (_r.state, _r.in_quota, _r.expires_at, _r.response_size, dialect.now.label("now"))
    return _locked(dialect, select(*entry).where(is_mine(), _r.state != word(QUARANTINED)))


def distrust(dialect: Dialect) -> ReturningUpdate[Any]:
    """A row that is none of ours is where time does not end it. Nobody will run what it was about again."""
    return (
        update(records)
        .where(is_mine())
        .values(
            state=word(QUARANTINED),
            reason=word(CORRUPT),
            lease_expires_at=func.coalesce(_r.lease_expires_at, dialect.now),
            expires_at=null(),
            succeeded=_succeeded(),
        )
        .returning(_r.fence)
    )


def is_answer(dialect: Dialect, now: ColumnElement[int] | None = None) -> ColumnElement[bool]:
    """Whether a row is completed, and its life has not ended: then, or when it is looked at."""
    return and_(_is_completed(), _r.expires_at > (dialect.now if now is None else now))


def _succeeded() -> ColumnElement[int]:
    """What the state says of the answer, and will say no more."""
    return case((_r.state == word(COMPLETED), ONE), (_r.state == word(FAILED), ZERO), else_=_r.succeeded)


def _is_completed() -> ColumnElement[bool]:
    return _r.state.in_((word(COMPLETED), word(FAILED)))


def _replaced(statement: Any) -> ReturningUpdate[Any]:
    new: dict[str, Any] = {
        "state": bindparam("my_state", type_=String),
        "status": bindparam("my_status", type_=_r.status.type),
        "response_size": bindparam("my_response_size", type_=BigInteger),
        "response": _bytes("my_response"),
        "wrapping_key_id": bindparam("my_wrapping_key_id", type_=Text),
        "data_key_number": bindparam("my_data_key_number", type_=Integer),
    }
    replaced: ReturningUpdate[Any] = statement.values(new).returning(_r.fence)
    return replaced


def _holds_seen() -> ColumnElement[bool]:
    """By the clear facts first: they spare a comparison of mebibytes."""
    return and_(
        _r.state == bindparam("seen_state", type_=String),
        _r.status == bindparam("seen_status", type_=_r.status.type),
        _r.response_size == bindparam("seen_response_size", type_=BigInteger),
        _r.wrapping_key_id.is_not_distinct_from(bindparam("seen_wrapping_key_id", type_=Text)),
        _r.data_key_number.is_not_distinct_from(bindparam("seen_data_key_number", type_=Integer)),
        _r.response == _bytes("seen_response"),
    )


def _locked(dialect: Dialect, statement: Select[Any]) -> Select[Any]:
    return statement.with_for_update() if dialect.name == POSTGRESQL else statement


def _bytes(name: str) -> Any:
    return bindparam(name, type_=LargeBinary)
