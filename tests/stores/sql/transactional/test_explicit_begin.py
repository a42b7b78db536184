"""SQLite transactions that the application begins by itself: what counts is what they wrote, not that one is open."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select, text, update

from flask_idempotency import Step, current_claim, idempotent
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.journal import Effects
from flask_idempotency.stores.sql import engines
from flask_idempotency.stores.sql.transactional.listeners import has_written, is_locking, watch
from tests.stores.sql.conftest import on_sqlite
from tests.stores.sql.shops import Account, OpenShop, Payment, Shop

pytestmark = on_sqlite


def legacy(open_: OpenShop, **config: Any) -> Shop:
    """Python's sqlite3 begins a transaction before the first write."""
    return open_(**config)


def recipe(open_: OpenShop, begin: str = "BEGIN", **config: Any) -> Shop:
    """SQLAlchemy's documented recipe: the engine begins each transaction."""
    shop = open_(**config)
    engine = shop.db_engine
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    engine.dispose()
    return shop


def immediate(open_: OpenShop, **config: Any) -> Shop:
    return recipe(open_, "BEGIN IMMEDIATE", **config)


def autocommit_off(open_: OpenShop, **config: Any) -> Shop:
    """SQLAlchemy's recipe for Python 3.12: a transaction is open all the time."""
    config.setdefault("SQLALCHEMY_ENGINE_OPTIONS", {"connect_args": {}})["connect_args"]["autocommit"] = False
    return open_(**config)


NEEDS_312 = pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has the parameter from Python 3.12 on")
MODES = [legacy, recipe, pytest.param(autocommit_off, marks=NEEDS_312)]


@pytest.fixture(params=MODES, ids=lambda mode: mode.__name__)
def begun(request: pytest.FixtureRequest, open_: OpenShop, monkeypatch: pytest.MonkeyPatch) -> Shop:
    # What is refused waits for the lock that its own view holds.
    monkeypatch.setattr(engines, "BUSY_MS", 50)
    made: Shop = request.param(open_, SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"timeout": 0.05}})
    return made


def read(shop: Shop) -> None:
    assert shop.db.session.get(Account, 1) is not None


def sent_as_text(shop: Shop) -> None:
    shop.db.session.execute(text("-- note\nINSERT INTO payments (amount, account) VALUES (7, 1)"))


def flushed(shop: Shop) -> None:
    shop.db.session.add(Payment(amount=1))
    shop.db.session.flush()


def by_the_driver(shop: Shop) -> None:
    driver: Any = shop.db.session.connection().connection.dbapi_connection
    driver.execute("UPDATE accounts SET balance = 1")


def of_no_row(shop: Shop) -> None:
    """It has the write lock all the same."""
    shop.db.session.execute(update(Account).where(Account.id == 404).values(balance=1))


@pytest.mark.parametrize("effects", ("plain", "deduplicated", "pure", "transactional"))
def test_a_view_that_has_only_read_takes_its_steps(begun: Shop, effects: Effects) -> None:
    @begun.view()
    @idempotent(required=True, steps=(Step("first", effects=effects), Step("save", effects="transactional")))
    def pay() -> Any:
        read(begun)
        current_claim.step("first", begun.runs.append, "first")
        read(begun)
        current_claim.step("save", begun.pay)
        return {}, 201

    assert [201, 201] == [begun.post().status_code, begun.post().status_code]
    assert (["first", 100], 1) == (begun.runs, begun.payments())


@pytest.mark.parametrize("status", (200, 503))
def test_a_claim_whose_view_has_only_read_is_released(begun: Shop, status: int) -> None:
    @begun.view()
    @idempotent(required=True, steps=("charge",), decide=lambda response, error: "release")
    def pay() -> Any:
        read(begun)
        current_claim.step("charge", begun.runs.append, 1)
        read(begun)
        return {}, status

    @begun.view("/form")
    @idempotent(decide=lambda response, error: "release")
    def form() -> Any:
        read(begun)
        with begun.db.session.begin_nested():
            read(begun)
        return {}, status

    assert (status, "paused") == (begun.post().status_code, begun.post().headers["Idempotency-Status"])
    assert [1] == begun.runs
    assert [status, status] == [begun.post("/form", key="f").status_code for _ in range(2)]


def test_a_view_that_has_only_read_and_commits_is_not_marked(begun: Shop) -> None:
    @begun.view()
    def pay() -> Any:
        read(begun)
        begun.db.session.commit()
        read(begun)
        begun.db.session.commit()
        begun.pay()
        return {}, 201

    assert 201 == begun.post().status_code
    assert 1 == begun.payments()
    assert "CommittedEarly" not in begun.told()


def test_a_hook_may_read_before_the_claim(begun: Shop) -> None:
    @begun.view()
    def pay() -> Any:
        begun.pay()
        return {}, 201

    begun.app.before_request(lambda: read(begun))

    assert [201, 201] == [begun.post().status_code, begun.post().status_code]
    assert 1 == begun.payments()


def by_a_claim(shop: Shop, view: Callable[[], Any]) -> Any:
    return idempotent(effects="plain")(view)


def by_a_mark(shop: Shop, view: Callable[[], Any]) -> Any:
    def marked() -> Any:
        read(shop)
        current_claim.point_of_no_return()
        return view()

    return idempotent(effects="marked")(marked)


