"""Refuse servers that pass for PostgreSQL and cannot keep claims, and sequences whose numbers do not rise."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool

from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql import engines
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.dialects import refuse_relative
from flask_idempotency.stores.sql.schema import FENCES
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token, granted
from tests.stores.sql.conftest import MakeEngine, OpenStore, on_postgresql
from tests.stores.sql.shops import OpenShop, paying
from tests.stores.sql.test_naming import execute, within

RELATIVES = {
    "YugabyteDB": "PostgreSQL 15.12-YB-2025.1.0.0-b0 on x86_64-pc-linux-gnu, compiled by clang version 17.0.6, 64-bit",
    "CockroachDB": "CockroachDB CCL v24.1.0 (x86_64-pc-linux-gnu, built 2024/05/15 21:28:29, go1.22.2)",
    "Amazon Redshift": "PostgreSQL 8.0.2 on i686-pc-linux-gnu, compiled by GCC gcc (GCC) 3.4.2, Redshift 1.0.12103",
    "Materialize": "PostgreSQL 9.5.0 on x86_64-unknown-linux-gnu (Materialize v0.60.0)",
    "RisingWave": "PostgreSQL 13.14.0-RisingWave-2.0.1 (abc)",
    "QuestDB": "PostgreSQL 12.3, compiled by Visual C++ build 1914, 64-bit, QuestDB",
    "SomethingElse": "SomethingElse 1.0",
}


@pytest.mark.parametrize("name", RELATIVES)
def test_a_relative_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"this server is {name} and no PostgreSQL: .+ Keep the records in"):
        refuse_relative(RELATIVES[name])


@pytest.mark.parametrize(
    "version",
    (
        "PostgreSQL 17.2 on x86_64-pc-linux-gnu, compiled by gcc (Debian 12.2.0-14) 12.2.0, 64-bit",
        "PostgreSQL 15.4 on aarch64-unknown-linux-gnu, compiled by gcc (GCC) 9.5.0, 64-bit",
        "PostgreSQL 15.1 (Ubuntu 15.1-1.pgdg20.04+1) on aarch64-unknown-linux-gnu, compiled by gcc, 64-bit",
        "PostgreSQL 16.4 (EnterpriseDB Advanced Server 16.4.0) on x86_64-pc-linux-gnu, compiled by gcc, 64-bit",
        "EnterpriseDB 9.5.0.5 on x86_64-pc-linux-gnu, compiled by gcc, 64-bit",
        "PostgreSQL 18beta1 on x86_64-pc-linux-gnu, compiled by gcc, 64-bit",
    ),
)
def test_postgresql_by_another_name_is_none(version: str) -> None:
    refuse_relative(version)


@pytest.mark.parametrize("name", ("YugabyteDB", "CockroachDB"))
@on_postgresql
def test_the_store_asks_the_server_before_it_claims(records_url: str, make_engine: MakeEngine, name: str) -> None:
    says = f"CREATE FUNCTION pretends.version() RETURNS text LANGUAGE sql AS $$SELECT '{RELATIVES[name]}'$$"
    execute(make_engine(), "CREATE SCHEMA pretends", says)
    store = SqlStore(Database(within(records_url, "pretends,pg_catalog,public")))

    with pytest.raises(ConfigurationError, match=name):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    store.close()


@on_postgresql
def test_a_sequence_that_caches_numbers_is_refused_until_it_does_not(
    open_store: OpenStore, make_engine: MakeEngine
) -> None:
    engine, store = make_engine(), open_store()
    execute(engine, f"ALTER SEQUENCE {FENCES} CACHE 100")

    with pytest.raises(ConfigurationError, match=f"Run ALTER SEQUENCE public.{FENCES} CACHE 1"):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    (fault,) = store.schema.faults()
    found = {finding.check: finding for finding in store.health.findings()}["server"]
    assert (Verdict.FAULT, True) == (
        found.verdict,
        "CACHE 100" in found.text and found.text.startswith("This is Postgre"),
    )

    execute(engine, fault.rpartition("Run ")[2].rstrip("."))
    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    assert [] == store.schema.faults()


@on_postgresql
def test_a_role_that_may_not_read_the_catalogue_of_sequences_claims(records_url: str, make_engine: MakeEngine) -> None:
    role = "reads_no_catalogue"
    execute(
        make_engine(),
        f"CREATE ROLE {role} LOGIN",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}",
        "REVOKE SELECT ON pg_sequence, pg_sequences FROM public",
    )
    url = make_url(records_url).set(username=role).render_as_string(hide_password=False)
    store = SqlStore(Database(url))
    try:
        granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
        found = {finding.check: finding.verdict for finding in store.health.findings()}
        assert Verdict.UNKNOWN == found["server"]
        # SQLAlchemy reads the table of the catalogue, to list the columns of our tables.
        execute(make_engine(), "GRANT SELECT ON pg_sequence TO public")
        assert [] == store.schema.faults()
        found = {finding.check: finding.verdict for finding in store.health.findings()}
        assert (Verdict.FINE, Verdict.FINE) == (found["server"], found["schema"])
    finally:
        store.close()
        admin = create_engine(records_url, poolclass=NullPool)
        execute(
            admin, "GRANT SELECT ON pg_sequence, pg_sequences TO public", f"DROP OWNED BY {role}", f"DROP ROLE {role}"
        )


@pytest.mark.parametrize("named", (True, False))
def test_the_log_of_a_refusal_has_what_the_server_said_and_no_value(
    open_: OpenShop, database_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, named: bool
) -> None:
    """`named`: the store has claimed before. Otherwise it opens on a database that takes no write."""
    monkeypatch.setattr(engines, "BUSY_MS", 1)
    patience = "timeout" if database_url.startswith("sqlite") else "connect_timeout"
    shop = open_(SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {patience: 1}})
    paying(shop)
    if named:
        assert 201 == shop.post(key="before").status_code
    shop.store.database.close()
    admin = create_engine(shop.db_engine.url, poolclass=NullPool)
    if admin.dialect.name == "sqlite":
        writer = admin.connect()
        writer.exec_driver_sql("BEGIN IMMEDIATE")
        says = "(database is locked: SQLite has one writer)"
    else:
        execute(admin, f"ALTER DATABASE {admin.url.database} SET default_transaction_read_only = on")
        says = "(25006 ReadOnlySqlTransaction)"
    shop.db_engine.dispose()

    answer = shop.post(key="canary-key", data={"amount": "canary-amount"})

    assert (503, "store-unavailable") == (answer.status_code, answer.get_json()["code"])
    (line,) = [message for message in caplog.messages if "503" in message]
    assert f"pay was refused with 503: the store is not available {says}" == line
    assert "canary" not in caplog.text
    if admin.dialect.name == "sqlite":
        writer.close()
