"""A record commits with the application's rows while its tenant's data key is removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import pytest
from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, Table, event, func, insert, select
from sqlalchemy.orm import scoped_session, sessionmaker

from flask_idempotency.engine.capabilities import DataKey
from flask_idempotency.engine.errors import DataKeyMissing, LeaseLost, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, Record, SealedBy, State, StoredPayload
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.engine.store import Writing
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.transactional.session import TransactionalSqlStore
from flask_idempotency.stores.sql.transactional.transaction import SessionTransaction
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, found, granted
from tests.stores.sql.conftest import MakeEngine
from tests.stores.sql.counting import sent

payments = Table("payments", MetaData(), Column("id", Integer, primary_key=True), Column("amount", BigInteger))
SEALED = replace(PAYLOAD, sealed_by=SealedBy("2026-11", 1))
DONE = StoredPayload(b"", PAYLOAD.status, PAYLOAD.success, 0, ERASED)
ROOM = Quota(records=1000)


class OpenJoint(Protocol):
    def __call__(self, *, telling: bool = ...) -> Joint: ...


class Joint:
    """A store, the session that views write with, and what is told of what was committed."""

    def __init__(self, store: TransactionalSqlStore, sessions: scoped_session[Any]) -> None:
        self.store, self.sessions = store, sessions
        self.token = a_token()
        self.told: list[Record] = []

    def work(self, *keys: StorageKey, quota: Quota | None = None) -> SessionTransaction:
        """Claim these keys and write a row, as a view does."""
        for key in keys:
            granted(self.store.claim(a_request(key), token=self.token, lease=LEASE, quota=quota))
        transaction = self.store.transactions.join(keys, self.token, operation="pay", on_early_commit=lambda: None)
        self.sessions().execute(insert(payments).values(amount=100))
        return transaction

    def payments(self) -> int:
        with self.store.database.engine.connect() as connection:
            return connection.execute(select(func.count()).select_from(payments)).scalar_one()


def storing(*payloads: StoredPayload) -> Writing:
    """What stores these payloads, and no others."""
    return lambda write: write(payloads)


def never(key: StorageKey) -> NoReturn:
    raise AssertionError("nothing was in doubt")


def add(store: TransactionalSqlStore, tid: bytes, number: int = 1) -> None:
    shelf = store.data_keys.read_keys(tid)
    assert store.data_keys.add(tid, DataKey(number, "2026-11", b"wrapped"), store=shelf.store, after=shelf.last)


@pytest.fixture
def open_joint(records_url: str, make_engine: MakeEngine, clock: FrozenClock) -> Iterator[OpenJoint]:
    with ExitStack() as ends:

        def open_one(*, telling: bool = False) -> Joint:
            engine = make_engine()
            payments.metadata.create_all(engine)
            sessions = scoped_session(sessionmaker(engine))
            store = TransactionalSqlStore(Database(engine), sessions=lambda: sessions, clock=clock)
            ends.callback(store.close)
            ends.callback(sessions.remove)
            joint = Joint(store, sessions)
            if telling:
                store.transactions.on_committed(lambda _, record: joint.told.append(record))
            return joint

        yield open_one


@pytest.fixture(params=(False, True), ids=("", "told"))
def joint(open_joint: OpenJoint, request: pytest.FixtureRequest) -> Joint:
    """With a Redis in front, and without."""
    return open_joint(telling=request.param)


def test_rows_and_response_are_committed_together(joint: Joint) -> None:
    forms = [(payload, quota) for payload in (PAYLOAD, SEALED) for quota in (None, ROOM)]
    for number, (payload, quota) in enumerate(forms, 1):
        key = a_key()
        add(joint.store, key.tid)
        joint.told.clear()
        transaction = joint.work(key, quota=quota)

        transaction.settle(storing(payload), keep=KEEP, otherwise=never)

        usage = Usage() if quota is None else Usage(1, payload.byte_size, 0)
        assert (number, payload, usage) == (
            joint.payments(),
            found(joint.store, key).payload,
            joint.store.ledger.usage(key.tid),
        )
        assert [found(joint.store, key)][: len(joint.told)] == joint.told
        assert Drift() == joint.store.ledger.reconcile(key.tid)


@pytest.mark.parametrize("keys", (1, 2))
def test_a_lost_data_key_leaves_the_transaction_open(joint: Joint, keys: int) -> None:
    """Nothing is committed and nothing rolled back, and it may be settled once more."""
    used = [a_key() for _ in range(keys)]
    # Of two, the first could be completed, and could not be taken back.
    for key in used[:-1]:
        add(joint.store, key.tid)
    transaction = joint.work(*used, quota=ROOM)

    def writing(write: Callable[[Sequence[StoredPayload]], None]) -> None:
        with pytest.raises(DataKeyMissing) as gone:
            write([SEALED] * keys)
        assert not gone.value.erased
        assert 0 == joint.payments()
        assert joint.sessions().in_transaction()
        if joint.store.database.dialect.name == "postgresql":
            assert [State.PROCESSING] * keys == [found(joint.store, key).state for key in used]
        write([PAYLOAD] * keys)

    transaction.settle(writing, keep=KEEP, otherwise=never)

    assert (1, [PAYLOAD] * keys) == (joint.payments(), [found(joint.store, key).payload for key in used])
    assert [Drift()] * keys == [joint.store.ledger.reconcile(key.tid) for key in used]


def test_a_tenant_erased_during_the_view_keeps_its_rows_and_no_response(
    open_joint: OpenJoint, make_engine: MakeEngine, clock: FrozenClock
) -> None:
    """The work was done, and that is all that is said of it. On SQLite nobody else writes while a view does."""
    joint, key = open_joint(), a_key()
    add(joint.store, key.tid)
    granted(joint.store.claim(a_request(key), token=joint.token, lease=LEASE))
    transaction = joint.store.transactions.join([key], joint.token, operation="pay", on_early_commit=lambda: None)
    joint.store.data_keys.shred(key.tid)
    joint.sessions().execute(insert(payments).values(amount=100))

    erased: list[bool] = []

    def writing(write: Callable[[Sequence[StoredPayload]], None]) -> None:
        with pytest.raises(DataKeyMissing) as gone:
            write([SEALED])
        erased.append(gone.value.erased)
        write([DONE])

    transaction.settle(writing, keep=KEEP, otherwise=never)

    record = found(joint.store, key)
    assert ([True], 1, DONE, True) == (erased, joint.payments(), record.payload, record.erased)


def test_a_tenant_erased_between_check_and_commit_is_reported_as_erased(open_joint: OpenJoint) -> None:
    """Nobody can open that answer, so nobody need have kept it from being written."""
    joint, key = open_joint(), a_key()
    add(joint.store, key.tid)
    transaction = joint.work(key)
    before = [joint.store.data_keys.shred] if joint.store.database.dialect.name == "postgresql" else []

    def erased_first(connection: Connection) -> None:
        while before:
            before.pop()(key.tid)

    event.listen(joint.sessions().get_bind(), "commit", erased_first)
    transaction.settle(storing(SEALED), keep=KEEP, otherwise=never)
    joint.store.data_keys.shred(key.tid)

    record = found(joint.store, key)
    assert (SEALED, True) == (record.payload, record.erased)


def test_a_superseded_worker_gets_a_lost_lease_and_no_key_error(open_joint: OpenJoint) -> None:
    """To seal its answer anew would not help."""
    joint, key = open_joint(), a_key()
    granted(joint.store.claim(a_request(key), token=a_token(), lease=LEASE))
    transaction = joint.store.transactions.join([key], joint.token, operation="pay", on_early_commit=lambda: None)

    with pytest.raises(LeaseLost):
        transaction.settle(storing(SEALED), keep=KEEP, otherwise=never)


def test_a_process_without_quota_still_counts_counted_keys(open_joint: OpenJoint, clock: FrozenClock) -> None:
    claiming, joint, key = open_joint(), open_joint(), a_key()
    granted(claiming.store.claim(a_request(key), token=joint.token, lease=LEASE, quota=ROOM))
    transaction = joint.store.transactions.join([key], joint.token, operation="pay", on_early_commit=lambda: None)

    transaction.settle(storing(PAYLOAD), keep=KEEP, otherwise=never)

    assert Usage(1, PAYLOAD.byte_size, 0) == joint.store.ledger.usage(key.tid)


def test_storing_a_sealed_response_takes_one_statement(open_joint: OpenJoint) -> None:
    store = open_joint().store
    for payload in (PAYLOAD, SEALED):
        key, token = a_key(), a_token()
        add(store, key.tid)
        granted(store.claim(a_request(key), token=token, lease=LEASE))

        with sent(store) as seen:
            store.complete(key, token, payload, keep=KEEP)

        assert ["UPDATE idempotency_records"] == seen


def test_data_keys_of_a_tenant_are_read_in_one_statement(open_joint: OpenJoint) -> None:
    """Its last number and the store's own with them: what is read in two looks may be of two tenants."""
    store, tid = open_joint().store, a_key().tid
    add(store, tid)
    add(store, tid, 2)

    with sent(store) as seen:
        shelf = store.data_keys.read_keys(tid)

    assert (1, [1, 2], 2, store.identity()) == (len(seen), [key.number for key in shelf.keys], shelf.last, shelf.store)


