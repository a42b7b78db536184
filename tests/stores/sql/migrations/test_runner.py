"""Migrations create the declared schema in one transaction, one process at a time, with few locks."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import Connection, Engine, event, inspect, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateIndex, CreateTable

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.journal import Entry, JournalWrite, StepState
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnExpiry, Record, State
from flask_idempotency.stores.sql import engines as silence
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.admin.schema_check import SqlSchema
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.identity import identity
from flask_idempotency.stores.sql.migrations import LATEST, runner, upgrade
from flask_idempotency.stores.sql.migrations.runner import STEPS
from flask_idempotency.stores.sql.schema import FENCES, lacks, metadata
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    FINGERPRINT,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    granted,
)
from tests.stores.sql.catalogue import found, reached
from tests.stores.sql.conftest import MakeEngine, on_postgresql, on_sqlite
from tests.stores.sql.migrations import frozen
from tests.tooling.processes import eventually


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
    page = Path(__file__).parents[4] / "docs" / "guides" / "tiered.md"
    (line,) = [line for line in page.read_text("utf-8").splitlines() if line.startswith("UPDATE idempotency_meta")]
    return line


def execute(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement))


@pytest.mark.parametrize("version", range(LATEST))
def test_an_upgrade_of_any_release_makes_the_declared_schema(engine: Engine, version: int) -> None:
    """
    Columns, types, keys, checks, predicates, comments, storage and facts: whoever takes the tables from Alembic has
    the same as whoever runs our migrations.
    """
    if version:
        as_released(engine, version)
    assert [f"{number:04}" for number in range(1, LATEST + 1)] == [line[:4] for line in upgrade(engine)]
    migrated = found(engine)
    schema.metadata.drop_all(engine)

    schema.metadata.create_all(engine)

    assert found(engine) == migrated


def test_the_declaration_names_its_version() -> None:
    """`create_all` writes it into the facts."""
    assert (schema.VERSION, schema.VERSION) == (LATEST, len(frozen.STEPS))


@on_postgresql
def test_an_upgrade_changes_no_comment_that_an_operator_added(engine: Engine) -> None:
    """It sets the declared ones, and locks no table whose comments are right."""
    upgrade(engine)
    execute(engine, "COMMENT ON COLUMN idempotency_records.tenant IS 'see the data catalogue'")
    execute(engine, "COMMENT ON COLUMN idempotency_records.fence IS 'old words'")
    execute(engine, "UPDATE idempotency_meta SET value = 4 WHERE name = 'schema_version'")

    upgrade(engine)

    comments = {each["name"]: each["comment"] for each in inspect(engine).get_columns("idempotency_records")}
    assert (comments["tenant"], comments["fence"]) == (
        "see the data catalogue",
        metadata.tables[schema.records.name].c.fence.comment,
    )


def test_existing_tables_are_adopted(engine: Engine) -> None:
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


def test_records_of_a_schema_without_steps_go_on(engine: Engine) -> None:
    """And processes of the release before insert and release records as they did, beside the upgrade."""
    as_released(engine, 2)
    with engine.connect() as connection:
        columns = ", ".join(column["name"] for column in inspect(connection).get_columns("idempotency_records"))
    assert "step" not in columns
    clock, keys = FrozenClock(), [a_key() for _ in range(3)]
    lapsed, completed, older = keys

    def insert_as_before(key: StorageKey, state: str) -> None:
        """Write the columns that were there."""
        ends, answered = int(clock() * 1_000_000), state == "completed"
        values = {
            "record_id": key.rid,
            "tenant_id": key.tid,
            "token": a_token(),
            "fingerprint": FINGERPRINT,
            "state": state,
            "on_expiry": "takeover",
            **dict.fromkeys(("tenant", "principal", "method", "endpoint"), ""),
            "fence": 7,
            "attempt": 1,
            "in_quota": 0,
            "requested_at": ends - 9,
            "resolver_due_at": 0,
            "lease_expires_at": None if answered else ends,
            **({"completed_at": ends, "expires_at": ends + 10**9, "status": 201} if answered else {}),
            **({"response": PAYLOAD.data, "response_size": PAYLOAD.byte_size} if answered else {}),
        }
        names, given = ", ".join(values), ", ".join(f":{name}" for name in values)
        with engine.begin() as connection:
            connection.execute(text(f"INSERT INTO idempotency_records ({names}) VALUES ({given})"), values)  # noqa: S608

    insert_as_before(lapsed, "processing")
    insert_as_before(completed, "completed")

    assert ["0003", "0004", "0005", "0006"] == [line[:4] for line in upgrade(engine)][-4:]

    insert_as_before(older, "processing")
    with closing(SqlStore(Database(engine), clock=clock)) as store:
        record = store.claim(a_request(completed), token=a_token(), lease=LEASE)
        assert isinstance(record, Record)
        assert record.payload == PAYLOAD
        for key in (lapsed, older):
            grant = granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE))
            assert (2, ()) == (grant.attempt, store.journals.recall(key, grant.token, fence=grant.fence).entries)
            step = Entry(b"s" * 12, "charge", "plain", StepState.FINISHED, in_line=True)
            store.journals.write(
                key, grant.token, fence=grant.fence, writing=JournalWrite(1, [step], steps=1), lease=LEASE
            )
            assert store.release(key, grant.token) is State.PROCESSING


def test_fences_rise_over_tables_that_were_dropped(engine: Engine) -> None:
    """A fence that restarted from one would let a worker of long ago overwrite everybody."""
    upgrade(engine)
    before = last_fence(engine)
    schema.metadata.drop_all(engine)

    upgrade(engine)

    assert before < last_fence(engine)


@on_postgresql
def test_a_dropped_sequence_is_created_again(engine: Engine) -> None:
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
def test_a_sequence_with_a_cache_is_repaired(engine: Engine) -> None:
    """A later claim would get a lower fence from another session's store of them."""
    upgrade(engine)
    execute(engine, f"ALTER SEQUENCE {FENCES} CACHE 20")
    execute(engine, "DROP INDEX idempotency_expiry")

    upgrade(engine)

    (cache,) = [cache for name, *_, cache, _ in found(engine)["sequences"] if name == FENCES]
    assert 1 == cache


