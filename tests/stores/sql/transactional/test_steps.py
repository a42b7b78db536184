"""A transactional step: its rows and its entry are committed together, or neither is."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from flask_idempotency import Step, current_claim, idempotent
from flask_idempotency.engine.errors import ConfigurationError, LeaseLost, NotCommitted, StoreUnavailable
from flask_idempotency.engine.journal import Entry, Journal, JournalWrite, StepState
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, OnExpiry, StoredPayload
from flask_idempotency.stores.sql import engines
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.transactional.session import TransactionalSqlStore
from flask_idempotency.stores.sql.transactional.steps import SessionStep
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token, found, granted
from tests.stores.sql.conftest import on_each, on_postgresql, on_sqlite
from tests.stores.sql.shops import OpenShop, Payment, Shop, broken_commit

BEGUN, FINISHED = StepState.BEGUN, StepState.FINISHED
RESULT = StoredPayload(b"7", 0, success=True, byte_size=1)


def an_entry(name: str = "save", *, state: StepState = FINISHED, effects: str = "transactional") -> Entry:
    payload = RESULT if state is FINISHED else None
    return Entry(name.encode().ljust(12), name, effects, state, in_line=True, payload=payload)  # type: ignore[arg-type]


@dataclass
class Claimed:
    """A claim of a request with a transactional step, in its application's context."""

    shop: Shop
    store: TransactionalSqlStore
    keys: Sequence[StorageKey]
    grants: Sequence[Grant]
    early: list[str] = field(default_factory=list)

    def join(self) -> SessionStep:
        writes = [JournalWrite(1, [an_entry(state=BEGUN, effects="plain")], steps=1, in_doubt=True)] * len(self.keys)
        return self.store.transactions.join_step(
            self.keys,
            self.grants[0].token,
            fences=[grant.fence for grant in self.grants],
            lease=LEASE,
            operation="pay",
            early=lambda: writes,
            on_early_commit=lambda: self.early.append("early"),
        )

    def take(self, fn: Callable[[], None], *pending: Entry) -> None:
        """Run this function as the engine runs a transactional step."""
        step = self.join()
        try:
            fn()
            step.commit_step(lambda commit: commit([JournalWrite(2, [*pending, an_entry()], steps=1)] * len(self.keys)))
        finally:
            step.roll_back()
            step.leave()

    def pay(self, amount: int = 100, **columns: int) -> None:
        self.shop.db.session.add(Payment(amount=amount, **columns))

    def outcome(self) -> tuple[int, list[tuple[str, StepState]]]:
        """The payments that were made, and what the journal says."""
        return self.shop.payments(), told(self.store.journals.read(self.keys[0]))

    def steal(self) -> None:
        with self.shop.db_engine.begin() as connection:
            connection.execute(text("UPDATE idempotency_records SET fence = fence + 1"))


def told(journal: Journal) -> list[tuple[str, StepState]]:
    return [(entry.name, entry.state) for entry in journal.entries]


@pytest.fixture
def store(shop: Shop) -> Iterator[TransactionalSqlStore]:
    with shop.app.app_context():
        store = TransactionalSqlStore(Database(shop.db.engine), sessions=lambda: shop.db.session)
        yield store
        store.close()


def claim(shop: Shop, store: TransactionalSqlStore, *, keys: int = 1) -> Claimed:
    token, named = a_token(), [a_key() for _ in range(keys)]
    grants = [
        granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE)) for key in named
    ]
    return Claimed(shop, store, named, grants)


@pytest.fixture
def claimed(shop: Shop, store: TransactionalSqlStore) -> Claimed:
    return claim(shop, store)


@on_each
def test_rows_and_entry_are_committed_together(claimed: Claimed) -> None:
    claimed.take(claimed.pay, an_entry("quote", effects="pure"))

    assert (1, [("quote", FINISHED), ("save", FINISHED)]) == claimed.outcome()
    assert (OnExpiry.TAKEOVER, []) == (found(claimed.store, claimed.keys[0]).on_expiry, claimed.early)


def test_a_function_that_raises_leaves_neither(claimed: Claimed) -> None:
    def fails() -> None:
        claimed.pay()
        claimed.shop.db.session.flush()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        claimed.take(fails)

    assert (0, []) == claimed.outcome()


@on_each
def test_a_refused_commit_leaves_neither(claimed: Claimed) -> None:
    with pytest.raises(NotCommitted) as refused:
        claimed.take(lambda: claimed.pay(account=404))

    assert isinstance(refused.value.__cause__, IntegrityError)
    assert (0, []) == claimed.outcome()
    claimed.take(claimed.pay)
    assert (1, [("save", FINISHED)]) == claimed.outcome()


@on_postgresql
@pytest.mark.parametrize("code", ("40001", "40P01"))
def test_a_conflict_is_not_committed_and_may_be_retried(claimed: Claimed, code: str) -> None:
    def conflicts() -> None:
        claimed.pay()
        claimed.shop.db.session.flush()
        claimed.shop.db.session.connection().exec_driver_sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            f" $f$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '{code}'; END $f$"
        )
        claimed.shop.db.session.connection().exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER refused AFTER INSERT ON payments DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
        claimed.pay()

    with pytest.raises(NotCommitted) as refused:
        claimed.take(conflicts)

    assert refused.value.retryable
    assert (0, []) == claimed.outcome()


