"""Test suites that never commit: the session stands on a connection whose transaction the test rolls back.

The recipes are those that people use: SQLAlchemy's "Joining a Session into an External Transaction" (its session is bound to
the connection), the one that replaces the engines of Flask-SQLAlchemy by connections, and a database in memory.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from flask import Response
from sqlalchemy import event, func, select
from sqlalchemy.orm import Session, SessionTransaction, scoped_session, sessionmaker

from flask_idempotency import Step, current_claim, idempotent
from flask_idempotency.engine.ending import work_here
from flask_idempotency.stores.sql.schema import records
from tests.stores.sql.conftest import on_each, on_sqlite
from tests.stores.sql.shops import Account, OpenShop, Payment, Shop, open_shop, paying

RING = {"IDEMPOTENCY_KEY_RING": "2026-11:" + base64.b64encode(bytes(range(32))).decode()}


@contextmanager
def session_on_a_connection(shop: Shop, mode: Any = "create_savepoint") -> Iterator[Any]:
    """SQLAlchemy's recipe for test suites."""
    with shop.app.app_context():
        connection = shop.db.engine.connect()
        transaction = connection.begin()
        db: Any = shop.db
        before = db.session
        db.session = scoped_session(sessionmaker(bind=connection, join_transaction_mode=mode))
        try:
            yield connection
        finally:
            db.session.remove()
            db.session = before
            if transaction.is_active:
                transaction.rollback()
            connection.close()


@contextmanager
def engine_replaced(shop: Shop) -> Iterator[Any]:
    """The recipe for Flask-SQLAlchemy, whose sessions look for their engine there."""
    with shop.app.app_context():
        engines: Any = shop.db.engines
        engine: Any = engines[None]
        connection = engine.connect()
        transaction = connection.begin()
        connection.begin_nested()
        engines[None] = connection
        try:
            yield connection
        finally:
            shop.db.session.remove()
            transaction.rollback()
            connection.close()
            engines[None] = engine


@contextmanager
def savepoint_restarted(shop: Shop) -> Iterator[Any]:
    """The recipe of SQLAlchemy 1.4, which suites still have: a savepoint is begun whenever one ends."""
    with session_on_a_connection(shop, "conditional_savepoint") as connection:
        session: Any = shop.db.session

        @event.listens_for(session, "after_transaction_end")
        def again(session: Session, transaction: SessionTransaction) -> None:
            if transaction.nested and transaction.parent is not None and not transaction.parent.nested:
                session.expire_all()
                session.begin_nested()

        session.begin_nested()
        yield connection


RECIPES = pytest.mark.parametrize(
    "recipe", (session_on_a_connection, engine_replaced), ids=lambda recipe: recipe.__name__
)


@pytest.fixture
def shop(open_: OpenShop) -> Shop:
    shop = open_()
    shop.app.testing = True
    if shop.db_engine.dialect.name == "sqlite":
        begin_explicitly(shop.db_engine)
    return shop


def begin_explicitly(engine: Any) -> None:
    """SQLAlchemy's recipe for savepoints on SQLite."""
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))


def read(shop: Shop) -> None:
    """What a hook does that loads the user: it begins the session's transaction before the claim."""
    shop.db.session.get(Account, 1)


def nothing(shop: Shop) -> None:
    """Neither fixture nor hook."""


def counts(connection: Any) -> tuple[int, int]:
    """Payments and records that this connection sees."""
    return tuple(connection.scalar(select(func.count()).select_from(each)) for each in (Payment, records))


def left(shop: Shop) -> tuple[int, int]:
    """What the next test finds."""
    with shop.db_engine.connect() as connection:
        return counts(connection)


@pytest.mark.parametrize(
    "recipe", (session_on_a_connection, engine_replaced, savepoint_restarted), ids=lambda recipe: recipe.__name__
)
@on_each
def test_a_retry_is_replayed_and_the_test_rolls_all_back(shop: Shop, recipe: Callable[..., Any]) -> None:
    paying(shop)

    for _ in range(2):
        with recipe(shop) as connection:
            first, again = shop.post(), shop.post()

            assert [201, 201] == [first.status_code, again.status_code]
            assert ("true", (1, 1)) == (again.headers.get("Idempotency-Replayed"), counts(connection))
        assert (0, 0) == left(shop)


