"""Send the statements of one capability of the store, such as quotas, data keys or the janitor's work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.dialects import Dialect

Make: TypeAlias = Callable[[Dialect], Any]
"""Makes a statement. `statements.py` explains its parameters."""


class SqlCapability:
    """Make a statement for the database, send it with the time, and return its rows.

    `now` returns the time in microseconds, or None to use the server's.
    """

    def __init__(self, database: Database, *, now: Callable[[], int | None]) -> None:
        self._database = database
        self._now = now
        self._made: dict[tuple[Make, str], Any] = {}

    def _statement(self, make: Make, dialect: Dialect | None = None) -> Any:
        """Return this statement. It is made once, so that SQLAlchemy compiles it once."""
        dialect = self._database.dialect if dialect is None else dialect
        statement = self._made.get((make, dialect.name))
        if statement is None:
            # The first two threads may both do this: both make the same.
            statement = self._made[make, dialect.name] = make(dialect)
        return statement

    def _rows(self, make: Make, *, long: bool = False, **parameters: Any) -> Sequence[Any]:
        """Return all rows. `long` as for `Database.run`."""
        given = {**parameters, "now": self._now()}
        return self._database.run(lambda c: c.execute(self._statement(make), given).all(), long=long)

    def _row(self, make: Make, **parameters: Any) -> Any | None:
        """Return the only row, or None if there is none."""
        given = {**parameters, "now": self._now()}
        return self._database.run(lambda c: c.execute(self._statement(make), given).one_or_none())

    def _change(self, make: Make, *, long: bool = False, **parameters: Any) -> int:
        """Return how many rows the statement changed."""
        given = {**parameters, "now": self._now()}
        return self._database.run(lambda c: c.execute(self._statement(make), given).rowcount, long=long)
