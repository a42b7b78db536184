"""A row that outlives its response: what the release before finds in it, and what it leaves there."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, Expired, Record, State
from flask_idempotency.stores.sql.schema import COMPLETED, records
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, found, granted
from tests.stores.sql.conftest import OpenStore

REMEMBER = 30 * KEEP


def remembered(store: SqlStore) -> StorageKey:
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, PAYLOAD, keep=KEEP, remember=REMEMBER)
    return key


def row_of(store: SqlStore, key: StorageKey) -> Any:
    statement = select(records).where(records.c.record_id == key.rid)
    return store.database.run(lambda connection: connection.execute(statement).one())


def test_the_release_before_finds_a_response_and_then_an_erased_one(open_store: OpenStore, clock: FrozenClock) -> None:
    """It does not know the new column. To it the row lives until the end, so that it never runs the request again."""
    store, began = open_store(), clock.now
    key = remembered(store)
    before = row_of(store, key)
    clock.advance(KEEP)
    while store.expiry.sweep(horizon=clock.now, limit=1000):
        pass
    after = row_of(store, key)

    ends = round((began + REMEMBER) * 1_000_000)
    assert (COMPLETED, ends, PAYLOAD.data) == (before.state, before.expires_at, before.response)
    assert (COMPLETED, ends, b"", 0) == (after.state, after.expires_at, after.response, after.response_size)
    assert (ERASED.kid, ERASED.number, 201) == (after.wrapping_key_id, after.data_key_number, after.status)


def test_what_the_release_before_left_in_the_column_does_not_count(open_store: OpenStore, clock: FrozenClock) -> None:
    """It claims the row of a key whose life is over, and completes it. It writes all columns that it knows."""
    store, key = open_store(), a_key()
    token = a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    stale = update(records).where(records.c.record_id == key.rid)
    stale = stale.values(response_expires_at=round((clock.now - 1) * 1_000_000))
    store.database.run(lambda connection: connection.execute(stale))

    record = store.claim(a_request(key), token=a_token(), lease=LEASE)
    assert isinstance(record, Record)
    assert (PAYLOAD, None) == (record.payload, record.remembered_until)
    store.expiry.sweep(horizon=clock.now, limit=1000)
    assert PAYLOAD == found(store, key).payload


def test_a_new_claim_forgets_the_time_of_the_last_response(open_store: OpenStore, clock: FrozenClock) -> None:
    """Whatever the policy is by then."""
    store = open_store()
    key = remembered(store)
    clock.advance(KEEP)
    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Expired)
    clock.advance(REMEMBER)
    token = a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    assert row_of(store, key).response_expires_at is None
    store.complete(key, token, PAYLOAD, keep=KEEP)

    record = found(store, key)
    assert (State.COMPLETED, None, PAYLOAD) == (record.state, record.remembered_until, record.payload)
