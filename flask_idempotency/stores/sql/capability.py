"""Send the statements of one capability of the store, such as quotas, data keys or the janitor's work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from sqlalchemy import Connection

from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.dialects import made
from flask_idempotency.stores.sql.driver import RecordConnection
from flask_idempotency.stores.sql.statements import AFTER_LAST_KEY

Make: TypeAlias = Callable[..., Any]
"""Makes a statement for a dialect, in the form that further arguments choose. `statements.py` explains its parameters."""


class SqlCapability:
    """Make a statement for the database, send it with the time, and return its rows.

    `now` returns the time in microseconds, or None to use the server's.
    """

    def __init__(self, database: Database, *, now: Callable[[], int | None]) -> None:
        self._database = database
        self._now = now

    def _send(self, connection: RecordConnection, make: Make, parameters: Any, *form: Any) -> Any:
        """Return the result of this statement, in this form, on a connection that the caller has."""
        return connection.execute(made(make, self._database.dialect, *form), parameters)

    def _page(
        self, ends: Make, make: Make, *, limit: int, looked: int = 0, long: bool = False, **parameters: Any
    ) -> tuple[Sequence[Any], bytes | None]:
        """Return the rows of one page, and the key where it ends. None: it is the last.

        `ends` selects the last of as many keys as are looked at, `limit` or more, and the key after it. `make` then selects up
        to `limit` rows from `my_after` to `my_until`.
        """
        given, looked = {"my_limit": limit, "now": self._now(), **parameters}, max(looked, limit)

        def page(connection: Connection) -> tuple[Sequence[Any], bytes | None]:
            bounds = {**given, "my_limit": looked, "my_limit_less_one": looked - 1}
            found = self._send(connection, ends, bounds).scalars().all()
            last = found[0] if len(found) > 1 else None
            return self._send(connection, make, {**given, "my_until": last or AFTER_LAST_KEY}).all(), last

        return self._database.run(page, long=long)

    def _rows(self, make: Make, *form: Any, long: bool = False, **parameters: Any) -> Sequence[Any]:
        """Return all rows. `long` as for `Database.run`."""
        given = {**parameters, "now": self._now()}
        return self._database.run(lambda c: self._send(c, make, given, *form).all(), long=long)

    def _row(self, make: Make, **parameters: Any) -> Any | None:
        """Return the only row, or None if there is none."""
        given = {**parameters, "now": self._now()}
        return self._database.run(lambda c: self._send(c, make, given).one_or_none())

    def _change(self, make: Make, *form: Any, long: bool = False, **parameters: Any) -> int:
        """Return how many rows the statement changed."""
        given = {**parameters, "now": self._now()}
        return int(self._database.run(lambda c: self._send(c, make, given, *form).rowcount, long=long))
