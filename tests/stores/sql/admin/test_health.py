"""What `health` reports about a database, for each fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.sql.admin import health, schema_check
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.migrations import LATEST, upgrade
from flask_idempotency.stores.sql.schema import metadata
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, a_key, stand
from tests.lab.pgbouncer import PgBouncer, StartPgBouncer
from tests.lab.postgres import PostgresServer, StartPostgres
from tests.stores.sql.conftest import MakeEngine, OpenStore, on_postgresql, on_sqlite
from tests.tooling.processes import eventually

DURABLE = ("-c", "fsync=on", "-c", "full_page_writes=on")
Open = Callable[..., SqlStore]


@pytest.fixture
def store(open_store: OpenStore) -> SqlStore:
    return open_store()


@pytest.fixture
def opened() -> Iterator[Open]:
    """Stores on any database, with our tables in it, closed at the end."""
    with ExitStack() as ends:

        def open_one(bind: str | Engine, *, tables: str | None = None) -> SqlStore:
            where = tables or bind
            engine = create_engine(where) if isinstance(where, str) else where
            metadata.create_all(engine)
            store = SqlStore(Database(bind))
            ends.callback(store.close)
            ends.callback(engine.dispose)
            return store

        yield open_one


def execute(engine: Engine, *statements: str) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in statements:
            connection.execute(text(statement))


def found(store: SqlStore, check: str) -> Finding:
    (finding,) = [finding for finding in store.health.findings() if finding.check == check]
    assert (finding.verdict is Verdict.FINE) == (finding.remedy == "")
    return finding


@pytest.mark.parametrize("start", ("postgresql", "sqlite"))
def test_all_is_fine(start: str, request: pytest.FixtureRequest, opened: Open, tmp_path: Path) -> None:
    if start == "sqlite":
        store = opened(f"sqlite:///{tmp_path / 'records.sqlite'}")
    else:
        start_postgres: StartPostgres = request.getfixturevalue("start_postgres")
        store = opened(start_postgres(*DURABLE).url("postgres"))

    assert [] == [finding for finding in store.health.findings() if finding.verdict is not Verdict.FINE]


def test_missing_tables(store: SqlStore, make_engine: MakeEngine) -> None:
    """Said once, with the command that makes them; what cannot be looked at then is unknown."""
    metadata.drop_all(make_engine())

    schema = found(store, "schema")
    assert (Verdict.FAULT, "The idempotency tables are not in this database.") == (schema.verdict, schema.text)
    assert schema.remedy.startswith("Run `flask idempotency db upgrade`")
    assert [Verdict.UNKNOWN] * 2 == [found(store, check).verdict for check in ("indexes", "expiry")]


def test_old_tables(store: SqlStore, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_check, "LATEST", LATEST + 1)
    execute(make_engine(), "DROP INDEX idempotency_expired_leases")

    schema = found(store, "schema")
    assert (Verdict.FAULT, f"at version {LATEST} and this release needs {LATEST + 1}" in schema.text) == (
        schema.verdict,
        True,
    )


@on_postgresql
def test_tables_without_a_fillfactor(store: SqlStore, make_engine: MakeEngine) -> None:
    """As Alembic makes them. What an operator has chosen is left alone."""
    assert Verdict.FINE is found(store, "storage").verdict
    execute(make_engine(), "ALTER TABLE idempotency_records RESET (fillfactor)")

    assert Verdict.ADVICE is found(store, "storage").verdict
    execute(make_engine(), "ALTER TABLE idempotency_records SET (fillfactor = 60)")
    assert Verdict.FINE is found(store, "storage").verdict
    assert [] == upgrade(make_engine())


def test_a_missing_index(store: SqlStore, make_engine: MakeEngine) -> None:
    execute(make_engine(), "DROP INDEX idempotency_quarantined")

    indexes = found(store, "indexes")
    assert (Verdict.FAULT, True) == (indexes.verdict, "idempotency_quarantined" in indexes.text)
    assert Verdict.FINE is found(store, "schema").verdict


@on_postgresql
def test_an_index_that_was_never_finished(store: SqlStore, make_engine: MakeEngine) -> None:
    execute(
        make_engine(),
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'idempotency_expiry'::regclass",
    )

    indexes = found(store, "indexes")
    assert (Verdict.FAULT, "Run REINDEX INDEX CONCURRENTLY idempotency_expiry.") == (indexes.verdict, indexes.remedy)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ("fsync", "full_page_writes"))
def test_a_server_that_may_lose_what_it_acknowledged(start_postgres: StartPostgres, opened: Open, setting: str) -> None:
    store = opened(start_postgres(*DURABLE, "-c", f"{setting}=off").url("postgres"))

    durability = found(store, "durability")
    assert (Verdict.FAULT, True, True) == (
        durability.verdict,
        durability.text.startswith(f"{setting} is off"),
        f"et {setting} to on" in durability.remedy,
    )


@on_postgresql
def test_a_role_whose_commits_do_not_wait(open_store: OpenStore, make_engine: MakeEngine, records_url: str) -> None:
    name = records_url.rpartition("/")[2]
    execute(make_engine(), f"ALTER DATABASE {name} SET synchronous_commit = off")

    durability = found(open_store(), "durability")
    assert (Verdict.FAULT, True) == (durability.verdict, "synchronous_commit is off" in durability.text)


@on_sqlite
@pytest.mark.parametrize(
    ("pragma", "word"), (("journal_mode=DELETE", "journal_mode delete"), ("synchronous=OFF", "synchronous below"))
)
def test_a_file_that_is_not_written_as_it_should_be(
    records_url: str, make_engine: MakeEngine, opened: Open, pragma: str, word: str
) -> None:
    """Because the application sets it so, wherever it connects."""
    engine = make_engine()

    @event.listens_for(engine, "connect")
    def careless(connection: Any, record: object) -> None:
        connection.execute(f"PRAGMA {pragma}")

    store = opened(engine)
    store.database.run(lambda connection: None)
    # A log is given up by whoever is alone with the file.
    store.database.engine.dispose()
    engine.dispose()
    with engine.connect() as connection:
        durability = Finding("durability", *health.durability(connection))

    assert (Verdict.FAULT, True) == (durability.verdict, word in durability.text)
    assert durability.remedy


@pytest.fixture
def durable_url(postgres_server: PostgresServer) -> Iterator[str]:
    with postgres_server.database() as name:
        yield name


def test_a_pooler_and_statements_that_are_prepared(
    postgres_server: PostgresServer,
    pgbouncer: PgBouncer,
    durable_url: str,
    make_bind: Callable[..., Engine],
    opened: Open,
) -> None:
    """An application that has not told psycopg is advised to; one that has, and a URL of ours, are fine."""
    url = pgbouncer.url(durable_url)
    tables = postgres_server.url(durable_url)
    careless = found(opened(make_bind(url), tables=tables), "pooling")
    careful = found(opened(make_bind(url, connect_args={"prepare_threshold": None}), tables=tables), "pooling")
    ours = found(opened(url, tables=tables), "pooling")
    direct = found(opened(make_bind(tables)), "pooling")

    assert [Verdict.ADVICE, Verdict.FINE, Verdict.FINE, Verdict.FINE] == [
        finding.verdict for finding in (careless, careful, ours, direct)
    ]
    assert "prepare_threshold" in careless.remedy
    assert [True, True, False] == ["A pooler" in finding.text for finding in (careful, ours, direct)]


def test_a_pooler_of_sessions_is_none(
    postgres_server: PostgresServer, start_pgbouncer: StartPgBouncer, durable_url: str, make_bind: Any, opened: Open
) -> None:
    """Whoever has a server of their own while they are connected may prepare what they like."""
    bouncer = start_pgbouncer(postgres_server, pool_mode="session")
    store = opened(make_bind(bouncer.url(durable_url)), tables=postgres_server.url(durable_url))

    assert Finding("pooling", Verdict.FINE, "Each connection has its own server connection.") == found(store, "pooling")


def test_a_pooler_and_settings_given_at_connect(
    postgres_server: PostgresServer, start_pgbouncer: StartPgBouncer, durable_url: str, make_bind: Any, opened: Open
) -> None:
    bouncer = start_pgbouncer(postgres_server, ignored="options")
    arguments = {"options": "-c statement_timeout=1000", "prepare_threshold": None}
    engine = make_bind(bouncer.url(durable_url), connect_args=arguments)
    pooling = found(opened(engine, tables=postgres_server.url(durable_url)), "pooling")

    assert (Verdict.ADVICE, True) == (pooling.verdict, "ALTER ROLE" in pooling.remedy)


@pytest.fixture
def make_bind() -> Iterator[Callable[..., Engine]]:
    with ExitStack() as ends:

        def make(url: str, **options: Any) -> Engine:
            engine = create_engine(url, **options)
            ends.callback(engine.dispose)
            return engine

        yield make


@on_postgresql
def test_a_stricter_isolation_level_is_advised_against(
    open_store: OpenStore, make_engine: MakeEngine, records_url: str
) -> None:
    name = records_url.rpartition("/")[2]
    execute(make_engine(), f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")

    assert Verdict.ADVICE is found(open_store(), "isolation").verdict


@on_postgresql
def test_dead_rows_without_vacuum(
    store: SqlStore, clock: FrozenClock, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MANY_DEAD", 20)
    engine = make_engine()
    execute(engine, "ALTER TABLE idempotency_records SET (autovacuum_enabled = false)")
    before = found(store, "dead-rows").verdict
    stand(store, clock, a_key(), "completed")
    with engine.begin() as connection:
        # In one transaction: between two, PostgreSQL may remove the dead versions of a row from its page.
        for _ in range(30):
            connection.execute(text("UPDATE idempotency_records SET response_size = response_size + 1"))
    execute(engine, "SELECT pg_stat_force_next_flush()", "SELECT 1")

    assert eventually(lambda: found(store, "dead-rows").verdict is Verdict.ADVICE)
    assert Verdict.FINE is before


def test_expired_records_without_a_janitor(store: SqlStore, clock: FrozenClock) -> None:
    stand(store, clock, a_key(), "completed")
    clock.advance(KEEP + 3600 - 1)
    before = found(store, "expiry").verdict
    clock.advance(1)
    overdue = found(store, "expiry").verdict
    store.expiry.sweep(horizon=clock.now, limit=10)

    assert [Verdict.FINE, Verdict.ADVICE, Verdict.FINE] == [before, overdue, found(store, "expiry").verdict]


@on_postgresql
def test_facts_that_the_role_may_not_read_are_unknown(records_url: str, make_engine: MakeEngine, opened: Open) -> None:
    execute(make_engine(), "DROP ROLE IF EXISTS onlooker", "CREATE ROLE onlooker LOGIN")
    try:
        store = SqlStore(Database(records_url.replace("postgres@", "onlooker@")))
        expiry, schema = found(store, "expiry"), found(store, "schema")
        store.close()
    finally:
        execute(make_engine(), "DROP ROLE onlooker")

    assert (Verdict.UNKNOWN, Verdict.FAULT) == (expiry.verdict, schema.verdict)
    assert "DELETE on idempotency_tasks" in schema.text
    assert schema.remedy.startswith("Grant it SELECT, INSERT, UPDATE and DELETE on idempotency_records")


@pytest.mark.slow
def test_an_unreachable_database(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    store = SqlStore(Database(server.url("postgres")))
    server.stop()

    with pytest.raises(StoreUnavailable):
        store.health.findings()


def test_checks_change_no_data(store: SqlStore, clock: FrozenClock, make_engine: MakeEngine) -> None:
    """A doctor may be asked at any time."""
    key = a_key()
    stand(store, clock, key, "quarantined")
    before = store.read(key)
    store.health.findings()

    assert before == store.read(key)
