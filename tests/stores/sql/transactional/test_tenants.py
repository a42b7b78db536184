"""Tenants in schemas and roles: what an application does to its session does not reach the tables of the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from click.testing import Result
from flask import request
from sqlalchemy import Engine, create_engine, event, text

from flask_idempotency import Step, current_claim, idempotent
from flask_idempotency.codec.key_sources import generate
from tests.outbox.conftest import Sent
from tests.stores.sql.conftest import on_both, on_each, on_postgresql
from tests.stores.sql.shops import OpenShop, Shop

TENANT: Final = "Tenant a"
"""A name that has to be quoted."""

_TABLES: Final = (
    'CREATE TABLE "Tenant a".accounts (id integer PRIMARY KEY, balance integer NOT NULL)',
    'INSERT INTO "Tenant a".accounts VALUES (1, 0)',
    'CREATE TABLE "Tenant a".payments (id {serial} PRIMARY KEY, amount integer NOT NULL, account integer NOT NULL)',
)


def execute(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def attach(engine: Engine) -> None:
    attached = f"ATTACH '{engine.url.database}-tenant' AS \"{TENANT}\""
    event.listen(engine, "connect", lambda connection, _: connection.execute(attached))


def make_tenant(shop: Shop) -> None:
    """Give the tenant tables of its own, in a schema of its own: on SQLite in an attached file."""
    engine = shop.db_engine
    if engine.dialect.name == "sqlite":
        attach(engine)
        engine.dispose()
    else:
        execute(engine, f'CREATE SCHEMA "{TENANT}"')
    serial = "integer" if engine.dialect.name == "sqlite" else "serial"
    execute(engine, *(statement.format(serial=serial) for statement in _TABLES))


def select(shop: Shop, sql: str) -> list[Any]:
    """Return the first column of these rows, on a new connection."""
    engine = create_engine(shop.db_engine.url)
    if engine.dialect.name == "sqlite":
        attach(engine)
    with engine.connect() as connection:
        found = list(connection.exec_driver_sql(sql).scalars())
    engine.dispose()
    return found


def paid(shop: Shop) -> list[int]:
    """Return the payments of the tenant, and those of all others."""
    tables = (f'"{TENANT}".payments', "main.payments" if shop.db_engine.dialect.name == "sqlite" else "public.payments")
    return [len(select(shop, f"SELECT id FROM {table}")) for table in tables]  # noqa: S608 - the test's own words


def search_path(command: str) -> Callable[[Shop], object]:
    return lambda shop: shop.db.session.execute(text(f'{command} "{TENANT}"'))


def translate(names: dict[str | None, str | None]) -> Callable[[Shop], object]:
    return lambda shop: shop.db.session.connection(execution_options={"schema_translate_map": names})


PATHS: Final[dict[str, Callable[[Shop], object]]] = {
    "SET LOCAL": search_path("SET LOCAL search_path TO"),
    "SET": search_path("SET search_path TO"),
}
MAPS: Final[dict[str, Callable[[Shop], object]]] = {
    "a map of the connection": translate({None: TENANT}),
    "a map with our schema": translate({None: TENANT, "public": TENANT, "main": TENANT}),
}
WAYS: Final = PATHS | MAPS


def routing(shop: Shop, way: str, place: str) -> Callable[[], None]:
    """Lead each request to its tenant, in a hook of the application or in the view. Return what the view calls."""

    def here() -> None:
        WAYS[way](shop)

    if place == "hook":
        shop.app.before_request(here)
        return lambda: None
    return here


def done_once(shop: Shop) -> None:
    """Send the request twice, and check that it was done once, for the tenant."""
    first, again = shop.post(), shop.post()

    assert [(200, b"paid")] * 2 == [(each.status_code, each.data) for each in (first, again)]
    assert "true" == again.headers["Idempotency-Replayed"]
    assert ([1, 0], 1) == (paid(shop), len(shop.runs))
    assert ["completed"] == select(shop, "SELECT state FROM idempotency_records")


@pytest.mark.parametrize("place", ("hook", "view"))
@pytest.mark.parametrize("way", PATHS)
@on_postgresql
def test_a_search_path_leads_the_rows_to_the_tenant_and_the_record_to_its_table(
    shop: Shop, way: str, place: str
) -> None:
    make_tenant(shop)
    here = routing(shop, way, place)

    @shop.view()
    def pay() -> str:
        here()
        shop.pay()
        return "paid"

    done_once(shop)


@pytest.mark.parametrize("place", ("hook", "view"))
@pytest.mark.parametrize("way", MAPS)
@on_both
def test_a_translate_map_leads_the_rows_to_the_tenant_and_the_record_to_its_table(
    shop: Shop, way: str, place: str
) -> None:
    make_tenant(shop)
    here = routing(shop, way, place)

    @shop.view()
    def pay() -> str:
        here()
        shop.pay()
        return "paid"

    done_once(shop)


@on_both
def test_a_translate_map_of_the_engine_leads_no_statement_of_the_store_astray(open_: OpenShop) -> None:
    make_tenant(open_())
    options = {"execution_options": {"schema_translate_map": {None: TENANT}}}
    shop = open_(existing=True, SQLALCHEMY_ENGINE_OPTIONS=options)
    if shop.db_engine.dialect.name == "sqlite":
        attach(shop.db_engine)

    @shop.view()
    def pay() -> str:
        shop.pay()
        return "paid"

    done_once(shop)


EVERYWHERE: Final = ("SET LOCAL", "a map with our schema")


@pytest.mark.parametrize("way", EVERYWHERE)
@on_postgresql
def test_everything_that_runs_in_the_session_of_a_tenant_finds_its_tables(open_: OpenShop, way: str) -> None:
    """Steps, messages, a commit of the view's own, a quota and a sealed response."""
    shop = open_(IDEMPOTENCY_QUOTA_RECORDS=100, IDEMPOTENCY_KEY_RING=generate("one"))
    make_tenant(shop)
    route = WAYS[way]
    messages = shop.idempotency.outbox()
    messages.route("*", Sent())

    @shop.view("/stepped")
    @idempotent(steps=(Step("save", effects="transactional"),))
    def stepped() -> str:
        def save() -> int:
            route(shop)
            shop.pay()
            messages.publish("paid", {"amount": 1})
            return 7

        return f"saved {current_claim.step('save', save)}"

    @shop.view("/told")
    def told() -> str:
        route(shop)
        shop.pay()
        messages.publish("paid", {"amount": 1}, message_id="m-1")
        return "told"

    @shop.view("/early")
    def early() -> str:
        route(shop)
        shop.pay()
        shop.db.session.commit()
        route(shop)
        shop.pay()
        return "early"

    for path, body in (("/stepped", b"saved 7"), ("/told", b"told"), ("/early", b"early")):
        first, again = shop.post(path, key=path), shop.post(path, key=path)
        assert [(200, body)] * 2 == [(each.status_code, each.data) for each in (first, again)]

    assert [4, 0] == paid(shop)
    assert ["completed"] * 3 == select(shop, "SELECT state FROM idempotency_records")
    assert 2 == len(select(shop, "SELECT seq FROM idempotency_outbox"))
    assert [] == select(shop, "SELECT name FROM idempotency_steps")


