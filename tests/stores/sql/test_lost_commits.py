"""The reply to COMMIT is lost: the record knows what became of it."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.model import State
from tests.stores.sql.shops import OpenShop, Shop, broken_commit, paying


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

    def test_it_was_committed_and_its_answer_has_expired(
        self, open_: OpenShop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By the time that anybody asks: that it was committed has not changed."""
        shop = open_(IDEMPOTENCY_KEEP=0.001)
        paying(shop)
        broken_commit(shop, monkeypatch, applied=True)

        assert (201, 1) == (shop.post().status_code, shop.payments())

    def test_a_cache_hears_of_nothing_that_was_not_committed(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever heard of it before the commit would replay what is then rolled back."""
        paying(shop)
        told: list[State] = []
        shop.store.transactions.on_committed(lambda _, record: told.append(record.state))
        broken_commit(shop, monkeypatch, applied=False)

        refused, told_of_it = shop.post(), list(told)

        assert (503, []) == (refused.status_code, told_of_it)
        assert (201, [State.COMPLETED]) == (shop.post().status_code, told)
