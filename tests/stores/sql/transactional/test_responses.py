"""A response promises rows only if they are committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from flask import Response, stream_with_context
from sqlalchemy import event, text, update

from flask_idempotency import ConfigurationError, claim_here, current_claim, idempotent
from tests.stores.sql.conftest import on_both, on_each
from tests.stores.sql.shops import Account, OpenShop, Payment, Shop, paying


@pytest.mark.parametrize("decided", ["release", "quarantine"])
def test_a_response_that_is_not_kept_is_not_sent(shop: Shop, decided: str) -> None:
    """Its rows are rolled back: a 201 would be a false promise."""

    @shop.view()
    @idempotent(decide=lambda response, error: decided)
    def pay() -> tuple[str, int]:
        shop.pay()
        return "paid", 201

    answer = shop.post()

    assert {"release": 500, "quarantine": 409}[decided] == answer.status_code
    assert 0 == shop.payments()


def nothing(shop: Shop) -> None: ...


def only_read(shop: Shop) -> None:
    shop.db.session.execute(text("SELECT 1")).all()
    assert shop.db.session.get(Payment, 404) is None


def rolled_back_itself(shop: Shop) -> None:
    shop.pay()
    shop.db.session.flush()
    shop.db.session.rollback()


@pytest.mark.parametrize("work", [nothing, only_read, rolled_back_itself], ids=lambda work: work.__name__)
@on_each
def test_a_released_response_of_a_read_only_view_is_sent(shop: Shop, work: Callable[[Shop], None]) -> None:
    """A form is shown once more, with 200. It promises no rows, and its key is free for the corrected form."""

    @shop.view()
    @idempotent(decide=lambda response, error: "release" if response.data == b"form" else None)
    def pay() -> tuple[str, int]:
        shop.runs.append(1)
        if len(shop.runs) == 1:
            work(shop)
            return "form", 200
        shop.pay()
        return "paid", 201

    page, paid, again = shop.post(), shop.post(), shop.post()

    assert [(200, b"form"), (201, b"paid"), (201, b"paid")] == [(a.status_code, a.data) for a in (page, paid, again)]
    assert [False, False, True] == ["Idempotency-Replayed" in answer.headers for answer in (page, paid, again)]
    assert 1 == shop.payments()


def pending(shop: Shop) -> None:
    shop.db.session.add(Payment(amount=1))


def flushed(shop: Shop) -> None:
    pending(shop)
    shop.db.session.flush()


def in_sql(shop: Shop) -> None:
    shop.db.session.execute(update(Account).values(id=Account.id))


def in_a_savepoint(shop: Shop) -> None:
    with shop.db.session.begin_nested():
        pending(shop)


@pytest.mark.parametrize("work", [pending, flushed, in_sql, in_a_savepoint], ids=lambda work: work.__name__)
@on_each
def test_a_released_response_of_a_view_that_wrote_is_not_sent(
    shop: Shop, work: Callable[[Shop], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows are rolled back, and the page may speak of them. The log says what to do."""

    @shop.view()
    @idempotent(decide=lambda response, error: "release")
    def pay() -> str:
        work(shop)
        return "paid"

    answer = shop.post()

    assert (500, "not-committed") == (answer.status_code, answer.get_json()["code"])
    assert "database refused" not in answer.get_json()["title"]
    assert (0, "released") == (shop.payments(), shop.record().state)
    (message,) = [message for message in caplog.messages if "rolled back" in message]
    assert message.startswith("pay answered 200")
    assert "status of 400 or above" in message


def test_rows_in_a_second_database_count_as_written(open_: OpenShop, tmp_path: Path) -> None:
    """The records are not there, so what was written there is not looked at: no page may speak of it."""
    shop = open_(SQLALCHEMY_BINDS={"second": f"sqlite:///{tmp_path}/second.db"})
    with shop.app.app_context(), shop.db.engines["second"].begin() as connection:
        connection.execute(text("CREATE TABLE notes (id INTEGER)"))

    @shop.view()
    @idempotent(decide=lambda response, error: "release")
    def pay() -> str:
        bind = {"bind": shop.db.engines["second"]}
        shop.db.session.execute(text("INSERT INTO notes VALUES (1)"), bind_arguments=bind)
        return "noted"

    assert 500 == shop.post().status_code


def test_a_decision_that_fails_rolls_back_and_is_logged(shop: Shop) -> None:
    def fail(response: Any, error: Any) -> str:
        raise RuntimeError("a fault in the application")

    @shop.view()
    @idempotent(decide=fail)
    def pay() -> tuple[str, int]:
        shop.pay()
        return "paid", 201

    assert (500, 0, "released") == (shop.post().status_code, shop.payments(), shop.record().state)


def test_released_success_statuses_are_refused(open_: OpenShop) -> None:
    with pytest.raises(ConfigurationError, match="release_statuses below 400 exclude each other"):
        open_(IDEMPOTENCY_RELEASE_STATUSES=[202])


@pytest.mark.parametrize(("view", "hook"), [(422, 200), (201, 422)])
def test_the_worse_status_of_view_and_hooks_counts(shop: Shop, view: int, hook: int) -> None:
    """With a key and without: a view that failed has not written what is to stay, whatever a hook makes of it."""

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        return "answered", view

    @shop.app.after_request
    def change(response: Response) -> Response:
        response.status_code = hook
        return response

    assert [(hook, 0)] * 2 == [(shop.post(key=key).status_code, shop.payments()) for key in ("k", None)]