@pytest.fixture
def role(shop: Shop) -> Iterator[str]:
    """A role of a tenant that may use the application's tables, and none of the store's."""
    name = "Tenant role"
    execute(
        shop.db_engine,
        f'DROP ROLE IF EXISTS "{name}"',
        f'CREATE ROLE "{name}"',
        f'GRANT SELECT, INSERT ON payments, accounts TO "{name}"',
        f'GRANT USAGE ON SEQUENCE payments_id_seq TO "{name}"',
    )
    yield name
    engine = create_engine(shop.db_engine.url)
    execute(engine, f'DROP OWNED BY "{name}"', f'DROP ROLE "{name}"')
    engine.dispose()


def db_check(shop: Shop, role: str, *options: str) -> Result:
    return shop.app.test_cli_runner().invoke(args=["idempotency", "db", "check", "--role", role, *options])


AS_ROLE: Final = (
    'SET LOCAL ROLE "Tenant role"',
    "set local role to 'Tenant role'",
    "SELECT set_config('role', :role, true)",
)


@pytest.mark.parametrize("command", AS_ROLE, ids=("name", "text", "function"))
@pytest.mark.parametrize("place", ("hook", "view"))
@on_postgresql
def test_a_role_needs_the_grants_that_the_command_prints(
    shop: Shop, role: str, caplog: pytest.LogCaptureFixture, command: str, place: str
) -> None:
    messages = shop.idempotency.outbox()
    messages.route("*", Sent())

    def take_role() -> None:
        shop.db.session.execute(text(command), {"role": role} if ":role" in command else {})

    if place == "hook":
        shop.app.before_request(take_role)

    @shop.view()
    def pay() -> str:
        if place == "view":
            take_role()
        shop.pay()
        if request.args.get("tell"):
            messages.publish("paid", {"amount": 1})
        return "paid"

    assert 500 == shop.post().status_code
    (line,) = [each for each in caplog.messages if "was answered" in each]
    assert "its rows were rolled back: a statement before the commit failed (42501 InsufficientPrivilege)" in line
    assert f"role {role} may not use idempotency_records: `flask idempotency db check --role '{role}'`" in line
    assert (0, "released") == (shop.payments(), shop.record().state)

    caplog.clear()
    assert 500 == shop.post("/pay?tell=1", key="tell").status_code
    assert f"The database's role {role} may not use idempotency_outbox" in caplog.text

    found = db_check(shop, role)
    assert (1, True) == (found.exit_code, f"The role {role} lacks SELECT, UPDATE on the table" in found.output)
    grants = [line for line in found.output.splitlines() if line.startswith("GRANT ")]
    assert json.loads(db_check(shop, role, "--json").output)["grants"] == grants
    execute(shop.db_engine, *grants)
    assert 0 == db_check(shop, role).exit_code
    assert {"role": role, "in_order": True, "missing": [], "grants": []} == json.loads(
        db_check(shop, role, "--json").output
    )

    assert [200, 200] == [shop.post().status_code, shop.post("/pay?tell=1", key="tell").status_code]
    assert (2, 2) == (shop.payments(), len(select(shop, "SELECT record_id FROM idempotency_records")))


