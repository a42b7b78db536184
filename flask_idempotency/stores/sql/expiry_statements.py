"""Every statement about what is over and may be removed.

Parameters as in `unsettled_statements.py`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Delete, Integer, Select, and_, bindparam, delete, or_, select

from flask_idempotency.stores.sql.clauses import ONE, chosen, word
from flask_idempotency.stores.sql.dialects import Dialect
from flask_idempotency.stores.sql.schema import COMPLETED, FAILED, RELEASED, records

_r = records.c


def sweep(dialect: Dialect) -> Delete:
    """Some of the records that are over, those first that were over first. On PostgreSQL what somebody has locked stays:
    they are about to use the row again, or remove it themselves."""
    over = _is_over(dialect)
    first = select(_r.record_id).where(over).order_by(_r.expires_at).limit(bindparam("my_limit", type_=Integer))
    which = chosen(dialect, first)
    # Once more: whoever used the row again between the look and the lock has it.
    return delete(records).where(_r.record_id.in_(select(which.c.record_id)), over)


def is_overdue(dialect: Dialect) -> Select[Any]:
    """Whether there is a record that was over by then, and is still there."""
    there = select(ONE).select_from(records).where(_is_over(dialect)).exists()
    return select(there)


def _is_over(dialect: Dialect) -> ColumnElement[bool]:
    # A life that ended before it began is a flipped bit: to remove that row is to run its payment again.
    is_answer = and_(_r.state.in_((word(COMPLETED), word(FAILED))), _r.expires_at >= _r.completed_at)
    horizon = bindparam("my_horizon", type_=BigInteger)
    return and_(or_(_r.state == word(RELEASED), is_answer), _r.expires_at <= horizon, _r.expires_at <= dialect.now)