def test_an_error_of_a_hook_is_not_replayed_as_a_success(shop: Shop) -> None:
    """The rows were rolled back: whoever asks again must not hear that they are there."""
    refusals = [422]
    paying(shop)

    @shop.app.after_request
    def refuse(response: Response) -> Response:
        if refusals:
            response.status_code = refusals.pop()
        return response

    assert [422, 422] == [shop.post().status_code, shop.post().status_code]
    assert (0, "failed", 422) == (shop.payments(), shop.record().state, shop.record().status)


def test_rows_kept_with_a_temporary_error_keep_its_response(shop: Shop) -> None:
    """Otherwise the retry would write them again."""

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay()
        current_claim.keep_rows()
        return "refused, and written down", 503

    assert [503, 503] == [shop.post().status_code, shop.post().status_code]
    assert 1 == shop.payments()


def test_an_exception_keeps_no_rows(shop: Shop) -> None:
    @shop.view()
    def pay() -> str:
        shop.pay()
        current_claim.keep_rows()
        raise RuntimeError("half-way")

    assert [(500, 0), (500, 0)] == [(shop.post(key=key).status_code, shop.payments()) for key in ("k", None)]


def test_a_view_that_never_calls_claim_here_is_committed(shop: Shop) -> None:
    """It runs without a claim, which is warned of; its rows must not vanish as well."""

    def around(view: Any) -> Any:
        return wraps(view)(lambda: view.__wrapped__())

    @shop.view()
    @around
    @claim_here
    def pay() -> tuple[str, int]:
        shop.pay()
        return "paid", 201

    assert [(201, 1), (201, 2)] == [(shop.post(key=key).status_code, shop.payments()) for key in ("k", None)]


def test_writes_of_a_stream_are_rolled_back_and_logged(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    @shop.view()
    def pay() -> Response:
        def body() -> Iterator[str]:
            shop.db.session.add(Payment(amount=1))
            yield "paid"

        return Response(stream_with_context(body()))

    with caplog.at_level(logging.ERROR, "flask_idempotency"):
        shop.post()

    assert any("has written with the session after its rows were committed" in line for line in caplog.messages)


def test_an_application_without_our_hooks_gets_no_success(shop: Shop) -> None:
    """What it answers cannot be kept, so what it did is not."""
    paying(shop)
    shop.app.process_response = lambda response: response  # type: ignore[method-assign]

    assert (500, 0) == (shop.post().status_code, shop.payments())


AUTOCOMMIT = {"isolation_level": "AUTOCOMMIT"}


@on_each
def test_a_session_that_commits_every_statement_is_refused(open_: OpenShop, caplog: pytest.LogCaptureFixture) -> None:
    """Before it has written anything: nothing could be rolled back."""
    shop = open_(SQLALCHEMY_ENGINE_OPTIONS=AUTOCOMMIT)

    @shop.view()
    def pay() -> str:
        shop.pay()
        if len(shop.runs) == 1:
            shop.db.session.flush()
        return "paid"

    for _ in range(2):
        caplog.clear()
        assert 500 <= shop.post().status_code
        assert 0 == shop.payments()
        assert "AUTOCOMMIT" in caplog.text


@on_each
def test_the_point_of_no_return_does_not_wait_for_its_own_session(open_: OpenShop, database_url: str) -> None:
    """On SQLite the session that has written holds the lock that the mark would need."""
    shop = open_(PROPAGATE_EXCEPTIONS=True)

    @shop.view()
    def pay() -> str:
        shop.pay()
        shop.db.session.flush()
        current_claim.point_of_no_return()
        return "paid"

    if database_url.startswith("sqlite"):
        with pytest.raises(ConfigurationError, match="before the first flush"):
            shop.post()
    else:
        assert 200 == shop.post().status_code


@on_both
def test_an_application_may_configure_its_connections_by_statements(open_: OpenShop) -> None:
    """A listener that leaves its transaction open works with SQLAlchemy, so it must with us."""
    shop = open_()
    paying(shop)

    def prepare(connection: Any, record: object) -> None:
        wanted = "PRAGMA cache_size = 100" if shop.db_engine.dialect.name == "sqlite" else "SET search_path = public"
        connection.cursor().execute(wanted)

    # Before our pool is made of it, at the first request.
    event.listen(shop.db_engine, "connect", prepare)

    assert [201, 201] == [shop.post().status_code, shop.post().status_code]


def test_a_second_bind_may_commit_freely(open_: OpenShop, tmp_path: Path) -> None:
    """It holds no records: only the session's connection to theirs must keep what is written until it is settled."""
    statistics = {"url": f"sqlite:///{tmp_path / 'statistics.sqlite3'}", "isolation_level": "AUTOCOMMIT"}
    shop = open_(SQLALCHEMY_BINDS={"statistics": statistics})

    @shop.view()
    def pay() -> tuple[str, int]:
        with shop.app.app_context():
            engine = shop.db.engines["statistics"]
        shop.db.session.execute(text("SELECT 1"), bind_arguments={"bind": engine})
        shop.pay()
        return "paid", 201

    assert (201, 1) == (shop.post().status_code, shop.payments())
    with shop.app.app_context():
        shop.db.engines["statistics"].dispose()
