"""Tenants in schemas and roles: what an application does to its session does not reach the tables of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from sqlalchemy import Engine, create_engine, event, text

from flask_idempotency import Step, current_claim, idempotent
from flask_idempotency.codec.key_sources import generate
from tests.outbox.conftest import Sent
from tests.stores.sql.conftest import on_both, on_postgresql
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
    return [len(select(shop, f"SELECT id FROM {table}")) for table in tables]


def search_path(command: str) -> Callable[[Shop], None]:
    return lambda shop: shop.db.session.execute(text(f'{command} "{TENANT}"')) and None


def translate(names: dict[str | None, str | None]) -> Callable[[Shop], None]:
    return lambda shop: shop.db.session.connection(execution_options={"schema_translate_map": names}) and None


PATHS: Final[dict[str, Callable[[Shop], None]]] = {
    "SET LOCAL": search_path("SET LOCAL search_path TO"),
    "SET": search_path("SET search_path TO"),
}
MAPS: Final[dict[str, Callable[[Shop], None]]] = {
    "a map of the connection": translate({None: TENANT}),
    "a map with our schema": translate({None: TENANT, "public": TENANT, "main": TENANT}),
}
WAYS: Final = PATHS | MAPS


def routing(shop: Shop, way: str, place: str) -> Callable[[], None]:
    """Lead each request to its tenant, in a hook of the application or in the view. Return what the view calls."""
    route = WAYS[way]
    if place == "hook":
        shop.app.before_request(lambda: route(shop))
        return lambda: None
    return lambda: route(shop)


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
