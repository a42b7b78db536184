"""From one record of a use of a key to the others."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.keys import Identity, Scope, new_token
from flask_idempotency.engine.model import ClaimRequest, OnExpiry
from flask_idempotency.operations.records import Case, with_rotated
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
