"""Keys that cannot be had, or are gone: before the claim, after the work, and in the middle of a transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from flask_idempotency.codec.envelope import EnvelopeCodec, byte_size_of
from flask_idempotency.engine.claim import Claim, SealedResponse
from flask_idempotency.engine.engine import Engine, Replay
from flask_idempotency.engine.errors import DataKeyMissing, KeyProviderUnavailable, StoreUnavailable
from flask_idempotency.engine.events import Completed
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    ERASED,
    TRIES,
    Erased,
    InFlight,
    Mismatched,
    OverQuota,
    SealContext,
    State,
    StoredPayload,
    StoredResponse,
)
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.quota import NewKeys, Quota, Usage
from flask_idempotency.testing.contract.support import found
from tests.engine.conftest import House
from tests.engine.test_transactions import Book

PAID = StoredResponse(201, body=b"paid")


@dataclass
class Keys(EnvelopeCodec):
    """Whose keys can be taken away. `log` is what was asked of it."""

    away: bool = False
    log: list[str] = field(default_factory=list)
    error: type[Exception] = KeyProviderUnavailable

    def __post_init__(self) -> None:
        EnvelopeCodec.__init__(self)

    def prepare(self, key: StorageKey) -> None:
        self._ask("prepare")

    def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
        self._ask("seal")
        return super().seal(result, binding)

    def forget(self, key: StorageKey) -> None:
        self.log.append("forget")

    def _ask(self, what: str) -> None:
        self.log.append(what)
        if self.away:
            raise self.error("the key service is away")


@pytest.fixture
def keys(house: House) -> Keys:
    keys = Keys()
    house.around = replace(house.around, codec=keys)
    house.engine = Engine(house.around)
    return keys


@pytest.fixture
def book(house: House, keys: Keys) -> Book:
    book = Book(house.store)
    house.policy = Policy(effects="transactional")
    house.around = replace(house.around, transactions=book)
    house.engine = Engine(house.around)
    return book


@pytest.mark.parametrize("error", (KeyProviderUnavailable, StoreUnavailable))
def test_nothing_is_begun_without_keys(house: House, keys: Keys, error: type[Exception]) -> None:
    """
    What could not be stored. The key is free again; and this is never an outage of the store, which has just answered.
    """
    keys.away, keys.error = True, error
    with pytest.raises(KeyProviderUnavailable):
        house.claim()

    assert ["claim", "release"] == house.store.calls
    assert house.store.read(house.key) is None
    keys.away = False
    assert 1 == house.won().attempt


def test_what_is_known_needs_no_keys_to_seal_with(house: House, keys: Keys) -> None:
    house.won().complete(PAID)
    house.won(house.request("flying"))
    keys.away = True
    keys.log.clear()

    assert isinstance(house.claim(), Replay)
    assert isinstance(house.claim(house.request(body=b"other")), Mismatched)
    assert isinstance(house.claim(house.request("flying")), InFlight)
    assert isinstance(house.engine.claim(house.request("new"), house.policy, quota=Quota(records=0)), OverQuota)
    assert [] == keys.log


def test_an_answer_that_waits_for_its_keys_is_not_taken_over(house: House, keys: Keys) -> None:
    house.policy = Policy(effects="deduplicated")
    first = house.won()
    keys.away = True
    first.complete(PAID)
    for _ in range(40):
        house.pass_time(house.policy.lease / 10)
    assert isinstance(house.claim(), InFlight)
    keys.away = False
    house.pass_time(60)

    outcome = house.claim()
    assert isinstance(outcome, Replay)
    assert PAID == outcome.response


def test_what_was_taken_over_without_keys_is_not_released(house: House, keys: Keys) -> None:
    """Its former owner may have done it: it lapses, and is taken over once more."""
    house.policy = Policy(effects="deduplicated")
    house.won()
    house.clock.advance(house.policy.lease + 1)
    keys.away = True
    with pytest.raises(KeyProviderUnavailable):
        house.claim()
    assert (State.PROCESSING, 2) == (found(house.store, house.key).state, found(house.store, house.key).attempt)
    keys.away = False
    house.clock.advance(house.policy.lease + 1)

    assert 3 == house.won().attempt


def test_an_answer_waits_for_its_keys_and_its_key_is_not_released(house: House, keys: Keys) -> None:
    claim = house.won()
    keys.away = True
    claim.complete(PAID)

    assert State.PROCESSING is found(house.store, house.key).state
    assert ["ClaimGranted", "CompletionRetrying"] == house.told()
    keys.away = False
    house.pass_time(60)
    assert State.COMPLETED is found(house.store, house.key).state


@pytest.mark.parametrize("error", (KeyProviderUnavailable, StoreUnavailable, RuntimeError))
def test_rows_are_rolled_back_when_their_answer_cannot_be_sealed(
    house: House, keys: Keys, book: Book, error: type[Exception]
) -> None:
    """Before the session is left: whoever commits it afterwards must find nothing, for the key will be free again."""
    claim = house.won()
    keys.away, keys.error = True, error
    with pytest.raises(error):
        claim.complete(PAID)

    assert ["join", "roll back", "leave"] == book.log


def test_rows_are_rolled_back_when_the_store_forgets_every_key(
    house: House, keys: Keys, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = house.won()

    def gone(*payloads: object) -> None:
        raise DataKeyMissing("forgotten", erased=False)

    monkeypatch.setattr(book, "complete", gone)
    with pytest.raises(StoreUnavailable):
        claim.complete(PAID)

    assert ["join", "settle", "roll back", "leave"] == book.log
    assert TRIES == keys.log.count("forget")


def test_an_answer_whose_tenant_was_erased_is_kept_as_done(house: House, keys: Keys) -> None:
    kept: list[StoredPayload] = []
    binding = SealContext(house.key, b"t" * 16, 1, b"f")
    sealing = SealedResponse(keys, [binding], PAID)

    def store(payloads: Sequence[StoredPayload]) -> None:
        if payloads[0].sealed_by is None:
            raise DataKeyMissing("erased", erased=True)
        kept.extend(payloads)

    sealing.write(store)

    assert [StoredPayload(b"", 201, True, 0, ERASED)] == kept
    assert Completed("label", "pay", status=201, kept=False, byte_size=0) == sealing.completed("label", "pay")


def test_an_erased_answer_is_an_outcome_of_its_own(house: House, keys: Keys) -> None:
    house.won().complete(PAID)
    house.store._store.data_keys.shred(house.key.tid)

    assert Erased() == house.claim()
    assert "ErasedRefused" == house.told()[-1]


def test_during_a_rotation_of_secrets_only_what_is_new_under_the_newest_counts(house: House) -> None:
    """
    A host that has dropped the old secret knows the key by its new name alone: to one that lists both it is no new key.
    """
    quota, ledger = Quota(records=1, new_keys=NewKeys(1, 3600)), house.store._store.ledger
    new, old = house.request(), house.request(identity=1)
    alone = house.engine.claim(new, house.policy, quota=quota)
    assert isinstance(alone, Claim)
    alone.complete(PAID)
    for _ in range(3):
        assert isinstance(house.engine.claim(new, house.policy, former=[old], quota=quota), Replay)

    assert (Usage(1, byte_size_of(PAID), 0, 1), Usage()) == (ledger.usage(new.key.tid), ledger.usage(old.key.tid))
    other = house.request("another"), house.request("another", identity=1)
    refused = house.engine.claim(other[0], house.policy, former=[other[1]], quota=quota)
    assert isinstance(refused, OverQuota)
    assert [None, None] == [house.store.read(each.key) for each in other]
