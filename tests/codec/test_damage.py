"""Whatever bytes stand in a store or a key file, a codec opens them as they were sealed, or calls them damaged."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flask_idempotency.codec import compression
from flask_idempotency.codec.envelope import MAX_HEAD_BYTES, MAX_PAIRS, MAX_REASON, EnvelopeCodec, byte_size_of
from flask_idempotency.codec.key_sources import PassphraseKeyFile, load_ring
from flask_idempotency.codec.keyring import KEY_BYTES, KeyRing
from flask_idempotency.engine.capabilities import LARGEST_WRAPPED, TenantKeys
from flask_idempotency.engine.errors import (
    ConfigurationError,
    CorruptRecord,
    KeyProviderUnavailable,
    NotStorable,
    RingMismatch,
)
from flask_idempotency.engine.model import LARGEST_PAYLOAD, SealedBy, StoredPayload, StoredResponse
from tests.codec.sealing import BINDING, NEW, OLD, RESULT, RING, TENANT, Shelf, codec, ring_on, text
from tests.codec.test_envelope import envelope
from tests.damage import damaged

CODEC = EnvelopeCodec()
LONG = StoredResponse(200, "Fine", (("Content-Type", "text/plain"),), b"all work and no play " * 100)


class Unfolding:
    """Counts the bytes that zlib returns."""

    def __init__(self) -> None:
        self.made = 0
        self._real = zlib.decompressobj

    def __call__(self, *arguments: Any) -> Any:
        outer, stream = self, self._real(*arguments)

        class Stream:
            def decompress(self, data: bytes, most: int = 0) -> bytes:
                made: bytes = stream.decompress(data, most)
                outer.made += len(made)
                return made

            def __getattr__(self, name: str) -> Any:
                return getattr(stream, name)

        return Stream()


@pytest.fixture
def unfolding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Unfolding]:
    counting = Unfolding()
    with monkeypatch.context() as patch:
        patch.setattr(compression.zlib, "decompressobj", counting)  # type: ignore[attr-defined]
        yield counting


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_envelope_is_what_was_sealed_or_damage(data: st.DataObject) -> None:
    """
    The checksum is right: who can write to the store can write that too. What opens has the status and size beside it.
    """
    sealed = CODEC.seal(data.draw(st.sampled_from((RESULT, LONG, LONG.without_body()))), BINDING)
    head, content = sealed.data[0], sealed.data[5:]
    head = data.draw(st.sampled_from((head, head ^ 1, head ^ 2, head ^ 16)))
    changed = envelope(data.draw(damaged(content) | st.just(content)), head)
    try:
        found = CODEC.open(replace(sealed, data=changed), BINDING)
    except CorruptRecord:
        return

    assert (found.status, byte_size_of(found)) == (sealed.status, sealed.byte_size)


@given(status=st.integers(-1, 2**15), size=st.integers(-(2**63), 2**63 - 1))
@example(status=200, size=byte_size_of(LONG) + 1)
@example(status=201, size=byte_size_of(LONG))
def test_an_envelope_has_the_status_and_size_that_stand_beside_it(status: int, size: int) -> None:
    sealed = CODEC.seal(LONG, BINDING)
    if (status, size) == (sealed.status, sealed.byte_size):
        return
    with pytest.raises(CorruptRecord):
        CODEC.open(replace(sealed, status=status, byte_size=size), BINDING)


def test_an_envelope_unfolds_to_no_more_than_its_record_says(unfolding: Unfolding) -> None:
    bomb = envelope(zlib.compress(b"200\r\n\r\n" + b"\0" * 5_000_000, 9), 0x12)
    for size in (-(2**63), 0, 1, 100, 5_000):
        unfolding.made = 0
        with pytest.raises(CorruptRecord):
            CODEC.open(StoredPayload(bomb, 200, True, size), BINDING)
        assert unfolding.made <= max(size, 0) + MAX_REASON + 16


def test_whatever_its_record_says_an_envelope_unfolds_to_no_more_than_the_limit(unfolding: Unfolding) -> None:
    bomb = envelope(zlib.compress(b"200\r\n\r\n" + b"\0" * 5_000_000, 9), 0x12)
    with pytest.raises(CorruptRecord, match="more than"):
        EnvelopeCodec(max_bytes=10_000).open(StoredPayload(bomb, 200, True, 2**63 - 1), BINDING)

    assert 0 < unfolding.made <= 10_001


def test_a_head_has_a_limit() -> None:
    for content in (
        b"200 " + b"r" * (MAX_REASON + 1) + b"\r\n\r\n",
        b"200\r\n" + b"A: b\r\n" * (MAX_PAIRS + 1) + b"\r\n",
        b"200\r\nA: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"200\r\n" * MAX_HEAD_BYTES,
    ):
        with pytest.raises(CorruptRecord):
            CODEC.unwrap(envelope(content))


def test_no_head_is_sealed_that_would_not_open() -> None:
    for result in (
        StoredResponse(200, reason="r" * (MAX_REASON + 1)),
        StoredResponse(200, metadata=(("A", "b"),) * (MAX_PAIRS + 1)),
        StoredResponse(200, metadata=(("A", "b" * MAX_HEAD_BYTES),)),
    ):
        with pytest.raises(NotStorable):
            CODEC.wrap(result)


def test_the_largest_heads_open() -> None:
    most = StoredResponse(200, "r" * MAX_REASON, (("A", "b"),) * MAX_PAIRS)
    room = MAX_HEAD_BYTES - len("200\r\nA: ")
    longest = StoredResponse(200, metadata=(("A", "b" * room),), body=b"\r\n\r\n")

    for result in (most, longest):
        assert result == CODEC.open(CODEC.seal(result, BINDING), BINDING)


def test_what_is_sealed_fits_into_a_store() -> None:
    assert LARGEST_PAYLOAD > 64 * 1024 * 1024 + 5 + 29


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_sealed_answer_opens_as_it_was_or_is_damage(data: st.DataObject) -> None:
    shelf = Shelf()
    sealed = codec(shelf).seal(RESULT, BINDING)
    assert sealed.sealed_by is not None
    payload = replace(
        sealed,
        data=data.draw(damaged(sealed.data) | st.just(sealed.data)),
        byte_size=data.draw(st.sampled_from((sealed.byte_size, 0, -1, 2**63 - 1))),
        sealed_by=data.draw(
            st.just(sealed.sealed_by)
            | st.builds(SealedBy, kid=st.text(max_size=300), number=st.integers(-(2**63), 2**63 - 1))
        ),
    )
    try:
        found = codec(shelf, plain_allowed=False).open(payload, BINDING)
    except CorruptRecord:
        return

    assert (found, payload) == (RESULT, sealed)


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_data_key_opens_nothing_and_seals_nothing(data: st.DataObject) -> None:
    """A new one is not made in its place where it is the newest: that would hide the damage."""
    shelf = Shelf()
    made = ring_on(shelf).for_sealing(TENANT)
    wrapped = data.draw(damaged(made.wrapped))
    kid = data.draw(st.sampled_from(("new", "old", "", "\ud800", "k" * 300)))

    def changed(kept: TenantKeys) -> TenantKeys:
        return replace(kept, keys=tuple(replace(key, wrapped=wrapped, kid=kid) for key in kept.keys))

    shelf.changed = changed
    if (wrapped, kid) == (made.wrapped, "new"):
        return
    with pytest.raises((CorruptRecord, RingMismatch)):
        ring_on(shelf).for_opening(TENANT, SealedBy(kid, made.number))
    if kid == "new":
        with pytest.raises(KeyProviderUnavailable):
            ring_on(shelf).for_sealing(TENANT)


def test_a_key_service_gets_no_bytes_that_are_no_key() -> None:
    shelf = Shelf()
    made = ring_on(shelf).for_sealing(TENANT)
    asked = list[int]()

    class Counting(KeyRing):
        def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes:
            return b"w" * (LARGEST_WRAPPED + 1)

        def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
            asked.append(len(wrapped))
            return super().unwrap(kid, wrapped, context=context)

    ring = Counting({"new": NEW, "old": OLD})

    def grown(kept: TenantKeys) -> TenantKeys:
        return replace(kept, keys=tuple(replace(key, wrapped=b"w" * (LARGEST_WRAPPED + 1)) for key in kept.keys))

    shelf.changed = grown
    with pytest.raises(CorruptRecord):
        ring_on(shelf, ring).for_opening(TENANT, SealedBy("new", made.number))
    with pytest.raises(KeyProviderUnavailable, match=f"{LARGEST_WRAPPED} are allowed"):
        ring_on(Shelf(), ring).for_sealing(TENANT)
    assert [] == asked


@given(wrapped=st.binary(max_size=100) | damaged(RING.wrap("new", b"k" * KEY_BYTES, context=b"c")))
def test_a_ring_unwraps_what_it_wrapped_or_nothing(wrapped: bytes) -> None:
    with pytest.raises(CorruptRecord):
        RING.unwrap("new", wrapped, context=b"another context")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_key_file_is_a_fault_of_the_configuration(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "ring"
    path.write_bytes(data.draw(damaged(f"new:{text(NEW)}\nold:{text(OLD)}\n".encode())))
    path.chmod(0o600)
    try:
        ring = load_ring(f"file:{path}")
    except ConfigurationError:
        return

    assert ring.kids()


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_wrapped_file_is_a_fault_of_the_configuration(data: st.DataObject, tmp_path: Path) -> None:
    """Its costs are not believed: a number that was replaced does not take gigabytes."""
    path = tmp_path / "sound.json"
    if not path.exists():
        PassphraseKeyFile.make(path, "made of sixteen letters", "spring", cost=2**14)
    broken = tmp_path / "broken.json"
    broken.write_bytes(data.draw(damaged(path.read_bytes())))
    broken.chmod(0o600)
    try:
        ring = PassphraseKeyFile(broken, "made of sixteen letters")
    except ConfigurationError:
        return

    assert ring.kids()
