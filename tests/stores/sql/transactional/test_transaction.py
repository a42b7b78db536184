"""Commits by the view, and commits whose reply is lost: the record knows the outcome, and no view runs again."""

from __future__ import annotations

import logging

import pytest
from sqlalchemy import event, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from flask_idempotency import idempotent
from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.model import State
from flask_idempotency.stores.sql.schema import records
from tests.stores.sql.conftest import on_each
from tests.stores.sql.shops import Account, OpenShop, Payment, Shop, broken_commit, paying


class TestEarlyCommits:
    """A view that commits by itself is noticed, and what it has committed is never repeated."""

    @on_each
    def test_the_record_is_marked_in_the_same_commit(self, shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
        """From there on a vanished worker leaves an unknown outcome, and not a second payment."""
        seen: list[tuple[int, str]] = []

        @shop.view()
        def pay() -> str:
            if not seen:
                seen.append((shop.payments(), shop.record().on_expiry))
            shop.pay()
            shop.db.session.commit()
            if len(seen) == 1:
                seen.append((shop.payments(), shop.record().on_expiry))
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

    @on_each
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

    @on_each
    def test_ending_a_read_only_transaction_is_no_commit(self, shop: Shop) -> None:
        @shop.view()
        def pay() -> str:
            shop.db.session.get(Account, 1)
            shop.db.session.commit()
            shop.pay()
            shop.db.session.flush()
            with shop.db.session.session_factory() as session:
                session.get(Account, 1)
                session.commit()
            return "paid"

        assert 200 == shop.post().status_code
        assert "CommittedEarly" not in shop.told()
        assert 1 == shop.payments()

    def test_a_failed_commit_of_another_session_does_not_count(self, shop: Shop) -> None:
        """Only what failed is rolled back."""

        @shop.view()
        def pay() -> str:
            other = shop.db.session.session_factory()
            other.add(Payment(amount=5, account=404))
            with pytest.raises(IntegrityError):
                other.commit()
            shop.pay()
            return "paid"

        assert (200, 1) == (shop.post().status_code, shop.payments())
        assert "CommittedEarly" not in shop.told()

    @on_each
    def test_savepoints_are_no_commits(self, shop: Shop) -> None:
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

    def test_other_requests_may_commit(self, shop: Shop) -> None:
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

    @pytest.mark.parametrize("key", ["k", None])
    @pytest.mark.parametrize("end", ["raises", "declines"])
    @on_each
    def test_an_earlier_savepoint_is_no_commit(self, shop: Shop, key: str | None, end: str) -> None:
        """Python's sqlite3 would begin no transaction for it, and commit when it is released."""

        @shop.view()
        def pay() -> tuple[str, int]:
            with shop.db.session.begin_nested():
                shop.pay()
            if end == "raises":
                raise RuntimeError("after the savepoint")
            return "declined", 400

        shop.post(key=key)

        assert 0 == shop.payments()

    def test_a_commit_that_was_never_sent_does_not_count(self, shop: Shop) -> None:
        """A validator of the application's refused the flush before it, and the view went on."""
        bad = [Payment(amount=-1)]

        def validate(session: Session, context: object, instances: object) -> None:
            if any(payment.amount < 0 for payment in session.new if isinstance(payment, Payment)):
                raise ValueError("no negative payments")

        event.listen(shop.db.session, "before_flush", validate)

        @shop.view()
        def pay() -> tuple[str, int]:
            shop.pay()
            shop.db.session.flush()
            shop.db.session.add(bad[0])
            with pytest.raises(ValueError, match="negative"):
                shop.db.session.commit()
            shop.db.session.expunge(bad[0])
            shop.pay()
            return "paid", 201

        assert (201, 2) == (shop.post().status_code, shop.payments())

    def test_a_failed_early_commit_differs_from_a_policy_without_take_over(self, open_: OpenShop) -> None:
        """The record would be quarantined when its lease ends anyway: that says nothing of a commit."""
        shop = open_(IDEMPOTENCY_ON_ABANDONED="quarantine")

        @shop.view()
        def pay() -> str:
            shop.pay(account=404 if not shop.runs else 1)
            shop.db.session.commit()
            return "paid"

        assert [500, 200] == [shop.post().status_code, shop.post().status_code]
        assert 1 == shop.payments()

    def test_a_failure_after_an_early_commit_does_not_hide_it(self, shop: Shop) -> None:
        """A listener of the application's own raises: the rows are there all the same."""
        failures = [RuntimeError("the search index is away")]

        def index(session: Session) -> None:
            if failures:
                raise failures.pop()

        event.listen(shop.db.session, "after_commit", index)

        @shop.view()
        def pay() -> str:
            shop.pay()
            shop.db.session.commit()
            return "paid"

        answers = [shop.post(), shop.post()]

        assert [500, 409] == [answer.status_code for answer in answers]
        assert 1 == shop.payments()

    def test_an_interrupt_after_an_early_commit_does_not_hide_it(self, shop: Shop) -> None:
        interrupts = [SystemExit(1)]

        def interrupt(session: Session) -> None:
            if interrupts:
                raise interrupts.pop()

        event.listen(shop.db.session, "after_commit", interrupt)

        @shop.view()
        def pay() -> str:
            shop.pay()
            shop.db.session.commit()
            return "paid"

        with pytest.raises(SystemExit):
            shop.post()

        assert (409, 1) == (shop.post().status_code, shop.payments())

    @pytest.mark.parametrize("how", ["on the connection", "as a statement"])
    @on_each
    def test_a_commit_below_the_session_is_noticed(self, shop: Shop, how: str) -> None:
        @shop.view()
        def pay() -> str:
            shop.pay()
            shop.db.session.flush()
            if how == "on the connection":
                shop.db.session.connection().commit()
            else:
                shop.db.session.execute(text("COMMIT"))
            raise RuntimeError("after the commit")

        answers = [shop.post(), shop.post()]

        assert [500, 409] == [answer.status_code for answer in answers]
        assert 1 == shop.payments()

    @pytest.mark.parametrize(("applied", "statuses"), [(True, [500, 409]), (False, [503, 200])])
    @on_each
    def test_a_lost_reply_of_an_early_commit_is_resolved_by_the_record(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch, applied: bool, statuses: list[int]
    ) -> None:
        @shop.view()
        def pay() -> str:
            shop.pay()
            shop.db.session.commit()
            return "paid"

        broken_commit(shop, monkeypatch, applied=applied)

        assert statuses == [shop.post().status_code, shop.post().status_code]
        assert 1 == shop.payments()

    @on_each
    def test_an_early_commit_with_an_unknown_outcome_counts_as_committed(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A key that is quarantined for nothing costs a question; one that is released for nothing, a payment."""

        @shop.view()
        def pay() -> str:
            shop.pay()
            shop.db.session.commit()
            return "paid"

        broken_commit(shop, monkeypatch, applied=True)
        read = type(shop.store).read
        monkeypatch.setattr(type(shop.store), "read", unavailable)
        first = shop.post()
        monkeypatch.setattr(type(shop.store), "read", read)

        assert [500, 409] == [first.status_code, shop.post().status_code]
        assert 1 == shop.payments()


def unavailable(*_: object) -> None:
    raise StoreUnavailable("nobody answers")


class TestLostCommits:
    """The reply to COMMIT is lost: the record knows what became of it."""

    @on_each
    def test_a_lost_reply_of_an_applied_commit_is_a_success(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        paying(shop)
        broken_commit(shop, monkeypatch, applied=True)

        answer = shop.post()

        assert (201, b"paid") == (answer.status_code, answer.data)
        assert (1, "completed") == (shop.payments(), shop.record().state)
        assert "true" == shop.post().headers["Idempotency-Replayed"]

    @on_each
    def test_a_lost_reply_of_a_failed_commit_asks_for_a_retry(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        paying(shop)
        broken_commit(shop, monkeypatch, applied=False)

        refused, again = shop.post(), shop.post()

        assert (503, "transaction-conflict") == (refused.status_code, refused.get_json()["code"])
        assert (201, 1) == (again.status_code, shop.payments())

    @on_each
    def test_an_applied_commit_counts_after_its_response_has_expired(
        self, open_: OpenShop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shop = open_(IDEMPOTENCY_KEEP=0.001)
        paying(shop)
        broken_commit(shop, monkeypatch, applied=True)

        assert (201, 1) == (shop.post().status_code, shop.payments())

    def test_a_cache_gets_no_uncommitted_response(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever heard of it before the commit would replay what is then rolled back."""
        paying(shop)
        told: list[State] = []
        shop.store.transactions.on_committed(lambda _, record: told.append(record.state))
        broken_commit(shop, monkeypatch, applied=False)

        refused, told_of_it = shop.post(), list(told)

        assert (503, []) == (refused.status_code, told_of_it)
        assert (201, [State.COMPLETED]) == (shop.post().status_code, told)
