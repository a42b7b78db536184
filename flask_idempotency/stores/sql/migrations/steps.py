"""Which steps there are, which of them a database has behind it, and taking the rest."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, Engine, inspect, text

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql import structure
from flask_idempotency.stores.sql.migrations import m0001_tables
from flask_idempotency.stores.sql.migrations.alone import alone
from flask_idempotency.stores.sql.migrations.patience import gives_way
from flask_idempotency.stores.sql.migrations.step import Step

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
    with alone(connection), gives_way(connection):
        done = [step.run(connection) for step in _steps_for(connection)]
        if done:
            connection.execute(_WRITE_VERSION, {"version": LATEST})
    return done


def _steps_for(connection: Connection) -> list[Step]:
    reached = version(connection)
    if reached <= LATEST and structure.lacks(connection):
        # Something was dropped since. Every step again: each adds only what is not there.
        reached = 0
    return [step for step in STEPS if step.number > reached]
