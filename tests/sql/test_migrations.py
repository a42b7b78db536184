"""The migrations make what is declared, once, whoever else is at it."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateIndex, CreateTable

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql import migrations, schema
from flask_idempotency.stores.sql.migrations import LATEST, steps, upgrade, version
from flask_idempotency.stores.sql.migrations.steps import STEPS
from flask_idempotency.stores.sql.structure import lacks
from tests.sql.catalogue import Catalogue, catalogue
from tests.sql.conftest import MakeEngine, on_postgresql, on_sqlite
from tests.tooling.processes import eventually

CROWD = 8


def found(engine: Engine) -> Catalogue:
    with engine.connect() as connection:
        return catalogue(connection)


def reached(engine: Engine) -> int:
    with engine.connect() as connection:
        return version(connection)


def last_fence(engine: Engine) -> int:
    place = "idempotency_fences" if engine.dialect.name == "postgresql" else "idempotency_facts WHERE name = 'fence'"
    column = "last_value" if engine.dialect.name == "postgresql" else "value"
    with engine.connect() as connection:
        fence: int = connection.scalar(text(f"SELECT {column} FROM {place}"))  # noqa: S608 - our own two words
        return fence


def set_fence(engine: Engine, fence: int) -> None:
    statement = (
        "SELECT setval('idempotency_fences', :fence)"
        if engine.dialect.name == "postgresql"
        else "UPDATE idempotency_facts SET value = :fence WHERE name = 'fence'"
    )
    with engine.begin() as connection:
        connection.execute(text(statement), {"fence": fence})


def execute(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement))


def test_all_migrations_make_what_is_declared(engine: Engine) -> None:
    """
    Columns, types, keys, checks, predicates, comments, storage and facts: whoever takes the tables from Alembic has
    the same as whoever runs our migrations.
    """
    upgrade(engine)
    migrated = found(engine)
    schema.metadata.drop_all(engine)

    schema.metadata.create_all(engine)

    assert found(engine) == migrated


def test_the_declaration_names_the_migration_that_makes_it() -> None:
    """
    Numbers rise by one, and `create_all` writes the last of them into the facts.
    """
    assert ([*range(1, schema.VERSION + 1)], schema.VERSION) == ([step.number for step in STEPS], LATEST)


def test_migrations_do_not_follow_the_declaration() -> None:
    """
    A frozen step that read schema.py would make other tables tomorrow.
    """
    sources = [inspect.getsource(module) for name, module in vars(migrations).items() if name.startswith("m0")]

    assert [False] * len(STEPS) == [".schema" in source or "import schema" in source for source in sources]


@pytest.mark.parametrize("isolation", (None, "AUTOCOMMIT", "SERIALIZABLE"))
def test_an_engine_is_upgraded_at_once(make_engine: MakeEngine, isolation: str | None) -> None:
    """
    Whatever it does about transactions, what was done is committed and nothing is left open.
    """
    engine = make_engine(**({"isolation_level": isolation} if isolation else {}))

    done = upgrade(engine)

    assert (len(STEPS), [], LATEST) == (len(done), upgrade(engine), reached(make_engine()))


def test_a_transaction_of_the_callers_stays_the_callers(engine: Engine) -> None:
    """
    Alembic commits the tables together with its own note of them, or not at all.
    """
    with engine.connect() as connection, connection.begin() as transaction:
        upgrade(connection)
        transaction.rollback()

    assert 0 == reached(engine)

    with engine.begin() as connection:
        upgrade(connection)

    assert LATEST == reached(engine)


@pytest.mark.parametrize("isolation", (None, "AUTOCOMMIT"))
def test_a_connection_without_a_transaction_gets_one(make_engine: MakeEngine, isolation: str | None) -> None:
    """
    What was said to be done is not rolled back when the connection is put away.
    """
    engine = make_engine(**({"isolation_level": isolation} if isolation else {}))
    with engine.connect() as connection:
        upgrade(connection)

    assert LATEST == reached(engine)


@pytest.mark.parametrize("isolation", (None, "AUTOCOMMIT"))
def test_a_step_that_fails_leaves_nothing(
    make_engine: MakeEngine, isolation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Half a schema is never committed, and the connection serves whoever is next.
    """
    engine = make_engine(pool_size=1, max_overflow=0, **({"isolation_level": isolation} if isolation else {}))
    with monkeypatch.context() as patch:
        statements = (*STEPS[-1].statements[engine.dialect.name], "SELECT nothing FROM nowhere")
        patch.setattr(steps, "STEPS", (replace(STEPS[-1], statements={engine.dialect.name: statements}),))
        with pytest.raises(Exception, match="nowhere"), engine.connect() as connection:
            upgrade(connection)

    assert (0, True) == (reached(engine), bool(upgrade(engine)))