@RECIPES
@on_each
def test_a_view_that_fails_leaves_its_key_free(shop: Shop, recipe: Callable[..., Any]) -> None:
    """Also where a hook has begun the session's transaction before the claim, which its rollback undoes too."""
    shop.app.testing = True
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    shop.app.before_request(lambda: read(shop))

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        shop.db.session.flush()
        if len(shop.runs) == 1:
            raise RuntimeError("half-way")
        return "paid", 201

    with recipe(shop) as connection:
        failed, paid, again = shop.post(), shop.post(), shop.post()

        assert [500, 201, 201] == [a.status_code for a in (failed, paid, again)]
        assert ("true", 1) == (again.headers.get("Idempotency-Replayed"), counts(connection)[0])
    assert (0, 0) == left(shop)


@RECIPES
@on_each
def test_a_refusal_of_the_view_is_kept_without_its_rows(shop: Shop, recipe: Callable[..., Any]) -> None:
    shop.app.before_request(lambda: read(shop))

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        shop.db.session.flush()
        return "declined", 422

    with recipe(shop) as connection:
        refused, again = shop.post(), shop.post()

        assert (422, 422, "true") == (refused.status_code, again.status_code, again.headers["Idempotency-Replayed"])
        assert (0, 1) == counts(connection)
    assert (0, 0) == left(shop)


