"""A person settles a key while its owner comes back: on every store, one of the two wins, and what they said stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.events import Event, Resolved
from flask_idempotency.engine.model import OnExpiry, State, StoredPayload, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Settler
from flask_idempotency.operations.records import AuditNote, Case, complete, doubts, release
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.stress import at_once
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, found, granted
from tests.backends import MakeStore, make_kept
from tests.sql_backends import maria_database, sql_databases, sql_stores

__all__ = ["make_kept", "maria_database", "sql_databases", "sql_stores"]

ROUNDS = 4
SAID = StoredResponse(299, body=b"said by hand")
WORD = AuditNote("ops", "asked the bank")


class Race:
    """One key, its owner, and a person who has looked at it."""

    def __init__(self, store: Any, *, quarantined: bool = False, on_expiry: OnExpiry = OnExpiry.QUARANTINE) -> None:
        self.store = store
        self.events: list[Event] = []
        self.key, self.token = a_key(), a_token()
        granted(store.claim(a_request(self.key, on_expiry=on_expiry), token=self.token, lease=LEASE))
        if quarantined:
            store.quarantine(self.key, self.token, "view-crashed")
        self.settler = Settler(store.recovery, EnvelopeCodec(), self.events.append, label=lambda key: "label")
        self.case = self.seen()

    def seen(self) -> Case:
        return Case((SeenRecord(self.key, found(self.store, self.key)),))

    def completed_by_hand(self, status: int = SAID.status) -> bool:
        return bool(complete(self.settler, self.case, replace(SAID, status=status), WORD, Policy(keep=KEEP)).settled)

    def released_by_hand(self, *, forced: bool = False) -> bool:
        return bool(release(self.settler, self.case, WORD, forced=forced).settled)

    def owner_completes(self) -> bool:
        return self._owned(lambda: self.store.complete(self.key, self.token, PAYLOAD, keep=KEEP))

    def owner_renews(self, lease: float = LEASE) -> bool:
        return self._owned(lambda: self.store.renew(self.key, self.token, lease=lease))

    def stored(self) -> StoredPayload | None:
        record = self.store.read(self.key)
        return None if record is None else record.payload

    def _owned(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except LeaseLost:
            return False
        return True


@pytest.fixture
def store(make_kept: MakeStore, clock: FrozenClock) -> Any:
    return make_kept(clock)


def test_44_the_response_of_the_operator_or_of_the_owner_stays(store: Any) -> None:
    for _ in range(ROUNDS):
        race = Race(store, quarantined=True)

        by_hand, by_owner = at_once(race.completed_by_hand, race.owner_completes)

        assert by_hand is not by_owner
        stored = race.stored()
        assert stored is not None
        assert (SAID.status if by_hand else PAYLOAD.status) == stored.status
        assert not (race.owner_completes() if by_hand else race.completed_by_hand())
        assert stored == race.stored()
        assert int(by_hand) == len(race.events)


def test_44_a_key_is_released_or_completed_and_never_both(store: Any) -> None:
    for _ in range(ROUNDS):
        race = Race(store, quarantined=True)

        by_hand, by_owner = at_once(race.released_by_hand, race.owner_completes)

        assert by_hand is not by_owner
        assert (None if by_hand else PAYLOAD) == race.stored()
        assert int(by_hand) == len([event for event in race.events if isinstance(event, Resolved)])
        if by_hand:
            assert not race.owner_completes()
            granted(store.claim(a_request(race.key), token=a_token(), lease=LEASE))
            assert not race.owner_completes()
            assert State.PROCESSING is found(store, race.key).state


def test_44_a_key_whose_owner_renews_is_not_released_behind_its_back(store: Any) -> None:
    """Of two people who release at once, one does. The deadline must move, and time stands still here."""
    for _ in range(ROUNDS):
        race = Race(store)

        force = partial(race.released_by_hand, forced=True)
        first, second, renewed = at_once(force, force, partial(race.owner_renews, LEASE + 7))

        assert 1 == first + second + renewed
        assert renewed == (store.read(race.key) is not None)
        assert renewed == race.owner_completes()


def test_44_a_silent_owner_that_comes_back_is_not_released_behind_its_back(store: Any, clock: FrozenClock) -> None:
    """
    It has not renewed for three leases, by the store's own clock, so nobody needs force. It renews at the same moment.
    """
    policy = Policy(lease=LEASE, effects="deduplicated")
    for _ in range(ROUNDS):
        race = Race(store, on_expiry=OnExpiry.TAKEOVER)
        clock.advance(3 * LEASE - 0.5)
        assert doubts(race.seen(), policy)[0]
        clock.advance(0.5)
        race.case = race.seen()
        assert [] == doubts(race.case, policy)[0]

        first, second, renewed = at_once(race.released_by_hand, race.released_by_hand, race.owner_renews)

        assert 1 == first + second + renewed
        assert renewed == (store.read(race.key) is not None)
        if renewed:
            assert doubts(race.seen(), policy)[0]
        assert renewed == race.owner_completes()


def test_44_of_two_operators_with_different_responses_one_wins(store: Any) -> None:
    race = Race(store, quarantined=True)
    told = at_once(*(partial(race.completed_by_hand, status) for status in (201, 202, 203, 204)))

    stored = race.stored()
    assert 1 == sum(told)
    assert stored is not None
    assert 201 + told.index(True) == stored.status
