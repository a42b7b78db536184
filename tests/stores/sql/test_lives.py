"""When an answer's life ends: never before it has begun, whatever the clock or a flipped bit says."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.model import Replayed
from flask_idempotency.engine.quota import Drift, Quota, bucket_edge_ms, bucket_width_ms
from flask_idempotency.stores.sql import statements
from flask_idempotency.stores.sql.claiming import ClaimWriter, Move, claim_query
from flask_idempotency.stores.sql.dialects import POSTGRESQL
from flask_idempotency.stores.sql.rows import row_of
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted, stand
from flask_idempotency.testing.doubles import FrozenClock
from tests.stores.sql.conftest import MakeEngine, OpenStore
from tests.stores.sql.test_rows import row, spoil

ROOM = Quota(records=1_000_000)
BACK = KEEP * 100


@pytest.mark.parametrize("quota", (None, ROOM), ids=("uncounted", "counted"))
def test_a_clock_that_is_set_back_shortens_no_life(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock, quota: Quota | None
) -> None:
    """Between claim and completion: the answer's life begins when the key was first used, at the earliest."""
    store, key, token = open_store(), a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=quota))
    began = round(clock.now * 1_000_000)
    clock.advance(-BACK)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    edge = bucket_edge_ms(began, round(KEEP * 1_000_000), width_ms=bucket_width_ms(KEEP)) * 1000

    kept = row(make_engine, key)
    assert (began, began + round(KEEP * 1_000_000) if quota is None else edge) == (kept.completed_at, kept.expires_at)
    clock.advance(BACK + KEEP - 1)
    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Replayed)
    assert Drift() == store.ledger.reconcile(key.tid)


@pytest.mark.parametrize("quota", (None, ROOM), ids=("uncounted", "counted"))
def test_nobody_takes_over_what_was_over_before_it_began(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock, quota: Quota | None
) -> None:
    """Nor by a statement that compares what was seen before the bit was flipped."""
    store, key = open_store(), a_key()
    stand(store, clock, key, "completed")
    clock.advance(KEEP)
    asked = claim_query(a_request(key), a_token(), lease=1_000_000, now=store.now(), quota=quota)
    dialect = store.database.dialect
    with store.database.engine.connect() as connection:
        seen = row_of(connection.execute(statements.read(dialect), asked.parameters).one())
    spoil(make_engine, key, {"expires_at": 1})
    before = row(make_engine, key)

    with store.database.engine.connect() as connection:
        fence = None if dialect.name == POSTGRESQL else seen.fence + 1
        assert ClaimWriter(dialect).write(connection, Move.RECLAIM, seen, asked, fence=fence) is None

    assert before == row(make_engine, key)