@on_postgresql
def test_no_fence_is_granted_while_fences_rise(make_engine: MakeEngine) -> None:
    """One that was granted between the look and the leap could be granted again."""
    engine, other = make_engine(), make_engine(connect_args={"options": "-c lock_timeout=1ms"})
    upgrade(engine)
    set_fence(engine, 1)
    with engine.connect() as upgrading, upgrading.begin():
        upgrade(upgrading)

        with other.connect() as claiming, pytest.raises(OperationalError, match="lock timeout"):
            claiming.scalar(text(f"SELECT nextval('{FENCES}')"))


@on_postgresql
def test_an_unseeded_fence_is_found_and_raised(engine: Engine) -> None:
    """A sequence that somebody made by hand looks complete and counts from one."""
    upgrade(engine)
    set_fence(engine, 1)
    with engine.connect() as connection:
        assert lacks(connection).seed

    upgrade(engine)

    with engine.connect() as connection:
        assert not lacks(connection)


@pytest.mark.parametrize("make", (upgrade, schema.metadata.create_all))
def test_every_database_gets_a_different_number(engine: Engine, make: Callable[[Engine], object]) -> None:
    """
    By whichever way it is made: sixty-three random bits, so no two are alike. Four of them say that they vary, that
    none is negative, and that the high bits are used.
    """
    numbers = set()
    for _ in range(4):
        make(engine)
        numbers.add(number(engine))
        schema.metadata.drop_all(engine)

    assert 4 == len(numbers)
    assert 2**50 < max(numbers) < 2**63


def test_an_upgrade_adds_a_number_and_never_changes_it(engine: Engine) -> None:
    """What was cached under the old one would be lost. Somebody deleted it, or copied the records alone."""
    upgrade(engine)
    before = number(engine)
    execute(engine, "DROP INDEX idempotency_expired_leases")
    upgrade(engine)
    assert before == number(engine)

    execute(engine, "DELETE FROM idempotency_meta WHERE name = 'store'")
    with engine.connect() as connection:
        assert lacks(connection).store
    upgrade(engine)

    assert number(engine) >= 0


def test_a_copy_may_be_given_another_number(engine: Engine) -> None:
    """By the statement of docs/guides/tiered.md, which shows PostgreSQL's way and, behind it, SQLite's."""
    upgrade(engine)
    before = number(engine)
    statement, _, sqlite = documented_update().partition(";  -- on SQLite: value = ")
    if engine.dialect.name == "sqlite":
        statement = statement.replace("(random() * 9e15)::bigint", sqlite)

    execute(engine, statement.replace(":", "\\:"))

    assert before != number(engine)


def test_a_newer_schema_is_left_alone(engine: Engine) -> None:
    """While a release is rolled back, the old one must not touch what the new one made."""
    upgrade(engine)
    execute(engine, "UPDATE idempotency_meta SET value = value + 1 WHERE name = 'schema_version'")
    execute(engine, "DROP INDEX idempotency_expired_leases")
    before = found(engine)

    assert ([], before) == (upgrade(engine), found(engine))


def test_another_database_is_refused_by_name(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.dialect, "name", "oracle")

    with pytest.raises(ConfigurationError, match="no schema for oracle in this release"):
        upgrade(engine)


