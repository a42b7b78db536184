"""A sealed answer opens in the one record that it was sealed for, or not at all."""

from __future__ import annotations

import hmac
import traceback
from base64 import b64encode
from dataclasses import fields, replace
from typing import cast

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import example, given
from hypothesis import strategies as st

from flask_idempotency.codec.encryption import DataKeyring, EncryptedCodec
from flask_idempotency.codec.envelope import EnvelopeCodec, byte_size_of
from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.capabilities import DataKeys
from flask_idempotency.engine.claim import SealedResponse
from flask_idempotency.engine.errors import CorruptRecord, NotStorable, RingMismatch, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey, encode
from flask_idempotency.engine.model import (
    ERASED,
    ClaimRequest,
    Grant,
    OnExpiry,
    SealContext,
    SealedBy,
    StoredPayload,
    StoredResponse,
)
from flask_idempotency.stores.memory import MemoryStore
from tests.codec.sealing import (
    BINDING,
    KEY,
    NEW,
    OLD,
    OTHER_TENANT,
    PLAIN,
    RESULT,
    RING,
    TENANT,
    Service,
    codec,
    keyring,
)
from tests.codec.test_envelope import RESULTS

CODEC = codec()
SEALED = CODEC.seal(RESULT, BINDING)


def assert_corrupt(payload: StoredPayload, binding: SealContext = BINDING, opened_by: EncryptedCodec = CODEC) -> None:
    with pytest.raises(CorruptRecord):
        opened_by.open(payload, binding)


@given(RESULTS, st.integers(1), st.binary(min_size=1, max_size=32))
def test_opening_gives_what_was_sealed(result: StoredResponse, fence: int, token: bytes) -> None:
    binding = replace(BINDING, fence=fence, token=token)

    assert result == CODEC.open(CODEC.seal(result, binding), binding)
    assert result.without_body() == CODEC.open(CODEC.seal(result.without_body(), binding), binding)


def test_clear_facts_are_those_of_the_plain_answer() -> None:
    """What quotas count and lists show does not depend on encryption; which key opens it is said beside it."""
    plain = PLAIN.seal(RESULT, BINDING)

    assert replace(plain, data=SEALED.data, sealed_by=SealedBy("new", 1)) == SEALED
    assert len(plain.data) + 29 == len(SEALED.data)


def test_no_two_sealings_are_alike() -> None:
    """Not even of one answer for one record: two equal answers must not be seen to be equal."""
    assert SEALED.data != CODEC.seal(RESULT, BINDING).data


def test_flipped_bytes_are_found_wherever_they_are() -> None:
    for place in range(len(SEALED.data)):
        damaged = bytearray(SEALED.data)
        damaged[place] ^= 1 << place % 8
        assert_corrupt(replace(SEALED, data=bytes(damaged)))


BINDINGS = {
    "rid": replace(BINDING, key=StorageKey(b"R" + KEY.rid[1:], KEY.tid)),
    "tid": replace(BINDING, key=StorageKey(KEY.rid, OTHER_TENANT)),
    "token": replace(BINDING, token=b"token-of-another"),
    "fence": replace(BINDING, fence=18),
    "fingerprint": replace(BINDING, fingerprint=b"g" * 32),
}

PAYLOADS = {
    "status": replace(SEALED, status=200),
    "success": replace(SEALED, success=False),
    "byte_size": replace(SEALED, byte_size=SEALED.byte_size - 1),
    "sealed_by.kid": replace(SEALED, sealed_by=SealedBy("old", 1)),
    "sealed_by.kid, unknown": replace(SEALED, sealed_by=SealedBy("other", 1)),
    "sealed_by.kid, malformed": replace(SEALED, sealed_by=SealedBy("\ud800\n", 1)),
    "sealed_by.number": replace(SEALED, sealed_by=SealedBy("new", 2)),
    "sealed_by.number, none": replace(SEALED, sealed_by=ERASED),
    "sealed_by.number, negative": replace(SEALED, sealed_by=SealedBy("new", -1)),
    "sealed_by, none": replace(SEALED, sealed_by=None),
}


@pytest.mark.parametrize("binding", BINDINGS.values(), ids=BINDINGS)
def test_an_answer_opens_for_no_other_record(binding: SealContext) -> None:
    CODEC.prepare(binding.key)

    assert RESULT == CODEC.open(CODEC.seal(RESULT, binding), binding)
    assert_corrupt(SEALED, binding)


