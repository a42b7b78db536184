"""A step's item and result come back as they were sealed, in their own entry, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flask_idempotency.codec.compression import COMPRESSIONS
from flask_idempotency.codec.encryption import DataKeyring, EncryptedCodec
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.step_envelope import StepEnvelopes
from flask_idempotency.engine.capabilities import DataKey, TenantKeys
from flask_idempotency.engine.errors import CorruptRecord, NotStorable, ResponseUnavailable, RingMismatch
from flask_idempotency.engine.journal import LARGEST_ENTRY, LARGEST_ITEM
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, SealedBy, StoredPayload
from flask_idempotency.engine.store import StepContext
from tests.codec.sealing import BINDING, KEY, OTHER_TENANT, RESULT, RING, Shelf, codec
from tests.codec.test_envelope import envelope
from tests.codec.test_golden_encryption import GOLDEN

STEPS = StepEnvelopes()
PLAIN = StepEnvelopes(compression=None)
ZSTD = StepEnvelopes(compression=COMPRESSIONS["zstd"])
CONTEXT = StepContext(KEY, b"step-id-12.b", 17, b"f" * 32, "plain", b"d" * 16, "finished")

# What each file in golden/steps holds. Files are never rewritten: they are what users' stores are full of.
EXAMPLES: dict[str, tuple[bytes, bytes | None]] = {
    "v3-plain": (b'"line-1"', b'{"id":"ch_1"}'),
    "v3-no-item": (b"", b"null"),
    "v3-begun": (b"7", None),
    "v3-zlib": (b"7", b'"' + b"all work and no play " * 100 + b'"'),
    "v3-zstd": (b"7", b'"' + b"all work and no play " * 100 + b'"'),
}
GOLDEN_STEPS = GOLDEN / "steps"

# One thing changed each: an entry must open in no other place, state or request.
ELSEWHERE = {
    "another step": replace(CONTEXT, step=b"step-id-13.b"),
    "an older fence": replace(CONTEXT, fence=16),
    "another request": replace(CONTEXT, key=StorageKey(b"q" * 32, KEY.tid)),
    "another tenant": replace(CONTEXT, key=StorageKey(KEY.rid, OTHER_TENANT)),
    "another body": replace(CONTEXT, fingerprint=b"g" * 32),
    "another kind": replace(CONTEXT, effects="deduplicated"),
    "other arguments": replace(CONTEXT, digest=b"e" * 16),
    "another state": replace(CONTEXT, state="begun"),
}


def changed(payload: StoredPayload, data: bytes) -> StoredPayload:
    return replace(payload, data=data)


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_steps_open_for_ever(name: str) -> None:
    data = bytes.fromhex((GOLDEN_STEPS / f"{name}.hex").read_text())

    assert EXAMPLES[name] == STEPS.unwrap(data)
    assert EXAMPLES[name] == PLAIN.unwrap(data)


def test_every_golden_step_is_tested() -> None:
    assert set(EXAMPLES) == {path.stem for path in GOLDEN_STEPS.glob("*.hex")}
    assert {"v3-sealed"} == {path.stem for path in GOLDEN_STEPS.glob("*.json")}


@pytest.mark.parametrize("name", ("v3-plain", "v3-no-item", "v3-begun"))
def test_steps_are_written_as_ever(name: str) -> None:
    """During a roll-out the old release opens what the new one writes. Compressed bytes may vary with zlib's version."""
    assert (GOLDEN_STEPS / f"{name}.hex").read_text().split() == [STEPS.wrap(*EXAMPLES[name]).hex()]


def test_golden_sealed_steps_open_and_are_sealed_as_ever() -> None:
    content: dict[str, Any] = json.loads((GOLDEN_STEPS / "v3-sealed.json").read_text())
    key, payload = content["data_key"], content["payload"]
    shelf = TenantKeys(
        bytes.fromhex(key["store"]), (DataKey(key["number"], key["kid"], bytes.fromhex(key["wrapped"])),), key["number"]
    )
    data = bytes.fromhex(payload["data"])
    sealing = EncryptedCodec(
        EnvelopeCodec(compression=None),
        DataKeyring(RING, Shelf(changed=lambda _: shelf), step=lambda: 1),
        randomness=lambda size: data[1 : 1 + size],
    )
    sealed = StoredPayload(data, 0, True, payload["byte_size"], SealedBy(key["kid"], key["number"]))

    assert EXAMPLES["v3-plain"] == sealing.steps.open(sealed, CONTEXT)
    assert sealed == sealing.steps.seal(*EXAMPLES["v3-plain"], CONTEXT)


