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

from flask_idempotency.engine.chores import LONGEST_LOCK_SECONDS
from flask_idempotency.stores.sql.clauses import ONE
from flask_idempotency.stores.sql.dialects import Dialect
from flask_idempotency.stores.sql.schema import chores

_c = chores.c


def time(dialect: Dialect) -> Select[Any]:
    """What time it is."""
    return select(dialect.now.label("now"))


def note(dialect: Dialect) -> Insert:
    """What the last run of this chore has said, whatever the one before it did."""
    source = select(_name(), dialect.now, bindparam("my_report", type_=Text)).where(ONE == ONE)
    suffix = "ON CONFLICT (name) DO UPDATE SET noted_at = excluded.noted_at, report = excluded.report"
    return sqlalchemy.insert(chores).from_select(["name", "noted_at", "report"], source.suffix_with(suffix))


def last(dialect: Dialect) -> Select[Any]:
    """What was noted of each, and how long ago."""
    ago = (dialect.now - _c.noted_at).label("ago")
    return select(_c.name, ago, _c.report).where(_c.noted_at.is_not(None))


def take(dialect: Dialect) -> ReturningInsert[Any]:
    """The chore is this holder's from now on, if it is nobody's, or is already, or was somebody's for too long. Else
    nothing is returned."""
    until = dialect.now + bindparam("lease", type_=BigInteger)
    source = select(_name(), _holder(), until).where(ONE == ONE).suffix_with(_unless_held(dialect))
    into = sqlalchemy.insert(chores).from_select(["name", "holder", "held_until"], source)
    return into.returning(_c.name)


def give_back(dialect: Dialect) -> Update:
    """It is nobody's, if it was this holder's."""
    mine = update(chores).where(_c.name == _name(), _c.holder == _holder())
    return mine.values(holder=null(), held_until=null())


def _unless_held(dialect: Dialect) -> TextClause:
    free = "idempotency_chores.holder IS NULL OR idempotency_chores.holder = excluded.holder"
    now = f"coalesce(:now, {dialect.clock})"
    over = f"idempotency_chores.held_until <= {now}"
    # By a clock that was set back since.
    too_long = f"idempotency_chores.held_until > {now} + {round(LONGEST_LOCK_SECONDS * 1_000_000)}"
    taken = "ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, held_until = excluded.held_until"
    return text(f"{taken} WHERE {free} OR {over} OR {too_long}").bindparams(bindparam("now", type_=BigInteger))


def _name() -> ColumnElement[str]:
    return bindparam("my_name", type_=String)


def _holder() -> ColumnElement[bytes]:
    return bindparam("my_holder", type_=LargeBinary)
