"""For applications that keep their records in SQL, or write beside a claim to SQL of their own."""

from __future__ import annotations

from typing import TypeVar

from sqlalchemy import ColumnElement, Update, or_
from sqlalchemy.orm import InstrumentedAttribute

from flask_idempotency.stores.sql.migrations import upgrade
from flask_idempotency.stores.sql.schema import include_in

__all__ = ["fenced", "include_in", "upgrade"]

UpdateT = TypeVar("UpdateT", bound=Update)


def fenced(
    statement: UpdateT, column: ColumnElement[int | None] | InstrumentedAttribute[int | None], fence: int
) -> UpdateT:
    """The same UPDATE, of rows only that no later claim has written to, leaving this claim's mark on them.

    `fence` is `current_claim.fence`, and `column` a nullable BIGINT of the table itself, for this alone. When no row
    was matched a successor has taken over: raise, so that the transaction is rolled back. The same attempt may write
    again. Raises `TypeError` for anything but an UPDATE and a whole number.
    """
    if not isinstance(statement, Update):
        raise TypeError(f"fenced() takes an UPDATE, not {type(statement).__name__}.")
    if type(fence) is not int:
        # `column <= NULL` matches nothing, and a row without a fence would be written without one.
        raise TypeError(f"fenced() takes a whole number for a fence, as current_claim.fence is, not {fence!r}.")
    return statement.where(or_(column.is_(None), column <= fence)).values({column: fence})