@settings(deadline=None)
@given(
    st.binary(max_size=60),
    st.none() | st.binary(max_size=200) | st.binary(min_size=1, max_size=3).map(lambda p: p * 900),
)
@example(b"", None)
@example(b"", b"")
def test_opening_gives_what_was_sealed(item: bytes, result: bytes | None) -> None:
    for steps in (STEPS, PLAIN, ZSTD, codec().steps):
        assert (item, result) == steps.open(steps.seal(item, result, CONTEXT), CONTEXT)


@settings(deadline=None)
@given(st.binary())
@example(b"")
@example(envelope(b"", 0x30))
@example(envelope(b"\0\5abc", 0x31))
@example(envelope(b"\0\0abc", 0x30))
@example(envelope(b"\0\0", 0x3E))
def test_any_bytes_are_a_corrupt_record(data: bytes) -> None:
    with pytest.raises(CorruptRecord):
        STEPS.unwrap(data)


@settings(deadline=None)
@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_flipped_bits_are_found(name: str, data: st.DataObject) -> None:
    for steps in (STEPS, codec().steps):
        payload = steps.seal(*EXAMPLES[name], CONTEXT)
        flipped = bytearray(payload.data)
        flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))

        with pytest.raises(CorruptRecord):
            steps.open(changed(payload, bytes(flipped)), CONTEXT)


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_sealed_step_opens_in_its_own_entry_only(where: str) -> None:
    ours = codec()
    sealed = ours.steps.seal(b'"line-1"', b'{"id":"ch_1"}', CONTEXT)
    # The other place has a result of its own, under the same data key where the tenant is the same.
    ours.steps.seal(b'"line-1"', b'{"id":"ch_2"}', ELSEWHERE[where])

    with pytest.raises(CorruptRecord):
        ours.steps.open(sealed, ELSEWHERE[where])
    assert (b'"line-1"', b'{"id":"ch_1"}') == ours.steps.open(sealed, CONTEXT)


def test_a_step_is_no_response_and_a_response_no_step() -> None:
    ours = codec()
    step, response = ours.steps.seal(b"", b"1", CONTEXT), ours.seal(RESULT, BINDING)

    with pytest.raises(CorruptRecord):
        ours.open(step, BINDING)
    with pytest.raises(CorruptRecord):
        ours.steps.open(response, CONTEXT)


def test_a_planted_plain_step_is_corrupt_where_encryption_is_required() -> None:
    planted = STEPS.seal(b"", b'{"id":"ch_1"}', CONTEXT)

    with pytest.raises(CorruptRecord, match="required"):
        codec(plain_allowed=False).steps.open(planted, CONTEXT)
    assert (b"", b'{"id":"ch_1"}') == codec(plain_allowed=True).steps.open(planted, CONTEXT)


def test_a_sealed_step_waits_for_its_key_ring() -> None:
    with pytest.raises(RingMismatch, match="KEY_RING"):
        STEPS.open(codec().steps.seal(b"", b"1", CONTEXT), CONTEXT)


@pytest.mark.parametrize("steps", (STEPS, codec().steps), ids=("plain", "sealed"))
def test_an_erased_step_is_unavailable_and_not_corrupt(steps: Any) -> None:
    with pytest.raises(ResponseUnavailable, match="erased"):
        steps.open(StoredPayload(b"", 0, True, 0, ERASED), CONTEXT)


def test_too_large_items_and_results_are_refused() -> None:
    STEPS.wrap(b"i" * LARGEST_ITEM, b"r" * LARGEST_ENTRY)

    with pytest.raises(NotStorable, match="item"):
        STEPS.wrap(b"i" * (LARGEST_ITEM + 1), None)
    with pytest.raises(NotStorable, match="result"):
        STEPS.wrap(b"", b"r" * (LARGEST_ENTRY + 1))


def test_the_largest_step_opens_again() -> None:
    largest = b"i" * LARGEST_ITEM, b"r" * LARGEST_ENTRY

    assert largest == STEPS.unwrap(PLAIN.wrap(*largest))
    assert largest == STEPS.unwrap(STEPS.wrap(*largest))


def test_quotas_count_the_plain_size() -> None:
    assert 3 + 2 == codec().steps.seal(b'"a"', b"12", CONTEXT).byte_size == STEPS.seal(b'"a"', b"12", CONTEXT).byte_size


def test_a_bomb_is_corrupt() -> None:
    method = COMPRESSIONS["zlib"]
    bomb = method.compress(b"\0" * (LARGEST_ENTRY * 2))

    with pytest.raises(CorruptRecord, match="unfolds"):
        STEPS.unwrap(envelope(bomb, 0x31 | method.number << 1))
