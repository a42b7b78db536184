"""The migrations make what is declared, from wherever a database stands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateIndex, CreateTable

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql import migrations, schema
from flask_idempotency.stores.sql.identity import identity
from flask_idempotency.stores.sql.migrations import LATEST, upgrade
from flask_idempotency.stores.sql.migrations.runner import STEPS
from flask_idempotency.stores.sql.schema import FENCES, lacks
from tests.stores.sql.catalogue import found
from tests.stores.sql.conftest import MakeEngine, on_postgresql


def last_fence(engine: Engine) -> int:
    place = FENCES if engine.dialect.name == "postgresql" else "idempotency_meta WHERE name = 'fence'"
    column = "last_value" if engine.dialect.name == "postgresql" else "value"
    with engine.connect() as connection:
        fence: int = connection.scalar(text(f"SELECT {column} FROM {place}"))  # noqa: S608 - our own two words
        return fence


def set_fence(engine: Engine, fence: int) -> None:
    statement = (
        f"SELECT setval('{FENCES}', :fence)"
        if engine.dialect.name == "postgresql"
        else "UPDATE idempotency_meta SET value = :fence WHERE name = 'fence'"
    )
    with engine.begin() as connection:
        connection.execute(text(statement), {"fence": fence})


def number(engine: Engine) -> int:
    with engine.connect() as connection:
        return int.from_bytes(identity(connection), "big")


def documented_update() -> str:
    page = Path(__file__).parents[3] / "docs" / "sql.md"
    (line,) = [line for line in page.read_text("utf-8").splitlines() if line.startswith("UPDATE idempotency_meta")]
    return line


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
    """Numbers rise by one, and `create_all` writes the last of them into the facts."""
    assert ([*range(1, schema.VERSION + 1)], schema.VERSION) == ([step.number for step in STEPS], LATEST)


def test_migrations_do_not_follow_the_declaration() -> None:
    """A frozen step that read schema.py would make other tables tomorrow."""
    sources = [inspect.getsource(module) for name, module in vars(migrations).items() if name.startswith("m0")]

    assert [False] * len(STEPS) == [".schema" in source or "import schema" in source for source in sources]


def test_tables_that_others_made_are_taken_over(engine: Engine) -> None:
    """Alembic's autogenerate makes tables and indexes, and no facts: the rest is added."""
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
    (*(f"DROP TABLE {table}" for table in schema.metadata.tables), "DROP INDEX idempotency_expired_leases"),
)
def test_what_was_dropped_is_made_again(engine: Engine, loss: str) -> None:
    """Although the facts say that this database is up to date."""
    upgrade(engine)
    migrated = found(engine)
    execute(engine, loss)

    upgrade(engine)

    assert migrated == found(engine)


def test_fences_rise_over_tables_that_were_dropped(engine: Engine) -> None:
    """A fence that restarted from one would let a worker of long ago overwrite everybody."""
    upgrade(engine)
    before = last_fence(engine)
    schema.metadata.drop_all(engine)

    upgrade(engine)

    assert before < last_fence(engine)


@on_postgresql
def test_a_sequence_that_was_dropped_is_made_again(engine: Engine) -> None:
    """Its table is still there."""
    upgrade(engine)
    migrated = found(engine)
    execute(engine, f"DROP SEQUENCE {FENCES} CASCADE")

    upgrade(engine)

    assert migrated == found(engine)


@pytest.mark.parametrize("ahead", (True, False))
def test_fences_are_seeded_only_upwards(engine: Engine, ahead: bool) -> None:
    """One that is ahead of the clock stays; one that counts from one is lifted."""
    upgrade(engine)
    fence = 10**17 if ahead else 1
    set_fence(engine, fence)
    execute(engine, "DROP INDEX idempotency_expiry")

    upgrade(engine)

    assert ahead == (last_fence(engine) == fence)


@on_postgresql
def test_a_sequence_that_hands_out_numbers_in_advance_is_mended(engine: Engine) -> None:
    """A later claim would get a lower fence from another session's store of them."""
    upgrade(engine)
    execute(engine, f"ALTER SEQUENCE {FENCES} CACHE 20")
    execute(engine, "DROP INDEX idempotency_expiry")

    upgrade(engine)

    ((*_, cache, _),) = found(engine)["sequences"]
    assert 1 == cache


@on_postgresql
def test_no_fence_is_granted_while_fences_are_lifted(make_engine: MakeEngine) -> None:
    """One that was granted between the look and the leap could be granted again."""
    engine, other = make_engine(), make_engine(connect_args={"options": "-c lock_timeout=1ms"})
    upgrade(engine)
    set_fence(engine, 1)
    with engine.connect() as upgrading, upgrading.begin():
        upgrade(upgrading)

        with other.connect() as claiming, pytest.raises(OperationalError, match="lock timeout"):
            claiming.scalar(text(f"SELECT nextval('{FENCES}')"))


@on_postgresql
def test_an_unseeded_fence_is_found_and_lifted(engine: Engine) -> None:
    """A sequence that somebody made by hand looks complete and counts from one."""
    upgrade(engine)
    set_fence(engine, 1)
    with engine.connect() as connection:
        assert lacks(connection).seed

    upgrade(engine)

    with engine.connect() as connection:
        assert not lacks(connection)


@pytest.mark.parametrize("make", (upgrade, schema.metadata.create_all))
def test_every_database_gets_a_number_of_its_own(engine: Engine, make: Callable[[Engine], object]) -> None:
    """
    By whichever way it is made: sixty-three random bits, so no two are alike. Eight of them say that they vary, that
    none is negative, and that the high bits are used.
    """
    numbers = set()
    for _ in range(8):
        make(engine)
        numbers.add(number(engine))
        schema.metadata.drop_all(engine)

    assert 8 == len(numbers)
    assert 2**55 < max(numbers) < 2**63


def test_a_databases_number_is_never_changed(engine: Engine) -> None:
    """Not by an upgrade that has other things to mend either: what was cached under the old one would be lost."""
    upgrade(engine)
    before = number(engine)
    execute(engine, "DROP INDEX idempotency_expired_leases")

    upgrade(engine)

    assert before == number(engine)


def test_a_copy_may_be_given_another_number(engine: Engine) -> None:
    """By the statement of docs/sql.md, which shows PostgreSQL's way and, behind it, SQLite's."""
    upgrade(engine)
    before = number(engine)
    statement, _, sqlite = documented_update().partition(";  -- on SQLite: value = ")
    if engine.dialect.name == "sqlite":
        statement = statement.replace("(random() * 9e15)::bigint", sqlite)

    execute(engine, statement.replace(":", "\\:"))

    assert before != number(engine)


def test_tables_that_have_no_number_get_one(engine: Engine) -> None:
    """Somebody deleted it, or copied the records alone."""
    upgrade(engine)
    execute(engine, "DELETE FROM idempotency_meta WHERE name = 'store'")
    with engine.connect() as connection:
        assert lacks(connection).store

    upgrade(engine)

    assert number(engine) >= 0


def test_a_newer_schema_is_left_alone(engine: Engine) -> None:
    """While a release is rolled back, the old one must not touch what the new one made."""
    upgrade(engine)
    execute(engine, "UPDATE idempotency_meta SET value = value + 1 WHERE name = 'schema_version'")
    execute(engine, "DROP INDEX idempotency_expired_leases")
    before = found(engine)

    assert ([], before) == (upgrade(engine), found(engine))


def test_another_database_is_refused_by_name(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written to it."""
    monkeypatch.setattr(engine.dialect, "name", "oracle")

    with pytest.raises(ConfigurationError, match="no schema for oracle in this release"):
        upgrade(engine)