@RECIPES
@on_each
def test_a_commit_of_the_view_stays_in_the_test(
    shop: Shop, recipe: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A commit after reads is none. One of rows is reported, as outside tests, and the test rolls it back."""

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.db.session.get(Account, 1)
        shop.db.session.commit()
        assert "CommittedEarly" not in shop.told()
        shop.pay()
        shop.db.session.commit()
        return "paid", 201

    with recipe(shop) as connection:
        assert [201, 201] == [shop.post().status_code, shop.post().status_code]
        assert (1, 1) == counts(connection)
    assert "CommittedEarly" in shop.told()
    assert (0, 0) == left(shop)


@RECIPES
@on_each
def test_steps_and_their_rows_are_joined(shop: Shop, recipe: Callable[..., Any]) -> None:
    """A step that is recorded in a transaction which the view rolls back stays recorded, as outside tests."""
    did: list[str] = []

    def charge() -> str:
        did.append("charge")
        return "ch_1"

    def save() -> None:
        did.append("save")
        shop.db.session.add(Payment(amount=1))

    @shop.view()
    @idempotent(effects="steps", steps=("charge", Step("save", effects="transactional")))
    def pay() -> tuple[str, int]:
        shop.db.session.get(Account, 1)
        current_claim.step("charge", charge)
        shop.db.session.rollback()
        shop.runs.append(1)
        if len(shop.runs) == 1:
            return "later", 503
        current_claim.step("save", save)
        return "paid", 201

    with recipe(shop) as connection:
        assert [503, 201, 201] == [shop.post().status_code for _ in range(3)]
        assert (["charge", "save"], (1, 1)) == (did, counts(connection))
    assert (0, 0) == left(shop)


@pytest.mark.parametrize("mode", ("rollback_only", "conditional_savepoint", "create_savepoint"))
@pytest.mark.parametrize("before", (Shop.pay, read, nothing), ids=("fixture", "hook", "nothing"))
@on_each
def test_a_rollback_of_the_engine_spares_what_the_test_has_written(
    shop: Shop, mode: str, before: Callable[[Shop], None]
) -> None:
    """An application may never have rolled back at a 4xx. By default, its session would roll back the test's transaction."""
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    if before is read:
        shop.app.before_request(lambda: read(shop))

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        shop.db.session.flush()
        if len(shop.runs) == 2:
            raise RuntimeError("half-way")
        return ("declined", 400) if len(shop.runs) == 3 else ("paid", 201)

    with session_on_a_connection(shop, mode) as connection:
        shop.db.session.add(Account(id=7))
        shop.db.session.commit()
        before(shop)
        shop.db.session.flush()
        written, shop.runs[:] = counts(connection)[0], [0]

        assert [500, 400, 400] == [shop.post().status_code for _ in range(3)]
        assert (written, 1) == counts(connection)
        assert [400, 201, 201] == [shop.post(key=key).status_code for key in ("k", "l", "l")]
        assert (written + 1, 2) == counts(connection)
        assert 2 == connection.scalar(select(func.count()).select_from(Account))
    assert (0, 0) == left(shop)
    with shop.db_engine.connect() as connection:
        assert 1 == connection.scalar(select(func.count()).select_from(Account))


@pytest.mark.parametrize("config", ({"IDEMPOTENCY_QUOTA_RECORDS": 5}, {"IDEMPOTENCY_ENCRYPTION": "on", **RING}))
@on_each
def test_counted_and_sealed_records_are_joined(open_: OpenShop, config: dict[str, Any]) -> None:
    shop = open_(**config, TESTING=True)
    if shop.db_engine.dialect.name == "sqlite":
        begin_explicitly(shop.db_engine)
    shop.app.before_request(lambda: read(shop))
    paying(shop)

    for _ in range(2):
        with session_on_a_connection(shop) as connection:
            assert [201, 201] == [shop.post().status_code, shop.post().status_code]
            assert (1, 1) == counts(connection)
        assert (0, 0) == left(shop)


@on_sqlite
@RECIPES
def test_without_an_explicit_begin_nothing_is_left_either(open_: OpenShop, recipe: Callable[..., Any]) -> None:
    """Python's sqlite3 begins no transaction before a savepoint."""
    shop = open_()
    shop.app.testing = True
    paying(shop)

    with recipe(shop):
        assert [201, 201] == [shop.post().status_code, shop.post().status_code]
    assert (0, 0) == left(shop)


@on_each
def test_a_lease_is_not_renewed_from_another_thread(shop: Shop) -> None:
    """It would find no record on another connection, and give the claim up; or use the test's at the same time."""

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        work: Any = work_here()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(work.claim.run).result()
        return "paid", 201

    with session_on_a_connection(shop):
        assert [201, 201] == [shop.post().status_code, shop.post().status_code]
    assert "LeaseExpired" not in shop.told()


@on_each
def test_a_stream_that_ends_after_its_request_is_joined(shop: Shop) -> None:
    @shop.view()
    @idempotent(effects="plain")
    def pay() -> Response:
        return Response(iter(["pa", "id"]), status=201)

    with session_on_a_connection(shop) as connection:
        first, again = shop.post(), shop.post()

        assert (b"paid", b"paid", 1) == (first.data, again.data, counts(connection)[1])
    assert (0, 0) == left(shop)


@RECIPES
@on_each
def test_elsewhere_a_connection_is_refused_by_name(
    shop: Shop, recipe: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    shop.app.testing = False
    paying(shop)

    with recipe(shop):
        assert 503 == shop.post().status_code
    assert "stands on a connection with a transaction of its own" in caplog.text
    assert "TESTING = True" in caplog.text
    assert 0 == len(shop.runs)


@pytest.fixture
def in_memory() -> Iterator[Shop]:
    """What most project templates use in tests."""
    shop = open_shop("sqlite://", TESTING=True)
    yield shop
    shop.db_engine.dispose()


@pytest.mark.parametrize("hook", (True, False))
def test_a_database_in_memory_is_joined(in_memory: Shop, hook: bool) -> None:
    shop = in_memory
    if hook:
        shop.app.before_request(lambda: read(shop))
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        shop.db.session.flush()
        if len(shop.runs) == 1:
            raise RuntimeError("half-way")
        return "paid", 201

    answers = [shop.post() for _ in range(3)]

    assert [500, 201, 201] == [answer.status_code for answer in answers]
    assert ("true", (1, 1)) == (answers[-1].headers.get("Idempotency-Replayed"), left(shop))
    assert "CommittedEarly" not in shop.told()


def test_a_database_in_memory_also_keeps_records_of_plain_views(in_memory: Shop) -> None:
    @in_memory.view()
    @idempotent(effects="plain")
    def pay() -> tuple[str, int]:
        in_memory.pay()
        in_memory.db.session.commit()
        return "paid", 201

    assert [201, 201] == [in_memory.post().status_code, in_memory.post().status_code]
    assert (1, 1) == left(in_memory)


def test_outside_tests_a_database_in_memory_is_refused(in_memory: Shop, caplog: pytest.LogCaptureFixture) -> None:
    in_memory.app.testing = False
    paying(in_memory)

    assert (503, 0) == (in_memory.post().status_code, len(in_memory.runs))
    assert "TESTING = True" in caplog.text
