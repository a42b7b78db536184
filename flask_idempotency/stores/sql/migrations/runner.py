"""Which steps there are, which of them a database has behind it, and taking the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.errors import is_lock_timeout
from flask_idempotency.stores.sql.migrations import m0001_tables
from flask_idempotency.stores.sql.migrations.step import Step

LOCK_MS: Final = 2000
"""Whatever claims come meanwhile queue behind a statement that waits for the whole table, and give up after five seconds:
well before that it leaves the queue."""

FOR_EVER: Final = 0


@contextmanager
def lock_timeout(connection: Connection, milliseconds: int) -> Iterator[None]:
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
def refuse_when_locked(connection: Connection) -> Iterator[None]:
    """In here a statement that does not get its lock in time raises `StoreUnavailable`."""
    try:
        with lock_timeout(connection, LOCK_MS):
            yield
    except DBAPIError as error:
        if connection.dialect.name != "postgresql" or not is_lock_timeout(error):
            raise
        raise StoreUnavailable(
            f"The tables are in use: for {LOCK_MS / 1000:g} seconds a transaction of somebody else's, such as a long report, "
            f"a VACUUM or a forgotten session, has held a lock that this needs: {_first_line(error.statement)}. Nothing "
            "was changed. Wait until it is over, or end it (pg_locks and pg_stat_activity show it), and run the upgrade "
            "again, which is safe at any time."
        ) from error


def _first_line(statement: str | None) -> str:
    return (statement or "").partition("\n")[0].strip("( ")


# "idempote" in ASCII: the whole application shares one space of advisory locks.
_MIGRATION_LOCK: Final = 0x6964656D706F7465


@contextmanager
def migration_lock(connection: Connection) -> Iterator[None]:
    """Inside a transaction that no other upgrade of this database is in.

    One that the caller has begun is left for the caller to commit or roll back, and any other is committed here.
    Nothing outlives the transaction: behind a pooler, a lock of the session's would stay with somebody else's.
    """
    with nullcontext() if connection.in_transaction() else connection.begin():
        ours = _begin(connection)
        try:
            if connection.dialect.name == "postgresql":
                with lock_timeout(connection, FOR_EVER):
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


STEPS: Final = (m0001_tables.STEP,)
LATEST: Final = STEPS[-1].number

_READ_VERSION: Final = text("SELECT value FROM idempotency_meta WHERE name = 'schema_version'")
_WRITE_VERSION: Final = text(
    "INSERT INTO idempotency_meta (name, value) VALUES ('schema_version', :version)"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE idempotency_meta.value < excluded.value"
)


def upgrade(bind: Engine | Connection) -> list[str]:
    """Bring the tables to this release's schema, and return what was done, one line for each step.

    Safe to run again and in several processes at once: one works, the others wait and find nothing left to do. On an
    engine it happens in a transaction of its own; on a connection, such as Alembic's `op.get_bind()`, in the one that
    is under way, for its owner to commit. A schema newer than this release is left alone.

    Raises `StoreUnavailable` when somebody else's transaction keeps a lock for long that this needs.
    """
    if isinstance(bind, Engine):
        return _upgrade_engine(bind)
    return _upgrade(bind)


def version(connection: Connection) -> int:
    """The last step this database has behind it; 0 before the first, or when other tools made the tables."""
    if not inspect(connection).has_table("idempotency_meta"):
        return 0
    reached = connection.scalar(_READ_VERSION)
    return reached if isinstance(reached, int) else 0


def _upgrade_engine(engine: Engine) -> list[str]:
    _refuse_others(engine.dialect.name)
    with engine.connect() as connection:
        # Where nothing is left to do, as in most deployments, it takes no lock to see that: steps only add.
        if not _steps_for(connection):
            return []
    with engine.connect() as connection:
        # What the application set up as it connected may have begun a transaction, in which no mode can be changed.
        connection.connection.commit()
        return _upgrade(connection.execution_options(isolation_level="AUTOCOMMIT"))


def _refuse_others(dialect: str) -> None:
    if dialect not in STEPS[0].statements:
        raise ConfigurationError(
            f"There is no schema for {dialect} in this release: use PostgreSQL or SQLite for IDEMPOTENCY_STORE."
        )


def _upgrade(connection: Connection) -> list[str]:
    _refuse_others(connection.dialect.name)
    with migration_lock(connection), refuse_when_locked(connection):
        done = [step.run(connection) for step in _steps_for(connection)]
        if done:
            connection.execute(_WRITE_VERSION, {"version": LATEST})
    return done


def _steps_for(connection: Connection) -> list[Step]:
    reached = version(connection)
    if reached <= LATEST and schema.lacks(connection):
        # Something was dropped since. Every step again: each adds only what is not there.
        reached = 0
    return [step for step in STEPS if step.number > reached]
