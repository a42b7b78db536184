"""How long an upgrade waits for whom: for another upgrade as long as it takes, for everybody else briefly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.sql.faults import waited_in_vain

LOCK_MS: Final = 2000
"""Whatever claims come meanwhile queue behind a statement that waits for the whole table, and give up after five seconds:
well before that it leaves the queue."""

FOR_EVER: Final = 0


@contextmanager
def waiting(connection: Connection, milliseconds: int) -> Iterator[None]:
    """In here this transaction waits so long for each lock, and afterwards as long as before.

    Not so after an error: then the transaction ends, and the setting with it. SQLite has one lock, taken at the start.
    """
    if connection.dialect.name != "postgresql":
        yield
        return
    before = connection.exec_driver_sql("SELECT current_setting('lock_timeout')").scalar_one()
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {milliseconds}")
    yield
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{before}'")


@contextmanager
def gives_way(connection: Connection) -> Iterator[None]:
    """In here a statement that does not get its lock in time raises `StoreUnavailable`."""
    try:
        with waiting(connection, LOCK_MS):
            yield
    except DBAPIError as error:
        if connection.dialect.name != "postgresql" or not waited_in_vain(error):
            raise
        raise StoreUnavailable(
            f"The tables are in use: for {LOCK_MS / 1000:g} seconds a transaction of somebody else's, such as a long report, "
            f"a VACUUM or a forgotten session, has held a lock that this needs: {_first_line(error.statement)}. Nothing "
            "was changed. Wait until it is over, or end it (pg_locks and pg_stat_activity show it), and run the upgrade "
            "again, which is safe at any time."
        ) from error


def _first_line(statement: str | None) -> str:
    return (statement or "").partition("\n")[0].strip("( ")
