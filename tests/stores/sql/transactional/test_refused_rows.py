"""Rows that the database refuses, and rows in a database that does not hold the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from flask import Blueprint, redirect
from sqlalchemy import MetaData, create_engine, event, func, insert, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from flask_idempotency import current_claim
from tests.lab.postgres import LentDatabase
from tests.stores.sql.conftest import on_each
from tests.stores.sql.shops import Account, OpenShop, Payment, Shop, paying

KEYS = ("k", None)
"""With a key, and without one: both leave the commit to us."""


def conflicting(shop: Shop, *, to: Any = None) -> list[int]:
    """Give it a view whose first row the database refuses when it is flushed. Return the statuses that hooks have seen."""
    seen: list[int] = []

    target: Any = to or shop.app

    @target.post("/pay")  # type: ignore[untyped-decorator]
    def pay() -> tuple[str, int]:
        shop.runs.append(1)
        # There is one already.
        shop.db.session.add(Account(id=1) if len(shop.runs) == 1 else Payment(amount=1))
        return "paid", 201

    @shop.app.after_request
    def look(response: Any) -> Any:
        seen.append(response.status_code)
        return response

    return seen


def answering(status: int) -> Callable[[IntegrityError], Any]:
    return lambda error: (f"taken: {type(error.orig).__name__}", status)


@pytest.mark.parametrize("key", KEYS)
@on_each
def test_the_error_handlers_of_the_application_answer_for_a_refused_row(shop: Shop, key: str | None) -> None:
    """As they do where the view commits by itself. A 409 leaves the key free."""
    seen = conflicting(shop)
    shop.app.register_error_handler(IntegrityError, answering(409))

    refused, again = shop.post(key=key), shop.post(key=key)

    assert [(409, True), (201, False)] == [(a.status_code, a.text.startswith("taken")) for a in (refused, again)]
    assert ([409, 201], 1) == (seen, shop.payments())


@on_each
def test_the_status_of_the_error_handler_decides(shop: Shop) -> None:
    """A final 4xx is kept: the retry gets the same, and does not run."""
    conflicting(shop)
    shop.app.register_error_handler(IntegrityError, answering(422))

    refused, again = shop.post(), shop.post()

    assert (422, 422, "true") == (refused.status_code, again.status_code, again.headers["Idempotency-Replayed"])
    assert (refused.data, 1, 0) == (again.data, len(shop.runs), shop.payments())


def test_the_handler_of_a_blueprint_answers_first(shop: Shop) -> None:
    shopping = Blueprint("shopping", __name__)
    conflicting(shop, to=shopping)
    shopping.register_error_handler(IntegrityError, answering(409))
    shop.app.register_error_handler(IntegrityError, answering(400))
    shop.app.register_blueprint(shopping)

    assert 409 == shop.post().status_code


@pytest.mark.parametrize("key", KEYS)
def test_a_handler_may_read_and_write_and_send_elsewhere(shop: Shop, key: str | None) -> None:
    """The view's rows are rolled back before it runs. What it writes itself is committed with its response."""

    @shop.view()
    def pay() -> str:
        shop.pay()
        shop.db.session.add(Account(id=1))
        return "paid"

    @shop.app.errorhandler(IntegrityError)
    def explain(error: IntegrityError) -> Any:
        account = shop.db.session.get(Account, 1)
        assert account is not None
        account.balance -= 1
        return redirect("/form")

    assert (302, 0) == (shop.post(key=key).status_code, shop.payments())
    with shop.db_engine.connect() as connection:
        assert -1 == connection.scalar(select(Account.balance))


