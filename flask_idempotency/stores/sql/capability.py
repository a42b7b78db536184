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

    def _rows(self, make: Make, *, long: bool = False, **parameters: Any) -> Sequence[Any]:
        """Return all rows. `long` as for `Database.run`."""
        statement, given = make(self._database.dialect), {**parameters, "now": self._now()}
        return self._database.run(lambda connection: connection.execute(statement, given).all(), long=long)

    def _row(self, make: Make, **parameters: Any) -> Any | None:
        """Return the only row, or None if there is none."""
        statement, given = make(self._database.dialect), {**parameters, "now": self._now()}
        return self._database.run(lambda connection: connection.execute(statement, given).one_or_none())

    def _change(self, make: Make, *, long: bool = False, **parameters: Any) -> int:
        """Return how many rows the statement changed."""
        statement, given = make(self._database.dialect), {**parameters, "now": self._now()}
        return self._database.run(lambda connection: connection.execute(statement, given).rowcount, long=long)
