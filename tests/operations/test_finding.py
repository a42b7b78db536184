"""From one record of a use of a key to the others."""

from __future__ import annotations

from typing import Any

import pytest

from flask_idempotency.engine.capabilities import RecordPage, SeenRecord
from flask_idempotency.engine.keys import Identity, Scope, new_token
from flask_idempotency.engine.model import ClaimRequest, OnExpiry, State
from flask_idempotency.operations.browse import Browsing, listing
from flask_idempotency.operations.records import Case, by_short, handle_of, with_rotated
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock


@pytest.mark.parametrize("shards", (1, 4))
@pytest.mark.parametrize("named", (0, 1), ids=("by the newest", "by the oldest"))
def test_of_two_records_of_one_use_the_one_under_the_oldest_secret_decides(named: int, shards: int) -> None:
    """Owners settle it first. Whoever settled the other one first might release what its owner completes."""
    store, token = MemoryStore(clock=FrozenClock()), new_token(bytes(5))
    secrets = [Identity(secret, tenant_shards=shards) for secret in (b"new", b"old")]
    keys = [who.storage_key(Scope("shop", "acme", "alice"), "k") for who in secrets]
    for key in keys:
        store.claim(ClaimRequest(key, bytes(32), OnExpiry.QUARANTINE), token=token, lease=30.0)
    record = store.read(keys[named])
    assert record is not None
    theirs = [who.tenant_ids("shop", "acme") for who in secrets]

    case = with_rotated(Case((SeenRecord(keys[named], record),)), store.recovery, store.read, theirs)

    assert [keys[1], keys[0]] == [found.key for found in case.found]


def test_a_record_that_is_quarantined_during_the_search_is_found() -> None:
    store, token = MemoryStore(clock=FrozenClock()), new_token(bytes(5))
    who = Identity(b"s")
    key = who.storage_key(Scope("shop", "acme", "alice"), "k")

    class Moving:
        def scan(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> RecordPage:
            page = store.recovery.scan(state, after=after, limit=limit, tid=tid)
            store.quarantine(key, token, "status-500")
            return page

    def listed(recovery: Any) -> str:
        return handle_of(listing(recovery, Browsing(), limit=1).found[0].key)

    def looked_up(recovery: Any) -> str:
        return by_short(recovery, [who], handle_of(key)[:8], tids=[None])

    for search in (listed, looked_up):
        store.claim(ClaimRequest(key, bytes(32), OnExpiry.QUARANTINE), token=token, lease=30.0)
        assert handle_of(key) == search(Moving())
        (found,) = store.recovery.scan(State.QUARANTINED, limit=1).found
        assert store.recovery.force_release(found)
        token = new_token(bytes(5))
