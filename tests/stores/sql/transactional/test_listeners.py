"""Session listeners of the application see the same as with their own commit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from flask_idempotency import current_claim
from flask_idempotency.engine.errors import DataKeyMissing
from tests.stores.sql.shops import Account, OpenShop, Payment, Shop, broken_commit, paying

KEYS = ("k", None)
"""A request with a claim, and one without."""


class Index:
    """What Flask's Mega-Tutorial does for its search index: it reads the session's lists before the commit."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[str], list[str], list[str]]] = []

    def before_commit(self, session: Session) -> None:
        lists = session.new, session.dirty, session.deleted
        new, dirty, deleted = ([type(each).__name__ for each in found] for found in lists)
        self.seen.append((new, dirty, deleted))


def on_the_scoped_session(shop: Shop, listener: Callable[..., Any], name: str = "before_commit") -> None:
    event.listen(shop.db.session, name, listener)


def on_each_session(shop: Shop, listener: Callable[..., Any], name: str = "before_commit") -> None:
    @shop.app.before_request
    def listen() -> None:
        event.listen(shop.db.session(), name, listener)


PLACES = pytest.mark.parametrize("listen", (on_the_scoped_session, on_each_session))


def moving(shop: Shop, *statuses: int) -> None:
    """A view that writes a row, changes one and deletes one, and leaves all of it to the commit."""
    with shop.app.app_context():
        shop.db.session.add_all([Account(id=number) for number in range(2, 9)])
        shop.db.session.commit()

    @shop.view()
    def pay() -> tuple[str, int]:
        status = statuses[len(shop.runs)]
        deleted, changed = shop.db.session.get(Account, 2 + len(shop.runs)), shop.db.session.get(Account, 1)
        assert changed is not None
        changed.balance += 1
        shop.db.session.delete(deleted)
        shop.pay()
        if status >= 400:
            current_claim.keep_rows()
        return "paid", status


ALL_THREE = (["Payment"], ["Account"], ["Account"])