CROWD = 8


@pytest.mark.parametrize("isolation", (None, "AUTOCOMMIT", "SERIALIZABLE"))
def test_an_upgrade_of_an_engine_commits(make_engine: MakeEngine, isolation: str | None) -> None:
    """Whatever it does about transactions, what was done is committed and nothing is left open."""
    engine = make_engine(**({"isolation_level": isolation} if isolation else {}))

    done = upgrade(engine)

    assert (len(STEPS), [], LATEST) == (len(done), upgrade(engine), reached(make_engine()))


def test_an_upgrade_leaves_the_callers_transaction_open(engine: Engine) -> None:
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
    """SQLAlchemy says that one which commits each statement is in a transaction since its first statement."""
    engine = make_engine(**({"isolation_level": isolation} if isolation else {}))
    with engine.connect() as connection:
        if isolation is not None:
            connection.execute(text("SELECT 1"))
        upgrade(connection)

    assert LATEST == reached(engine)


@on_sqlite
def test_an_upgrade_joins_a_transaction_begun_in_sql(engine: Engine) -> None:
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
def test_an_upgrade_that_fails_leaves_no_change(
    make_engine: MakeEngine, isolation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a schema is never committed, and the connection serves whoever is next."""
    engine = make_engine(pool_size=1, max_overflow=0, **({"isolation_level": isolation} if isolation else {}))
    with monkeypatch.context() as patch:
        fault = Mock(side_effect=lambda connection: connection.exec_driver_sql("SELECT nothing FROM nowhere"))
        patch.setattr(runner, "write_version", fault)
        with pytest.raises(Exception, match="nowhere"), engine.connect() as connection:
            upgrade(connection)

    with engine.connect() as connection:
        assert len(metadata.tables) == len(lacks(connection, metadata.tables).tables)
    assert len(STEPS) == len(upgrade(engine))


@pytest.mark.slow
def test_concurrent_upgrades_run_once(make_engine: MakeEngine) -> None:
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
def test_the_second_upgrade_waits_before_it_reads(make_engine: MakeEngine, isolation: str) -> None:
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
def test_the_second_upgrade_takes_the_lock_before_it_reads(make_engine: MakeEngine) -> None:
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


WAITS_FOR_LONG = text("""
    SELECT count(*) FROM pg_stat_activity
    WHERE wait_event = 'advisory' AND datname = current_database()
      AND clock_timestamp() - query_start > interval '400 milliseconds'""")

OUR_LOCKS = text("""
    SELECT DISTINCT relation::regclass::text, mode FROM pg_locks
    WHERE pid = pg_backend_pid() AND relation::regclass::text LIKE 'idempotency%' AND mode <> 'AccessShareLock'""")

WRITE = "INSERT INTO idempotency_meta VALUES ('x', 1)"
UPDATE = "UPDATE idempotency_records SET attempt = 2"
READ = "SELECT count(*) FROM idempotency_records"
PLAIN_STORAGE = "ALTER TABLE idempotency_records RESET (fillfactor)"
NO_INDEX = "DROP INDEX idempotency_expiry"
NO_NUMBER = "DELETE FROM idempotency_meta WHERE name = 'store'"


def in_a_transaction(engine: Engine) -> list[str]:
    with engine.begin() as connection:
        return upgrade(connection)


def as_released(engine: Engine, version: int) -> None:
    """Make the tables that the release with this version of the schema made."""
    with engine.begin() as connection:
        for step in frozen.STEPS[:version]:
            step.run(connection)
        connection.execute(text("INSERT INTO idempotency_meta VALUES ('schema_version', :it)"), {"it": version})


@contextmanager
def in_use(engine: Engine, statement: str) -> Iterator[Connection]:
    """Somebody has done this, and has not ended the transaction."""
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text(statement))
        yield connection
        transaction.rollback()


@on_postgresql
def test_an_upgrade_waits_for_another_one(
    make_engine: MakeEngine, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Longer than records have patience with a server, and than this or the role has with a lock: it may build an index
    of a large table.
    """
    monkeypatch.setattr(silence, "READ_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(runner, "LOCK_MS", 1)
    options = "?options=-c%20lock_timeout%3D1ms"
    database, watching = Database(database_url + options), make_engine(isolation_level="AUTOCOMMIT").connect()
    with watching, ThreadPoolExecutor(1) as threads, make_engine().connect() as first, first.begin() as transaction:
        upgrade(first)
        second = threads.submit(SqlSchema(database).upgrade)
        assert eventually(lambda: second.done() or watching.scalar(WAITS_FOR_LONG) == 1)
        assert not second.done(), second.exception()
        transaction.commit()

        assert [] == second.result(60)
    database.close()


@on_postgresql
def test_an_upgrade_without_changes_waits_for_no_lock(engine: Engine, make_engine: MakeEngine) -> None:
    upgrade(engine)
    with make_engine().connect() as other, other.begin():
        other.exec_driver_sql(f"SELECT pg_advisory_xact_lock({runner._MIGRATION_LOCK})")
        other.exec_driver_sql("LOCK TABLE idempotency_records, idempotency_meta IN EXCLUSIVE MODE")

        assert [] == upgrade(make_engine(connect_args={"options": "-c statement_timeout=60s"}))


@on_postgresql
def test_an_upgrade_of_a_current_schema_locks_no_more_than_its_facts(engine: Engine) -> None:
    upgrade(engine)
    execute(engine, "UPDATE idempotency_meta SET value = 1 WHERE name = 'schema_version'")
    with engine.begin() as connection:
        assert LATEST - 1 == len(upgrade(connection))

        taken = {tuple(row) for row in connection.execute(OUR_LOCKS)}

    # The look at the last fence takes the sequence as a claim does.
    facts = ("idempotency_meta", "idempotency_meta_pkey", FENCES)
    assert {(name, "RowExclusiveLock") for name in facts} == taken


@on_postgresql
@pytest.mark.parametrize(("loss", "use"), ((NO_INDEX, READ), (NO_NUMBER, READ), (NO_NUMBER, UPDATE)))
def test_an_upgrade_waits_for_tables_in_use_only_if_it_must(engine: Engine, loss: str, use: str) -> None:
    """A long report keeps nobody from building an index, and neither it nor a writer from adding a number."""
    upgrade(engine)
    before = found(engine)
    execute(engine, loss)
    with in_use(engine, use):
        upgrade(engine)

    assert before == found(engine)


@pytest.mark.slow
@on_postgresql
@pytest.mark.parametrize(("loss", "use"), ((NO_INDEX, UPDATE), (PLAIN_STORAGE, READ)))
def test_a_table_that_stays_locked_is_left_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, loss: str, use: str
) -> None:
    """
    Claims queue behind whoever waits for a whole table. The sentence says what stood in the way, and to run it again.
    """
    monkeypatch.setattr(runner, "LOCK_MS", 1)
    upgrade(engine)
    as_it_should_be = found(engine)
    execute(engine, loss)
    execute(engine, NO_NUMBER)
    before = found(engine)

    statement = (
        "CREATE INDEX IF NOT EXISTS idempotency_expiry" if loss == NO_INDEX else "ALTER TABLE idempotency_records"
    )
    for run in (upgrade, in_a_transaction):
        with in_use(engine, use), pytest.raises(StoreUnavailable) as raised:
            run(engine)
        for words in (statement, "held a lock", "run the upgrade again, which is safe", "Nothing was changed"):
            assert words in str(raised.value)
        assert before == found(engine)
    upgrade(engine)
    assert as_it_should_be == found(engine)


@on_postgresql
def test_a_callers_transaction_keeps_its_lock_timeout(engine: Engine) -> None:
    """What Alembic does next is none of ours."""
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '7s'"))
        upgrade(connection)

        assert "7s" == connection.scalar(text("SHOW lock_timeout"))


@on_postgresql
def test_an_application_that_configures_connections_by_statements_is_upgraded(make_engine: MakeEngine) -> None:
    """To psycopg each of them begins a transaction, in which the connection's mode cannot be changed."""
    engine = make_engine()

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, record: object) -> None:
        connection.cursor().execute("SET statement_timeout = '30s'")

    for _ in range(2):
        upgrade(engine)
        execute(engine, NO_INDEX)
        engine.dispose()
    upgrade(engine)

    with engine.connect() as connection:
        assert not lacks(connection)


def test_the_store_upgrades_on_the_applications_engine(engine: Engine) -> None:
    """In ordinary transactions, SQLite's legacy mode among them; its connections are as they were afterwards."""
    database = Database(engine)
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))

    done = SqlSchema(database).upgrade()

    assert (LATEST, True) == (len(done), any("idempotency_records (" in statement for statement in sent))
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text(WRITE))
        transaction.rollback()
    with engine.connect() as connection:
        assert 0 == connection.scalar(text("SELECT count(*) FROM idempotency_meta WHERE name = 'x'"))
    database.close()


def test_repeated_upgrades_work_behind_a_pooler(pgbouncer_url: str) -> None:
    """Of a database by its URL, whose own engine has heard of no pooler: twelve times, each with something to mend."""
    database = Database(pgbouncer_url)
    schema = SqlSchema(database)
    for _ in range(12):
        schema.upgrade()
        assert [] == schema.faults()
        execute(database.engine, NO_INDEX)
    database.close()