def test_an_answer_opens_with_no_other_clear_facts() -> None:
    """Who can write to the store cannot make a failure pass for a success, or have another key tried."""
    for payload in PAYLOADS.values():
        assert_corrupt(payload)


def test_every_field_is_tampered_with() -> None:
    """A field that is added to a binding or a payload is bound, or a test says why not."""
    bound = {field.name for field in fields(SealContext)} | {field.name for field in fields(StorageKey)}
    clear = {field.name for field in fields(StoredPayload)}

    # A key is its rid and tid; a label is for people, a mark is part of the token, and `steps` only derives ids.
    assert bound == {*BINDINGS, "key", "label", "mark", "steps"}
    assert clear == {name.partition(".")[0] for name in PAYLOADS if "," not in name} | {"data"}


def test_answers_cannot_change_places() -> None:
    other = replace(BINDING, key=StorageKey(b"s" * 32, TENANT))
    theirs = replace(RESULT, body=b'{"id":"pay_2"}')
    sealed = CODEC.seal(theirs, other)

    assert replace(SEALED, data=b"") == replace(sealed, data=b"")
    assert theirs == CODEC.open(sealed, other)
    assert_corrupt(sealed, BINDING)
    assert_corrupt(SEALED, other)


def test_an_answer_of_another_store_does_not_open() -> None:
    """Not even with the same data key, as after a copy of records and keys from a test system."""
    here, there = MemoryStore().data_keys, MemoryStore().data_keys
    sealed = codec(there).seal(RESULT, BINDING)
    copied = there.read_keys(TENANT).keys[0]
    assert here.add(TENANT, copied, store=here.read_keys(TENANT).store, after=0)

    with pytest.raises(RingMismatch, match="does not open a data key"):
        codec(here).open(sealed, BINDING)


def test_the_inner_answer_must_say_what_the_record_says() -> None:
    """Both are authentic, so one of them was sealed by a release that was wrong."""

    class Lying(EnvelopeCodec):
        def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
            return replace(super().seal(result, binding), status=500)

    shelf = MemoryStore().data_keys
    sealed = EncryptedCodec(Lying(), keyring(shelf)).seal(RESULT, BINDING)

    with pytest.raises(CorruptRecord, match="differ in status"):
        codec(shelf).open(sealed, BINDING)


def test_other_formats_are_not_known() -> None:
    """Nor another algorithm: what this release does not know is corrupt, not absent."""
    for head in set(range(256)) - {0x21}:
        with pytest.raises(CorruptRecord, match="is unknown to this release"):
            CODEC.open(replace(SEALED, data=bytes((head,)) + SEALED.data[1:]), BINDING)


@given(st.binary(max_size=100))
@example(b"")
@example(b"\x21")
@example(b"\x21" + bytes(27))
@example(b"\x21" + bytes(28))
def test_any_bytes_are_a_corrupt_record(data: bytes) -> None:
    """Nothing but CorruptRecord: another exception might pass for an absent record, and run a payment again."""
    assert_corrupt(replace(SEALED, data=data))
    assert_corrupt(replace(SEALED, data=b"\x21" + data))


@given(st.binary(max_size=60))
def test_authentic_bytes_that_are_no_envelope_are_corrupt(content: bytes) -> None:
    class Anything(EnvelopeCodec):
        def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
            return replace(super().seal(result, binding), data=content)

    shelf = MemoryStore().data_keys

    assert_corrupt(EncryptedCodec(Anything(), keyring(shelf)).seal(RESULT, BINDING), opened_by=codec(shelf))


def test_the_key_of_a_record_is_derived_as_the_standard_says() -> None:
    """HKDF-Expand for one block is one HMAC (RFC 5869): what another implementation needs to read our records."""
    shelf = MemoryStore().data_keys
    data_key = keyring(shelf).for_sealing(TENANT)
    sealed = codec(shelf).seal(RESULT, BINDING)
    info = encode(b"flask_idempotency/record-key/1", KEY.rid, b"17", BINDING.token)
    bound = encode(
        *(b"flask_idempotency/answer/2", b"\x21", shelf.read_keys(TENANT).store, TENANT, KEY.rid, b"17", BINDING.token),
        *(b"completed", BINDING.fingerprint, b"new", b"1", b"201", b"\1", str(byte_size_of(RESULT)).encode()),
    )
    key = hmac.digest(data_key.key, info + b"\1", "sha256")

    assert PLAIN.wrap(RESULT) == AESGCM(key).decrypt(sealed.data[1:13], sealed.data[13:], bound)


