"""What others do to a key than its owner: look at it, condemn its answer, quarantine, settle and free it, and sweep."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, multiple, rule

from flask_idempotency.engine.record import Payload
from flask_idempotency.engine.unsettled import Found
from flask_idempotency.maintenance.drain import Drain
from flask_idempotency.maintenance.reap import reap
from flask_idempotency.testing.contract.examples import a_token
from tests.model.machine import OwnersMachine, Weather, durations, payloads, places, weather
from tests.model.reference import Seen

horizons = st.integers(-50, 50)


class ReferenceMachine(OwnersMachine):
    """Everybody who may change a record."""

    owners = OwnersMachine.owners
    sights = Bundle("sights")

    @rule(place=places, other=payloads, weather=weather, right=st.booleans())
    def condemn(self, place: int, other: Payload, weather: Weather, right: bool) -> None:
        key = self.keys[place]
        row = self.reference.row(key)
        payload = row.payload if right and row is not None and row.payload is not None else other

        def condemned() -> bool:
            self.reference.condemn(key, payload)
            return True

        self.write("condemn", weather, lambda: self.line.condemn(key, payload), condemned)

    @rule(target=sights, place=places)
    def look(self, place: int) -> Any:
        """Remembered for as long as it takes, and acted on whatever has happened since."""
        record = self.store.read(self.keys[place])
        return multiple() if record is None else (place, Found(self.keys[place], record))

    @rule(sight=sights, ahead=horizons, times=st.integers(1, 2))
    def lapse(self, sight: tuple[int, Found], ahead: int, times: int) -> None:
        found, horizon = sight[1], int(self.clock.now) + ahead
        for _ in range(times):
            expected = self.reference.lapse(found.key, _seen(found), horizon)
            assert expected == self.store.unsettled.lapse(found, horizon=horizon)
            self.just_released = None

    @rule(sight=sights, payload=payloads, keep=durations, times=st.integers(1, 2))
    def settle(self, sight: tuple[int, Found], payload: Payload, keep: int, times: int) -> None:
        found, token = sight[1], a_token()
        for _ in range(times):
            expected = self.reference.settle(found.key, _seen(found), token, payload, keep)
            assert expected == self.store.unsettled.settle(found, token=token, payload=payload, keep=keep)
            self.just_released = None

    @rule(sight=sights)
    def free(self, sight: tuple[int, Found]) -> None:
        found = sight[1]
        assert self.reference.free(found.key, _seen(found)) == self.store.unsettled.free(found)
        self.just_released = None

    @rule(place=places, owner=owners, payload=payloads, verb=st.sampled_from(("lapse", "settle", "free")))
    def look_and_act(self, place: int, owner: bytes, payload: Payload, verb: str) -> None:
        """At once, for most of what was seen a while ago is no longer so."""
        if verb == "settle":
            self.hold(place, owner, "lost", "fine")
        record = self.store.read(self.keys[place])
        if record is None:
            return
        sight = place, Found(self.keys[place], record)
        match verb:
            case "lapse":
                self.time_passes(41)
                self.lapse(sight, 0, 2)
            case "settle":
                self.settle(sight, payload, 30, 2)
            case _:
                self.free(sight)

    @rule(ahead=horizons)
    def reap(self, ahead: int) -> None:
        horizon = int(self.clock.now) + ahead
        unsettled = self.store.unsettled
        reap(unsettled, horizon=horizon, drain=Drain(), observers=lambda _: None, label=lambda key: key.label)
        self.reference.reap(horizon)
        self.just_released = None

    @rule(ahead=horizons)
    def expire(self, ahead: int) -> None:
        """Whoever sweeps by a clock of its own ends nothing before the store's."""
        self.store.expiry.sweep(horizon=self.clock.now + ahead, limit=1000)
        self.just_released = None


def _seen(found: Found) -> Seen:
    return found.record.state, found.record.token, round(found.record.deadline)