@on_postgresql
def test_a_role_that_the_pool_sets_needs_the_grants_of_a_claim(
    shop: Shop, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    def take(connection: Any, record: Any, proxy: Any) -> None:
        connection.cursor().execute(f'SET ROLE "{role}"')

    def give_back(connection: Any, record: Any) -> None:
        if connection is not None:
            connection.cursor().execute("RESET ROLE")

    event.listen(shop.db_engine, "checkout", take)
    event.listen(shop.db_engine, "checkin", give_back)

    @shop.view()
    def pay() -> str:
        shop.pay()
        return "paid"

    assert 500 <= shop.post().status_code
    assert f"role {role} may not use idempotency_" in caplog.text

    found = db_check(shop, role)
    assert "INSERT, UPDATE, DELETE on the table idempotency_records" in found.output
    event.remove(shop.db_engine, "checkout", take)
    shop.db_engine.dispose()
    execute(shop.db_engine, *(line for line in found.output.splitlines() if line.startswith("GRANT ")))
    event.listen(shop.db_engine, "checkout", take)

    assert (200, 1) == (shop.post(key="again").status_code, shop.payments())


@on_each
def test_a_role_that_cannot_be_checked(shop: Shop) -> None:
    found = db_check(shop, "nobody here")
    there = "no role nobody here" if shop.db_engine.dialect.name == "postgresql" else "is for PostgreSQL"
    assert (2, True) == (found.exit_code, there in found.output)


@on_postgresql
def test_the_remedy_is_named_wherever_a_role_lacks_its_grants(
    shop: Shop, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In a step, in a commit of the view's own, and where the role may not use the schema."""
    execute(
        shop.db_engine,
        "REVOKE USAGE ON SCHEMA public FROM public",
        "CREATE SCHEMA other",
        "CREATE TABLE other.payments (id integer)",
        f'GRANT USAGE ON SCHEMA other TO "{role}"',
        f'GRANT INSERT ON other.payments TO "{role}"',
    )

    def pay(amount: int = 1) -> int:
        shop.db.session.execute(text(f'SET LOCAL ROLE "{role}"'))
        shop.db.session.execute(text("INSERT INTO other.payments VALUES (1)"))
        return amount

    @shop.view("/stepped")
    @idempotent(steps=(Step("save", effects="transactional"),))
    def stepped() -> str:
        return f"saved {current_claim.step('save', pay)}"

    @shop.view("/early")
    def early() -> str:
        pay()
        shop.db.session.commit()
        return "early"

    @shop.view("/late")
    def late() -> str:
        pay()
        return "late"

    for path in ("/stepped", "/early", "/late"):
        caplog.clear()
        assert 500 <= shop.post(path, key=path).status_code
        remedy = f"`flask idempotency db check --role '{role}'` prints what to grant"
        assert f"role {role} may not use the schema public: {remedy}" in caplog.text

    assert 'GRANT USAGE ON SCHEMA public TO "Tenant role";' in db_check(shop, role).output.splitlines()
    assert [] == select(shop, "SELECT id FROM other.payments")
