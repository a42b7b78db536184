"""A view's rows and its record commit together or not at all, through Flask-SQLAlchemy's `db.session`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from flask import Flask, Response, abort, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import create_engine, event, text, update
from sqlalchemy.exc import OperationalError
from werkzeug.test import run_wsgi_app

from flask_idempotency import ConfigurationError, Idempotency, current_claim
from flask_idempotency.stores.sql.schema import records
from tests.stores.sql.conftest import on_both, on_each, on_postgresql, on_sqlite
from tests.stores.sql.shops import SECRET, Account, OpenShop, Payment, Shop, broken_commit, paying


@on_each
def test_rows_and_record_are_committed_together(shop: Shop) -> None:
    paying(shop)

    first, again = shop.post(), shop.post()

    assert [(201, b"paid")] * 2 == [(answer.status_code, answer.data) for answer in (first, again)]
    assert "true" == again.headers["Idempotency-Replayed"]
    assert 1 == shop.payments() == len(shop.runs)
    assert "completed" == shop.record().state


def test_a_replay_makes_no_session(shop: Shop) -> None:
    """To make one and to end it would take longer than the look at the cache."""
    paying(shop)
    made = []
    shop.app.teardown_request(lambda _: made.append(shop.db.session.registry.has()))

    shop.post()
    shop.post()

    assert [True, False] == made


@on_each
def test_no_reader_sees_the_rows_before_the_record(shop: Shop) -> None:
    """While the view runs nothing of it is visible; when its answer leaves, everything is."""
    seen = []

    @shop.view()
    def pay() -> str:
        shop.pay()
        shop.db.session.flush()
        seen.append((shop.payments(), shop.record().state))
        return "paid"

    shop.post()

    assert [(0, "processing")] == seen
    assert (1, "completed") == (shop.payments(), shop.record().state)


def test_a_failed_view_leaves_no_rows(shop: Shop) -> None:
    @shop.view()
    def pay() -> str:
        shop.pay()
        shop.db.session.flush()
        if len(shop.runs) == 1:
            raise RuntimeError("half-way")
        return "paid"

    assert [500, 200] == [shop.post().status_code, shop.post().status_code]
    assert 1 == shop.payments()


def test_the_rows_of_an_error_are_rolled_back_and_its_response_kept(shop: Shop) -> None:
    @shop.view()
    def pay() -> str:
        shop.pay()
        abort(422)

    answers = [shop.post(), shop.post()]

    assert [422, 422] == [answer.status_code for answer in answers]
    assert answers[0].data == answers[1].data
    assert (0, 1, "failed") == (shop.payments(), len(shop.runs), shop.record().state)


def test_a_view_may_keep_the_rows_of_an_error(shop: Shop) -> None:
    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        current_claim.keep_rows()
        return "declined", 402

    assert [402, 402] == [shop.post().status_code, shop.post().status_code]
    assert (1, 1) == (shop.payments(), len(shop.runs))


@on_both
def test_a_refused_commit_leaves_no_rows(shop: Shop) -> None:
    """A deferred constraint speaks up at the very end. The answer that was ready is not delivered, and never was."""
    accounts = [404, 1]

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay(account=accounts[len(shop.runs)])
        return "paid", 201

    refused = shop.post()

    assert (500, "not-committed") == (refused.status_code, refused.get_json()["code"])
    assert b"paid" not in refused.data
    assert (0, "released") == (shop.payments(), shop.record().state)

    again = shop.post()

    assert (201, b"paid") == (again.status_code, again.data)
    assert "Idempotency-Replayed" not in again.headers
    assert 1 == shop.payments()
    assert ["ClaimGranted", "Released", "ClaimGranted", "Completed"] == shop.told()


@on_each
def test_a_superseded_worker_commits_no_rows(shop: Shop) -> None:
    """It was paused beyond its lease and its successor has paid: its rows go, and its caller gets the stored answer."""

    @shop.view()
    def pay() -> str:
        number = len(shop.runs)
        shop.runs.append(number)
        if number == 0:
            with shop.db_engine.begin() as connection:
                connection.execute(update(records).values(lease_expires_at=0))
            with ThreadPoolExecutor(1) as another:  # a worker of its own, with a session of its own
                assert b"by run 1" == another.submit(shop.post).result().data
        shop.db.session.add(Payment(amount=1))
        return f"by run {number}"

    late = shop.post()

    assert (200, b"by run 1") == (late.status_code, late.data)
    assert 1 == shop.payments()
    assert "LeaseExpired" in shop.told()


def test_a_failing_hook_rolls_the_rows_back(shop: Shop) -> None:
    failures = [RuntimeError("the session cookie could not be signed")]
    paying(shop)

    @shop.app.after_request
    def fail(response: Response) -> Response:
        if failures:
            raise failures.pop()
        return response

    assert [500, 201] == [shop.post().status_code, shop.post().status_code]
    assert (1, 2) == (shop.payments(), len(shop.runs))


def test_an_interrupted_view_leaves_no_rows(shop: Shop) -> None:
    @shop.view()
    def pay() -> str:
        shop.pay()
        shop.db.session.flush()
        if len(shop.runs) == 1:
            raise KeyboardInterrupt
        return "paid"

    with pytest.raises(KeyboardInterrupt):
        shop.post()

    assert (200, 1) == (shop.post().status_code, shop.payments())


def test_a_stream_is_committed_before_its_first_byte(shop: Shop) -> None:
    """What it will say is not known then, so retries are told that it was not kept; they never run."""
    seen = []

    @shop.view()
    def pay() -> Response:
        shop.pay()

        def body() -> Iterator[str]:
            seen.append(shop.payments())
            yield "paid"

        return Response(body())

    first, again = shop.post(), shop.post()

    assert (200, b"paid", [1]) == (first.status_code, first.data, seen)
    assert (200, "response-not-kept") == (again.status_code, again.get_json()["code"])
    assert 1 == shop.payments()


@on_each
def test_a_conflict_in_the_view_is_a_retryable_error(shop: Shop) -> None:
    """The database chose another transaction: that is no 500, and the retry runs."""

    @shop.view()
    def pay() -> str:
        shop.pay()
        if len(shop.runs) == 1:
            raise a_conflict(shop)
        return "paid"

    answer = shop.post()

    assert (503, "transaction-conflict") == (answer.status_code, answer.get_json()["code"])
    assert "1" == answer.headers["Retry-After"]
    assert (200, 1) == (shop.post().status_code, shop.payments())


def a_conflict(shop: Shop) -> Exception:
    """A real one: a lock that somebody else holds."""
    with shop.db_engine.connect() as holder, shop.db_engine.connect() as other:
        if shop.db_engine.dialect.name == "sqlite":
            holder.exec_driver_sql("BEGIN IMMEDIATE")
            other.exec_driver_sql("PRAGMA busy_timeout = 0")
            wanted = "BEGIN IMMEDIATE"
        else:
            holder.execute(text("SELECT * FROM accounts FOR UPDATE"))
            wanted = "SELECT * FROM accounts FOR UPDATE NOWAIT"
        with pytest.raises(OperationalError) as caught:
            other.exec_driver_sql(wanted)
        holder.rollback()
        return caught.value


@on_postgresql
def test_a_lost_database_connection_is_a_retryable_error(shop: Shop) -> None:
    """The view could not even connect: nothing is there, and the retry may find the database back."""
    away = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")

    @shop.view()
    def pay() -> str:
        shop.pay()
        if len(shop.runs) == 1:
            away.connect()
        return "paid"

    assert [503, 200] == [shop.post().status_code, shop.post().status_code]
    assert 1 == shop.payments()


def test_views_of_other_effects_commit_by_themselves(open_: OpenShop) -> None:
    shop = open_(IDEMPOTENCY_EFFECTS="plain")

    @shop.view()
    def pay() -> str:
        shop.pay()
        shop.db.session.commit()
        return "paid"

    assert [200, 200] == [shop.post().status_code, shop.post().status_code]
    assert 1 == shop.payments()
    assert "CommittedEarly" not in shop.told()


def test_a_rotation_commits_under_both_secrets(open_: OpenShop) -> None:
    """A release that knows only the old one replays what this one has committed."""
    shop = open_(IDEMPOTENCY_SECRET=["new-9f2c47d1e8b35a60", "old-9f2c47d1e8b35a60"])
    paying(shop)
    shop.post()
    older = open_(IDEMPOTENCY_SECRET="old-9f2c47d1e8b35a60", existing=True)
    paying(older)

    assert "true" == older.post().headers["Idempotency-Replayed"]
    assert 1 == shop.payments()


@on_sqlite
def test_a_session_that_holds_the_write_lock_is_reported(open_: OpenShop) -> None:
    """On SQLite a hook that has written with the session would wait for the claim that waits for it."""
    shop = open_(PROPAGATE_EXCEPTIONS=True)
    paying(shop)

    @shop.app.before_request
    def note() -> None:
        shop.db.session.execute(update(Account).values(balance=1))

    with pytest.raises(ConfigurationError, match=r"must end it: db\.session\.commit"):
        shop.post()


@on_postgresql
class TestSnapshots:
    """A session that keeps its snapshot sees no claim that was made after it was taken."""

    STRICT: ClassVar = {"SQLALCHEMY_ENGINE_OPTIONS": {"isolation_level": "REPEATABLE READ"}}

    def test_one_that_begins_in_the_view_is_late_enough(self, open_: OpenShop) -> None:
        shop = open_(**self.STRICT)
        paying(shop)

        assert [201, 201] == [shop.post().status_code, shop.post().status_code]
        assert 1 == shop.payments()

    def test_one_that_began_in_a_hook_is_named(self, open_: OpenShop) -> None:
        """It could never complete its record."""
        shop = open_(**self.STRICT, PROPAGATE_EXCEPTIONS=True)
        paying(shop)

        @shop.app.before_request
        def authenticate() -> None:
            shop.db.session.get(Account, 1)

        with pytest.raises(ConfigurationError, match="would never see the claim"):
            shop.post()

    def test_each_transaction_is_looked_at(self, open_: OpenShop) -> None:
        shop = open_(PROPAGATE_EXCEPTIONS=True)
        paying(shop)
        levels = ["READ COMMITTED", "SERIALIZABLE", "READ COMMITTED"]

        @shop.app.before_request
        def authenticate() -> None:
            shop.db.session.connection(execution_options={"isolation_level": levels.pop(0)})
            shop.db.session.get(Account, 1)

        assert 201 == shop.post(key="1").status_code
        with pytest.raises(ConfigurationError, match="would never see the claim"):
            shop.post(key="2")
        assert 201 == shop.post(key="3").status_code

    def test_one_cannot_mark_its_record(self, open_: OpenShop) -> None:
        """The mark would come after its snapshot, and its commit be refused for that: said before the effect."""
        shop = open_(**self.STRICT, PROPAGATE_EXCEPTIONS=True)

        @shop.view()
        def pay() -> str:
            shop.db.session.get(Account, 1)
            current_claim.point_of_no_return()
            return "paid"

        with pytest.raises(ConfigurationError, match=r"point_of_no_return\(\)"):
            shop.post()

    def test_one_that_a_renewal_has_overtaken_frees_the_key(self, open_: OpenShop) -> None:
        """The record has changed since the snapshot: the commit is refused, nothing is there, and the retry may run."""
        shop = open_(**self.STRICT)

        @shop.view()
        def pay() -> str:
            shop.pay()
            shop.db.session.flush()
            if len(shop.runs) == 1:
                with shop.db_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
                    other.execute(update(records).values(lease_expires_at=records.c.lease_expires_at + 1))
            return "paid"

        assert [503, 200] == [shop.post().status_code, shop.post().status_code]
        assert 1 == shop.payments()


@on_each
def test_a_hook_may_read_with_the_session(shop: Shop) -> None:
    paying(shop)

    @shop.app.before_request
    def authenticate() -> None:
        shop.db.session.get(Account, 1)

    assert [201, 201] == [shop.post().status_code, shop.post().status_code]
    assert 1 == shop.payments()


def test_an_application_without_flask_sqlalchemy_is_refused() -> None:
    app = Flask(__name__)
    app.config |= {"IDEMPOTENCY_STORE": "flask-sqlalchemy://", "IDEMPOTENCY_SECRET": SECRET, "TESTING": True}
    Idempotency(app)
    app.add_url_rule("/", view_func=lambda: "done", methods=["POST"])

    with pytest.raises(ConfigurationError, match="has no Flask-SQLAlchemy"):
        app.test_client(use_cookies=False).post("/", headers={"Idempotency-Key": "k"})


@on_each
def test_extensions_may_be_initialised_in_any_order(database_url: str) -> None:
    app = Flask(__name__)
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": database_url,
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
        "IDEMPOTENCY_SECRET": SECRET,
    }
    idempotency = Idempotency(app)
    db = SQLAlchemy()
    db.init_app(app)
    app.add_url_rule("/", view_func=lambda: "done", methods=["POST"])
    with app.app_context():
        records.metadata.create_all(db.engine)

        client = app.test_client(use_cookies=False)
        answers = [client.post("/", headers={"Idempotency-Key": "k"}) for _ in range(2)]

        db.engine.dispose()
    Shop(app, db, idempotency).store.close()
    assert [None, "true"] == [answer.headers.get("Idempotency-Replayed") for answer in answers]


@on_each
def test_a_request_adds_one_commit_and_two_statements(shop: Shop) -> None:
    """What the protection costs: the claim, which commits by itself, and the record's update in the view's commit."""
    paying(shop)
    shop.post(key="warm")
    sent: list[str] = []
    commits: list[str] = []
    engine = shop.db_engine
    event.listen(engine, "before_cursor_execute", lambda *args: sent.append(args[2].split()[0]))
    event.listen(engine, "commit", lambda connection: commits.append("session"))

    shop.post()

    assert (["INSERT", "UPDATE"], ["session"]) == (sent, commits)


@pytest.mark.parametrize("key", ["inner", None])
def test_a_transactional_request_inside_another_one_on_its_session_is_refused_and_harms_nothing(
    shop: Shop, key: str | None
) -> None:
    """What it commits or rolls back would be the outer one's. The outer rows stay, once, with the outer record."""
    inner: list[int] = []

    @shop.view("/inner")
    def pay_inside() -> tuple[str, int]:
        shop.pay(7)
        return "paid inside", 201

    @shop.view("/outer")
    def pay() -> tuple[str, int]:
        shop.pay(5)
        environ = {**request.environ, "PATH_INFO": "/inner"}
        environ.pop("HTTP_IDEMPOTENCY_KEY")
        if key is not None:
            environ["HTTP_IDEMPOTENCY_KEY"] = key
        _, status, _ = run_wsgi_app(shop.app, environ, buffered=True)
        inner.append(int(status[:3]))
        return "paid", 201

    first, again = shop.post("/outer"), shop.post("/outer")

    assert [500 if key is None else 503] == inner
    assert (201, "true") == (first.status_code, again.headers.get("Idempotency-Replayed"))
    assert 1 == shop.payments()


