"""Public helpers for applications with SQL: tables in your metadata, migrations, Alembic, and fenced updates."""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Update, or_
from sqlalchemy.orm import InstrumentedAttribute

from flask_idempotency.stores.sql.migrations import upgrade
from flask_idempotency.stores.sql.schema import include_in, metadata

__all__ = ["fenced", "include_in", "include_object", "upgrade"]

UpdateT = TypeVar("UpdateT", bound=Update)


def include_object(object_: Any, name: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:
    """Make Alembic leave the store's tables alone where your metadata does not have them.

    Alembic drops every table of the database that your metadata lacks. So give it this function if the store's tables
    are in that database and not in that metadata: `Migrate(app, db, include_object=include_object)`, or
    `context.configure(…, include_object=include_object)` in `env.py`. Where the metadata has them it changes nothing.

    If you have a function of your own, return `include_object(…) and` what yours returns.
    """
    return not (type_ == "table" and reflected and compare_to is None and name in metadata.tables)


def fenced(
    statement: UpdateT, column: ColumnElement[int | None] | InstrumentedAttribute[int | None], fence: int
) -> UpdateT:
    """Restrict your UPDATE to rows that no later claim has written to, and write this claim's fence into them.

    Pass `current_claim.fence` as `fence`. `column` is a nullable BIGINT of the same table, used for this only. If the
    UPDATE matches no row, another worker has taken over: raise, so that your transaction is rolled back. The same attempt
    may write again. Raises `TypeError` if this is not an UPDATE, or `fence` is not a whole number.
    """
    if not isinstance(statement, Update):
        raise TypeError(f"fenced() takes an UPDATE, not {type(statement).__name__}.")
    if type(fence) is not int:
        # `column <= NULL` matches nothing, and a row without a fence would be written without one.
        raise TypeError(f"fenced() takes a whole number for a fence, as current_claim.fence is, not {fence!r}.")
    return statement.where(or_(column.is_(None), column <= fence)).values({column: fence})
