"""A store that has forgotten a claim whose owner is at work: what owners put back, and what they are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flask_idempotency.engine.engine import Engine, Replay
from flask_idempotency.engine.errors import LeaseLost, StoreDataLoss, StoreUnavailable
from flask_idempotency.engine.events import ClaimRestored, DataLossDetected, RefusedAfterDataLoss
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.lease import LeaseRenewer
from flask_idempotency.engine.model import ClaimRequest, DataLossStatus, Grant, Record, State, StoredResponse
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from tests.engine.conftest import House

RESULT = StoredResponse(status=201, body=b"paid")


class Memory:
    """Forgets when it is told to, and takes back what owners bring."""

    rules = RedisDataLossPolicy()

    def __init__(self, house: House) -> None:
        self._house = house
        self.forgotten = self.down = False
        self.brought: list[tuple[ClaimRequest, float, float]] = []

    def forget(self) -> None:
        self._house.store._store = MemoryStore(clock=self._house.clock)
        self.forgotten = True

    def restore_claim(self, request: ClaimRequest, grant: Grant, *, lease: float, age: float) -> bool:
        self.brought.append((request, lease, age))
        if self.down:
            raise StoreUnavailable("down")
        if not self.forgotten:
            return False
        outcome = self._house.store.claim(request, token=grant.token, lease=lease)
        return isinstance(outcome, Grant)

    def would_run(self, key: StorageKey, *, key_timestamp: float | None = None, record: Record | None = None) -> bool:
        if self.forgotten and record is None:
            raise StoreDataLoss("forgotten", loss="missing")
        return not self.forgotten

    def initialise(self) -> str:
        raise NotImplementedError

    def acknowledge(self, *, forced: bool = False, seen: DataLossStatus | None = None) -> DataLossStatus:
        raise NotImplementedError

    def status(self) -> DataLossStatus:
        raise NotImplementedError


@pytest.fixture
def memory(house: House) -> Memory:
    memory = Memory(house)
    house.around = replace(house.around, data_loss=memory)
    house.engine = Engine(house.around)
    return memory


def told(house: House) -> int:
    return house.told().count(ClaimRestored.__name__)


@pytest.mark.parametrize("verb", ("renew", "complete", "quarantine"))
def test_an_owner_puts_back_what_was_forgotten(house: House, memory: Memory, verb: str) -> None:
    claim = house.won(lease=30)
    house.clock.advance(10)
    memory.forget()
    match verb:
        case "renew":
            house.renewer.tick()
        case "complete":
            claim.complete(RESULT)
        case "quarantine":
            claim.quarantine("view-crashed")

    states = {"renew": State.PROCESSING, "complete": State.COMPLETED, "quarantine": State.QUARANTINED}
    record = house.engine.read(house.key)
    assert record is not None
    assert (states[verb], 1) == (record.state, told(house))
    assert [(house.request(), 30.0, 10.0)] == memory.brought


def test_a_result_of_a_forgotten_claim_is_replayed(house: House, memory: Memory) -> None:
    claim = house.won()
    memory.forget()
    claim.complete(RESULT)

    assert isinstance(house.claim(), Replay)


def test_nothing_is_put_back_where_nothing_was_forgotten(house: House, memory: Memory) -> None:
    claim = house.won()
    house.store._store = MemoryStore(clock=house.clock)
    with pytest.raises(LeaseLost):
        claim.complete(RESULT)

    assert (0, 1) == (told(house), len(memory.brought))


def test_whoever_may_have_been_taken_over_puts_nothing_back(house: House, memory: Memory) -> None:
    claim = house.won(effects="deduplicated")
    memory.forget()
    with pytest.raises(LeaseLost):
        claim.complete(RESULT)

    assert [] == memory.brought


def test_past_its_point_of_no_return_nobody_has_taken_it_over(house: House, memory: Memory) -> None:
    claim = house.won(effects="marked")
    claim.point_of_no_return()
    memory.forget()
    claim.complete(RESULT)

    assert isinstance(house.claim(effects="marked"), Replay)


def test_a_release_needs_nothing_back(house: House, memory: Memory) -> None:
    claim = house.won()
    memory.forget()
    claim.release("status-503")

    assert [] == memory.brought


def test_a_store_that_cannot_take_it_back_yet_is_asked_again(house: House, memory: Memory) -> None:
    claim = house.won()
    memory.forget()
    memory.down = True
    claim.complete(RESULT)
    memory.down = False
    house.pass_time(1)

    assert isinstance(house.claim(), Replay)


def test_a_claim_of_which_nobody_heard_is_never_put_back(house: House, memory: Memory) -> None:
    house.store.down |= {"claim", "release"}
    with pytest.raises(StoreUnavailable):
        house.claim()
    memory.forget()
    house.pass_time(1)
    house.pass_time(1)
    house.store.down.clear()
    house.pass_time(1)

    assert ([], None) == (memory.brought, house.engine.read(house.key))
    assert ["claim", *["release"] * 3, "read"] == house.store.calls


def test_both_records_are_put_back_while_secrets_rotate(house: House, memory: Memory) -> None:
    claim = house.won(house.request(), house.request(identity=1))
    memory.forget()
    claim.complete(RESULT)

    assert [house.request(identity=1), house.request()] == [request for request, *_ in memory.brought]


class Lost(MemoryStore):
    """Does not know whether it knows."""

    noticed = True

    def claim(self, *args: Any, **kwargs: Any) -> Any:
        error = StoreDataLoss("lost", loss="changed", noticed=self.noticed)
        self.noticed = False
        raise error


def test_a_loss_is_told_once_and_every_refusal(house: House) -> None:
    house.store._store = Lost(clock=house.clock)
    for _ in range(2):
        with pytest.raises(StoreDataLoss):
            house.claim()
    house.pass_time(60)

    assert [DataLossDetected.__name__, RefusedAfterDataLoss.__name__, RefusedAfterDataLoss.__name__] == house.told()
    assert {"claim"} == set(house.store.calls)


def test_a_loss_found_under_the_newest_secret_gives_the_older_claim_back(house: House) -> None:
    house.store._store.claim, first = _first_only(house.store._store.claim), house.request(identity=1)
    with pytest.raises(StoreDataLoss):
        house.claim(house.request(), first)

    assert house.engine.read(first.key) is None


def _first_only(claim: Any) -> Any:
    asked: list[object] = []

    def granting(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        if len(asked) > 1:
            raise StoreDataLoss("lost", loss="changed")
        return claim(*args, **kwargs)

    return granting


def test_what_a_store_would_not_take_is_repeated_beside_the_renewals(house: House) -> None:
    """Each attempt at a silent node takes seconds: leases must not wait for that."""
    repeater = LeaseRenewer(monotonic=house.clock, threaded=False)
    house.engine = Engine(replace(house.around, repeater=repeater))
    claim = house.won(house.request("first"))
    house.store.down.add("complete")
    claim.complete(RESULT)
    house.store.down.add("claim")
    with pytest.raises(StoreUnavailable):
        house.claim(house.request("second"))
    house.store.calls.clear()
    house.clock.advance(1)
    house.renewer.tick()
    assert [] == house.store.calls

    repeater.tick()

    assert {"complete", "release"} & set(house.store.calls)