def test_tables_that_others_made_are_taken_over(engine: Engine) -> None:
    """
    Alembic's autogenerate makes tables and indexes, and neither facts nor sequences: the rest is added.
    """
    upgrade(engine)
    migrated = found(engine)
    schema.metadata.drop_all(engine)
    with engine.begin() as connection:
        for table in schema.metadata.sorted_tables:
            connection.execute(CreateTable(table))
            for index in table.indexes:
                connection.execute(CreateIndex(index))

    done = upgrade(engine)

    assert (migrated, len(STEPS)) == (found(engine), len(done))


@pytest.mark.parametrize(
    "loss",
    ("DROP TABLE idempotency_records", "DROP TABLE idempotency_facts", "DROP INDEX idempotency_stale"),
)
def test_what_was_dropped_is_made_again(engine: Engine, loss: str) -> None:
    """
    Although the facts say that this database is up to date.
    """
    upgrade(engine)
    migrated = found(engine)
    execute(engine, loss)

    upgrade(engine)

    assert migrated == found(engine)


def test_fences_rise_over_tables_that_were_dropped(engine: Engine) -> None:
    """
    A fence that restarted from one would let a worker of long ago overwrite everybody.
    """
    upgrade(engine)
    before = last_fence(engine)
    schema.metadata.drop_all(engine)

    upgrade(engine)

    assert before < last_fence(engine)


@pytest.mark.parametrize("ahead", (True, False))
def test_fences_are_seeded_only_upwards(engine: Engine, ahead: bool) -> None:
    """
    One that is ahead of the clock stays; one that counts from one is lifted.
    """
    upgrade(engine)
    fence = 10**17 if ahead else 1
    set_fence(engine, fence)
    execute(engine, "DROP INDEX idempotency_expiry")

    upgrade(engine)

    assert ahead == (last_fence(engine) == fence)


def test_an_unseeded_fence_is_found_and_lifted(engine: Engine) -> None:
    """
    A sequence that somebody made by hand looks complete and counts from one.
    """
    upgrade(engine)
    set_fence(engine, 1)
    with engine.connect() as connection:
        assert lacks(connection).seed

    upgrade(engine)

    with engine.connect() as connection:
        assert not lacks(connection)


def test_a_newer_schema_is_left_alone(engine: Engine) -> None:
    """
    While a release is rolled back, the old one must not touch what the new one made.
    """
    upgrade(engine)
    execute(engine, "UPDATE idempotency_facts SET value = value + 1 WHERE name = 'schema_version'")
    execute(engine, "DROP INDEX idempotency_stale")
    before = found(engine)

    assert ([], before) == (upgrade(engine), found(engine))


def test_another_database_is_refused_by_name(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Before anything is written to it.
    """
    monkeypatch.setattr(engine.dialect, "name", "oracle")

    with pytest.raises(ConfigurationError, match="no schema for oracle in this release"):
        upgrade(engine)


def test_a_crowd_upgrades_once(make_engine: MakeEngine) -> None:
    """
    Every container of a deployment runs it at start: one works, the others find it done.
    """
    barrier = Barrier(CROWD)

    def run(engine: Engine) -> list[str]:
        with engine.connect():
            barrier.wait(30)
        return upgrade(engine)

    with ThreadPoolExecutor(CROWD) as threads:
        done = list(threads.map(run, [make_engine() for _ in range(CROWD)]))

    assert [[]] * (CROWD - 1) == sorted(done)[:-1]


@on_postgresql
def test_the_second_waits_before_its_first_look(make_engine: MakeEngine) -> None:
    """
    What the first has not committed yet is invisible: without the wait, both would create the same table.
    """
    with ThreadPoolExecutor(1) as threads, make_engine().connect() as first, first.begin() as transaction:
        upgrade(first)
        second = threads.submit(upgrade, make_engine())
        waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        assert eventually(lambda: first.scalar(waiting) == 1)
        transaction.commit()

        assert [] == second.result(30)


@on_sqlite
def test_the_second_asks_for_the_lock_before_its_first_look(make_engine: MakeEngine) -> None:
    """
    A transaction that had read first would fail at its first write, however patient it is.
    """
    with make_engine().connect() as first, first.begin():
        upgrade(first)
        with pytest.raises(OperationalError, match="locked") as refused:
            upgrade(make_engine(connect_args={"timeout": 0}))

    assert "BEGIN IMMEDIATE" == refused.value.statement


@on_postgresql
def test_no_lock_outlives_an_upgrade(engine: Engine) -> None:
    """
    Behind a pooler it would be somebody else's, and the next upgrade would wait for ever.
    """
    with engine.connect() as connection:
        upgrade(connection)

        assert 0 == connection.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"))