def test_errors_and_logs_show_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    shelf = MemoryStore().data_keys
    data_keys = keyring(shelf)
    sealing = EncryptedCodec(PLAIN, data_keys)
    canary = StoredResponse(201, "", (("X-Canary", "canary-header"),), b"canary-body")
    sealed = sealing.seal(canary, BINDING)
    key = data_keys.for_sealing(TENANT)
    told = [*map(repr, (sealing, data_keys, sealed, BINDING, key, RING, canary, shelf.read_keys(TENANT)))]
    for payload, binding in (
        *((payload, BINDING) for payload in PAYLOADS.values()),
        *((sealed, binding) for binding in BINDINGS.values()),
        *((replace(sealed, data=sealed.data[:length]), BINDING) for length in (0, 1, 28, 29, 60)),
    ):
        try:
            sealing.open(payload, binding)
        except CorruptRecord as error:
            told += traceback.format_exception(error)
    shown = "".join([*told, *caplog.messages])

    for secret in (NEW, OLD, key.key, key.wrapped, sealed.data, canary.body, BINDING.token, BINDING.fingerprint):
        for form in (repr(secret)[2:-1], secret.hex(), b64encode(secret).decode()):
            assert form not in shown
    assert "canary-header" not in shown
    assert 15 <= len(told)


def test_what_cannot_be_replayed_is_not_sealed() -> None:
    with pytest.raises(NotStorable):
        codec().seal(StoredResponse(200, metadata=(("A", "b\r\nc"),)), BINDING)


def test_answers_from_before_encryption_still_open() -> None:
    assert RESULT == codec().open(PLAIN.seal(RESULT, BINDING), BINDING)


def test_required_refuses_answers_that_are_not_encrypted() -> None:
    """Who can write to the store cannot plant one of his own by leaving out the encryption."""
    strict = codec(plain_allowed=False)

    assert RESULT == strict.open(strict.seal(RESULT, BINDING), BINDING)
    with pytest.raises(CorruptRecord, match="may have planted it"):
        strict.open(PLAIN.seal(RESULT, BINDING), BINDING)


def test_answers_from_when_encryption_was_on_still_open() -> None:
    shelf = MemoryStore().data_keys
    sealed = codec(shelf).seal(RESULT, BINDING)
    off = codec(shelf, sealing=False)
    off.prepare(replace(KEY, tid=OTHER_TENANT))

    assert RESULT == off.open(sealed, BINDING)
    assert PLAIN.seal(RESULT, BINDING) == off.seal(RESULT, BINDING)
    assert () == shelf.read_keys(OTHER_TENANT).keys
    with pytest.raises(RingMismatch, match="IDEMPOTENCY_KEY_RING"):
        PLAIN.open(sealed, BINDING)


def test_all_keys_of_the_ring_open() -> None:
    shelf = MemoryStore().data_keys
    before, after = codec(shelf, provider=KeyRing({"old": OLD, "new": NEW})), codec(shelf)

    for sealing, opening in ((before, after), (after, before)):
        assert RESULT == opening.open(sealing.seal(RESULT, BINDING), BINDING)
    assert [SealedBy("old", 1), SealedBy("new", 2)] == [c.seal(RESULT, BINDING).sealed_by for c in (before, after)]


def test_a_key_that_left_the_ring_opens_nothing() -> None:
    shelf = MemoryStore().data_keys
    sealed = codec(shelf, provider=KeyRing({"old": OLD})).seal(RESULT, BINDING)

    with pytest.raises(RingMismatch, match="'old' is not in the ring"):
        codec(shelf, provider=KeyRing({"new": NEW})).open(sealed, BINDING)


class Replaceable:
    """A store that may lose its memory, and is another one from then on."""

    def __init__(self) -> None:
        self.now = MemoryStore().data_keys

    def __getattr__(self, name: str) -> object:
        return getattr(self.now, name)


