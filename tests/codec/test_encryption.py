"""A sealed answer opens in the one record that it was sealed for, or not at all."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flask_idempotency.codec.encryption import EncryptedCodec
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.ports import Binding
from flask_idempotency.engine.record import ERASED, Payload, SealedBy
from flask_idempotency.engine.result import Result
from tests.codec.sealing import BINDING, KEY, OTHER_TENANT, PLAIN, RESULT, codec
from tests.codec.test_envelope import RESULTS

CODEC = codec()
SEALED = CODEC.seal(RESULT, BINDING)


def assert_corrupt(payload: Payload, binding: Binding = BINDING, opened_by: EncryptedCodec = CODEC) -> None:
    with pytest.raises(CorruptRecord):
        opened_by.open(payload, binding)


@given(RESULTS, st.integers(1), st.binary(min_size=1, max_size=32))
def test_opening_gives_what_was_sealed(result: Result, fence: int, token: bytes) -> None:
    """
    Whatever the answer, and whoever owns it; a tombstone too.
    """
    binding = replace(BINDING, fence=fence, token=token)

    assert result == CODEC.open(CODEC.seal(result, binding), binding)
    assert result.without_body() == CODEC.open(CODEC.seal(result.without_body(), binding), binding)


def test_clear_facts_are_those_of_the_plain_answer() -> None:
    """
    What quotas count and lists show does not depend on encryption; which key opens it is said beside it.
    """
    plain = PLAIN.seal(RESULT, BINDING)

    assert replace(plain, data=SEALED.data, sealed_by=SealedBy("new", 1)) == SEALED
    assert len(plain.data) + 29 == len(SEALED.data)


def test_no_two_sealings_are_alike() -> None:
    """
    Not even of one answer for one record: two equal answers must not be seen to be equal.
    """
    assert SEALED.data != CODEC.seal(RESULT, BINDING).data


def test_flipped_bytes_are_found_wherever_they_are() -> None:
    """
    Version, algorithm, nonce, ciphertext, tag: every bit of every byte.
    """
    for place in range(len(SEALED.data)):
        for bit in range(8):
            damaged = bytearray(SEALED.data)
            damaged[place] ^= 1 << bit
            assert_corrupt(replace(SEALED, data=bytes(damaged)))


def test_answers_cut_anywhere_or_lengthened_are_found() -> None:
    """
    Nothing of it opens, from none of it to all but a byte.
    """
    for length in range(len(SEALED.data)):
        assert_corrupt(replace(SEALED, data=SEALED.data[:length]))
    assert_corrupt(replace(SEALED, data=SEALED.data + b"\0"))


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
def test_an_answer_opens_for_no_other_record(binding: Binding) -> None:
    """
    Not another key's, tenant's, attempt's or request's. The other tenant has a data key of that number too.
    """
    CODEC.prepare(binding.key)

    assert RESULT == CODEC.open(CODEC.seal(RESULT, binding), binding)
    assert_corrupt(SEALED, binding)


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_an_answer_opens_with_no_other_clear_facts(payload: Payload) -> None:
    """
    Who can write to the store cannot make a failure pass for a success, or have another key tried.
    """
    assert_corrupt(payload)


def test_every_field_is_tampered_with() -> None:
    """
    A field that is added to a binding or a payload is bound, or a test says why not.
    """
    bound = {field.name for field in fields(Binding)} | {field.name for field in fields(StorageKey)}
    clear = {field.name for field in fields(Payload)}

    assert bound == {*BINDINGS, "key", "label"}  # a key is its rid and tid; a label is for people
    assert clear == {name.partition(".")[0] for name in PAYLOADS if "," not in name} | {"data"}
