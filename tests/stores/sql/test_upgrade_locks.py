"""An upgrade waits for another one as long as it takes, and keeps nobody who works with the tables waiting for long."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.sql import database as silence
from flask_idempotency.stores.sql.admin.schema_check import SqlSchema
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.migrations import runner, upgrade
from flask_idempotency.stores.sql.schema import lacks
from tests.stores.sql.catalogue import found
from tests.stores.sql.conftest import MakeEngine, on_postgresql
from tests.tooling.processes import eventually

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


def execute(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement))


def in_a_transaction(engine: Engine) -> list[str]:
    with engine.begin() as connection:
        return upgrade(connection)


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
def test_an_upgrade_with_nothing_to_do_waits_for_nobody(engine: Engine, make_engine: MakeEngine) -> None:
    """Not even for another upgrade: each deployment runs it."""
    upgrade(engine)
    with make_engine().connect() as other, other.begin():
        other.exec_driver_sql(f"SELECT pg_advisory_xact_lock({runner._MIGRATION_LOCK})")
        other.exec_driver_sql("LOCK TABLE idempotency_records, idempotency_meta IN EXCLUSIVE MODE")

        assert [] == upgrade(make_engine(connect_args={"options": "-c statement_timeout=2s"}))


@on_postgresql
def test_every_step_of_a_current_schema_locks_no_more_than_its_facts(engine: Engine) -> None:
    """As whoever claims does: everybody works on meanwhile."""
    upgrade(engine)
    with engine.begin() as connection:
        for step in runner.STEPS:
            step.run(connection)

        taken = {tuple(row) for row in connection.execute(OUR_LOCKS)}

    assert {(name, "RowExclusiveLock") for name in ("idempotency_meta", "idempotency_meta_pkey")} == taken


@on_postgresql
@pytest.mark.parametrize(("loss", "use"), ((NO_INDEX, READ), (NO_NUMBER, READ), (NO_NUMBER, UPDATE)))
def test_what_is_in_use_is_waited_for_only_where_it_must_be(engine: Engine, loss: str, use: str) -> None:
    """A long report keeps nobody from building an index, and neither it nor a writer from adding a number."""
    upgrade(engine)
    before = found(engine)
    execute(engine, loss)
    with in_use(engine, use):
        upgrade(engine)

    assert before == found(engine)


@on_postgresql
@pytest.mark.parametrize(("loss", "use"), ((NO_INDEX, UPDATE), (PLAIN_STORAGE, READ)))
@pytest.mark.parametrize("given", ("engine", "connection"))
def test_a_table_that_is_not_to_be_had_is_left_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, loss: str, use: str, given: str
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

    run = upgrade if given == "engine" else in_a_transaction
    with in_use(engine, use), pytest.raises(StoreUnavailable) as raised:
        run(engine)

    statement = (
        "CREATE INDEX IF NOT EXISTS idempotency_expiry" if loss == NO_INDEX else "ALTER TABLE idempotency_records"
    )
    for words in (statement, "held a lock", "run the upgrade again, which is safe", "Nothing was changed"):
        assert words in str(raised.value)
    assert before == found(engine)
    upgrade(engine)
    assert as_it_should_be == found(engine)


@on_postgresql
def test_a_transaction_of_the_callers_keeps_its_own_patience(engine: Engine) -> None:
    """What Alembic does next is none of ours."""
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '7s'"))
        upgrade(connection)

        assert "7s" == connection.scalar(text("SHOW lock_timeout"))


@on_postgresql
def test_an_application_that_sets_up_its_connections_with_statements_is_upgraded(make_engine: MakeEngine) -> None:
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


def test_the_port_upgrades_on_the_applications_own_engine(engine: Engine) -> None:
    """In ordinary transactions, SQLite's legacy mode among them; its connections are as they were afterwards."""
    database = Database(engine)
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2]))

    done = SqlSchema(database).upgrade()

    assert (1, True) == (len(done), any("idempotency_records (" in statement for statement in sent))
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text(WRITE))
        transaction.rollback()
    with engine.connect() as connection:
        assert 0 == connection.scalar(text("SELECT count(*) FROM idempotency_meta WHERE name = 'x'"))
    database.close()


def test_a_pooler_is_no_hindrance_to_repeated_upgrades(pgbouncer_url: str) -> None:
    """Of a database by its URL, whose own engine has heard of no pooler: twelve times, each with something to mend."""
    database = Database(pgbouncer_url)
    schema = SqlSchema(database)
    for _ in range(12):
        schema.upgrade()
        assert [] == schema.faults()
        execute(database.engine, NO_INDEX)
    database.close()