@on_each
def test_without_a_handler_it_is_an_unhandled_error(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    conflicting(shop)

    refused, paid, again = shop.post(), shop.post(), shop.post()

    assert ([500, 201, 201], 1) == ([a.status_code for a in (refused, paid, again)], shop.payments())
    assert "not known to be committed" not in caplog.text


def test_in_testing_the_error_reaches_the_test(shop: Shop) -> None:
    conflicting(shop)
    shop.app.testing = True

    with pytest.raises(IntegrityError):
        shop.post()

    assert 201 == shop.post().status_code


def test_where_listeners_look_for_unsaved_rows_the_commit_finds_it(shop: Shop) -> None:
    """A search index reads `session.new` before the commit. So these rows are flushed by the commit, after all hooks."""
    conflicting(shop)
    shop.app.register_error_handler(IntegrityError, answering(409))
    found: list[list[str]] = []
    event.listen(
        shop.db.session, "before_commit", lambda session: found.append([type(each).__name__ for each in session.new])
    )

    refused, again = shop.post(), shop.post()

    assert ("not-committed", 201) == (refused.get_json()["code"], again.status_code)
    assert (1, [["Account"], ["Payment"]]) == (shop.payments(), found)


@pytest.mark.parametrize("key", KEYS)
@on_each
def test_an_error_that_the_view_lets_pass_promises_no_rows(shop: Shop, key: str | None) -> None:
    """PostgreSQL has aborted the transaction, and would answer COMMIT with a rollback. SQLite goes on."""

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        shop.db.session.flush()
        with suppress(IntegrityError):
            shop.db.session.execute(insert(Account).values(id=1, balance=0))
        return "paid", 201

    answer = shop.post(key=key)

    assert (answer.status_code, shop.payments()) in ((201, 1), (500, 0))


@on_each
def test_a_handler_that_commits_by_itself_is_noticed(shop: Shop) -> None:
    """Its rows stay, so its response is kept, and no retry writes them again."""

    @shop.view()
    def pay() -> str:
        shop.runs.append(1)
        shop.db.session.add(Account(id=1))
        return "paid"

    @shop.app.errorhandler(IntegrityError)
    def note_it(error: IntegrityError) -> tuple[str, int]:
        shop.db.session.add(Payment(amount=5))
        shop.db.session.commit()
        return "taken", 422

    assert [422, 422] == [shop.post().status_code, shop.post().status_code]
    assert (1, 1) == (len(shop.runs), shop.payments())
    assert "CommittedEarly" in shop.told()


def test_what_only_the_commit_can_refuse_gets_the_problem(shop: Shop) -> None:
    shop.app.register_error_handler(IntegrityError, answering(409))

    @shop.view()
    def pay() -> str:
        shop.pay(account=404)
        return "paid"

    assert ("not-committed", 0) == (shop.post().get_json()["code"], shop.payments())


def test_rows_kept_with_an_error_are_flushed_too(shop: Shop) -> None:
    shop.app.register_error_handler(IntegrityError, answering(409))

    @shop.view()
    def pay() -> tuple[str, int]:
        current_claim.keep_rows()
        shop.db.session.add(Account(id=1))
        return "declined", 402

    assert 409 == shop.post().status_code


# -- another database


class Audits(DeclarativeBase):
    metadata = MetaData(info={"bind_key": "audit"})


class Note(Audits):
    __tablename__ = "notes"

    id: Mapped[int] = mapped_column(primary_key=True)


class Audited:
    """A shop with a second database, the bind `audit`, for notes."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        with shop.app.app_context():
            self.engine = shop.db.engines["audit"]
        Audits.metadata.create_all(self.engine)

    def count(self) -> tuple[int, int]:
        """What both databases have: payments and notes."""
        with self.engine.connect() as connection:
            return self.shop.payments(), connection.scalar(select(func.count()).select_from(Note)) or 0


@pytest.fixture
def audited(open_: OpenShop, database_url: str, tmp_path: Path) -> Iterator[Audited]:
    """On PostgreSQL the second one is the same database, by connections of its own."""
    url = database_url if "postgresql" in database_url else f"sqlite:///{tmp_path / 'audit.sqlite3'}"
    audited = Audited(open_(SQLALCHEMY_BINDS={"audit": url}))
    yield audited
    Audits.metadata.drop_all(audited.engine)
    audited.engine.dispose()


def by_the_session(audited: Audited) -> None:
    audited.shop.db.session.add(Note())


def flushed(audited: Audited) -> None:
    by_the_session(audited)
    audited.shop.db.session.flush()


def in_sql(audited: Audited) -> None:
    audited.shop.db.session.execute(insert(Note).values(id=7))


def as_text(audited: Audited) -> None:
    statement = text("INSERT INTO notes (id) VALUES (7)")
    audited.shop.db.session.execute(statement, bind_arguments={"bind": audited.engine})


def by_its_own_commit(audited: Audited) -> None:
    by_the_session(audited)
    audited.shop.db.session.commit()


def with_a_listener(audited: Audited) -> None:
    """Then the session is not flushed before its commit."""
    by_the_session(audited)
    event.listen(audited.shop.db.session(), "before_commit", lambda session: None)


WAYS = (by_the_session, flushed, in_sql, as_text, by_its_own_commit, with_a_listener)


@pytest.mark.parametrize("write", WAYS, ids=lambda write: write.__name__)
@on_each
def test_rows_in_a_second_database_are_refused_before_anything_commits(
    audited: Audited, write: Callable[[Audited], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Two commits are not one: a crash between them would lose a note, or run a payment again. The log names the bind."""
    shop = audited.shop

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        if len(shop.runs) == 1:
            write(audited)
        return "paid", 201

    refused = shop.post()

    assert (500, (0, 0)) == (refused.status_code, audited.count())
    assert "has written to another database (bind 'audit')" in caplog.text
    assert (201, (1, 0)) == (shop.post().status_code, audited.count())


@pytest.mark.parametrize("writes", (True, False))
@on_each
def test_a_second_database_of_another_kind_is_looked_at_too(
    open_: OpenShop, database_url: str, empty_database: LentDatabase, tmp_path: Path, writes: bool
) -> None:
    with empty_database.lent() as postgresql:
        url = postgresql if "sqlite" in database_url else f"sqlite:///{tmp_path / 'audit.sqlite3'}"
        audited = Audited(open_(SQLALCHEMY_BINDS={"audit": url}))
        shop = audited.shop

        @shop.view()
        def pay() -> tuple[str, int]:
            shop.pay()
            shop.db.session.execute(select(Note)).all()
            if writes:
                by_the_session(audited)
            return "paid", 201

        assert ((500, (0, 0)) if writes else (201, (1, 0))) == (shop.post().status_code, audited.count())
        audited.engine.dispose()


def test_without_a_key_they_are_refused_too(audited: Audited) -> None:
    shop = audited.shop

    @shop.view()
    def pay() -> str:
        shop.pay()
        by_the_session(audited)
        return "paid"

    assert (500, (0, 0)) == (shop.post(key=None).status_code, audited.count())


@pytest.mark.parametrize("setting", ({"IDEMPOTENCY_ENABLED": False}, {"IDEMPOTENCY_MODE": "observe"}))
def test_what_is_not_enforced_is_not_refused(open_: OpenShop, tmp_path: Path, setting: dict[str, Any]) -> None:
    audited = Audited(open_(SQLALCHEMY_BINDS={"audit": f"sqlite:///{tmp_path / 'audit.sqlite3'}"}, **setting))
    shop = audited.shop

    @shop.view()
    def pay() -> str:
        shop.pay()
        by_the_session(audited)
        return "paid"

    assert (200, (1, 1)) == (shop.post().status_code, audited.count())
    audited.engine.dispose()


def assert_empty(rows: Any) -> None:
    assert [] == list(rows)


@on_each
def test_a_second_database_that_is_only_read_is_fine(audited: Audited) -> None:
    """Also where a hook has begun to read it before the view."""
    shop = audited.shop
    shop.app.before_request(lambda: assert_empty(shop.db.session.execute(select(Note).where(Note.id == 404)).all()))
    with audited.engine.begin() as connection:
        connection.execute(insert(Note).values(id=1))

    @shop.view()
    def pay() -> str:
        shop.pay()
        note = shop.db.session.get(Note, 1)
        assert note is not None
        note.id = note.id  # changes nothing
        shop.db.session.commit()
        return "paid"

    assert (200, 200, (1, 1)) == (shop.post().status_code, shop.post().status_code, audited.count())


def test_a_session_that_routes_to_the_database_of_a_tenant_is_refused(
    audited: Audited, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows would be there, and the record in the default one. A URL may name the tenant: the log has none."""
    shop = audited.shop
    tenant = create_engine(audited.engine.url)
    Payment.metadata.create_all(tenant)
    monkeypatch.setattr(shop.db.session.session_factory.class_, "get_bind", lambda *_, bind=None, **__: bind or tenant)
    paying(shop)

    assert (500, 0) == (shop.post().status_code, shop.payments())

    with tenant.connect() as connection:
        assert 0 == connection.scalar(select(func.count()).select_from(Payment))
    assert "(a bind that get_bind() returned)" in caplog.text
    assert "audit.sqlite3" not in caplog.text
    tenant.dispose()