def test_a_store_that_lost_its_memory_does_not_make_good_answers_corrupt() -> None:
    """
    It gives number 1 again: what another process seals with that opens here, where the first number 1 is remembered.
    """
    store = Replaceable()
    here, there = codec(cast("DataKeys", store)), codec(cast("DataKeys", store))
    here.open(there.seal(RESULT, BINDING), BINDING)
    store.now = MemoryStore().data_keys
    there.forget(KEY)
    sealed = there.seal(RESULT, BINDING)

    assert SealedBy("new", 1) == sealed.sealed_by
    assert RESULT == here.open(sealed, BINDING)
    assert RESULT == here.open(sealed, BINDING)


def test_a_key_that_the_store_has_forgotten_is_not_taken_for_the_next_one() -> None:
    """
    Numbers begin anywhere: what is sealed with a remembered key is refused by a store that has another one by now.
    """
    store = Replaceable()
    rings = [DataKeyring(KeyRing({"new": bytes(range(32))}), cast("DataKeys", store)) for _ in range(2)]
    remembered = rings[0].for_sealing(TENANT)
    store.now = MemoryStore().data_keys
    made = rings[1].for_sealing(TENANT)

    assert remembered == rings[0].for_sealing(TENANT)
    assert remembered.number != made.number
    assert {1} != {remembered.number, made.number}


def test_a_forgotten_key_seals_no_more() -> None:
    shelf = MemoryStore().data_keys
    sealing = codec(shelf)
    sealing.seal(RESULT, BINDING)
    shelf.shred(TENANT)
    assert SealedBy("new", 1) == sealing.seal(RESULT, BINDING).sealed_by

    sealing.forget(KEY)

    assert SealedBy("new", 2) == sealing.seal(RESULT, BINDING).sealed_by


def test_a_destroyed_key_opens_nothing_anywhere_it_is_not_remembered() -> None:
    shelf = MemoryStore().data_keys
    sealed = codec(shelf).seal(RESULT, BINDING)
    shelf.shred(TENANT)

    with pytest.raises(CorruptRecord, match="data key 1"):
        codec(shelf).open(sealed, BINDING)


def test_a_provider_that_is_away_is_noticed_before_the_work() -> None:
    service, shelf = Service(), MemoryStore().data_keys
    sealed = codec(shelf).seal(RESULT, BINDING)
    sealing = codec(shelf, provider=service)
    sealing.prepare(KEY)
    service.error = TimeoutError("away")

    assert SealedBy("new", 1) == sealing.seal(RESULT, BINDING).sealed_by
    for ask in (sealing.prepare, lambda key: sealing.seal(RESULT, replace(BINDING, key=key))):
        with pytest.raises(StoreUnavailable):
            ask(StorageKey(b"r" * 32, OTHER_TENANT))
    with pytest.raises(StoreUnavailable):
        codec(shelf, provider=service).open(sealed, BINDING)


def test_compression_is_the_envelopes_and_may_be_left_out() -> None:
    """It is for the application to ask for: a length tells what an answer has in common with what was sent."""
    long = replace(RESULT, body=b"x" * 5000)
    compressing = EncryptedCodec(EnvelopeCodec(), keyring())

    assert len(codec().seal(long, BINDING).data) > 5000
    assert len(compressing.seal(long, BINDING).data) < 200
    assert long == compressing.open(compressing.seal(long, BINDING), BINDING)


def test_a_store_that_lost_its_data_keys_gets_an_answer_that_it_can_keep() -> None:
    store = MemoryStore()
    sealing = codec(store.data_keys)
    sealing.prepare(KEY)
    store.data_keys.disable(TENANT, 1)
    token = b"token-of-owner.."
    claimed = store.claim(ClaimRequest(KEY, BINDING.fingerprint, OnExpiry.TAKEOVER), token=token, lease=30)
    assert isinstance(claimed, Grant)
    binding = replace(BINDING, token=token, fence=claimed.fence)

    SealedResponse(sealing, [binding], RESULT).write(lambda each: store.complete(KEY, token, *each, keep=60))
    record = store.read(KEY)

    assert record is not None
    assert record.payload is not None
    assert SealedBy("new", 2) == record.payload.sealed_by
    assert RESULT == codec(store.data_keys).open(record.payload, binding)