def test_without_a_key_the_rows_of_an_error_are_not(shop: Shop) -> None:
    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        shop.db.session.flush()
        if shop.runs == [100, 100]:
            current_claim.keep_rows()
        return "declined", 402

    assert [402, 402] == [shop.post(key=None).status_code, shop.post(key=None).status_code]
    assert 1 == shop.payments()


@pytest.mark.parametrize(("enabled", "key"), ((False, "k"), (True, None)))
def test_rows_are_committed_without_a_key_or_the_extension(open_: OpenShop, enabled: bool, key: str | None) -> None:
    """IDEMPOTENCY_ENABLED=False takes away the protection and must not take away the payments."""
    shop = open_(IDEMPOTENCY_ENABLED=enabled)
    paying(shop)

    assert [201, 201] == [shop.post(key=key).status_code, shop.post(key=key).status_code]
    assert (2, None) == (shop.payments(), shop.record())


def test_a_lost_commit_reply_asks_for_no_retry(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key a retry would pay again, so nobody may be told that it is safe."""
    paying(shop)
    broken_commit(shop, monkeypatch, applied=True)

    answer = shop.post(key=None)

    assert (500, "commit-unknown") == (answer.status_code, answer.get_json()["code"])
    assert "Retry-After" not in answer.headers


def test_a_redirect_of_the_same_request_commits_nothing(shop: Shop) -> None:
    """With a key and without: the request goes elsewhere."""

    @shop.view()
    def pay() -> tuple[str, int, dict[str, str]]:
        shop.pay()
        return "", 307, {"Location": "/elsewhere"}

    assert [307, 307] == [shop.post(key=key).status_code for key in ("k", None)]
    assert 0 == shop.payments()


@pytest.mark.parametrize("key", ["k", None])
def test_no_other_transactional_view_runs_on_the_same_session(shop: Shop, key: str | None) -> None:
    """The inner one's commit would be this one's too, whether or not it has a key."""

    @shop.view("/inner")
    def inner() -> str:
        return "inner"

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        shop.db.session.flush()
        shop.post("/inner", key=key)
        return "half-way", 500

    assert (500, 0) == (shop.post(key=None).status_code, shop.payments())
