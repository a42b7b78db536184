"""Whatever bytes a store gives back, they are read in few steps, as a record or as damage. No other exception, no miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flask_idempotency.engine.activity import read_counts
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.journal import Entry, StepState
from flask_idempotency.engine.model import (
    LATEST,
    Mismatched,
    OnExpiry,
    Record,
    RequestInfo,
    SealedBy,
    State,
    StoredPayload,
)
from flask_idempotency.engine.tasks import TaskReport
from flask_idempotency.stores.redis import (
    activity,
    encoding,
    quota,
    replay_cache,
    step_encoding,
    task_log,
)
from flask_idempotency.stores.redis.admin import data_keys, data_loss
from flask_idempotency.stores.redis.encoding import decode, encode, payload_bytes
from flask_idempotency.stores.redis.executor import text_in, whole_number
from flask_idempotency.stores.redis.step_encoding import step_bytes
from flask_idempotency.stores.sql.claiming import claim_query, classify
from flask_idempotency.stores.sql.rows import Row, is_gone, row_of
from flask_idempotency.testing.contract.support import PAYLOAD, a_key, a_request, a_token, for_each
from flask_idempotency.web.problems import refusal
from tests.damage import Watched, damaged
from tests.long import unless_long

TID = bytes(range(16))
COMPLETED = Record(
    state=State.COMPLETED,
    token=b"t" * 16,
    fence=1_700_000_000_000_000,
    attempt=1,
    fingerprint=b"\1" * 17,
    on_expiry=OnExpiry.TAKEOVER,
    info=RequestInfo("acme", "alice", "POST", "payments.pay"),
    requested_at=1_700_000_000.0,
    deadline=1_700_086_400.0,
    remaining=0.0,
    completed_at=1_700_000_001.5,
    payload=StoredPayload(b"\x10sealed bytes", 201, True, 300, SealedBy("2026-11-21", 70_000)),
)
RECORDS = {
    "sealed": COMPLETED,
    "plain": replace(COMPLETED, payload=StoredPayload(b"\x10plain bytes", 201, True, 70_000)),
    "in flight": replace(COMPLETED, state=State.PROCESSING, payload=None, completed_at=None),
    "quarantined": replace(COMPLETED, state=State.QUARANTINED, payload=None, completed_at=None, reason="lease-expired"),
    "condemned": replace(COMPLETED, state=State.QUARANTINED, reason="corrupt"),
}
MOST_LOOKS = 8 * 9 + 2
"""Eight lengths at most, of nine bytes each, and whether there is a seal."""


@pytest.mark.parametrize("name", RECORDS)
@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_record_in_redis_is_read_in_few_steps(name: str, data: st.DataObject) -> None:
    seen = Watched(data.draw(damaged(encode(RECORDS[name], tid=TID))))
    try:
        found = decode(seen, now=0.0)
    except CorruptRecord:
        assert seen.looks <= MOST_LOOKS
        return

    assert seen.looks <= MOST_LOOKS
    numbers = [found.fence, found.attempt, *(() if found.payload is None else (found.payload.byte_size,))]
    by = None if found.payload is None else found.payload.sealed_by
    if by is not None:
        numbers.append(by.number)
        assert len(by.kid.encode()) <= encoding.KID_BYTES
    assert all(0 <= number < 2**63 for number in numbers)
    assert max(found.requested_at, found.deadline, found.completed_at or 0.0) <= LATEST


def lengthened(place: bytes, spelling: bytes) -> bytes:
    """A record in which the number behind `place` is spelt so."""
    data = encode(COMPLETED, tid=TID)
    at = data.index(place) + len(place)
    return data[:at] + spelling + data[at + 1 :]


@for_each("place", (b"payments.pay", b"\xac\x02"), ids=("size", "number of the key"))
def test_four_hundred_kilobytes_of_length_are_refused_after_nine(place: bytes) -> None:
    """
    They took 40 seconds to read, for each retry, and then an error of Python's own: 850,000 digits are too many to write.
    """
    seen = Watched(lengthened(place, b"\x80" * 400_000 + b"\x01"))
    with pytest.raises(CorruptRecord, match="length"):
        decode(seen, now=0.0)

    assert seen.looks <= MOST_LOOKS


@for_each("spelling", (b"\xac\x82\0", b"\x80\0"))
def test_a_number_has_one_spelling(spelling: bytes) -> None:
    """A script compares the answer with what is written anew: another spelling could never be condemned."""
    with pytest.raises(CorruptRecord, match="padded"):
        decode(lengthened(b"payments.pay", spelling), now=0.0)


def test_a_decoded_record_encodes_to_the_same_bytes() -> None:
    for each in RECORDS.values():
        data = encode(each, tid=TID)
        found = decode(data, now=each.deadline)
        assert data == encode(found, tid=TID)
        if found.payload is not None:
            assert data.endswith(payload_bytes(found.payload))


@for_each("at", (42, 48, 54), ids=("requested", "deadline", "duration"))
def test_a_time_outside_the_calendar_is_damage(at: int) -> None:
    """A mismatch would tell it to the client, and Python knows no year 10889."""
    data = encode(replace(COMPLETED, requested_at=LATEST - 1, completed_at=LATEST, deadline=LATEST), tid=TID)
    size = 5 if at == 54 else 6
    with pytest.raises(CorruptRecord):
        decode(data[:at] + b"\xff" * size + data[at + size :], now=0.0)

    assert refusal(Mismatched(first_seen=decode(data, now=0.0).requested_at)).detail.endswith("9999-12-31T23:59:58Z.")


def test_a_record_that_is_too_long_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(COMPLETED, tid=TID)
    monkeypatch.setattr(encoding, "LARGEST_BYTES", len(data))
    assert decode(data, now=0.0).payload == COMPLETED.payload

    with pytest.raises(CorruptRecord, match="bytes, not"):
        decode(data + b"x", now=0.0)


def test_scripts_and_python_know_the_same_limits() -> None:
    from importlib.resources import files

    text = files("flask_idempotency.stores.redis").joinpath("lua/lib/record.lua").read_text("utf-8")

    assert f"local LARGEST, LATEST = {encoding.LARGEST_BYTES}, {int(LATEST) * 1000}\n" in text


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_cache_entry_is_the_same_response_or_none(data: st.DataObject) -> None:
    """Its sum finds accidents; and who writes the sum as well still has to write a completed record."""
    key = a_key()
    name = data.draw(st.sampled_from(sorted(RECORDS)))
    inner = data.draw(damaged(encode(RECORDS[name], tid=key.tid)) | st.just(encode(RECORDS[name], tid=key.tid)))
    sealed = inner + replay_cache._sum(key, inner)
    try:
        found = replay_cache._opened(key, sealed)
    except CorruptRecord:
        return

    assert (State.COMPLETED, True) == (found.state, found.payload is not None)


def test_a_quarantined_record_is_not_replayed_from_a_cache() -> None:
    key = a_key()
    inner = encode(RECORDS["condemned"], tid=key.tid)

    with pytest.raises(CorruptRecord, match="not completed"):
        replay_cache._opened(key, inner + replay_cache._sum(key, inner))


STEP = Entry(b"c" * 12, "charge", "plain", StepState.FINISHED, True, b"d" * 16, PAYLOAD)


def summed(text: bytes) -> bytes:
    """Return these bytes with the checksums of a step, which are no secret."""
    head, body = text[: step_encoding._HEAD - 2], text[step_encoding._BODY :]
    return head + sum(head).to_bytes(2, "big") + step_encoding._crc(STEP.id, text[:1], body) + body


STORED_STEP = summed(step_bytes(STEP)[:1] + bytes(step_encoding._BODY - 1) + step_bytes(STEP)[5:])
"""As the script writes it, with all numbers 0."""

TEXTS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "number": (b"1700000000000000", whole_number),
    "limits": (b"100,,5,10,60000000,60.0", quota.decode_limits),
    "note": (
        b'1700000000000000 {"finished": true}',
        lambda text: task_log._report(text, 1_700_000_000_000_000).facts(),
    ),
    "task": (b"heartbeat", text_in),
    "lost": (
        b"1700000000000",
        lambda text: data_loss._part((10**15, b"a", b"b", b"c", text, text, 0, text, text, text)),
    ),
    "data key": (b"\x0a2026-11-21wrapped", lambda text: data_keys._key(b"1", {b"1": text}, 0)),
    "key's number": (b"70000", lambda text: data_keys._key(text, {text: b"\x01kw", b"x" + text: b"1700"}, 10**15)),
    "step": (STORED_STEP, lambda text: step_encoding.decode_entry(STEP.id, text)),
    "step with its checksums": (STORED_STEP, lambda text: step_encoding.decode_entry(STEP.id, summed(text))),
    "counts": (b'{"pay":{"new":1}}', read_counts),
    "change": (
        b"1700000000000000 " + b"t" * 16 + b'["released","","ann","","",0,1]',
        lambda text: activity._entry(text, 0),
    ),
    "erasure": (
        b"70000 1700000000000000",
        lambda text: encoding.with_erasure(COMPLETED, encoding.decode_erasure(text)),
    ),
}


@pytest.mark.parametrize("name", TEXTS)
@settings(deadline=None, max_examples=unless_long(40, long=1_000))
@given(data=st.data())
def test_a_damaged_text_in_redis_raises_only_corrupt(name: str, data: st.DataObject) -> None:
    sound, read = TEXTS[name]
    assert read(sound) is not None
    text = data.draw(damaged(sound) | st.binary(max_size=40))
    try:
        read(text)
    except CorruptRecord:
        return


@for_each(
    "text",
    (b"", b"-1", b"+1", b" 1", b"1_0", b"1.0", b"1" * 21, b"9" * 5000, "١".encode(), b"nan", b"0x1f", 1, None),
)
def test_only_a_few_digits_are_a_number(text: Any) -> None:
    with pytest.raises(CorruptRecord):
        whole_number(text)


@for_each(
    "report",
    (
        "[" * 3999,
        "9" * 3999,
        '{"skew_ms": 1e999}',
        '{"skew_ms": ' + "9" * 3000 + "}",
        '{"skew_ms": true}',
        "[]",
        "x" * 5000,
    ),
)
def test_a_forged_report_is_ignored(report: str) -> None:
    """Neither a recursion without an end nor a number without one reaches a gauge or a heartbeat."""
    assert TaskReport(1.0, report).whole("skew_ms") is None


GOOD = Row(
    response_expires_at=None,
    state="completed",
    token=b"t" * 16,
    fence=7,
    attempt=1,
    fingerprint=b"\1" * 17,
    on_expiry="takeover",
    tenant="acme",
    principal="alice",
    method="POST",
    endpoint="pay",
    requested_at=1_700_000_000_000_000,
    lease_expires_at=None,
    completed_at=1_700_000_001_000_000,
    expires_at=1_700_086_400_000_000,
    status=201,
    response_size=300,
    response=b"\x10bytes",
    reason=None,
    in_quota=1,
    wrapping_key_id="2026-11-21",
    data_key_number=1,
    succeeded=None,
    erased=None,
    now=1_700_000_002_000_000,
)
ROWS = {
    "completed": GOOD,
    "in flight": GOOD._replace(
        state="processing",
        lease_expires_at=GOOD.expires_at,
        expires_at=None,
        completed_at=None,
        response=None,
        status=None,
    ),
    "quarantined": GOOD._replace(
        state="quarantined", lease_expires_at=GOOD.expires_at, expires_at=None, reason="corrupt"
    ),
    "released": GOOD._replace(state="released", response=None),
}
NUMBERS = (0, -1, 1, 2**31, 2**63 - 1, -(2**63), 10**5000, 1.5, float("nan"), float("inf"))
ODD = st.sampled_from(
    (None, *NUMBERS, "", "x", "9" * 5000, "\ud800", "completed", "␛d800", "␛ffff", b"", b"t" * 16, b"\xff")
)
STORED = [name for name in Row._fields if name not in ("now", "erased")]


@pytest.mark.parametrize("name", ROWS)
@settings(deadline=None, max_examples=unless_long(50, long=1_000))
@given(changed=st.dictionaries(st.sampled_from(STORED), ODD, min_size=1, max_size=3))
@example(changed={"requested_at": 2**63 - 1})
@example(changed={"reason": 5})
@example(changed={"completed_at": "then"})
@example(changed={"response_size": -1})
def test_a_damaged_row_is_a_record_or_damage(name: str, changed: dict[str, Any]) -> None:
    """SQLite keeps anything in any column. What a claim is told can be told to a client and to a person."""
    request = a_request(a_key())
    columns = ROWS[name]._replace(**changed)
    try:
        row = row_of(tuple(columns))
        verdict = classify(
            row, claim_query(replace(request, fingerprint=row.fingerprint), a_token(), lease=1, now=None)
        )
        classify(row, claim_query(request, a_token(), lease=1, now=None))
        found = None if row.state == "released" else row.record()
    except CorruptRecord:
        return

    assert verdict is not None
    if not is_gone(row):
        refusal(Mismatched(first_seen=row.requested_at / 1_000_000))
    if found is not None:
        assert max(found.requested_at, found.deadline) <= LATEST
        by = None if found.payload is None else found.payload.sealed_by
        assert by is None or by.number >= 0


def test_sound_rows_are_read() -> None:
    """Else the test above would pass for readers that refuse everything."""
    assert all(row_of(tuple(row)).state == row.state for row in ROWS.values())
