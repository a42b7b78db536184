"""The schema check names each fault with its remedy, and changes no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.stores.sql.admin import schema_check
from flask_idempotency.stores.sql.admin.schema_check import SqlSchema, advice, faults
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.migrations import LATEST, upgrade
from flask_idempotency.stores.sql.schema import RECORD_TABLES, fence_numbers, metadata
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import a_key
from tests.stores.sql import catalogue
from tests.stores.sql.conftest import MakeEngine, on_postgresql, on_sqlite

FENCES = "idempotency_fence_numbers_number_seq"
FENCE_FROM_ONE = f"SELECT setval('{FENCES}', 1, false)"
USED = [name for name in RECORD_TABLES if name != fence_numbers.name]
TABLES = ", ".join(USED)
UPGRADE = "Run `flask idempotency db upgrade`"


def holder(engine: Engine) -> Any:
    """What has engines, as the store's database does: one and the same, here."""
    return SimpleNamespace(engine=engine, base=engine, joining=None)


@pytest.fixture
def engine(make_engine: MakeEngine, records_url: str) -> Engine:
    """With the tables, and everything in order."""
    engine = make_engine()
    if engine.dialect.name == "sqlite":
        execute(engine, "PRAGMA journal_mode = WAL")
    return engine


def execute(engine: Engine, *statements: str) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in statements:
            connection.execute(text(statement))


