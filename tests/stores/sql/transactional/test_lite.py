"""Flask-SQLAlchemy-Lite in the place of Flask-SQLAlchemy: its session belongs to the context and is no `scoped_session`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import pytest
from flask import Flask, g, has_app_context, request
from flask_sqlalchemy import SQLAlchemy as FlaskSQLAlchemy
from flask_sqlalchemy_lite import SQLAlchemy
from sqlalchemy import create_engine, func, insert, select

from flask_idempotency import Idempotency, Step, current_claim, idempotent
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql.schema import include_in, records
from flask_idempotency.stores.sql.transactional.joining import lent
from flask_idempotency.web.application_database import ApplicationDatabase, ContextSessions
from tests.stores.sql.conftest import on_each, on_sqlite
from tests.stores.sql.shops import SECRET, Account, Base, OpenShop, Payment, Shop, paying
from tests.stores.sql.transactional.test_joining import begin_explicitly, left


class Sent:
    """An adapter that no relay of these tests reaches."""

    def send(self, messages: Any) -> Any:
        raise AssertionError("nothing is relayed here")


@pytest.fixture
def shop(open_: OpenShop) -> Shop:
    return open_(lite=True)


@on_each
def test_rows_and_record_are_committed_together_or_not_at_all(shop: Shop) -> None:
    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay(account=1 if len(shop.runs) else 404)
        return "paid", 201

    assert [500, 201, 201] == [shop.post().status_code for _ in range(3)]
    assert (1, "completed") == (shop.payments(), shop.record().state)
    assert [100, 100] == shop.runs


@on_each
def test_a_commit_of_the_view_is_noticed(shop: Shop) -> None:
    """Of the session of the context, and of one that the same factory has made."""

    @shop.view()
    def pay() -> str:
        with shop.db.sessionmaker() as other, other.begin():
            other.add(Payment(amount=5))
        return "paid"

    @shop.view("/own")
    def own() -> str:
        shop.pay()
        shop.db.session.commit()
        return "paid"

    assert 200 == shop.post().status_code
    assert ["CommittedEarly"] == [name for name in shop.told() if name == "CommittedEarly"]
    shop.events.clear()
    assert 200 == shop.post("/own", key="l").status_code
    assert "CommittedEarly" in shop.told()


@on_each
def test_a_transactional_step_commits_with_its_rows(shop: Shop) -> None:
    def save() -> None:
        shop.pay()

    @shop.view()
    @idempotent(effects="steps", steps=("charge", Step("save", effects="transactional")))
    def pay() -> tuple[str, int]:
        current_claim.step("charge", lambda: "ch_1")
        current_claim.step("save", save)
        shop.runs.append("view")
        return ("later", 503) if shop.runs.count("view") == 1 else ("paid", 201)

    assert [503, 201, 201] == [shop.post().status_code for _ in range(3)]
    assert (1, [100, "view", "view"]) == (shop.payments(), shop.runs)


@on_each
def test_a_message_of_the_outbox_is_in_the_transaction_of_its_rows(shop: Shop) -> None:
    outbox = shop.idempotency.outbox()
    outbox.route("paid", Sent())
    Base.metadata.create_all(shop.db_engine)

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay(account=1 if len(shop.runs) else 404)
        outbox.publish("paid", {"amount": 1})
        return "paid", 201

    assert [500, 201] == [shop.post().status_code for _ in range(2)]
    with shop.db_engine.connect() as connection:
        assert 1 == connection.exec_driver_sql("SELECT count(*) FROM idempotency_outbox").scalar()


@contextmanager
def bound_to_a_connection(shop: Shop) -> Iterator[None]:
    """SQLAlchemy's recipe for test suites, where this extension makes its sessions."""
    with shop.app.app_context(), shop.db.engine.connect() as connection:
        transaction = connection.begin()
        place = {"bind": connection, "join_transaction_mode": "create_savepoint"}
        with patch.dict(shop.db.sessionmaker.kw, place):
            yield
        transaction.rollback()


@contextmanager
def isolated(shop: Shop) -> Iterator[None]:
    """The recipe of the extension itself. It lends one connection in place of all of the engine's."""
    with shop.app.app_context(), shop.db.test_isolation():
        yield


# With SQLAlchemy 2.1, a session commits the transaction of a lent connection: `test_isolation` rolls nothing back there.
LENDS = pytest.mark.skipif(version("sqlalchemy") >= "2.1", reason="test_isolation of 0.2.1 is for SQLAlchemy 2.0")


