"""Keys are settled in their owners' place, sealed as their own, and told with who did it and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from flask_idempotency.codec.encryption import DataKeyring, EncryptedCodec
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import (
    CorruptRecord,
    IdempotencyError,
    KeyProviderUnavailable,
    LeaseLost,
    NotApplied,
    RingMismatch,
    StoreUnavailable,
)
from flask_idempotency.engine.events import Event, Resolved
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, ERASED, Record, SealContext, State, StoredPayload, StoredResponse
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.recovery import Settler
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    ABOUT,
    KEEP,
    LEASE,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    near,
)

PAID = StoredResponse(201, metadata=(("Location", "/payments/1"),), body=b"paid")
OTHER = StoredResponse(200, body=b"refunded")
WHY: dict[str, Any] = {"actor": "alice", "reason": "ticket 7"}
KEYS = {"2025": b"5" * 32, "2026": b"6" * 32}


@dataclass
class Desk:
    """A store with encrypted answers, and somebody who settles in it."""

    clock: FrozenClock
    store: MemoryStore
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turn("2025")

    def turn(self, *kids: str) -> None:
        """A restart with these keys in the ring, the newest first."""
        ring = KeyRing({kid: KEYS[kid] for kid in kids})
        keys = DataKeyring(ring, self.store.data_keys, monotonic=lambda: self.clock.now)
        self.codec = EncryptedCodec(EnvelopeCodec(compression=None), keys)
        self.settler = Settler(
            self.store.recovery,
            self.codec,
            Observers([self.events.append]),
            label=lambda key: key.rid.hex()[:8],
        )

    def claim(self) -> tuple[StorageKey, bytes, SealContext]:
        key, token = a_key(), a_token()
        request = a_request(key)
        fence = granted(self.store.claim(request, token=token, lease=LEASE)).fence
        return key, token, SealContext(key, token, fence, request.fingerprint)

    def held(self) -> tuple[SeenRecord, bytes]:
        key, token, _ = self.claim()
        self.store.quarantine(key, token, "view-crashed")
        return self.seen(key), token

    def answered(self) -> tuple[SeenRecord, bytes]:
        key, token, binding = self.claim()
        self.store.complete(key, token, self.codec.seal(PAID, binding), keep=KEEP)
        return self.seen(key), token

    def condemned(self) -> tuple[SeenRecord, bytes]:
        """Whoever could not open its answer has said so."""
        answered, token = self.answered()
        assert answered.record.payload is not None
        self.store.mark_corrupt(answered.key, answered.record.payload)
        return self.seen(answered.key), token

    def seen(self, key: StorageKey) -> SeenRecord:
        return SeenRecord(key, found(self.store, key))

    def payload(self, key: StorageKey) -> StoredPayload:
        payload = found(self.store, key).payload
        assert payload is not None
        return payload

    def opened(self, key: StorageKey) -> StoredResponse:
        return self.codec.open(self.payload(key), self.binding(key))

    def binding(self, key: StorageKey) -> SealContext:
        record = found(self.store, key)
        return SealContext(key, record.token, record.fence, record.fingerprint)

    def told(self, seen: SeenRecord, verb: str, *, forced: bool = False) -> Resolved:
        was = seen.record.state.value
        return Resolved(seen.key.rid.hex()[:8], ABOUT.operation, verb=verb, was=was, forced=forced, **WHY)


@pytest.fixture
def desk() -> Desk:
    clock = FrozenClock()
    return Desk(clock, MemoryStore(clock))


def test_a_completed_key_is_replayed_and_told(desk: Desk) -> None:
    held, token = desk.held()

    assert desk.settler.complete(held, PAID, keep=KEEP, **WHY)
    assert (PAID, near(KEEP)) == (desk.opened(held.key), found(desk.store, held.key).remaining)
    assert isinstance(desk.store.claim(a_request(held.key), token=a_token(), lease=LEASE), Record)
    assert [desk.told(held, "completed")] == desk.events
    with pytest.raises(LeaseLost):
        desk.store.complete(held.key, token, desk.payload(held.key), keep=KEEP)


def test_an_answer_is_sealed_under_the_fresh_token(desk: Desk) -> None:
    held, token = desk.held()
    desk.settler.complete(held, PAID, keep=KEEP, **WHY)

    assert found(desk.store, held.key).token != token
    others: list[dict[str, Any]] = [
        {"token": token},
        {"key": a_key(tid=held.key.tid)},
        {"fence": held.record.fence + 1},
    ]
    for other in others:
        with pytest.raises(CorruptRecord):
            desk.codec.open(desk.payload(held.key), replace(desk.binding(held.key), **other))


def test_an_answer_without_keys_is_not_stored(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    held, _ = desk.held()

    def away(result: StoredResponse, binding: SealContext) -> StoredPayload:
        raise KeyProviderUnavailable("the key service is away")

    monkeypatch.setattr(desk.codec, "seal", away)
    with pytest.raises(KeyProviderUnavailable):
        desk.settler.complete(held, PAID, keep=KEEP, **WHY)
    assert (held, []) == (desk.seen(held.key), desk.events)


def test_an_answer_whose_key_was_closed_meanwhile_is_sealed_anew(desk: Desk) -> None:
    held, _ = desk.held()
    desk.codec.seal(PAID, desk.binding(held.key))
    last = desk.store.data_keys.read_keys(held.key.tid).last
    desk.store.data_keys.disable(held.key.tid, last)

    assert desk.settler.complete(held, PAID, keep=KEEP, **WHY)
    by = desk.payload(held.key).sealed_by
    assert by is not None
    assert (True, PAID) == (by.number > last, desk.opened(held.key))


def test_of_an_erased_tenant_only_that_it_was_done_is_stored(desk: Desk) -> None:
    held, _ = desk.held()
    desk.codec.seal(PAID, desk.binding(held.key))
    desk.store.data_keys.shred(held.key.tid)

    assert desk.settler.complete(held, PAID, keep=KEEP, **WHY)
    assert (b"", ERASED, 201) == (
        desk.payload(held.key).data,
        desk.payload(held.key).sealed_by,
        desk.payload(held.key).status,
    )
    assert [desk.told(held, "completed")] == desk.events


@pytest.mark.parametrize("verb", ("complete", "free", "reopen"))
def test_who_was_not_first_changes_nothing_and_tells_nothing(desk: Desk, verb: str) -> None:
    seen, token = desk.condemned() if verb == "reopen" else desk.held()
    if verb == "reopen":
        desk.settler.force_release(seen, **WHY)
        desk.events.clear()
    else:
        desk.store.complete(seen.key, token, desk.codec.seal(PAID, desk.binding(seen.key)), keep=KEEP)
    before = desk.store.read(seen.key)
    done = {
        "complete": lambda: desk.settler.complete(seen, OTHER, keep=KEEP, **WHY),
        "free": lambda: desk.settler.force_release(seen, **WHY),
        "reopen": lambda: desk.settler.reopen(seen, keep=KEEP, **WHY),
    }

    assert not done[verb]()
    assert (before, []) == (desk.store.read(seen.key), desk.events)


@pytest.mark.parametrize("forced", (False, True))
def test_a_freed_key_runs_again_and_is_told(desk: Desk, forced: bool) -> None:
    held, _ = desk.held()

    assert desk.settler.force_release(held, forced=forced, **WHY)
    assert desk.store.read(held.key) is None
    assert [desk.told(held, "released", forced=forced)] == desk.events


def test_an_answer_that_can_be_opened_again_is_reopened(desk: Desk) -> None:
    damaged, _ = desk.condemned()
    desk.turn("2026")
    with pytest.raises(RingMismatch):
        desk.settler.reopen(damaged, keep=KEEP, **WHY)
    assert (damaged, []) == (desk.seen(damaged.key), desk.events)

    desk.turn("2026", "2025")
    desk.clock.advance(10 * KEEP)
    damaged = desk.seen(damaged.key)
    assert desk.settler.reopen(damaged, keep=KEEP, **WHY)
    record, by = found(desk.store, damaged.key), desk.payload(damaged.key).sealed_by
    assert (State.COMPLETED, "", near(KEEP), PAID) == (
        record.state,
        record.reason,
        record.remaining,
        desk.opened(damaged.key),
    )
    assert ("2026", True) == (None if by is None else by.kid, record.token != damaged.record.token)
    assert [desk.told(damaged, "reopened")] == desk.events


def test_damage_is_not_reopened(desk: Desk) -> None:
    answered, _ = desk.answered()
    spoilt = replace(desk.payload(answered.key), data=desk.payload(answered.key).data[::-1])
    desk.store.responses.replace(answered.key, desk.payload(answered.key), spoilt)
    desk.store.mark_corrupt(answered.key, spoilt)
    damaged = desk.seen(answered.key)
    with pytest.raises(CorruptRecord):
        desk.settler.reopen(damaged, keep=KEEP, **WHY)

    assert (damaged, CORRUPT) == (desk.seen(answered.key), damaged.record.reason)


def test_only_a_condemned_answer_is_reopened(desk: Desk) -> None:
    for seen, _ in (desk.held(), desk.answered()):
        with pytest.raises(CorruptRecord, match="no response"):
            desk.settler.reopen(seen, keep=KEEP, **WHY)
        assert seen == desk.seen(seen.key)


def test_an_erased_answer_is_not_reopened(desk: Desk) -> None:
    damaged, _ = desk.condemned()
    desk.store.data_keys.shred(damaged.key.tid)
    key, token, _ = desk.claim()
    wiped = StoredPayload(b"", 201, True, 0, ERASED)
    desk.store.complete(key, token, wiped, keep=KEEP)
    desk.store.mark_corrupt(key, wiped)

    for seen in (desk.seen(damaged.key), desk.seen(key)):
        with pytest.raises(CorruptRecord):
            desk.settler.reopen(seen, keep=KEEP, **WHY)
        assert State.QUARANTINED is desk.seen(seen.key).record.state
    assert desk.events == []


@pytest.mark.parametrize("error", (StoreUnavailable("down"), KeyboardInterrupt(), TimeoutError()))
def test_a_store_that_does_not_answer_is_said_to(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    held, _ = desk.held()

    def away(*arguments: Any, **options: Any) -> bool:
        raise error

    for verb in ("resolve", "force_release"):
        monkeypatch.setattr(desk.store.recovery, verb, away)
    with pytest.raises(type(error)):
        desk.settler.complete(held, PAID, keep=KEEP, **WHY)
    with pytest.raises(type(error)):
        desk.settler.force_release(held, forced=True, **WHY)

    told = desk.told(held, "completed"), desk.told(held, "released", forced=True)
    assert [replace(event, certain=False) for event in told] == desk.events


@pytest.mark.parametrize("error", (NotApplied("down"), CorruptRecord("none of ours")))
def test_what_was_certainly_not_done_is_not_told(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, error: IdempotencyError
) -> None:
    held, _ = desk.held()

    def refuse(*arguments: Any, **options: Any) -> bool:
        raise error

    for verb in ("resolve", "force_release"):
        monkeypatch.setattr(desk.store.recovery, verb, refuse)
    with pytest.raises(type(error)):
        desk.settler.complete(held, PAID, keep=KEEP, **WHY)
    with pytest.raises(type(error)):
        desk.settler.force_release(held, **WHY)

    assert desk.events == []