@pytest.mark.parametrize("applied", (True, False))
@on_each
def test_the_journal_decides_a_commit_without_a_reply(
    claimed: Claimed, monkeypatch: pytest.MonkeyPatch, applied: bool
) -> None:
    broken_commit(claimed.shop, monkeypatch, applied=applied)

    if applied:
        claimed.take(claimed.pay)
        assert (1, [("save", FINISHED)]) == claimed.outcome()
    else:
        with pytest.raises(NotCommitted):
            claimed.take(claimed.pay)
        assert (0, []) == claimed.outcome()


@pytest.mark.parametrize("applied", (True, False))
@on_each
def test_the_journal_decides_if_another_bind_refuses_its_commit(
    open_: OpenShop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, applied: bool
) -> None:
    """SQLAlchemy commits the session's databases one after the other: that of the records may have committed before."""
    shop = open_(SQLALCHEMY_BINDS={"other": f"sqlite:///{tmp_path / 'other.sqlite'}"})
    with shop.app.app_context():
        store = TransactionalSqlStore(Database(shop.db.engine), sessions=lambda: shop.db.session)
        claimed, other, session = claim(shop, store), shop.db.engines["other"], shop.db.session

        held: list[Any] = []

        def refuses(connection: object) -> None:
            held[0].commit() if applied else held[0].rollback()
            raise IntegrityError("COMMIT", {}, sqlite3.IntegrityError("refused"))

        def pays_and_counts() -> None:
            session.execute(text("SELECT 1"), bind_arguments={"bind": other})
            held.append(session.connection(bind_arguments={"bind": shop.db.engine}).connection.dbapi_connection)
            claimed.pay()

        for engine in (other,) if applied else (other, shop.db.engine):
            monkeypatch.setattr(engine.dialect, "do_commit", refuses)
        with pytest.raises(StoreUnavailable if applied else NotCommitted):
            claimed.take(pays_and_counts)

        assert ((1, [("save", FINISHED)]) if applied else (0, [])) == claimed.outcome()
        other.dispose()
        store.close()


def test_a_commit_whose_journal_cannot_be_read_stays_unknown(claimed: Claimed, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_commit(claimed.shop, monkeypatch, applied=True)

    def away(*_: object, **__: object) -> bool:
        raise StoreUnavailable("away")

    monkeypatch.setattr(claimed.store.transactions, "has_reached", away)

    with pytest.raises(StoreUnavailable, match="may be done or not"):
        claimed.take(claimed.pay)


@on_each
def test_a_claim_that_was_overtaken_commits_nothing(claimed: Claimed) -> None:
    """Its token is still that of the record, and its fence is not: it was granted once more."""
    step = claimed.join()
    claimed.steal()
    claimed.pay()
    with pytest.raises(LeaseLost):
        step.commit_step(lambda commit: commit([JournalWrite(2, [an_entry()], steps=1)]))
    step.leave()

    assert (0, []) == claimed.outcome()


@on_each
def test_a_function_that_commits_by_itself_leaves_a_begun_plain_entry(claimed: Claimed) -> None:
    seen = []

    def commits() -> None:
        claimed.pay()
        claimed.shop.db.session.commit()
        (entry,) = claimed.store.journals.read(claimed.keys[0]).entries
        record = found(claimed.store, claimed.keys[0])
        seen.append((entry.effects, entry.state, record.on_expiry, claimed.shop.payments()))

    claimed.take(commits)

    assert [("plain", BEGUN, OnExpiry.QUARANTINE, 1)] == seen
    assert (1, [("save", FINISHED)]) == claimed.outcome()
    assert (["early"], OnExpiry.TAKEOVER) == (claimed.early, found(claimed.store, claimed.keys[0]).on_expiry)


def test_a_savepoint_is_no_commit(claimed: Claimed) -> None:
    def saves() -> None:
        with claimed.shop.db.session.begin_nested():
            claimed.pay()

    claimed.take(saves)

    assert (1, [("save", FINISHED)], []) == (*claimed.outcome(), claimed.early)


def test_each_record_of_a_claim_gets_the_entry(shop: Shop, store: TransactionalSqlStore) -> None:
    """While secrets rotate, a claim has a record under each."""
    claimed = claim(shop, store, keys=2)

    claimed.take(claimed.pay)

    assert [[("save", FINISHED)]] * 2 == [told(store.journals.read(key)) for key in claimed.keys]


@on_each
def test_one_lost_record_rolls_back_all(shop: Shop, store: TransactionalSqlStore) -> None:
    claimed = claim(shop, store, keys=2)
    store.release(claimed.keys[1], claimed.grants[1].token)

    with pytest.raises(LeaseLost):
        claimed.take(claimed.pay)

    assert (0, []) == claimed.outcome()


@pytest.mark.parametrize("flushed", (True, False))
@on_each
def test_a_session_with_other_writes_is_refused(claimed: Claimed, flushed: bool) -> None:
    claimed.pay()
    if flushed:
        claimed.shop.db.session.flush()

    with pytest.raises(ConfigurationError, match="do not belong to this transactional step"):
        claimed.join()


def test_a_view_that_enters_a_step_with_open_writes_gets_its_own_error(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    @shop.view()
    @idempotent(required=True, steps=(Step("save", effects="transactional"),))
    def pay() -> Any:
        if not shop.runs:
            shop.pay()
        return {"saved": current_claim.step("save", lambda: 7)}, 201

    assert 500 == shop.post().status_code
    assert "do not belong to this transactional step" in caplog.text
    assert (201, 0) == (shop.post().status_code, shop.payments())


def test_a_thread_without_an_application_context_takes_steps(shop: Shop) -> None:
    @shop.view()
    @idempotent(required=True, steps=(Step("ship", effects="deduplicated"),))
    def pay() -> Any:
        ship = current_claim.carry(lambda line: current_claim.step(("ship", line), shop.runs.append, line))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ship, (1, 2)))
        return {}, 201

    assert (201, [1, 2]) == (shop.post().status_code, sorted(shop.runs))


