"""Every statement about chores: when each was done, and who is at it."""

from __future__ import annotations

from typing import Any

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Insert,
    LargeBinary,
    Select,
    String,
    Text,
    TextClause,
    Update,
    bindparam,
    null,
    select,
    text,
    update,
)
from sqlalchemy.sql.dml import ReturningInsert

from flask_idempotency.engine.capabilities import LONGEST_LOCK_SECONDS
from flask_idempotency.stores.sql.clauses import ONE
from flask_idempotency.stores.sql.dialects import Dialect
from flask_idempotency.stores.sql.schema import tasks

_c = tasks.c


def time(dialect: Dialect) -> Select[Any]:
    """What time it is."""
    return select(dialect.now.label("now"))


def note(dialect: Dialect) -> Insert:
    """What the last run of this chore has said, whatever the one before it did."""
    source = select(_name(), dialect.now, bindparam("my_report", type_=Text)).where(ONE == ONE)
    suffix = "ON CONFLICT (name) DO UPDATE SET reported_at = excluded.reported_at, report = excluded.report"
    return sqlalchemy.insert(tasks).from_select(["name", "reported_at", "report"], source.suffix_with(suffix))


def last(dialect: Dialect) -> Select[Any]:
    """What was noted of each, and how long ago."""
    ago = (dialect.now - _c.reported_at).label("ago")
    return select(_c.name, ago, _c.report).where(_c.reported_at.is_not(None))


def take(dialect: Dialect) -> ReturningInsert[Any]:
    """The chore is this holder's from now on, if it is nobody's, or is already, or was somebody's for too long. Else
    nothing is returned."""
    until = dialect.now + bindparam("lease", type_=BigInteger)
    source = select(_name(), _holder(), until).where(ONE == ONE).suffix_with(_unless_held(dialect))
    into = sqlalchemy.insert(tasks).from_select(["name", "locked_by", "lock_expires_at"], source)
    return into.returning(_c.name)


def give_back(dialect: Dialect) -> Update:
    """It is nobody's, if it was this holder's."""
    mine = update(tasks).where(_c.name == _name(), _c.locked_by == _holder())
    return mine.values(locked_by=null(), lock_expires_at=null())


def _unless_held(dialect: Dialect) -> TextClause:
    free = "idempotency_tasks.locked_by IS NULL OR idempotency_tasks.locked_by = excluded.locked_by"
    now = f"coalesce(:now, {dialect.clock})"
    over = f"idempotency_tasks.lock_expires_at <= {now}"
    # By a clock that was set back since.
    too_long = f"idempotency_tasks.lock_expires_at > {now} + {round(LONGEST_LOCK_SECONDS * 1_000_000)}"
    taken = (
        "ON CONFLICT (name) DO UPDATE SET locked_by = excluded.locked_by, lock_expires_at = excluded.lock_expires_at"
    )
    return text(f"{taken} WHERE {free} OR {over} OR {too_long}").bindparams(bindparam("now", type_=BigInteger))


def _name() -> ColumnElement[str]:
    return bindparam("my_name", type_=String)


def _holder() -> ColumnElement[bytes]:
    return bindparam("my_locked_by", type_=LargeBinary)
