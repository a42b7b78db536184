"""Upgrade a database: find out what it lacks, and add that under a lock, one upgrade at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.dialects import MYSQL, SQLITE, SUPPORTED, kind_of
from flask_idempotency.stores.sql.errors import is_lock_timeout
from flask_idempotency.stores.sql.identity import raise_sequence, write_version
from flask_idempotency.stores.sql.migrations.additions import add_facts, add_parts, comment
from flask_idempotency.stores.sql.mysql import IN_CLUSTER, has_sequences, is_on
from flask_idempotency.stores.sql.naming import find, named, schema_of

LOCK_MS: Final = 2000
"""How long an upgrade waits for a table. Claims queue behind it and give up after five seconds, so it gives up well before."""

NO_LOCK_TIMEOUT: Final = 0


@contextmanager
def lock_timeout(connection: Connection, milliseconds: int) -> Iterator[None]:
    """Set how long this transaction waits for each lock, and restore the setting at the end.

    An error ends the transaction, and the setting with it. SQLite has one lock, which `migration_lock` takes first. On MySQL
    it is a setting of the session, in whole seconds, and an error leaves it.
    """
    if kind_of(connection.dialect.name) == MYSQL and milliseconds:
        connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {milliseconds // 1000}")
        try:
            yield
        finally:
            connection.exec_driver_sql("SET SESSION lock_wait_timeout = DEFAULT")
        return
    if connection.dialect.name != "postgresql":
        yield
        return
    before = connection.exec_driver_sql("SELECT current_setting('lock_timeout')").scalar_one()
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {milliseconds}")
    yield
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{before}'")


@contextmanager
def refuse_when_locked(connection: Connection) -> Iterator[None]:
    """Raise `StoreUnavailable` if a statement inside does not get its lock in time."""
    try:
        with lock_timeout(connection, LOCK_MS):
            yield
    except DBAPIError as error:
        if connection.dialect.name == SQLITE or not is_lock_timeout(error):
            raise
        first_line = (error.statement or "").partition("\n")[0].strip("( ")
        raise StoreUnavailable(
            f"The tables are in use: for {LOCK_MS / 1000:g} seconds another transaction, such as a long report, a VACUUM or "
            f"a forgotten session, has held a lock that this needs: {first_line}. Nothing was changed. "
            "Wait until that transaction ends, or end it (pg_locks and pg_stat_activity show it, or SHOW PROCESSLIST on "
            "MariaDB and MySQL). Then run the upgrade "
            "again, which is safe at any time."
        ) from error


@contextmanager
def beside_the_tables(connection: Connection) -> Iterator[None]:
    """Create new tables in the schema of those that are there: it need not be the first of the search path.

    The store names one schema in all its statements. On MySQL it is the database of the connection.
    """
    is_mysql = kind_of(connection.dialect.name) == MYSQL
    found = None if is_mysql else find(connection, schema.metadata.tables)[1]
    if found is None:
        yield
        return
    before = connection.exec_driver_sql("SELECT current_setting('search_path')").scalar_one()
    home = connection.dialect.identifier_preparer.quote_identifier(found)
    connection.execute(_SET_PATH, {"path": f"{home}, {before}" if before else home})
    yield
    connection.execute(_SET_PATH, {"path": before})


_SET_PATH: Final = text("SELECT set_config('search_path', :path, true)")


# "idempote" in ASCII: the whole application shares one space of advisory locks.
_MIGRATION_LOCK: Final = 0x6964656D706F7465
# All databases of the server share one space of these names.
_MYSQL_LOCK: Final = "sha1(concat('flask-idempotency upgrade of ', database()))"
_LONGEST_UPGRADE: Final = 86_400


@contextmanager
def migration_lock(connection: Connection) -> Iterator[None]:
    """Open a transaction and lock out every other upgrade of this database. Commit it at the end.

    A transaction that the caller has begun is left for the caller to commit or roll back. The lock ends with the
    transaction: behind a pooler, a session's lock would stay with another client. On MySQL each change of a table commits,
    also what the caller has begun, so there a lock of the session is held.
    """
    if kind_of(connection.dialect.name) == MYSQL:
        connection.exec_driver_sql(f"SELECT GET_LOCK({_MYSQL_LOCK}, {_LONGEST_UPGRADE})")
        try:
            yield
        finally:
            connection.exec_driver_sql(f"SELECT RELEASE_LOCK({_MYSQL_LOCK})")
        return
    with nullcontext() if connection.in_transaction() else connection.begin():
        ours = _begin(connection)
        try:
            if connection.dialect.name == "postgresql":
                with lock_timeout(connection, NO_LOCK_TIMEOUT):
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
    """Begin a transaction if none is open. Return True if SQLAlchemy does not know of it, and so does not commit it."""
    driver: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        if driver.in_transaction:
            return False
        # IMMEDIATE: a transaction that reads first cannot get the lock if another one wrote in between.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        return driver.isolation_level is None
    if driver.autocommit is True:
        # After the wait for the lock this transaction must see what the other upgrade did.
        connection.exec_driver_sql("BEGIN ISOLATION LEVEL READ COMMITTED")
        return True
    return False


STEPS: Final = (
    "idempotency_records, _meta, _tenants, _data_keys, _quota, _tasks, _fence_numbers, and the store's number",
    "idempotency_outbox",
    "idempotency_steps, and the columns steps and step_write of idempotency_records",
    "idempotency_activity, _activity_tokens, _observations, _audit",
    "namespaces of messages in idempotency_outbox",
    "response_expires_at in idempotency_records",
)
"""What each version of the schema added, in a few words for the operator. A release that changes the tables adds a line.