@pytest.fixture
def endless_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to SQLite that are made from now on wait for the one writer for an hour."""
    monkeypatch.setattr(engines, "BUSY_MS", 3_600_000)


@on_sqlite
@pytest.mark.usefixtures("endless_patience")
def test_on_sqlite_a_step_beside_it_is_refused_without_waiting(claimed: Claimed) -> None:
    """In another thread: it would wait for the one writer."""
    raised: list[BaseException] = []

    def write(state: StepState) -> None:
        (key,), (grant,) = claimed.keys, claimed.grants
        writing = JournalWrite(9, [an_entry("charge", state=state, effects="plain")], steps=1, in_doubt=state is BEGUN)
        try:
            claimed.store.journals.write(key, grant.token, fence=grant.fence, writing=writing, lease=LEASE)
        except (ConfigurationError, StoreUnavailable) as error:
            raised.append(error)

    def beside() -> None:
        claimed.pay()
        claimed.shop.db.session.flush()
        for state in (BEGUN, FINISHED):
            thread = Thread(target=write, args=(state,))
            thread.start()
            thread.join(timeout=60)
            assert not thread.is_alive()

    claimed.take(beside)

    assert [ConfigurationError, StoreUnavailable] == [type(error) for error in raised]
    write(FINISHED)
    assert 2 == len(raised)


@on_sqlite
def test_on_sqlite_a_step_behind_an_open_write_is_refused(claimed: Claimed) -> None:
    claimed.pay()
    claimed.shop.db.session.flush()
    (key,), (grant,) = claimed.keys, claimed.grants

    with pytest.raises(ConfigurationError, match=r"Commit before the step: db\.session\.commit\(\)"):
        claimed.store.journals.write(
            key, grant.token, fence=grant.fence, writing=JournalWrite(1, [an_entry()], steps=1), lease=LEASE
        )


def by_function(shop: Shop) -> None:
    current_claim.step("save", shop.pay)


def by_block(shop: Shop) -> None:
    with current_claim.manual_step("save") as step:
        if not step.done:
            shop.pay()
            step.finish()


@pytest.mark.parametrize("enabled", (True, False), ids=("on", "off"))
def test_rows_of_a_transactional_step_are_committed_without_a_claim_too(open_: OpenShop, enabled: bool) -> None:
    """Its function leaves the commit to us: without a key, the order would be lost behind a 201."""
    shop = open_(IDEMPOTENCY_ENABLED=enabled)
    take = by_function

    @shop.view()
    @idempotent(steps=(Step("save", effects="transactional"),))
    def pay() -> tuple[str, int]:
        take(shop)
        return "paid", 201

    payments = 0
    for take in (by_function, by_block):
        for key in (take.__name__, None):
            payments += 1
            assert 201 == shop.post(key=key).status_code
            assert payments == shop.payments(), (take, key)


def left_undone(shop: Shop) -> None:
    with current_claim.manual_step("save"):
        shop.pay()


def failing(shop: Shop) -> None:
    def save() -> None:
        shop.pay()
        shop.db.session.flush()
        raise LookupError

    with suppress(LookupError):
        current_claim.step("save", save)


@pytest.mark.parametrize("take", (left_undone, failing))
def test_rows_of_a_transactional_step_that_failed_are_not(open_: OpenShop, take: Callable[[Shop], None]) -> None:
    shop = open_()

    @shop.view()
    @idempotent(steps=(Step("save", effects="transactional"), Step("log", effects="transactional")))
    def pay() -> tuple[str, int]:
        take(shop)
        current_claim.step("log", lambda: None)
        return "paid", 201

    assert 201 == shop.post(key=None).status_code
    assert 0 == shop.payments()


def test_a_plain_step_without_a_claim_commits_nothing(shop: Shop) -> None:
    @shop.view()
    @idempotent(steps=("save",))
    def pay() -> tuple[str, int]:
        current_claim.step("save", shop.pay)
        return "paid", 201

    assert 201 == shop.post(key=None).status_code
    assert 0 == shop.payments()
