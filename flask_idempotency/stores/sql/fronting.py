"""Whether answers of this database may be in a cache: every host must know, also one that has none."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy
from sqlalchemy import ColumnElement, Insert, Select, func, literal_column, select

from flask_idempotency.stores.sql.clauses import ONE
from flask_idempotency.stores.sql.dialects import Dialect
from flask_idempotency.stores.sql.schema import meta

_NAME: Final[ColumnElement[str]] = literal_column("'cached_since'")


def noted(_: Dialect) -> Select[Any]:
    """1 where some host has ever noted that it puts answers into a cache, else 0."""
    return select(func.count()).select_from(meta).where(meta.c.name == _NAME)


def note(dialect: Dialect) -> Insert:
    """Some host does from now on. Whoever noted it first is right."""
    source = select(_NAME, dialect.now).where(ONE == ONE).suffix_with("ON CONFLICT (name) DO NOTHING")
    return sqlalchemy.insert(meta).from_select(["name", "value"], source)
