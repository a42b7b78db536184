"""Requests of transactional views without a claim: the commit is not the view's, so it must be somebody's."""

from __future__ import annotations

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from flask_idempotency import current_claim
from tests.stores.sql.shops import OpenShop, Shop, broken_commit, paying


def test_without_a_key_rows_are_committed(shop: Shop) -> None:
    """Each request by itself."""
    paying(shop)

    assert [201, 201] == [shop.post(key=None).status_code, shop.post(key=None).status_code]
    assert (2, None) == (shop.payments(), shop.record())


def test_without_a_key_the_rows_of_an_error_are_not(shop: Shop) -> None:
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


def test_a_refused_commit_is_no_201(shop: Shop) -> None:
    """Whether or not there is a key."""

    @shop.view()
    def pay() -> tuple[str, int]:
        shop.pay(account=404)
        return "paid", 201

    answer = shop.post(key=None)

    assert (500, 0) == (answer.status_code, shop.payments())


def test_switched_off_rows_are_committed_all_the_same(open_: OpenShop) -> None:
    """IDEMPOTENCY_ENABLED=False takes away the protection and must not take away the payments."""
    shop = open_(IDEMPOTENCY_ENABLED=False)
    paying(shop)

    assert [201, 201] == [shop.post().status_code, shop.post().status_code]
    assert (2, None) == (shop.payments(), shop.record())


def test_a_commit_whose_reply_is_lost_asks_for_no_repetition(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key a retry would pay again, so nobody may be told that it is safe."""
    paying(shop)
    broken_commit(shop, monkeypatch, applied=True)

    answer = shop.post(key=None)

    assert (500, "commit-unknown") == (answer.status_code, answer.get_json()["code"])
    assert "Retry-After" not in answer.headers


def test_whoever_fails_after_the_commit_does_not_make_it_undone(shop: Shop) -> None:
    """The rows are there, and the session has said so: the response stands. The log shows what failed."""
    paying(shop)

    def index(session: Session) -> None:
        raise RuntimeError("the search index is away")

    event.listen(shop.db.session, "after_commit", index)

    answer = shop.post(key=None)

    assert (201, 1) == (answer.status_code, shop.payments())


def test_a_redirect_of_the_same_request_commits_nothing(shop: Shop) -> None:
    """With a key and without: the request goes elsewhere."""

    @shop.view()
    def pay() -> tuple[str, int, dict[str, str]]:
        shop.pay()
        return "", 307, {"Location": "/elsewhere"}

    assert [307, 307] == [shop.post(key=key).status_code for key in ("k", None)]
    assert 0 == shop.payments()


@pytest.mark.parametrize("key", ["k", None])
def test_nothing_is_called_from_within_it_on_the_same_session(shop: Shop, key: str | None) -> None:
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