def test_a_session_without_listeners_gets_none(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    paying(shop)
    shop.post(key="first")
    added: list[Any] = []
    monkeypatch.setattr(event, "listen", lambda *arguments: added.append(arguments))

    assert [201, 201] == [shop.post(key=key).status_code for key in KEYS]
    assert (3, []) == (shop.payments(), added)


@PLACES
def test_before_commit_sees_the_lists_once(shop: Shop, listen: Any) -> None:
    """As with a commit of the view's own. Also for rows that are kept with an error."""
    statuses = (201, 201, 402, 402)
    moving(shop, *statuses)
    index = Index()
    listen(shop, index.before_commit)

    assert statuses == tuple(shop.post(key=key).status_code for key in ("1", None, "2", None))

    assert ([ALL_THREE] * 4, 4) == (index.seen, shop.payments())


def test_a_listener_registered_later_sees_the_lists(shop: Shop) -> None:
    moving(shop, 201, 201, 201)
    assert 201 == shop.post(key="first").status_code
    index = Index()
    on_the_scoped_session(shop, index.before_commit)

    assert [201, 201] == [shop.post(key=key).status_code for key in KEYS]

    assert ([ALL_THREE] * 2, 3) == (index.seen, shop.payments())


def test_a_listener_registered_in_the_view_sees_the_lists(shop: Shop) -> None:
    index = Index()

    @shop.view()
    def pay() -> str:
        event.listen(shop.db.session(), "before_commit", index.before_commit)
        shop.pay()
        return "paid"

    assert [200, 200] == [shop.post(key=key).status_code for key in KEYS]

    assert [(["Payment"], [], [])] * 2 == index.seen


@PLACES
def test_rows_that_a_listener_adds_are_committed_too(shop: Shop, listen: Any) -> None:
    paying(shop)
    listen(shop, lambda session: session.add(Payment(amount=7)))

    for key, payments in (("k", 2), ("k", 2), (None, 4), (None, 6)):
        assert (201, payments) == (shop.post(key=key).status_code, shop.payments())


@PLACES
@pytest.mark.parametrize("flushes", (True, False))
def test_a_listener_that_raises_prevents_the_commit(
    shop: Shop, listen: Any, flushes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The key is free, the client is not promised anything, and the log says which line failed."""
    paying(shop)
    failures: list[RuntimeError] = []

    def refuse(session: Session) -> None:
        if flushes:
            session.flush()
        if failures:
            raise failures.pop()

    listen(shop, refuse)

    for number, key in enumerate(KEYS):
        failures.append(RuntimeError("the search index is away"))
        caplog.clear()
        with caplog.at_level(logging.ERROR, "flask_idempotency"):
            refused = shop.post(key=key)

        assert (500, "not-committed") == (refused.status_code, refused.get_json()["code"])
        assert number == shop.payments()
        assert 1 == sum("raise failures.pop()" in (record.exc_text or "") for record in caplog.records)
        assert (201, number + 1) == (shop.post(key=key).status_code, shop.payments())


def test_refused_rows_of_a_listener_roll_all_rows_back(shop: Shop) -> None:
    paying(shop)
    refused: list[Payment] = []

    def add(session: Session) -> None:
        if refused:
            session.add(refused.pop())

    on_the_scoped_session(shop, add)

    for number, key in enumerate(KEYS):
        for faults in ({"amount": None}, {"amount": 1, "account": 404}):
            refused.append(Payment(**faults))
            assert ("not-committed", number) == (shop.post(key=key).get_json()["code"], shop.payments())
        assert (201, number + 1) == (shop.post(key=key).status_code, shop.payments())


def test_an_open_savepoint_is_committed_once(shop: Shop) -> None:
    """A view may leave `begin_nested()` open. Its commit has two levels, and the record is written in the last."""
    index = Index()
    on_the_scoped_session(shop, index.before_commit)

    @shop.view()
    def pay() -> str:
        shop.db.session.begin_nested()
        shop.pay()
        return "paid"

    assert [200, 200, 200] == [shop.post(key=key).status_code for key in ("k", "k", None)]

    assert ([(["Payment"], [], []), ([], [], [])] * 2, 2) == (index.seen, shop.payments())


@PLACES
def test_a_listener_that_fails_after_the_commit_is_shown_in_the_log(
    shop: Shop, listen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows are there, so the client gets its response. The application's fault is logged with its traceback."""
    paying(shop)

    def index(session: Session) -> None:
        raise RuntimeError("the search\nindex is away")

    listen(shop, index, "after_commit")

    for payments, key in enumerate(KEYS, 1):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "flask_idempotency"):
            answer = shop.post(key=key)

        assert (201, b"paid", payments) == (answer.status_code, answer.data, shop.payments())
        (record,) = [record for record in caplog.records if record.module == "transaction"]
        assert (logging.ERROR, True) == (record.levelno, "in index" in (record.exc_text or ""))
        assert "after_commit" in record.getMessage()
        assert "reply" not in caplog.text
    assert ("true", 2) == (shop.post().headers["Idempotency-Replayed"], shop.payments())


def test_a_listener_that_uses_the_session_after_the_commit_leaks_no_connection(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLAlchemy refuses statements there, which is the usual mistake."""
    paying(shop)
    pool = shop.db_engine.pool
    on_the_scoped_session(shop, lambda session: session.get(Account, 1), "after_commit")

    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        assert [201, 201] == [shop.post(key=key).status_code for key in KEYS]

    assert (2, 0) == (shop.payments(), pool.checkedout())
    assert 2 == sum(record.module == "transaction" for record in caplog.records)


def test_a_listener_that_fails_before_the_extensions_listener_is_logged(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """`insert=True` puts it in front. Then the record tells that the commit was done."""
    paying(shop)
    assert 201 == shop.post(key="first").status_code

    def index(session: Session) -> None:
        raise RuntimeError("the search index is away")

    event.listen(shop.db.session, "after_commit", index, insert=True)

    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        assert (201, 2) == (shop.post().status_code, shop.payments())

    assert any("in index" in (record.exc_text or "") for record in caplog.records)
    assert "reply" not in caplog.text


def test_a_lost_reply_is_not_a_failed_listener(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paying(shop)
    broken_commit(shop, monkeypatch, applied=True)

    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        assert 201 == shop.post().status_code

    assert any("its reply was lost" in record.getMessage() for record in caplog.records)


def test_a_tombstone_of_an_erased_tenant_runs_no_listener_twice(open_: OpenShop) -> None:
    """The data key goes away while the commit is under way: the answer is sealed again, and the commit goes on."""
    shop = open_()
    paying(shop)
    seen: list[Any] = []
    on_the_scoped_session(shop, seen.append)
    transactions = shop.store.transactions
    complete = transactions.complete
    gone = [DataKeyMissing("erased", erased=True)]

    def erased_first(*arguments: Any, **options: Any) -> Any:
        if gone:
            raise gone.pop()
        return complete(*arguments, **options)

    transactions.complete = erased_first

    assert 201 == shop.post().status_code

    assert ([], 1, 1) == (gone, len(seen), shop.payments())