def found(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return faults(connection)


def advised(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return advice(connection)


def test_a_database_in_order_has_no_faults(engine: Engine) -> None:
    assert ([], []) == (found(engine), advised(engine))


def test_missing_tables_are_one_fault(engine: Engine) -> None:
    metadata.drop_all(engine)

    (fault,) = found(engine)

    assert fault.startswith(
        "The idempotency tables are not in this database. Run `flask idempotency db upgrade`; where"
    )
    assert "`sql.upgrade(op.get_bind())`" in fault
    assert "`flask db upgrade` instead" in fault
    assert fault.endswith(" instead. With the store flask-sqlalchemy://, `db.create_all()` makes them too.")
    # Its downgrade would drop the records.
    assert "flask db migrate" not in fault


def test_each_missing_table_and_index_is_named_and_created_again(engine: Engine) -> None:
    """Although the facts say that this database is up to date, the upgrade adds what is gone."""
    complete = catalogue.found(engine)
    indexes = ("idempotency_expired_leases", "idempotency_expiry", "idempotency_unfinished")
    losses = {f"DROP TABLE {table}": f"The table {table} is not in this database. {UPGRADE}" for table in RECORD_TABLES}
    losses |= {f"DROP INDEX {index}": f"The index {index} is not in this database" for index in indexes}
    for loss, begin in losses.items():
        execute(engine, loss)

        (fault,) = found(engine)

        assert (loss, True, True) == (loss, fault.startswith(begin), UPGRADE in fault)
        upgrade(engine)
        assert (loss, complete) == (loss, catalogue.found(engine))
    for table in metadata.tables.keys() - set(RECORD_TABLES):
        execute(engine, f"DROP TABLE {table}")
        upgrade(engine)
        assert (table, complete) == (table, catalogue.found(engine))


def test_missing_tables_are_named_where_others_are_there(engine: Engine) -> None:
    execute(engine, "DROP TABLE idempotency_quota", "DROP TABLE idempotency_tenants")

    (fault,) = found(engine)

    assert fault.startswith("The tables idempotency_tenants, idempotency_quota are not in this database. Run `flask")


def test_an_older_schema_is_a_fault(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_check, "LATEST", LATEST + 1)
    execute(engine, "DROP INDEX idempotency_expired_leases")

    (fault,) = found(engine)

    versions = f"at version {LATEST} and this release needs {LATEST + 1}"
    assert fault.startswith(f"The idempotency tables are {versions}. {UPGRADE}")
    assert "`sql.upgrade(op.get_bind())`" in fault
    assert "flask db migrate" not in fault


def test_a_missing_version_does_not_make_a_schema_old(engine: Engine) -> None:
    """Alembic writes no rows. What it made is judged by what is there."""
    execute(engine, "DELETE FROM idempotency_meta")

    assert [] == found(engine)


def test_a_newer_schema_is_a_fault(engine: Engine) -> None:
    """And the only one: this release cannot say what else is right or wrong about it."""
    execute(engine, "UPDATE idempotency_meta SET value = 99 WHERE name = 'schema_version'")
    execute(engine, "DROP INDEX idempotency_expired_leases")

    (fault,) = found(engine)

    assert f"version 99, which is newer than this release knows ({LATEST}). Install the release" in fault


def test_a_missing_column_is_a_fault_that_no_upgrade_repairs(engine: Engine) -> None:
    """A column that were added anew would be empty, and what it held is what replays."""
    execute(engine, "ALTER TABLE idempotency_records RENAME COLUMN principal TO subject")
    upgrade(engine)

    (fault,) = found(engine)

    assert fault.startswith("The column idempotency_records.principal is not in this database: ")
    assert "Restore it" in fault


@on_postgresql
def test_a_missing_sequence_is_a_fault(engine: Engine) -> None:
    """Somebody dropped it: Alembic's autogenerate makes it with its table."""
    execute(engine, "DROP SEQUENCE idempotency_fence_numbers_number_seq CASCADE")

    (fault,) = found(engine)

    assert fault.startswith("The sequence idempotency_fence_numbers_number_seq is not in this database")


@on_postgresql
def test_fences_from_one_are_a_fault_if_no_claim_can_raise_them(engine: Engine, teller: Engine) -> None:
    """Whoever may set the sequence does so at the first claim."""
    execute(engine, FENCE_FROM_ONE)

    assert [] == found(engine)
    (fault,) = found(teller)

    assert fault.startswith("The fences of this database count from one")
    assert f"grant UPDATE on the sequence {FENCES}" in fault
    upgrade(engine)
    assert [] == found(teller)


@pytest.mark.parametrize(
    "in_use",
    (
        "INSERT INTO idempotency_data_keys (tenant_id, number, wrapping_key_id, wrapped_key, created_at)"
        " VALUES ('t', 1, 'k', 'w', 1)",
        "INSERT INTO idempotency_meta (name, value) VALUES ('cached_since', 1)",
    ),
    ids=("sealed", "cached"),
)
def test_a_lost_store_number_is_a_fault_if_responses_need_it(engine: Engine, in_use: str) -> None:
    """Another one would make them unreadable without a word."""
    execute(engine, "DELETE FROM idempotency_meta WHERE name = 'store'")
    assert [] == found(engine)
    execute(engine, in_use)

    (fault,) = found(engine)
    store = SqlStore(Database(engine))
    with pytest.raises(ConfigurationError, match="has lost the number"):
        store.identity()
    store.close()

    assert fault.startswith("This database has lost the number that its encrypted or cached responses belong to.")
    upgrade(engine)
    assert [] == found(engine)


@pytest.fixture
def teller(engine: Engine, make_engine: MakeEngine) -> Iterator[Engine]:
    """The same database, for a role that may do what docs/guides/sql.md asks for, and no more."""
    role = f"teller_{engine.url.database}"
    execute(
        engine,
        f"CREATE ROLE {role} LOGIN",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {TABLES} TO {role}",
        f"GRANT USAGE ON SEQUENCE idempotency_fence_numbers_number_seq TO {role}",
    )
    yield make_engine(engine.url.set(username=role).render_as_string(), isolation_level="AUTOCOMMIT")
    execute(engine, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def revoke(engine: Engine, rights: str, *, of: Engine) -> None:
    execute(engine, f"REVOKE {rights} FROM {of.url.username}")


@on_postgresql
def test_each_right_that_a_role_lacks_is_named(engine: Engine, teller: Engine) -> None:
    """All that docs/guides/sql.md asks for, and no more: not the tables' owner, nor a right to read the sequence."""
    assert [] == found(teller)
    for right in ("SELECT", "INSERT", "UPDATE", "DELETE"):
        for table in USED:
            revoke(engine, f"{right} ON {table}", of=teller)

            (fault,) = found(teller)

            remedy = "The database's role may not use the tables of idempotency records: grant it SELECT, "
            assert (True, True) == (fault.startswith(remedy), fault.endswith(f"It lacks {right} on {table}.")), fault
            execute(engine, f"GRANT {right} ON {table} TO {teller.url.username}")


@on_postgresql
def test_a_role_that_may_change_the_sequence_may_use_it(engine: Engine, teller: Engine) -> None:
    """PostgreSQL asks for one of two rights."""
    revoke(engine, "USAGE ON SEQUENCE idempotency_fence_numbers_number_seq", of=teller)
    execute(engine, f"GRANT UPDATE ON SEQUENCE idempotency_fence_numbers_number_seq TO {teller.url.username}")

    assert [] == found(teller)


@on_postgresql
def test_a_role_without_the_sequence_is_a_fault(engine: Engine, teller: Engine) -> None:
    """And not that fences start from one: what cannot be seen is not reported as if it had been."""
    revoke(engine, "USAGE ON SEQUENCE idempotency_fence_numbers_number_seq", of=teller)

    (fault,) = found(teller)

    assert fault.endswith("It lacks USAGE on idempotency_fence_numbers_number_seq.")


@on_postgresql
def test_a_role_without_rights_gets_the_error_of_a_request(engine: Engine, teller: Engine) -> None:
    """In the same words. That its version cannot be read is no outage."""
    execute(engine, f"DROP OWNED BY {teller.url.username}")
    store = SqlStore(Database(teller))

    (fault,) = SqlSchema(holder(teller)).faults()
    with pytest.raises(ConfigurationError) as raised:
        store.read(a_key())
    store.close()

    lacking = "".join(f"SELECT, INSERT, UPDATE, DELETE on {table}; " for table in USED)
    assert fault == f"T{str(raised.value)[1:]}. It lacks {lacking}USAGE on idempotency_fence_numbers_number_seq."


@on_postgresql
def test_other_faults_are_reported_to_a_role_that_may_read(engine: Engine, teller: Engine) -> None:
    execute(engine, "DROP INDEX idempotency_expired_leases")
    revoke(engine, "DELETE ON idempotency_records", of=teller)

    rights, index = found(teller)

    assert rights.endswith("It lacks DELETE on idempotency_records.")
    assert index.startswith("The index idempotency_expired_leases ")


@on_postgresql
def test_commits_that_may_be_lost_are_a_fault(engine: Engine, make_engine: MakeEngine) -> None:
    """A claim that was acknowledged and then forgotten is a payment that runs again."""
    careless = make_engine(connect_args={"options": "-c synchronous_commit=off"})

    (fault,) = found(careless)

    assert fault.startswith("synchronous_commit is off here")


@on_sqlite
def test_a_journal_that_is_not_written_ahead_is_a_fault(engine: Engine) -> None:
    """Readers and writers would keep each other waiting."""
    execute(engine, "PRAGMA journal_mode = DELETE")

    (fault,) = found(engine)

    assert "journal_mode delete" in fault


@on_sqlite
def test_a_log_that_is_not_flushed_is_a_fault(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA synchronous = NORMAL")
        (fault,) = faults(connection)

    assert "PRAGMA synchronous below FULL" in fault


@on_postgresql
def test_a_different_isolation_level_is_advice_and_no_fault(engine: Engine, make_engine: MakeEngine) -> None:
    strict = make_engine(connect_args={"options": "-c default_transaction_isolation=serializable"})

    assert [] == found(strict)
    (sentence,) = advised(strict)
    assert sentence.startswith("default_transaction_isolation is 'serializable' here")


def test_checks_change_no_data(engine: Engine) -> None:
    """Only reads are sent: behind a pooler, whatever else was set would be somebody else's next."""
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2].split()[0]))

    found(engine)
    advised(engine)

    assert {"SELECT", "PRAGMA"} >= set(sent)


def test_the_store_runs_all_checks(make_engine: MakeEngine) -> None:
    engine = make_engine(isolation_level="AUTOCOMMIT")
    if engine.dialect.name == "sqlite":
        execute(engine, "PRAGMA journal_mode = WAL")
    schema = SqlSchema(holder(engine))

    before, done, after = schema.faults(), schema.upgrade(), schema.faults()

    assert (1, LATEST, [], []) == (len(before), len(done), after, schema.advice())


@on_postgresql
def test_an_unreachable_database_is_reported_without_its_password(make_engine: MakeEngine) -> None:
    """Drivers quote what they were given."""
    url = make_engine().url
    for password in ("s3cret", "a b/c@d"):
        closed = url.set(password=password, port=1).render_as_string(hide_password=False)
        schema = SqlSchema(holder(make_engine(closed)))
        for ask in (schema.upgrade, schema.faults, schema.advice):
            with pytest.raises(StoreUnavailable, match=r"^The database 'test_\w+' on 127.0.0.1: ") as raised:
                ask()

            assert (False, True) == (password in str(raised.value), raised.value.__suppress_context__)


def reported(url: str, quote: Callable[[Engine], str]) -> str:
    """What the check says of a database whose driver fails with this message."""
    engine = create_engine(url)

    @event.listens_for(engine, "do_connect")
    def refuse(*_: object) -> None:
        raise engine.dialect.loaded_dbapi.OperationalError(quote(engine))

    with pytest.raises(StoreUnavailable) as raised:
        SqlSchema(holder(engine)).faults()
    return str(raised.value)


def test_passwords_in_driver_messages_are_masked() -> None:
    url = "postgresql+psycopg://shop:a%20b%2Fc%40d@db/shop"
    for spelling in ("a b/c@d", "a+b%2Fc%40d", "a%20b%2Fc%40d"):
        said = reported(url, lambda _, spelt=spelling: f'missing "=" after "{spelt}"\nin the connection string')  # type: ignore[misc]
        assert said.endswith(': missing "=" after "***".'), spelling


def test_no_part_of_a_password_is_reported_as_a_host() -> None:
    """A URL is split at its first @. What drivers quote as host and database is then the rest of the password."""
    torn = (
        "The database (not named here, because its URL may be torn in the middle of a password: write @ in it as %40, "
        "/ as %2F, ? as %3F and % as %25): OperationalError."
    )
    passwords = (
        "p@ss/w", "p@ss", "p@s?s", "p@s?x=s", "p@ss:5/w", "p@/ss", "p@[s]/w", "p@ss#w", "p/@ss", "p@s?a=1&&",
    )  # fmt: skip
    for password in passwords:
        url = f"postgresql+psycopg://shop:{password}@db/shop"
        assert (password, torn) == (
            password,
            reported(url, lambda engine: f'failed to resolve "{engine.url.host}", or no "{engine.url.database}"'),
        )


def test_a_host_that_cannot_be_a_password_is_reported() -> None:
    """An operator with three databases needs to know which."""
    places = {
        "postgresql+psycopg://shop:p%40ss%2Fw@db.example-1.net/shop_2": "'shop_2' on db.example-1.net",
        "postgresql+psycopg://shop:p/w@[::1]:1/shop": "'shop' on ::1",
        "postgresql+psycopg://shop:p@/shop?host=/run/postgresql": "'shop'",
        "sqlite:////srv/me@home/missing/records.db": "'/srv/me@home/missing/records.db'",
    }
    said = {url: reported(url, lambda _: "no answer") for url in places}

    assert said == {url: f"The database {place}: no answer." for url, place in places.items()}


def test_checks_work_behind_a_pooler(pgbouncer_url: str) -> None:
    """Each statement may reach another server connection: the upgrade is one transaction, and a look needs none."""
    options = {"connect_args": {"prepare_threshold": None}, "isolation_level": "AUTOCOMMIT"}
    engine = create_engine(pgbouncer_url, **options)
    try:
        schema = SqlSchema(holder(engine))

        assert (1, LATEST, []) == (len(schema.faults()), len(schema.upgrade()), schema.faults())
    finally:
        engine.dispose()
