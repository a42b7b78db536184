"""Every statement about tenants' data keys."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy
from sqlalchemy import (
    BigInteger,
    Delete,
    Insert,
    Integer,
    LargeBinary,
    Select,
    Text,
    Update,
    and_,
    bindparam,
    delete,
    func,
    select,
    update,
)
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate

from flask_idempotency.stores.sql.clauses import ONE, ZERO, word
from flask_idempotency.stores.sql.dialects import Dialect
from flask_idempotency.stores.sql.schema import data_keys, facts, tenants

STORE: Final = "store"
"""The row of the facts that tells this database from others."""

_t, _k = tenants.c, data_keys.c


def shelf(dialect: Dialect) -> Select[Any]:
    """The store's number and the tenant's last one, once for each data key, in their order; once where there is none."""
    of_tenant = facts.outerjoin(tenants, _t.tid == _tid()).outerjoin(data_keys, _k.tid == _tid())
    told = (facts.c.value.label("store"), func.coalesce(_t.last_key, ZERO).label("last"))
    shown = select(*told, *_shown(dialect)).select_from(of_tenant).where(facts.c.name == word(STORE))
    return shown.order_by(_k.number)


def first_key(dialect: Dialect) -> ReturningInsert[Any]:
    """The tenant is there from now on, without keys. Returns nothing if it was."""
    source = select(_tid(), ZERO, ZERO).where(ONE == ONE).suffix_with("ON CONFLICT (tid) DO NOTHING")
    return sqlalchemy.insert(tenants).from_select(["tid", "last_key", "destroyed"], source).returning(_t.tid)


def take_number(dialect: Dialect) -> ReturningUpdate[Any]:
    """The number is the tenant's last one from now on, if it is above the last that was seen, and this is that store."""
    number, seen = _number(), bindparam("my_after", type_=Integer)
    this = select(facts.c.value).where(facts.c.name == word(STORE)).scalar_subquery()
    is_next = and_(_t.last_key == seen, number > seen)
    next_one = update(tenants).where(_t.tid == _tid(), is_next, this == bindparam("my_store", type_=BigInteger))
    return next_one.values(last_key=number).returning(_t.last_key)


def add_key(dialect: Dialect) -> Insert:
    """The key of a number that was just taken."""
    kept = [
        ("tid", _tid()),
        ("number", _number()),
        ("kid", bindparam("my_kid", type_=Text)),
        ("wrapped", bindparam("my_wrapped", type_=LargeBinary)),
        ("made_at", dialect.now),
    ]
    return sqlalchemy.insert(data_keys).values(dict(kept))


def close_key(dialect: Dialect) -> Update:
    """It seals no more, since when it was first told so."""
    return update(data_keys).where(*_is_key(), _k.closed_at.is_(None)).values(closed_at=dialect.now)


def retire_key(dialect: Dialect) -> Delete:
    """A key that seals no more is gone."""
    return delete(data_keys).where(*_is_key(), _k.closed_at.is_not(None))


def erase(dialect: Dialect) -> Update:
    """No data key of the tenant's may open anything from now on, and no answer to a key that was used before."""
    later = getattr(func, dialect.greatest)(func.coalesce(_t.erased_at, ZERO), dialect.now)
    return update(tenants).where(_t.tid == _tid()).values(destroyed=_t.last_key, erased_at=later)


def destroy_keys(dialect: Dialect) -> Delete:
    """All that the tenant has."""
    return delete(data_keys).where(_k.tid == _tid())


def other_keys(dialect: Dialect) -> Select[Any]:
    """Everybody's data keys that another key of the ring wraps."""
    others = select(_k.tid, *_shown(dialect)).where(_k.kid != bindparam("my_kid", type_=Text))
    return others.order_by(_k.tid, _k.number)


def count_keys(dialect: Dialect) -> Select[Any]:
    """How many there are under each key of the ring."""
    return select(_k.kid, func.count().label("keys_")).group_by(_k.kid)


def _shown(dialect: Dialect) -> tuple[Any, ...]:
    return _k.number, _k.kid, _k.wrapped, (dialect.now - _k.closed_at).label("closed_for")


def _is_key() -> tuple[Any, Any]:
    return _k.tid == _tid(), _k.number == _number()


def _tid() -> Any:
    return bindparam("my_tid", type_=LargeBinary)


def _number() -> Any:
    return bindparam("my_number", type_=Integer)
