"""What is over is removed, and nothing else."""

from __future__ import annotations

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.maintenance.janitor import ExpireReport, expire
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, PAYLOAD, a_key, stand
from tests.maintenance.yard import still


class Shelf:
    """Something to be removed, while others add to it or take from it."""

    def __init__(self, *batches: int | Exception) -> None:
        self.batches = list(batches)
        self.asked: list[tuple[float, int]] = []

    def sweep(self, *, horizon: float, limit: int) -> int:
        self.asked.append((horizon, limit))
        batch = self.batches.pop(0) if self.batches else 0
        if isinstance(batch, Exception):
            raise batch
        return batch


def test_answers_whose_life_is_over_are_removed(clock: FrozenClock) -> None:
    """And only they: not one that lives, and nothing that is not settled."""
    store, kept = MemoryStore(clock), [a_key() for _ in range(3)]
    for _ in range(5):
        stand(store, clock, a_key(), "completed")
    damaged = a_key()
    stand(store, clock, damaged, "completed")
    store.mark_corrupt(damaged, PAYLOAD)
    clock.advance(KEEP)
    stand(store, clock, kept[0], "completed")
    stand(store, clock, kept[1], "in flight")
    stand(store, clock, kept[2], "quarantined")
    expire(store.expiry, horizon=clock.now, drain=still(2))

    assert {damaged, *kept} == store._shared.records.keys()


def test_it_goes_on_until_nothing_is_left(clock: FrozenClock) -> None:
    """Not until a batch is not full: others who are at the same work may have had the rest of it."""
    shelf = Shelf(10, 3, 10, 1)

    assert ExpireReport(removed=24) == expire(shelf, horizon=7.0, drain=still(10))
    assert [(7.0, 10)] * 5 == shelf.asked


def test_a_store_that_ends_things_by_itself_is_asked_once(clock: FrozenClock) -> None:
    """There is nothing to do for anybody."""
    shelf = Shelf()

    assert ExpireReport() == expire(shelf, horizon=7.0, drain=still())
    assert len(shelf.asked) == 1


def test_what_was_removed_before_a_failure_is_counted(clock: FrozenClock) -> None:
    """Batches are halved then, and it is told how often."""
    shelf = Shelf(100, StoreUnavailable("slow"), 50)

    assert ExpireReport(removed=150, shrunk=1) == expire(shelf, horizon=7.0, drain=still(100))
    assert [100, 100, 50] == [limit for _, limit in shelf.asked[:3]]


def test_what_ends_meanwhile_is_left_for_the_next_run(clock: FrozenClock) -> None:
    """A run that began to chase time would have no end."""
    store, began = MemoryStore(clock), clock.now
    for _ in range(3):
        stand(store, clock, a_key(), "completed")
        clock.advance(60)
    horizon = began + KEEP + 90
    clock.advance(KEEP)

    assert ExpireReport(removed=2) == expire(store.expiry, horizon=horizon, drain=still(1))
    assert ExpireReport(removed=1) == expire(store.expiry, horizon=clock.now, drain=still(1))