def test_a_copied_store_accepts_no_data_key_of_the_original(open_joint: OpenJoint) -> None:
    store, tid = open_joint().store, a_key().tid

    for other in (b"", bytes(8), bytes(9), store.identity() + b"\0"):
        assert not store.data_keys.add(tid, DataKey(1, "2026-11", b"wrapped"), store=other, after=0)
    assert () == store.data_keys.read_keys(tid).keys


def test_a_response_of_another_size_changes_the_quota_by_the_difference(open_joint: OpenJoint) -> None:
    store, key, token = open_joint().store, a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=ROOM))
    store.complete(key, token, PAYLOAD, keep=KEEP)

    assert store.responses.replace(key, PAYLOAD, DONE)

    assert (Usage(1, 0, 0), Drift()) == (store.ledger.usage(key.tid), store.ledger.reconcile(key.tid))


def test_a_response_that_cannot_be_sealed_again_prevents_the_commit(open_joint: OpenJoint) -> None:
    """The codec's own error leaves, with nothing committed; the claim settles the record then."""
    joint, key = open_joint(), a_key()
    transaction = joint.work(key)

    def writing(write: Callable[[Sequence[StoredPayload]], None]) -> NoReturn:
        with pytest.raises(DataKeyMissing):
            write([SEALED])
        raise StoreUnavailable("no key can be had")

    with pytest.raises(StoreUnavailable, match="no key"):
        transaction.settle(writing, keep=KEEP, otherwise=never)

    assert (0, False) == (joint.payments(), joint.sessions().in_transaction())
    assert State.PROCESSING is found(joint.store, key).state