def by_a_step(shop: Shop, view: Callable[[], Any]) -> Any:
    def stepped() -> Any:
        read(shop)
        current_claim.step("charge", int)
        return view()

    return idempotent(required=True, steps=("charge",))(stepped)


def named(value: object) -> str | None:
    return {True: "saved", False: "rolled-back"}[value] if isinstance(value, bool) else getattr(value, "__name__", None)


@pytest.mark.parametrize(
    ("ours", "save"), ((by_a_claim, True), (by_a_mark, False), (by_a_step, True), (by_a_step, False)), ids=named
)
def test_what_has_only_read_may_write_after_a_write_of_ours(
    begun: Shop, ours: Callable[[Shop, Callable[[], Any]], Any], save: bool
) -> None:
    """SQLite refuses each write of a transaction that began to read before another connection wrote."""

    def pay() -> Any:
        begun.db.session.add(Payment(amount=100))
        begun.db.session.flush()
        (begun.db.session.commit if save else begun.db.session.rollback)()
        return {}, 201

    begun.view()(ours(begun, pay))
    begun.app.before_request(lambda: read(begun))

    assert [201, 201] == [begun.post().status_code, begun.post().status_code]
    assert int(save) == begun.payments()


@pytest.mark.parametrize(
    ("effects", "write"),
    (
        ("plain", sent_as_text),
        ("transactional", flushed),
        ("transactional", by_the_driver),
        ("plain", of_no_row),
    ),
    ids=named,
)
def test_a_view_that_has_written_takes_no_step(begun: Shop, write: Callable[[Shop], None], effects: Effects) -> None:
    begun.app.config["PROPAGATE_EXCEPTIONS"] = True

    @begun.view()
    @idempotent(required=True, steps=(Step("charge", effects=effects),))
    def pay() -> Any:
        read(begun)
        write(begun)
        current_claim.step("charge", begun.runs.append, 1)
        return {}, 201

    with pytest.raises(ConfigurationError, match=r"commit them before it|Commit before the step"):
        begun.post()
    assert [] == begun.runs


def test_a_transaction_that_begins_with_the_write_lock(open_: OpenShop) -> None:
    """A plain step cannot be recorded beside it. A transactional one is committed in a new one."""
    shop = immediate(open_, PROPAGATE_EXCEPTIONS=True)

    @shop.view("/<name>")
    @idempotent(required=True, steps=("charge", Step("save", effects="transactional")))
    def pay(name: str) -> Any:
        read(shop)
        current_claim.step(name, shop.pay)
        return {}, 201

    assert (201, 1) == (shop.post("/save").status_code, shop.payments())
    with pytest.raises(ConfigurationError, match="BEGIN IMMEDIATE"):
        shop.post("/charge", key="c")
    assert 1 == shop.payments()


@pytest.mark.parametrize(("begin", "locks"), (("BEGIN IMMEDIATE", True), ("begin exclusive", True), ("BEGIN", False)))
def test_a_listener_of_the_class_may_begin_it_before_ours_hear_of_it(open_: OpenShop, begin: str, locks: bool) -> None:
    shop = legacy(open_)
    engine: Engine = shop.db_engine
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    engine.dispose()

    def begin_it(connection: Connection) -> None:
        if connection.engine.pool is engine.pool:
            connection.exec_driver_sql(begin)

    event.listen(Engine, "begin", begin_it)
    try:
        for _ in range(2):
            with engine.connect() as connection:
                connection.exec_driver_sql("SELECT 1")
                assert (False, locks) == (has_written(connection), is_locking(connection))
    finally:
        event.remove(Engine, "begin", begin_it)


READING = (
    "SELECT 1",
    " \n-- who asks: UPDATE\n /* the\nshop */ select 1",
    "WITH a AS (SELECT 1) SELECT * FROM a",
    "VALUES (1)",
    "EXPLAIN DELETE FROM accounts",
    "PRAGMA table_info(accounts)",
    "SAVEPOINT a",
)
WRITING = (
    "INSERT INTO accounts (id, balance) VALUES (9, 0)",
    "/* SELECT */ DELETE FROM accounts",
    "WITH a AS (SELECT 1)\nUPDATE accounts SET balance = 0",
    "REPLACE INTO accounts (id, balance) VALUES (1, 1)",
    "CREATE TABLE notes (id)",
    "PRAGMA user_version = 3",
)


@pytest.mark.parametrize("statement", (*READING, *WRITING))
def test_a_statement_counts_by_what_it_may_do(open_: OpenShop, statement: str) -> None:
    engine: Engine = recipe(open_).db_engine
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
        assert (statement in WRITING,) * 2 == (has_written(connection), is_locking(connection))
        connection.rollback()
        connection.exec_driver_sql("SELECT 1")
        assert (False, False) == (has_written(connection), is_locking(connection))


def test_a_transaction_that_began_unseen_may_have_written(open_: OpenShop) -> None:
    engine = recipe(open_).db_engine.execution_options()
    with engine.connect() as connection:
        connection.execute(select(1))
        connection.info.clear()
        watch(engine)
        assert (True, True) == (has_written(connection), is_locking(connection))


def test_no_transaction_has_written_nothing(open_: OpenShop) -> None:
    with legacy(open_).db_engine.connect() as connection:
        assert isinstance(connection, Connection)
        connection.info.clear()
        connection.execute(select(1))
        assert (False, False) == (has_written(connection), is_locking(connection))
