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
from flask_idempotency.stores.sql.schema import data_keys, meta, tenants

STORE: Final = "store"
"""The row of `idempotency_meta` that tells this database from others."""

_t, _k = tenants.c, data_keys.c


def shelf(dialect: Dialect) -> Select[Any]:
    """The store's number and the tenant's last one, once for each data key, in their order; once where there is none."""
    of_tenant = meta.outerjoin(tenants, _t.tenant_id == _tid()).outerjoin(data_keys, _k.tenant_id == _tid())
    told = (meta.c.value.label("store"), func.coalesce(_t.last_key_number, ZERO).label("last"))
    shown = select(*told, *_shown(dialect)).select_from(of_tenant).where(meta.c.name == word(STORE))
    return shown.order_by(_k.number)


def first_key(dialect: Dialect) -> ReturningInsert[Any]:
    """The tenant is there from now on, without keys. Returns nothing if it was."""
    source = select(_tid(), ZERO, ZERO).where(ONE == ONE).suffix_with("ON CONFLICT (tenant_id) DO NOTHING")
    return (
        sqlalchemy.insert(tenants)
        .from_select(["tenant_id", "last_key_number", "shredded_key_number"], source)
        .returning(_t.tenant_id)
    )


def take_number(dialect: Dialect) -> ReturningUpdate[Any]:
    """The number is the tenant's last one from now on, if it is above the last that was seen, and this is that store."""
    number, seen = _number(), bindparam("my_after", type_=Integer)
    this = select(meta.c.value).where(meta.c.name == word(STORE)).scalar_subquery()
    is_next = and_(_t.last_key_number == seen, number > seen)
    next_one = update(tenants).where(_t.tenant_id == _tid(), is_next, this == bindparam("my_store", type_=BigInteger))
    return next_one.values(last_key_number=number).returning(_t.last_key_number)


def add_key(dialect: Dialect) -> Insert:
    """The key of a number that was just taken."""
    kept = [
        ("tenant_id", _tid()),
        ("number", _number()),
        ("wrapping_key_id", bindparam("my_wrapping_key_id", type_=Text)),
        ("wrapped_key", bindparam("my_wrapped_key", type_=LargeBinary)),
        ("created_at", dialect.now),
    ]
    return sqlalchemy.insert(data_keys).values(dict(kept))


def close_key(dialect: Dialect) -> Update:
    """It seals no more, since when it was first told so."""
    return update(data_keys).where(*_is_key(), _k.disabled_at.is_(None)).values(disabled_at=dialect.now)


def retire_key(dialect: Dialect) -> Delete:
    """A key that seals no more is gone."""
    return delete(data_keys).where(*_is_key(), _k.disabled_at.is_not(None))


def erase(dialect: Dialect) -> Update:
    """No data key of the tenant's may open anything from now on, and no answer to a key that was used before."""
    later = getattr(func, dialect.greatest)(func.coalesce(_t.erased_at, ZERO), dialect.now)
    return update(tenants).where(_t.tenant_id == _tid()).values(shredded_key_number=_t.last_key_number, erased_at=later)


def destroy_keys(dialect: Dialect) -> Delete:
    """All that the tenant has."""
    return delete(data_keys).where(_k.tenant_id == _tid())


def other_keys(dialect: Dialect) -> Select[Any]:
    """Everybody's data keys that another key of the ring wraps."""
    others = select(_k.tenant_id, *_shown(dialect)).where(
        _k.wrapping_key_id != bindparam("my_wrapping_key_id", type_=Text)
    )
    return others.order_by(_k.tenant_id, _k.number)


def count_keys(dialect: Dialect) -> Select[Any]:
    """How many there are under each key of the ring."""
    return select(_k.wrapping_key_id, func.count().label("keys_")).group_by(_k.wrapping_key_id)


def _shown(dialect: Dialect) -> tuple[Any, ...]:
    return _k.number, _k.wrapping_key_id, _k.wrapped_key, (dialect.now - _k.disabled_at).label("disabled_for")


def _is_key() -> tuple[Any, Any]:
    return _k.tenant_id == _tid(), _k.number == _number()


def _tid() -> Any:
    return bindparam("my_tenant_id", type_=LargeBinary)


def _number() -> Any:
    return bindparam("my_number", type_=Integer)
