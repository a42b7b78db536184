"""A record as bytes, made in Python: the same bytes that the scripts make, and the same record again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from flask_idempotency.engine.model import ERASED, OnExpiry, Record, RequestInfo, SealedBy, State, StoredPayload
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.encoding import ABOUT_TEXT_BYTES, TID_AT, decode, encode
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing.contract.support import Standing, a_key, for_each, stand
from flask_idempotency.testing.doubles import FrozenClock

TID = bytes(range(16))

texts = st.text(st.characters(), max_size=200)
milliseconds = st.integers(0, 2**41).map(lambda ms: ms / 1000)
abouts = st.builds(RequestInfo, tenant=texts, principal=texts, method=texts, operation=texts)
payloads = st.builds(
    StoredPayload,
    data=st.binary(max_size=300),
    status=st.integers(0, 65535),
    success=st.booleans(),
    byte_size=st.integers(0, 2**60),
    sealed_by=st.none() | st.just(ERASED) | st.builds(SealedBy, kid=st.text(max_size=60), number=st.integers(0, 2**40)),
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    state, requested = draw(st.sampled_from(State)), draw(milliseconds)
    completed = state is State.COMPLETED or (state is State.QUARANTINED and draw(st.booleans()))
    completed_at = round(requested + draw(st.integers(0, 2**38)) / 1000, 3) if completed else None
    lived = draw(milliseconds)
    return Record(
        state=state,
        token=draw(st.binary(min_size=16, max_size=16)),
        fence=draw(st.integers(0, 2**56 - 1)),
        attempt=draw(st.integers(0, 255)),
        fingerprint=draw(st.binary(min_size=17, max_size=17)),
        on_expiry=draw(st.sampled_from(OnExpiry)),
        info=draw(abouts),
        requested_at=requested,
        deadline=lived if completed_at is None or state is not State.COMPLETED else round(completed_at + lived, 3),
        remaining=0.0,
        completed_at=completed_at,
        payload=draw(payloads) if completed else None,
        reason=draw(st.text(max_size=200)) if state is State.QUARANTINED else "",
        in_quota=draw(st.booleans()),
    )


A_RECORD = Record(
    state=State.COMPLETED,
    token=b"t" * 16,
    fence=7,
    attempt=1,
    fingerprint=b"\1" * 17,
    on_expiry=OnExpiry.TAKEOVER,
    info=RequestInfo(),
    requested_at=1000.0,
    deadline=2000.0,
    remaining=0.0,
    completed_at=1001.0,
    payload=StoredPayload(b"", 204, True, 0),
)


@settings(deadline=None)
@given(record=records())
def test_every_record_survives_encoding(record: Record) -> None:
    assert decode(encode(record, tid=TID), now=record.deadline) == record


@settings(deadline=None)
@given(record=records(), off=st.floats(-0.0004, 0.0004))
def test_times_are_rounded_to_the_millisecond(record: Record, off: float) -> None:
    finer = replace(record, deadline=abs(record.deadline + off))

    assert decode(encode(finer, tid=TID), now=0.0).deadline == pytest.approx(finer.deadline, abs=0.00051, rel=0)


@for_each("standing", ("in flight", "completed", "quarantined", "lapsed, takeover"))
def test_python_encodes_the_same_bytes_as_the_scripts(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, standing: Standing
) -> None:
    key = a_key()
    clock.advance(0.123)
    stand(store, clock, key, standing)
    stored = redis_client.get(layout.keys(key)[0])
    assert isinstance(stored, bytes)

    assert encode(decode(stored, now=0.0), tid=key.tid) == stored
    assert stored[TID_AT] == key.tid


@for_each(
    "record",
    (
        replace(A_RECORD, token=b"t" * 15),
        replace(A_RECORD, fingerprint=b"\1" * 18),
        replace(A_RECORD, attempt=256),
        replace(A_RECORD, fence=2**56),
        replace(A_RECORD, fence=-1),
        replace(A_RECORD, completed_at=999.0),
        replace(A_RECORD, deadline=float("inf")),
        replace(A_RECORD, deadline=1000.999),
        replace(A_RECORD, requested_at=float("nan")),
        replace(A_RECORD, completed_at=None),
        replace(A_RECORD, payload=None),
        replace(A_RECORD, payload=StoredPayload(b"", 65536, True, 0)),
        replace(A_RECORD, payload=StoredPayload(b"", 200, True, -1)),
        replace(A_RECORD, info=RequestInfo(principal="p" * (ABOUT_TEXT_BYTES + 1))),
        replace(A_RECORD, payload=StoredPayload(b"", 200, True, 0, SealedBy("k", -1))),
        replace(A_RECORD, payload=StoredPayload(b"", 200, True, 0, SealedBy("\ud800", 1))),
        replace(A_RECORD, payload=StoredPayload(b"", 200, True, 0, SealedBy("k" * 256, 1))),
        replace(A_RECORD, deadline=253_402_300_800.0),
        replace(A_RECORD, state=State.QUARANTINED, reason="\ud800"),
        replace(A_RECORD, erased=True),
    ),
)
def test_a_record_that_does_not_fit_is_refused(record: Record) -> None:
    """Cut or wrapped round it would be another record."""
    with pytest.raises(ValueError, match=r"fit|completed|NaN|surrogates"):
        encode(record, tid=TID)
