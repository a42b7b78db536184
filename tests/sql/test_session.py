"""A view's rows and its record are committed together or not at all, with Flask-SQLAlchemy's `db.session` as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from flask import Flask, Response, abort
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import event, text, update
from sqlalchemy.exc import OperationalError

from flask_idempotency import ConfigurationError, Idempotency, current_claim, idempotent
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.stores.sql.schema import records
from tests.sql.shops import SECRET, Account, Payment, Shop, open_shop

OpenShop: TypeAlias = Callable[..., Shop]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database. Asking for this runs the test on each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.sqlite3'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def open_(database: str) -> Iterator[OpenShop]:
    opened: list[Shop] = []

    def open_one(**config: Any) -> Shop:
        opened.append(open_shop(database, **config))
        return opened[-1]

    yield open_one
    for shop in opened:
        shop.close()


@pytest.fixture
def shop(open_: OpenShop) -> Shop:
    return open_()


def paying(shop: Shop) -> None:
    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        return "paid", 201


def test_rows_and_record_are_there_together(shop: Shop) -> None:
    """And the retry replays."""
    paying(shop)

    first, again = shop.post(), shop.post()

    assert [(201, b"paid")] * 2 == [(answer.status_code, answer.data) for answer in (first, again)]
    assert "true" == again.headers["Idempotency-Replayed"]
    assert 1 == shop.payments() == len(shop.runs)
    assert "completed" == shop.record().state


def test_nobody_sees_the_rows_before_the_record(shop: Shop) -> None:
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


def test_a_failed_view_leaves_nothing(shop: Shop) -> None:
    """Neither rows nor a claim: the retry runs."""

    @shop.view()
    def pay() -> str:
        shop.pay()
        shop.db.session.flush()
        if len(shop.runs) == 1:
            raise RuntimeError("half-way")
        return "paid"

    assert [500, 200] == [shop.post().status_code, shop.post().status_code]
    assert 1 == shop.payments()


def test_the_rows_of_an_error_are_rolled_back_and_its_answer_kept(shop: Shop) -> None:
    """A view that breaks off with abort() has often done half of its work."""

    @shop.view()
    def pay() -> str:
        shop.pay()
        abort(422)

    answers = [shop.post(), shop.post()]

    assert [422, 422] == [answer.status_code for answer in answers]
    assert answers[0].data == answers[1].data
    assert (0, 1, "failed") == (shop.payments(), len(shop.runs), shop.record().state)


def test_a_view_may_keep_the_rows_of_an_error(shop: Shop) -> None:
    """A declined payment is written down with its answer."""

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        current_claim.keep_rows()
        return "declined", 402

    assert [402, 402] == [shop.post().status_code, shop.post().status_code]
    assert (1, 1) == (shop.payments(), len(shop.runs))


def test_a_commit_that_the_database_refuses_leaves_nothing(shop: Shop) -> None:
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


def test_a_superseded_worker_commits_nothing(shop: Shop) -> None:
    """It was paused beyond its lease and its successor has paid: its rows go, and its caller gets the stored answer."""

    @shop.view()
    def pay() -> str:
        number = len(shop.runs)
        shop.runs.append(number)
        if number == 0:
            with shop.db_engine.begin() as connection:
                connection.execute(update(records).values(lease_until=0))
            assert b"by run 1" == shop.post().data
        shop.db.session.add(Payment(amount=1))
        return f"by run {number}"

    late = shop.post()

    assert (200, b"by run 1") == (late.status_code, late.data)
    assert 1 == shop.payments()
    assert "LeaseExpired" in shop.told()


def test_a_failing_hook_takes_the_rows_along(shop: Shop) -> None:
    """What the client hears is what is stored: a 500, so nothing."""
    failures = [RuntimeError("the session cookie could not be signed")]
    paying(shop)

    @shop.app.after_request
    def fail(response: Response) -> Response:
        if failures:
            raise failures.pop()
        return response

    assert [500, 201] == [shop.post().status_code, shop.post().status_code]
    assert (1, 2) == (shop.payments(), len(shop.runs))


def test_an_interrupted_view_leaves_nothing(shop: Shop) -> None:
    """Ctrl-C, or a server that ends its worker's greenlet."""

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