@pytest.mark.parametrize("recipe", (bound_to_a_connection, pytest.param(isolated, marks=LENDS)))
@on_each
def test_rows_and_records_of_an_isolated_test_are_rolled_back(
    shop: Shop, recipe: Callable[[Shop], AbstractContextManager[None]]
) -> None:
    shop.app.testing = True
    if shop.db_engine.dialect.name == "sqlite":
        begin_explicitly(shop.db_engine)
        shop.db_engine.dispose()
    paying(shop)

    for _ in range(2):
        with recipe(shop):
            first, again = shop.post(), shop.post()

            assert [201, 201] == [first.status_code, again.status_code]
            with shop.app.app_context():
                found = [shop.db.session.scalar(select(func.count()).select_from(each)) for each in (Payment, records)]
            assert ("true", [1, 1]) == (again.headers.get("Idempotency-Replayed"), found)
        assert (0, 0) == left(shop)


@on_sqlite
def test_a_second_engine_is_refused_in_a_transactional_view(open_: OpenShop, tmp_path: Any) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    shop = open_(lite=True, PROPAGATE_EXCEPTIONS=True)
    with shop.app.app_context():
        engines: Any = shop.db.engines
        engines["other"] = engine = create_engine(other)
    Base.metadata.create_all(engine)

    @shop.view()
    def pay() -> str:
        shop.db.session.connection(bind_arguments={"bind": engine}).execute(insert(Account).values(id=9))
        return "paid"

    with pytest.raises(ConfigurationError, match="bind 'other'"):
        shop.post()
    engine.dispose()


def test_a_context_without_a_session_has_none(open_: OpenShop) -> None:
    shop = open_(lite=True)
    sessions = ContextSessions(shop.db)

    assert not sessions.has()
    with shop.app.app_context():
        assert not sessions.has()
        assert sessions() is shop.db.session
        assert sessions.has()
    assert [shop.db_engine] == ApplicationDatabase(shop.app).engines()


def test_any_other_extension_is_refused_by_name() -> None:
    class Peewee:
        database = None

    app = Flask("shop")
    app.extensions["sqlalchemy"] = Peewee()

    with pytest.raises(ConfigurationError, match="is a Peewee"):
        Idempotency(app, store="flask-sqlalchemy://", secret=SECRET)


def test_one_that_comes_later_closes_keyed_requests_and_leaves_no_context_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error while a context is pushed would leave it on the thread, and the next caller would share `g` with this one."""

    class Peewee:
        database = None

    app = Flask("shop")
    Idempotency(app, store="flask-sqlalchemy://", secret=SECRET)
    app.extensions["sqlalchemy"] = Peewee()

    @app.post("/pay")
    def pay() -> str:
        return str(g.setdefault("caller", request.headers.get("X-User")))

    client = app.test_client()
    callers = [client.post("/pay", headers={"X-User": name}).text for name in ("alice", "bob")]
    keyed = client.post("/pay", headers={"Idempotency-Key": "k"})

    assert (["alice", "bob"], 503, False) == (callers, keyed.status_code, has_app_context())
    assert "is a Peewee" in caplog.text


def test_a_subclass_with_a_sessionmaker_is_flask_sqlalchemy_still() -> None:
    class Extended(FlaskSQLAlchemy):
        sessionmaker = None

    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite://"
    app.extensions["sqlalchemy"] = db = Extended()

    assert ApplicationDatabase(app).session() is db.session


def test_an_engine_that_others_instrument_is_not_connected_by_a_look() -> None:
    engine: Any = create_engine("sqlite://")
    engine.connect = lambda **options: pytest.fail("a connection was taken")

    assert lent(engine) is None


def test_an_application_of_its_own_metadata_makes_the_tables(tmp_path: Any) -> None:
    app = Flask("shop")
    app.config["SQLALCHEMY_ENGINES"] = {"default": f"sqlite:///{tmp_path}/shop.db"}
    db = SQLAlchemy(app)
    include_in(Base.metadata)
    with app.app_context():
        Base.metadata.create_all(db.engine)
    Idempotency(app, store="flask-sqlalchemy://", secret=SECRET)
    app.add_url_rule("/pay", view_func=lambda: ("paid", 201), methods=["POST"], endpoint="pay")

    answers = [app.test_client().post("/pay", headers={"Idempotency-Key": "k"}) for _ in range(2)]

    assert [None, "true"] == [answer.headers.get("Idempotency-Replayed") for answer in answers]
