"""One upgrade at a time, in one transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.stores.sql.migrations.patience import FOR_EVER, waiting

# "idempote" in ASCII: the whole application shares one space of advisory locks.
_MIGRATION_LOCK: Final = 0x6964656D706F7465


@contextmanager
def alone(connection: Connection) -> Iterator[None]:
    """Inside a transaction that no other upgrade of this database is in.

    One that the caller has begun is left for the caller to commit or roll back, and any other is committed here.
    Nothing outlives the transaction: behind a pooler, a lock of the session's would stay with somebody else's.
    """
    with nullcontext() if connection.in_transaction() else connection.begin():
        ours = _begin(connection)
        try:
            if connection.dialect.name == "postgresql":
                with waiting(connection, FOR_EVER):
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
            yield
        except BaseException:
            if ours:
                with suppress(SQLAlchemyError):
                    connection.exec_driver_sql("ROLLBACK")
            raise
        if ours:
            connection.exec_driver_sql("COMMIT")


def _begin(connection: Connection) -> bool:
    """Whether this began a transaction that SQLAlchemy does not know of, and so will not commit."""
    driver: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        if driver.in_transaction:
            return False
        # A transaction that reads first is refused the lock at once when somebody else wrote in between.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        return driver.isolation_level is None
    if driver.autocommit is True:
        # Whoever waited for the lock must see what was done meanwhile, whatever the server's default is.
        connection.exec_driver_sql("BEGIN ISOLATION LEVEL READ COMMITTED")
        return True
    return False
