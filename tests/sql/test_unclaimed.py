"""Requests of transactional views without a claim: the commit is not the view's, so it must be somebody's."""

from __future__ import annotations

import pytest

from flask_idempotency import current_claim
from tests.sql.shops import OpenShop, Shop, broken_commit, paying


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

    assert (409, "outcome-unknown") == (answer.status_code, answer.get_json()["code"])
    assert "Retry-After" not in answer.headers
