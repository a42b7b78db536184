"""Find the schema of the tables once, and name it whatever a connection's search path is."""

from __future__ import annotations

from typing import Any, Final

import pytest
from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.pool import NullPool

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.migrations import upgrade
from flask_idempotency.stores.sql.schema import metadata
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token, granted
from tests.stores.sql.conftest import MakeEngine, on_postgresql

NAMES: Final = ("plain", "Upper Case", "select", "dash-ed")


def within(url: str, path: str) -> str:
    """Return the URL of connections with this search path."""
    return make_url(url).update_query_dict({"options": f"-csearch_path={path}"}).render_as_string(hide_password=False)


def execute(engine: Engine, *statements: str) -> list[Any]:
    with engine.begin() as connection:
        results = [connection.exec_driver_sql(statement) for statement in statements]
        return list(results[-1].scalars()) if results[-1].returns_rows else []


def count(engine: Engine, schema: str) -> list[Any]:
    return execute(engine, f'SELECT count(*) FROM "{schema}".idempotency_records')  # noqa: S608 - the test's own words


@pytest.mark.parametrize("driver_cursor", (True, False))
@on_postgresql
def test_stores_in_several_schemas_of_one_process_do_not_mix(
    database_url: str, make_engine: MakeEngine, driver_cursor: bool
) -> None:
    admin, stores = make_engine(), {}
    for name in NAMES:
        execute(admin, f'CREATE SCHEMA "{name}"')
        url = within(database_url, f'"{name}"'.replace(" ", "\\ "))
        upgrade(make_engine(url))
        stores[name] = SqlStore(Database(url, driver_cursor=driver_cursor))
    for number, store in enumerate(stores.values()):
        for _ in range(number + 1):
            granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))

    counts = [count(admin, name) for name in NAMES]
    assert [[1], [2], [3], [4]] == counts
    for store in stores.values():
        assert [] == store.schema.faults()
        store.close()


@on_postgresql
def test_a_pool_that_leads_to_a_tenant_leads_no_statement_astray(records_url: str, make_engine: MakeEngine) -> None:
    """A listener to checkouts sets a search path, and each tenant has tables of the same names."""
    engine = make_engine()
    execute(engine, "CREATE SCHEMA tenant")
    upgrade(make_engine(within(records_url, "tenant")))
    tenants = make_engine(records_url)

    def lead(connection: Any, record: Any, proxy: Any) -> None:
        connection.cursor().execute("SET search_path TO tenant, public")

    event.listen(tenants, "checkout", lead)
    store = SqlStore(Database(tenants))
    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    assert [] == store.schema.faults()
    assert {"schema", "indexes", "durability"} <= {finding.check for finding in store.health.findings()}
    store.close()

    found = [count(engine, name) for name in ("public", "tenant")]
    assert [[1], [0]] == found


@on_postgresql
def test_tables_that_only_the_pool_leads_to_are_found_as_before(database_url: str, make_engine: MakeEngine) -> None:
    """Each tenant has tables of its own, and there are no others: then the pool decides."""
    engine, tenants = make_engine(), make_engine(poolclass=NullPool)
    path = ["one"]
    for name in ("one", "two"):
        execute(engine, f"CREATE SCHEMA {name}")
        upgrade(make_engine(within(database_url, name)))

    def lead(connection: Any, record: Any, proxy: Any) -> None:
        connection.cursor().execute(f"SET search_path TO {path[0]}")

    event.listen(tenants, "checkout", lead)
    store = SqlStore(Database(tenants))
    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    path[:] = ["two"]
    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    store.close()

    assert [[1], [1]] == [count(engine, name) for name in ("one", "two")]


@on_postgresql
def test_tables_that_come_later_or_move_are_found_then(database_url: str, make_engine: MakeEngine) -> None:
    engine = make_engine()
    execute(engine, "CREATE SCHEMA app")
    store = SqlStore(Database(within(database_url, "app,public")))
    with pytest.raises(ConfigurationError, match="has no tables"):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)

    upgrade(engine)
    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))

    tables = [f"ALTER TABLE {name} SET SCHEMA app" for name in metadata.tables]
    execute(engine, *tables)
    with pytest.raises(ConfigurationError, match="has no tables"):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    store.close()

    assert [2] == execute(engine, "SELECT count(*) FROM app.idempotency_records")


@on_postgresql
def test_an_upgrade_keeps_the_tables_together(database_url: str, make_engine: MakeEngine) -> None:
    """The tables are in the second schema of the path, and a new one is created beside them."""
    engine = make_engine()
    execute(engine, "CREATE SCHEMA app")
    upgrade(engine)
    execute(engine, "DROP TABLE public.idempotency_audit")

    upgrade(create_engine(within(database_url, "app,public"), poolclass=NullPool))

    assert ["public"] == execute(engine, "SELECT schemaname FROM pg_tables WHERE tablename = 'idempotency_audit'")
