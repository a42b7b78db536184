"""The completion goes through the driver's cursor, or through SQLAlchemy's connection: the outcome is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest
from sqlalchemy import Engine, event, text, update
from sqlalchemy.orm import Session

from flask_idempotency.stores.sql import completion
from flask_idempotency.stores.sql.driver import DriverCursor, SessionCursor
from flask_idempotency.stores.sql.schema import records
from tests.stores.sql.conftest import on_both, on_each, on_postgresql
from tests.stores.sql.shops import OpenShop, Payment, Shop, paying

Ways: TypeAlias = list[DriverCursor]


@pytest.fixture
def cursors(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """The cursors of the driver that completions use."""
    made: Ways = []
    init = SessionCursor.__init__

    def note(self: SessionCursor, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(SessionCursor, "__init__", note)
    return made


def nothing(*_: Any) -> None:
    """Listen."""


def by_the_driver(shop: Shop) -> None:
    """Leave the engine as it is."""


def by_sqlalchemy(shop: Shop) -> None:
    event.listen(shop.db_engine, "after_cursor_execute", nothing)


Choose: TypeAlias = Callable[[Shop], None]
EITHER_WAY = pytest.mark.parametrize("choose", (by_the_driver, by_sqlalchemy))


@EITHER_WAY
@on_both
def test_the_completion_takes_the_drivers_cursor_unless_the_engine_has_listeners(
    shop: Shop, choose: Choose, cursors: Ways
) -> None:
    choose(shop)
    paying(shop)

    assert (201, 1, "completed") == (shop.post().status_code, shop.payments(), shop.record().state)
    assert len(cursors) == (choose is by_the_driver)


@contextmanager
def listening(target: Any, name: str, listener: Callable[..., Any]) -> Iterator[None]:
    event.listen(target, name, listener)
    try:
        yield
    finally:
        event.remove(target, name, listener)


@pytest.mark.parametrize("place", ("engine", "every engine", "connection"))
def test_a_listener_hears_the_completion(shop: Shop, cursors: Ways, place: str) -> None:
    heard: list[str] = []
    heard_of = ""

    def hear(connection: Any, *arguments: Any) -> None:
        heard.extend(str(each) for each in arguments[:2] if "UPDATE idempotency_records" in str(each))

    @shop.view()
    def pay() -> str:
        shop.pay()
        if place == "connection":
            event.listen(shop.db.session.connection(), heard_of, hear)
        return "paid"

    names = ("before_cursor_execute", "after_cursor_execute", "before_execute", "after_execute")
    for heard_of in names:
        heard.clear()
        if place == "connection":
            assert shop.post(key=heard_of).status_code == 200
        else:
            with listening(shop.db_engine if place == "engine" else Engine, heard_of, hear):
                assert shop.post(key=heard_of).status_code == 200

        assert (heard_of, 1, []) == (heard_of, len(heard), cursors)


@pytest.mark.parametrize("name", ("do_execute", "handle_error"))
def test_a_listener_to_the_dialect_makes_the_completion_use_sqlalchemy(shop: Shop, cursors: Ways, name: str) -> None:
    event.listen(shop.db_engine, name, nothing)
    paying(shop)

    assert (201, []) == (shop.post().status_code, cursors)


def test_execution_options_make_the_completion_use_sqlalchemy(shop: Shop, cursors: Ways) -> None:
    @shop.view()
    def pay() -> str:
        shop.pay()
        shop.db.session.connection(execution_options={"schema_translate_map": {"other": None}})
        return "paid"

    assert (200, 1, []) == (shop.post().status_code, shop.payments(), cursors)


def test_a_savepoint_below_the_session_makes_the_completion_use_sqlalchemy(shop: Shop, cursors: Ways) -> None:
    @shop.view()
    def pay() -> str:
        shop.pay()
        shop.db.session.flush()
        shop.db.session.connection().begin_nested()
        return "paid"

    assert (200, []) == (shop.post().status_code, cursors)
    assert (1, "completed") == (shop.payments(), shop.record().state)


@EITHER_WAY
def test_a_worker_that_lost_its_claim_commits_no_row(shop: Shop, choose: Choose) -> None:
    choose(shop)

    @shop.view()
    def pay() -> str:
        number = len(shop.runs)
        shop.runs.append(number)
        if number == 0:
            with shop.db_engine.begin() as connection:
                connection.execute(update(records).values(lease_expires_at=0))
            with ThreadPoolExecutor(1) as another:
                assert b"by run 1" == another.submit(shop.post).result().data
        shop.db.session.add(Payment(amount=1))
        return f"by run {number}"

    assert (b"by run 1", 1) == (shop.post().data, shop.payments())


@EITHER_WAY
@on_each
def test_a_failed_completion_rolls_the_rows_back(
    shop: Shop, choose: Choose, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The statement fails in the database, so no row stays and the key is free."""
    choose(shop)
    paying(shop)
    shop.post(key="first")
    broken = text("SELECT no_such_function(:my_token)").columns(records.c.fence)
    with monkeypatch.context() as patched:
        patched.setattr(completion, "made", lambda *_: broken)
        refused = shop.post()

    assert (True, 1) == (refused.status_code >= 500, shop.payments())
    assert "my_token" not in caplog.text
    assert (201, 2) == (shop.post().status_code, shop.payments())


@on_postgresql
@EITHER_WAY
def test_a_connection_that_broke_before_the_completion_is_replaced(shop: Shop, choose: Choose) -> None:
    choose(shop)
    broken = [True]
    paying(shop)

    def break_once(session: Session, _: Any) -> None:
        if broken and session.in_transaction():
            broken.clear()
            raw: Any = session.connection().connection.dbapi_connection
            raw.close()

    event.listen(shop.db.session, "after_flush_postexec", break_once)

    refused, again = shop.post(), shop.post()

    assert (503, "transaction-conflict") == (refused.status_code, refused.get_json()["code"])
    assert (201, 1) == (again.status_code, shop.payments())


@EITHER_WAY
@on_each
def test_a_counted_record_is_completed(open_: OpenShop, choose: Choose) -> None:
    shop = open_(IDEMPOTENCY_QUOTA_RECORDS=5)
    choose(shop)
    paying(shop)

    first, again = shop.post(), shop.post()

    assert [201, 201] == [first.status_code, again.status_code]
    assert ("true", 1, 1) == (again.headers["Idempotency-Replayed"], shop.payments(), shop.record().in_quota)
