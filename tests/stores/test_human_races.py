"""A person settles a key while its owner comes back: on every store, one of the two wins, and what they said stays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.events import Event, Resolved
from flask_idempotency.engine.model import OnExpiry, State, StoredPayload, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Settler
from flask_idempotency.operations.records import AuditNote, Case, complete, release, release_warnings
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, found, granted
from tests.backends import MakeStore, make_kept
from tests.sql_backends import sql_databases, sql_stores

__all__ = ["make_kept", "sql_databases", "sql_stores"]

ROUNDS = 12
MEETING_SECONDS = 60.0
SAID = StoredResponse(299, body=b"said by hand")
WORD = AuditNote("ops", "asked the bank")


class Race:
    """One key, its owner, and a person who has looked at it."""

    def __init__(self, store: Any, *, on_expiry: OnExpiry = OnExpiry.QUARANTINE) -> None:
        self.store = store
        self.events: list[Event] = []
        self.key, self.token = a_key(), a_token()
        granted(store.claim(a_request(self.key, on_expiry=on_expiry), token=self.token, lease=LEASE))
        self.settler = Settler(store.recovery, EnvelopeCodec(), self.events.append, label=lambda key: "label")

    def seen(self) -> Case:
        return Case((SeenRecord(self.key, found(self.store, self.key)),))

    def owner_completes(self) -> bool:
        return self._owned(lambda: self.store.complete(self.key, self.token, PAYLOAD, keep=KEEP))

    def owner_renews(self) -> bool:
        return self._owned(lambda: self.store.renew(self.key, self.token, lease=LEASE))

    def stored(self) -> StoredPayload | None:
        record = self.store.read(self.key)
        return None if record is None else record.payload

    def _owned(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except LeaseLost:
            return False
        return True


def at_once(*acts: Callable[[], bool]) -> list[bool]:
    """What each of these has said, all of them begun at the same time."""
    barrier, told = threading.Barrier(len(acts)), [False] * len(acts)
    failed: list[BaseException] = []

    def play(number: int, act: Callable[[], bool]) -> None:
        try:
            barrier.wait(MEETING_SECONDS)
            told[number] = act()
        except BaseException as error:  # noqa: BLE001 - it is raised below, where it is seen
            failed.append(error)

    threads = [threading.Thread(target=play, args=each) for each in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return told


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock()


@pytest.fixture
def store(make_kept: MakeStore, clock: FrozenClock) -> Any:
    return make_kept(clock)


def test_44_the_response_of_the_operator_or_of_the_owner_stays(store: Any) -> None:
    for _ in range(ROUNDS):
        _race_of_answers(Race(store))


def _race_of_answers(race: Race) -> None:
    race.store.quarantine(race.key, race.token, "view-crashed")
    case = race.seen()

    def person() -> bool:
        return bool(complete(race.settler, case, SAID, WORD, keep=KEEP).settled)

    by_hand, by_owner = at_once(person, race.owner_completes)

    assert by_hand is not by_owner
    stored = race.stored()
    assert stored is not None
    assert (SAID.status if by_hand else PAYLOAD.status) == stored.status
    assert not (race.owner_completes() if by_hand else person())
    assert stored == race.stored()
    assert int(by_hand) == len(race.events)


def test_44_a_key_is_released_or_completed_and_never_both(store: Any) -> None:
    for _ in range(ROUNDS):
        _race_of_release_and_answer(Race(store))


def _race_of_release_and_answer(race: Race) -> None:
    race.store.quarantine(race.key, race.token, "view-crashed")
    case = race.seen()

    def person() -> bool:
        return bool(release(race.settler, case, WORD, forced=False).settled)

    by_hand, by_owner = at_once(person, race.owner_completes)

    assert by_hand is not by_owner
    assert (None if by_hand else PAYLOAD) == race.stored()
    assert int(by_hand) == len([event for event in race.events if isinstance(event, Resolved)])
    if by_hand:
        assert not race.owner_completes()
        successor = a_token()
        granted(race.store.claim(a_request(race.key), token=successor, lease=LEASE))
        assert not race.owner_completes()
        assert State.PROCESSING is found(race.store, race.key).state


def test_44_a_key_whose_owner_renews_is_not_released_behind_its_back(store: Any) -> None:
    for _ in range(ROUNDS):
        _race_of_release_and_renewal(Race(store))


def _race_of_release_and_renewal(race: Race) -> None:
    case = race.seen()

    def person() -> bool:
        return bool(release(race.settler, case, WORD, forced=True).settled)

    def renewing() -> bool:
        # The deadline must move, and time stands still here.
        return race._owned(lambda: race.store.renew(race.key, race.token, lease=LEASE + 7))

    first, second, renewed = at_once(person, person, renewing)

    assert 1 == first + second + renewed
    assert renewed == (race.store.read(race.key) is not None)
    assert renewed == race.owner_completes()


def test_44_a_silent_owner_that_comes_back_is_not_released_behind_its_back(store: Any, clock: FrozenClock) -> None:
    """
    It has not renewed for three leases, by the store's own clock, so nobody needs force. It renews at the same moment.
    """
    policy = Policy(lease=LEASE, effects="deduplicated")
    for _ in range(ROUNDS):
        _race_of_release_without_force(Race(store, on_expiry=OnExpiry.TAKEOVER), clock, policy)


def _race_of_release_without_force(race: Race, clock: FrozenClock, policy: Policy) -> None:
    clock.advance(3 * LEASE - 0.5)
    assert release_warnings(race.seen(), policy)
    clock.advance(0.5)
    case = race.seen()
    assert [] == release_warnings(case, policy)

    def person() -> bool:
        return bool(release(race.settler, case, WORD, forced=False).settled)

    first, second, renewed = at_once(person, person, race.owner_renews)

    assert 1 == first + second + renewed
    assert renewed == (race.store.read(race.key) is not None)
    if renewed:
        assert release_warnings(race.seen(), policy)
    assert renewed == race.owner_completes()


def test_44_of_two_operators_with_different_responses_one_wins(store: Any) -> None:
    race = Race(store)
    store.quarantine(race.key, race.token, "view-crashed")
    case = race.seen()
    told = at_once(
        *(
            lambda status=status: bool(complete(race.settler, case, StoredResponse(status), WORD, keep=KEEP).settled)
            for status in (201, 202, 203, 204)
        )
    )

    stored = race.stored()
    assert 1 == sum(told)
    assert stored is not None
    assert 201 + told.index(True) == stored.status
