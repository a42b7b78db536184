"""Encryption is switched on and off, keys come and go, and no answer is lost or taken for another."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from flask_idempotency.codec.encryption import DataKeyring, EncryptedCodec
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.capabilities import DataKeys
from flask_idempotency.engine.claim import SealedResponse
from flask_idempotency.engine.errors import CorruptRecord, NotStorable, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Claimed, ClaimRequest, OnExpiry, SealedBy, StoredResponse
from flask_idempotency.stores.memory import MemoryStore
from tests.codec.sealing import (
    BINDING,
    KEY,
    NEW,
    OLD,
    OTHER_TENANT,
    PLAIN,
    RESULT,
    TENANT,
    Service,
    codec,
    keyring,
)


def test_what_cannot_be_replayed_is_not_sealed() -> None:
    """As without encryption."""
    with pytest.raises(NotStorable):
        codec().seal(StoredResponse(200, metadata=(("A", "b\r\nc"),)), BINDING)


def test_answers_from_before_encryption_still_open() -> None:
    """Switching it on loses no replay."""
    assert RESULT == codec().open(PLAIN.seal(RESULT, BINDING), BINDING)


def test_required_refuses_answers_that_are_not_encrypted() -> None:
    """Who can write to the store cannot plant one of his own by leaving out the encryption."""
    strict = codec(plain_allowed=False)

    assert RESULT == strict.open(strict.seal(RESULT, BINDING), BINDING)
    with pytest.raises(CorruptRecord, match="may have planted it"):
        strict.open(PLAIN.seal(RESULT, BINDING), BINDING)


def test_answers_from_when_encryption_was_on_still_open() -> None:
    """Switched off, nothing new is sealed or prepared for; what was sealed opens as long as the ring is there."""
    shelf = MemoryStore().data_keys
    sealed = codec(shelf).seal(RESULT, BINDING)
    off = codec(shelf, sealing=False)
    off.prepare(replace(KEY, tid=OTHER_TENANT))

    assert RESULT == off.open(sealed, BINDING)
    assert PLAIN.seal(RESULT, BINDING) == off.seal(RESULT, BINDING)
    assert () == shelf.read_keys(OTHER_TENANT).keys
    with pytest.raises(CorruptRecord, match="IDEMPOTENCY_KEY_RING"):
        PLAIN.open(sealed, BINDING)


def test_all_keys_of_the_ring_open() -> None:
    """During a rotation, in both directions."""
    shelf = MemoryStore().data_keys
    before, after = codec(shelf, provider=KeyRing({"old": OLD, "new": NEW})), codec(shelf)

    for sealing, opening in ((before, after), (after, before)):
        assert RESULT == opening.open(sealing.seal(RESULT, BINDING), BINDING)
    assert [SealedBy("old", 1), SealedBy("new", 2)] == [c.seal(RESULT, BINDING).sealed_by for c in (before, after)]


def test_a_key_that_left_the_ring_opens_nothing() -> None:
    """The text says which key to put back."""
    shelf = MemoryStore().data_keys
    sealed = codec(shelf, provider=KeyRing({"old": OLD})).seal(RESULT, BINDING)

    with pytest.raises(CorruptRecord, match="'old' is not in the ring"):
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
    """The store has said that it is gone: what is sealed next has a key that the store has."""
    shelf = MemoryStore().data_keys
    sealing = codec(shelf)
    sealing.seal(RESULT, BINDING)
    shelf.shred(TENANT)
    assert SealedBy("new", 1) == sealing.seal(RESULT, BINDING).sealed_by

    sealing.forget(KEY)

    assert SealedBy("new", 2) == sealing.seal(RESULT, BINDING).sealed_by


def test_a_destroyed_key_opens_nothing_anywhere_it_is_not_remembered() -> None:
    """The ciphertext is whole, the ring is there: nobody can open it."""
    shelf = MemoryStore().data_keys
    sealed = codec(shelf).seal(RESULT, BINDING)
    shelf.shred(TENANT)

    with pytest.raises(CorruptRecord, match="data key 1"):
        codec(shelf).open(sealed, BINDING)


def test_a_provider_that_is_away_is_noticed_before_the_work() -> None:
    """Preparing fails, and sealing after a preparation does not."""
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
    """It says so when the answer is stored; then that is sealed with a new key, and opens everywhere."""
    store = MemoryStore()
    sealing = codec(store.data_keys)
    sealing.prepare(KEY)
    store.data_keys.disable(TENANT, 1)
    token = b"token-of-owner.."
    claimed = store.claim(ClaimRequest(KEY, BINDING.fingerprint, OnExpiry.TAKEOVER), token=token, lease=30)
    assert isinstance(claimed, Claimed)
    binding = replace(BINDING, token=token, fence=claimed.held.fence)

    SealedResponse(sealing, [binding], RESULT).write(
        binding, lambda key, payload: store.complete(key, token, payload, keep=60)
    )
    record = store.read(KEY)

    assert record is not None
    assert record.payload is not None
    assert SealedBy("new", 2) == record.payload.sealed_by
    assert RESULT == codec(store.data_keys).open(record.payload, binding)