`add_parts` compares names. A release that changes what has a name already, such as a type, needs a statement for it beside.
"""

LATEST: Final = len(STEPS)
OUTBOX_STEPS: Final = (2, 5)

_READ_VERSION: Final = "SELECT value FROM {schema}idempotency_meta WHERE name = 'schema_version'"


def upgrade(bind: Engine | Connection) -> list[str]:
    """Upgrade the tables to this release's schema, and return one line for each step that ran.

    You can run it again, and in several processes at the same time: one works and the others wait. With an engine it runs
    in a new transaction. With a connection, such as Alembic's `op.get_bind()`, it runs in the current transaction, and you
    commit. It leaves a schema alone that is newer than this release.

    Raises `StoreUnavailable` if another transaction holds a lock that this needs for longer than two seconds.
    """
    _check_dialect(bind.dialect.name)
    if isinstance(bind, Connection):
        return _upgrade(bind)
    with bind.connect() as connection:
        # Most deployments change no table. Steps only add, so it takes no lock to see that.
        if not (_steps_for(connection) or lacks_sequence(connection)):
            return []
    with bind.connect() as connection:
        # A connect listener of the application may have begun a transaction, and there the mode cannot change.
        connection.connection.commit()
        return _upgrade(connection.execution_options(isolation_level="AUTOCOMMIT"))


def upgrade_outbox(engine: Engine) -> list[str]:
    """Create the table of the outbox in a database that holds no records, or what it lacks. Return a line for each
    step that ran.

    Raises `StoreUnavailable` if another transaction holds a lock that this needs for longer than two seconds.
    """
    _check_dialect(engine.dialect.name)
    with engine.connect() as connection:
        if not schema.lacks(connection, (schema.outbox.name,)):
            return []
    with engine.connect() as connection:
        connection.connection.commit()
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        with migration_lock(connection), refuse_when_locked(connection), beside_the_tables(connection):
            if not schema.lacks(connection, (schema.outbox.name,)):
                return []
            add_parts(connection, [schema.outbox])
            comment(connection, [schema.outbox])
            return [_line(number) for number in OUTBOX_STEPS]


def version(connection: Connection) -> int:
    """Return the last step that ran in this database. It is 0 before the first, or if other tools created the tables."""
    if not inspect(connection).has_table("idempotency_meta", schema=schema_of(connection)):
        return 0
    reached = connection.scalar(named(connection, _READ_VERSION))
    return reached if isinstance(reached, int) else 0


def _check_dialect(dialect: str) -> None:
    if kind_of(dialect) not in SUPPORTED:
        raise ConfigurationError(
            f"There is no schema for {dialect} in this release: use PostgreSQL, MariaDB, MySQL or SQLite for "
            "IDEMPOTENCY_STORE."
        )


def _upgrade(connection: Connection) -> list[str]:
    with migration_lock(connection), refuse_when_locked(connection), beside_the_tables(connection):
        done = _steps_for(connection)
        if done:
            tables = schema.metadata.tables.values()
            add_parts(connection, tables)
            comment(connection, tables)
            add_facts(connection)
            write_version(connection)
        if lacks_sequence(connection):
            raise_sequence(connection)
            return done or [f"created the sequence {schema.FENCES}"]
    return done


def lacks_sequence(connection: Connection) -> bool:
    """Return True on a MariaDB without the sequence of fences, such as one that has left its Galera cluster."""
    if kind_of(connection.dialect.name) != MYSQL:
        return False
    number = str(connection.exec_driver_sql("SELECT version()").scalar_one())
    if not has_sequences(number, in_cluster=is_on(connection.exec_driver_sql(IN_CLUSTER).first())):
        return False
    # By itself, SQLAlchemy looks where this engine's first connection was, and USE may have changed the database since.
    database = connection.exec_driver_sql("SELECT database()").scalar()
    return not inspect(connection).has_sequence(schema.FENCES, database)


def _steps_for(connection: Connection) -> list[str]:
    reached = version(connection)
    if reached <= LATEST and schema.lacks(connection, schema.metadata.tables):
        # Something was dropped since.
        reached = 0
    return [_line(number) for number in range(reached + 1, LATEST + 1)]


def _line(number: int) -> str:
    return f"{number:04}: {STEPS[number - 1]}"
