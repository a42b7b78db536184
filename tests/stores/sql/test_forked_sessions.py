"""An application's connections in a process that was forked from the one which opened them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from flask_idempotency.stores.sql.database import PROCESS, REMEDY
from flask_idempotency.web.application_database import ApplicationDatabase
from tests.forks import run
from tests.stores.sql.shops import Account, OpenShop, Shop, paying

pytestmark = pytest.mark.slow
SCENARIOS = ("idle", "held", "garbage", "binds", "late", "unpooled")


@pytest.mark.parametrize("how", ("python", "below-python"))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_forked_child_leaves_the_parents_connections_alone(
    database_url: str, scenario: str, how: str, tmp_path: Path
) -> None:
    status, told = run("tests.stores.sql.forked_sessions", scenario, how, database_url, folder=tmp_path, environment={})

    assert status == 0, told[-3000:]


def test_a_child_of_a_process_that_closes_its_connections_loses_no_commit(database_url: str, tmp_path: Path) -> None:
    """On SQLite nothing may be open at the fork. A fork below Python runs no hook of ours: see docs/guides/proxies.md."""
    test_a_forked_child_leaves_the_parents_connections_alone(database_url, "outlived", "python", tmp_path)


def as_another_process(shop: Shop) -> Any:
    """Have the session's connection look as if another process had opened it. Returns what the driver has."""
    connection = shop.db.session.connection()
    pooled = connection.connection
    driver: Any = pooled.dbapi_connection
    if connection.dialect.name == "sqlite" and not driver.in_transaction:
        # Python begins a transaction before the first write. This one locks nothing.
        driver.execute("BEGIN")
    pooled.info[PROCESS] = os.getpid() + 1
    return pooled.dbapi_connection


@pytest.mark.parametrize("key", ("k", None))
def test_a_session_with_an_inherited_connection_is_refused(
    open_: OpenShop, caplog: pytest.LogCaptureFixture, key: str | None
) -> None:
    """With and without a key, the view does not run, and no byte is sent on the connection: not even its ROLLBACK."""
    shop = open_()
    paying(shop)
    inherited: list[Any] = []

    @shop.app.before_request
    def sign_in() -> None:
        shop.db.session.execute(select(Account))
        if not inherited:
            inherited.append(as_another_process(shop))

    refused = shop.post(key=key)

    assert (refused.status_code, refused.get_json()["code"]) == (503, "store-unavailable")
    assert (shop.runs, shop.record()) == ([], None)
    assert [REMEDY] == [record.message for record in caplog.records if "another process" in record.message]
    assert "engine.dispose(close=False)" in REMEDY
    assert is_in_transaction(inherited[0])

    again = shop.post(key=key)

    assert (again.status_code, shop.payments()) == (201, 1)
    inherited[0].close()


@pytest.mark.parametrize("key", ("k", None))
def test_a_view_that_takes_an_inherited_connection_commits_nothing(open_: OpenShop, key: str | None) -> None:
    """The session was clean before the view. Its rows are not committed, and its answer does not leave."""
    shop = open_()
    inherited: list[Any] = []

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.db.session.execute(select(Account))
        if not inherited:
            inherited.append(as_another_process(shop))
        shop.pay()
        return "paid", 201

    failed = shop.post(key=key)

    assert (failed.status_code, failed.get_json()["code"]) == (500, "not-committed")
    assert is_in_transaction(inherited[0])
    inherited[0].rollback()
    assert (shop.post(key=key).status_code, shop.payments()) == (201, 1)
    inherited[0].close()


def test_a_commit_of_the_views_own_is_refused_on_an_inherited_connection(open_: OpenShop) -> None:
    shop = open_()
    inherited: list[Any] = []

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        shop.db.session.flush()
        inherited.append(as_another_process(shop))
        shop.db.session.commit()
        return "paid", 201

    assert shop.post().status_code == 500
    inherited[0].rollback()
    assert shop.payments() == 0
    inherited[0].close()


def is_in_transaction(connection: Any) -> bool:
    """Whether nobody has ended the transaction on this connection of a driver."""
    if hasattr(connection, "in_transaction"):
        return bool(connection.in_transaction)
    return bool(connection.info.transaction_status.name == "INTRANS")


def test_flask_sqlalchemy_tells_its_engines_without_a_context(open_: OpenShop) -> None:
    """It has no public way, and a forked child must not enter a context to learn them."""
    shop = open_(SQLALCHEMY_BINDS={"other": "sqlite://"})

    told = ApplicationDatabase(shop.app).engines()

    with shop.app.app_context():
        assert set(told) == set(shop.db.engines.values())
    assert len(told) == 2