class TestEarlyCommits:
    """A view that commits by itself is noticed, and what it has committed is never repeated."""

    def test_the_record_is_marked_in_the_same_commit(self, shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
        """From there on a vanished worker leaves an unknown outcome, and not a second payment."""
        seen: list[tuple[int, str]] = []

        @shop.view()
        def pay() -> str:
            if not seen:
                seen.append((shop.payments(), shop.record().on_lapse))
            shop.pay()
            shop.db.session.commit()
            if len(seen) == 1:
                seen.append((shop.payments(), shop.record().on_lapse))
            return "paid"

        with caplog.at_level(logging.WARNING, "flask_idempotency"):
            assert [200, 200] == [shop.post().status_code, shop.post().status_code]
            shop.post(key="another")

        assert [(0, "takeover"), (1, "quarantine")] == seen
        assert 2 == shop.payments() == len(shop.runs)
        assert 2 == shop.told().count("CommittedEarly")
        assert 1 == sum("commits by itself" in line for line in caplog.messages)

    def test_a_failure_afterwards_quarantines(self, shop: Shop) -> None:
        """The key is not released: half of the work is in the database for good."""

        @shop.view()
        def pay() -> str:
            shop.pay()
            shop.db.session.commit()
            raise RuntimeError("after the commit")

        assert 500 == shop.post().status_code
        again = shop.post()

        assert (409, "outcome-unknown") == (again.status_code, again.get_json()["code"])
        assert (1, 1) == (shop.payments(), len(shop.runs))

    def test_a_refused_last_commit_quarantines(self, shop: Shop) -> None:
        """Something was committed and the rest was not: nobody may tell the client that nothing remains."""

        @shop.view()
        def pay() -> str:
            shop.pay()
            shop.db.session.commit()
            shop.pay(account=404)
            return "paid"

        answers = [shop.post(), shop.post()]

        assert ["outcome-unknown"] * 2 == [answer.get_json()["code"] for answer in answers]
        assert 1 == shop.payments()

    def test_a_superseded_worker_cannot_commit_early_either(self, shop: Shop) -> None:
        """Its own commit raises `LeaseLost`, and nothing is committed."""
        raised = []

        @shop.view()
        def pay() -> str:
            shop.pay()
            with shop.db_engine.begin() as connection:
                connection.execute(update(records).values(token=b"x" * 16))
            try:
                shop.db.session.commit()
            except LeaseLost as error:
                raised.append(error)
                raise
            return "paid"

        # SQLite's one writer is the view once it has flushed: the theft must come first.
        with shop.app.app_context():
            shop.db.session.autoflush = False
        answer = shop.post()

        assert 1 == len(raised)
        assert 0 == shop.payments()
        assert 409 == answer.status_code

    def test_another_session_of_the_same_kind_does_not_escape(self, shop: Shop) -> None:
        """`db.session.remove()` and a session made by hand are still the application's."""

        @shop.view()
        def pay() -> str:
            shop.db.session.remove()
            with shop.db.session.session_factory() as session, session.begin():
                session.add(Payment(amount=5))
            return "paid"

        shop.post()

        assert "CommittedEarly" in shop.told()

    def test_savepoints_are_no_commits(self, shop: Shop) -> None:
        """They are part of the transaction that is still to come."""

        @shop.view()
        def pay() -> str:
            with shop.db.session.begin_nested():
                shop.pay()
            nested = shop.db.session.begin_nested()
            shop.pay()
            nested.rollback()
            return "paid"

        assert 200 == shop.post().status_code
        assert "CommittedEarly" not in shop.told()
        assert 1 == shop.payments()

    def test_a_rolled_back_early_commit_was_none(self, shop: Shop) -> None:
        """The database refused it, so nothing is there that a retry could repeat."""

        @shop.view()
        def pay() -> str:
            shop.pay(account=404 if len(shop.runs) == 0 else 1)
            shop.db.session.commit()
            return "paid"

        assert [500, 200] == [shop.post().status_code, shop.post().status_code]
        assert 1 == shop.payments()

    def test_other_requests_commit_as_they_like(self, shop: Shop) -> None:
        """On the same thread, after a claim: nobody watches over a view without one."""
        paying(shop)

        @shop.app.post("/plain")
        @idempotent(effects="plain")
        def plain() -> str:
            shop.db.session.add(Payment(amount=7))
            shop.db.session.commit()
            return "done"

        shop.post()
        shop.post("/plain", key=None)

        assert "CommittedEarly" not in shop.told()
        assert 2 == shop.payments()


class TestLostCommits:
    """The reply to COMMIT is lost: the record knows what became of it."""

    def test_it_was_committed(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        """The client gets its answer, as if nothing had happened."""
        paying(shop)
        broken_commit(shop, monkeypatch, applied=True)

        answer = shop.post()

        assert (201, b"paid") == (answer.status_code, answer.data)
        assert (1, "completed") == (shop.payments(), shop.record().state)
        assert "true" == shop.post().headers["Idempotency-Replayed"]

    def test_it_was_not(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is there, the key is free, and the client is told to try again."""
        paying(shop)
        broken_commit(shop, monkeypatch, applied=False)

        refused, again = shop.post(), shop.post()

        assert (503, "transaction-conflict") == (refused.status_code, refused.get_json()["code"])
        assert (201, 1) == (again.status_code, shop.payments())


def broken_commit(shop: Shop, monkeypatch: pytest.MonkeyPatch, *, applied: bool) -> None:
    """The session's next COMMIT fails as when its connection breaks, after or before the server has carried it out."""
    dialect = shop.db_engine.dialect
    original = dialect.do_commit
    failures = [OperationalError("COMMIT", {}, ConnectionError("broken"), connection_invalidated=True)]

    def do_commit(connection: Any) -> None:
        if not failures:
            original(connection)
            return
        if applied:
            original(connection)
        raise failures.pop()

    monkeypatch.setattr(dialect, "do_commit", do_commit)


class TestWithoutAClaim:
    """The commit is not the view's, so it must be somebody's."""

    def test_without_a_key_rows_are_committed(self, shop: Shop) -> None:
        """Each request by itself."""
        paying(shop)

        assert [201, 201] == [shop.post(key=None).status_code, shop.post(key=None).status_code]
        assert (2, None) == (shop.payments(), shop.record())

    def test_without_a_key_the_rows_of_an_error_are_not(self, shop: Shop) -> None:
        """By the same rule as with one."""

        @shop.view()
        def pay() -> tuple[str, int]:
            shop.pay()
            shop.db.session.flush()
            if shop.runs == [100, 100]:
                current_claim.keep_rows()
            return "declined", 402

        assert [402, 402] == [shop.post(key=None).status_code, shop.post(key=None).status_code]
        assert 1 == shop.payments()

    def test_a_refused_commit_is_no_201(self, shop: Shop) -> None:
        """Whether or not there is a key."""

        @shop.view()
        def pay() -> tuple[str, int]:
            shop.pay(account=404)
            return "paid", 201

        answer = shop.post(key=None)

        assert (500, 0) == (answer.status_code, shop.payments())

    def test_switched_off_rows_are_committed_all_the_same(self, open_: OpenShop) -> None:
        """IDEMPOTENCY_ENABLED=False takes away the protection and must not take away the payments."""
        shop = open_(IDEMPOTENCY_ENABLED=False)
        paying(shop)

        assert [201, 201] == [shop.post().status_code, shop.post().status_code]
        assert (2, None) == (shop.payments(), shop.record())


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


def test_a_conflict_in_the_view_asks_the_client_to_try_again(shop: Shop) -> None:
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


def test_views_of_other_effects_commit_by_themselves(open_: OpenShop) -> None:
    """On the same store: a plain view is left alone."""
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
    shop = open_(IDEMPOTENCY_SECRET=["new", "old"])
    paying(shop)
    shop.post()
    older = open_(IDEMPOTENCY_SECRET="old", existing=True)
    paying(older)

    assert "true" == older.post().headers["Idempotency-Replayed"]
    assert 1 == shop.payments()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_session_that_has_the_writers_lock_is_named(open_: OpenShop) -> None:
    """On SQLite a hook that has written with the session would wait for the claim that waits for it."""
    shop = open_(PROPAGATE_EXCEPTIONS=True)
    paying(shop)

    @shop.app.before_request
    def note() -> None:
        shop.db.session.execute(update(Account).values(balance=1))

    with pytest.raises(ConfigurationError, match=r"must end it: db\.session\.commit"):
        shop.post()


def test_a_hook_that_reads_with_the_session_is_no_hindrance(shop: Shop) -> None:
    """Authentication does, in most applications."""
    paying(shop)

    @shop.app.before_request
    def authenticate() -> None:
        shop.db.session.get(Account, 1)

    assert [201, 201] == [shop.post().status_code, shop.post().status_code]
    assert 1 == shop.payments()


def test_an_application_without_flask_sqlalchemy_is_told_so() -> None:
    """By name, and with the remedy."""
    app = Flask(__name__)
    app.config |= {"IDEMPOTENCY_STORE": "flask-sqlalchemy://", "IDEMPOTENCY_SECRET": SECRET, "TESTING": True}
    Idempotency(app)
    app.add_url_rule("/", view_func=lambda: "done", methods=["POST"])

    with pytest.raises(ConfigurationError, match="has no Flask-SQLAlchemy"):
        app.test_client(use_cookies=False).post("/", headers={"Idempotency-Key": "k"})


def test_it_does_not_matter_which_extension_comes_first(database: str) -> None:
    """The database is looked for at the first request."""
    app = Flask(__name__)
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": database,
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


def test_one_extra_commit_and_two_statements(shop: Shop) -> None:
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
