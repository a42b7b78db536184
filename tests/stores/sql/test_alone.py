"""An upgrade is one transaction, and one at a time."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import OperationalError

from flask_idempotency.stores.sql.migrations import LATEST, runner, upgrade
from flask_idempotency.stores.sql.migrations.runner import STEPS
from flask_idempotency.stores.sql.schema import lacks, metadata
from tests.stores.sql.catalogue import reached
from tests.stores.sql.conftest import MakeEngine, on_postgresql, on_sqlite
from tests.tooling.processes import eventually

CROWD = 8


@pytest.mark.parametrize("isolation", (None, "AUTOCOMMIT", "SERIALIZABLE"))
def test_an_engine_is_upgraded_at_once(make_engine: MakeEngine, isolation: str | None) -> None:
    """Whatever it does about transactions, what was done is committed and nothing is left open."""
    engine = make_engine(**({"isolation_level": isolation} if isolation else {}))

    done = upgrade(engine)

    assert (len(STEPS), [], LATEST) == (len(done), upgrade(engine), reached(make_engine()))


def test_a_transaction_of_the_callers_stays_the_callers(engine: Engine) -> None:
    """Alembic commits the tables together with its own note of them, or not at all."""
    with engine.connect() as connection, connection.begin() as transaction:
        upgrade(connection)
        transaction.rollback()

    assert 0 == reached(engine)

    with engine.begin() as connection:
        upgrade(connection)

    assert LATEST == reached(engine)


@pytest.mark.parametrize("isolation", (None, "AUTOCOMMIT"))
def test_a_connection_without_a_transaction_gets_one(make_engine: MakeEngine, isolation: str | None) -> None:
    """What was said to be done is not rolled back when the connection is put away."""
    engine = make_engine(**({"isolation_level": isolation} if isolation else {}))
    with engine.connect() as connection:
        upgrade(connection)

    assert LATEST == reached(engine)


def test_a_connection_that_commits_every_statement_gets_one_too(make_engine: MakeEngine) -> None:
    """Although SQLAlchemy says that it is in a transaction since its first statement."""
    engine = make_engine(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        upgrade(connection)

    assert LATEST == reached(engine)


@on_sqlite
def test_a_transaction_that_an_application_begins_by_its_own_words_is_joined(engine: Engine) -> None:
    """As SQLAlchemy's documentation recommends for SQLite: pysqlite begins nothing, an event does."""

    @event.listens_for(engine, "connect")
    def begin_nothing(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None

    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))

    with engine.connect() as connection, connection.begin() as transaction:
        upgrade(connection)
        transaction.rollback()

    assert 0 == reached(engine)


@pytest.mark.parametrize("isolation", (None, "AUTOCOMMIT"))
def test_a_step_that_fails_leaves_nothing(
    make_engine: MakeEngine, isolation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a schema is never committed, and the connection serves whoever is next."""
    engine = make_engine(pool_size=1, max_overflow=0, **({"isolation_level": isolation} if isolation else {}))
    with monkeypatch.context() as patch:
        statements = (*STEPS[-1].statements[engine.dialect.name], "SELECT nothing FROM nowhere")
        patch.setattr(runner, "STEPS", (replace(STEPS[-1], statements={engine.dialect.name: statements}),))
        with pytest.raises(Exception, match="nowhere"), engine.connect() as connection:
            upgrade(connection)

    with engine.connect() as connection:
        assert len(metadata.tables) == len(lacks(connection).tables)
    assert len(STEPS) == len(upgrade(engine))


def test_a_crowd_upgrades_once(make_engine: MakeEngine) -> None:
    """Every container of a deployment runs it at start: one works, the others find it done."""
    barrier = Barrier(CROWD)

    def run(engine: Engine) -> list[str]:
        with engine.connect():
            barrier.wait(60)
        return upgrade(engine)

    with ThreadPoolExecutor(CROWD) as threads:
        done = list(threads.map(run, [make_engine() for _ in range(CROWD)]))

    assert [[]] * (CROWD - 1) == sorted(done)[:-1]


@on_postgresql
@pytest.mark.parametrize("isolation", ("read\\ committed", "serializable"))
def test_the_second_waits_before_its_first_look(make_engine: MakeEngine, isolation: str) -> None:
    """
    What the first has not committed yet is invisible: without the wait, both would create the same table. And what it
    has is seen after the wait, also where transactions otherwise see what was there when they began.
    """
    strict = make_engine(connect_args={"options": f"-c default_transaction_isolation={isolation}"})
    with ThreadPoolExecutor(1) as threads, make_engine().connect() as first, first.begin() as transaction:
        upgrade(first)
        second = threads.submit(upgrade, strict)
        waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        assert eventually(lambda: first.scalar(waiting) == 1)
        transaction.commit()

        assert [] == second.result(60)


@on_sqlite
def test_the_second_asks_for_the_lock_before_its_first_look(make_engine: MakeEngine) -> None:
    """A transaction that had read first would fail at its first write, however patient it is."""
    with make_engine().connect() as first, first.begin():
        upgrade(first)
        with pytest.raises(OperationalError, match="locked") as refused:
            upgrade(make_engine(connect_args={"timeout": 0}))

    assert "BEGIN IMMEDIATE" == refused.value.statement


@on_postgresql
def test_no_lock_outlives_an_upgrade(engine: Engine) -> None:
    """Behind a pooler it would be somebody else's, and the next upgrade would wait for ever."""
    with engine.connect() as connection:
        upgrade(connection)

        assert 0 == connection.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"))
