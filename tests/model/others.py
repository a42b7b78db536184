"""What others do to a key than its owner: look at it, condemn its answer, quarantine, settle and free it, and sweep."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, multiple, rule

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.model import OnExpiry, StoredPayload
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.maintenance.reap import reap
from flask_idempotency.testing.contract.support import FINGERPRINT, PAYLOAD, a_token
from tests.model.machine import OwnersMachine, Weather, durations, fresh, payloads, places, weather
from tests.model.reference import Seen

horizons = st.sampled_from((-50, -1, 0, 1, 50))


class ReferenceMachine(OwnersMachine):
    """Everybody who may change a record."""

    owners = OwnersMachine.owners
    sights = Bundle("sights")

    @rule(place=places, fresh=fresh, owner=owners, other=payloads, weather=weather, right=st.booleans())
    def mark_corrupt(
        self, place: int, fresh: bool, owner: bytes, other: StoredPayload, weather: Weather, right: bool
    ) -> None:
        if fresh:
            owner = self.begin(place, owner, fresh=fresh)
            self.claim(place, owner, FINGERPRINT, OnExpiry.QUARANTINE, 30, "fine")
            self.complete(place, owner, PAYLOAD, 30, "fine")
        key = self.keys[place]
        row = self.reference.row(key)
        payload = row.payload if right and row is not None and row.payload is not None else other

        def condemned() -> bool:
            self.reference.mark_corrupt(key, payload)
            return True

        self.write("mark_corrupt", weather, lambda: self.line.mark_corrupt(key, payload), condemned)

    @rule(target=sights, place=places)
    def look(self, place: int) -> Any:
        """Remembered for as long as it takes, and acted on whatever has happened since."""
        record = self.store.read(self.keys[place])
        return multiple() if record is None else SeenRecord(self.keys[place], record)

    @rule(found=sights, ahead=horizons, times=st.integers(1, 2))
    def lapse(self, found: SeenRecord, ahead: int, times: int) -> None:
        horizon = int(self.clock.now) + ahead
        for _ in range(times):
            expected = self.reference.lapse(found.key, _seen(found), horizon)
            assert expected == self.store.recovery.quarantine_expired(found, horizon=horizon)
            self.just_released = None

    @rule(found=sights, payload=payloads, keep=durations, times=st.integers(1, 2))
    def settle(self, found: SeenRecord, payload: StoredPayload, keep: int, times: int) -> None:
        token = a_token()
        for _ in range(times):
            expected = self.reference.settle(found.key, _seen(found), token, payload, keep)
            assert expected == self.store.recovery.resolve(found, token=token, payload=payload, keep=keep)
            self.just_released = None

    @rule(found=sights)
    def free(self, found: SeenRecord) -> None:
        assert self.reference.free(found.key, _seen(found)) == self.store.recovery.force_release(found)
        self.just_released = None

    @rule(
        place=places,
        fresh=fresh,
        owner=owners,
        payload=payloads,
        on_expiry=st.sampled_from(OnExpiry),
        between=st.sampled_from(("nothing", "nothing", "time", "renew", "hold", "complete", "anew", "anew")),
        verb=st.sampled_from(("lapse", "lapse", "settle", "free")),
        ahead=horizons,
    )
    def look_and_act(
        self,
        place: int,
        fresh: bool,
        owner: bytes,
        payload: StoredPayload,
        on_expiry: OnExpiry,
        between: str,
        verb: str,
        ahead: int,
    ) -> None:
        """On a record in flight or held, to which little has happened since, or nothing."""
        if verb == "settle" and between != "hold":
            self.give_up(place, fresh, owner, 30, "hold")
        else:
            owner = self.begin(place, owner, fresh=fresh)
            self.claim(place, owner, FINGERPRINT, on_expiry, 30, "fine")
        record = self.store.read(self.keys[place])
        if record is None:
            return
        found = SeenRecord(self.keys[place], record)
        match between:
            case "time":
                self.time_passes(31)
            case "renew":
                self.renew(place, owner, 35, "fine")
            case "hold":
                self.quarantine(place, owner, "lost", "fine")
            case "complete":
                self.complete(place, owner, payload, 30, "fine")
            case "anew":
                # Another's, and in everything but its token the same.
                self.free(found)
                self.give_up(place, False, a_token(), 30, "hold") if verb == "settle" else self.claim(
                    place, a_token(), FINGERPRINT, on_expiry, 30, "fine"
                )
        match verb:
            case "lapse":
                self.lapse(found, ahead, 2)
            case "settle":
                self.settle(found, payload, 30, 2)
            case _:
                self.free(found)

    @rule(place=places, fresh=fresh, owner=owners, ahead=horizons)
    def reap(self, place: int, fresh: bool, owner: bytes, ahead: int) -> None:
        """Nor does it quarantine anything before then: what a janitor has met, or meets now."""
        owner = self.begin(place, owner, fresh=fresh)
        self.claim(place, owner, FINGERPRINT, OnExpiry.QUARANTINE, 30, "fine")
        record = self.store.read(self.keys[place])
        if record is not None:
            self.lapse(SeenRecord(self.keys[place], record), ahead, 1)
        horizon = int(self.clock.now) + ahead
        unsettled = self.store.recovery
        reap(unsettled, horizon=horizon, drain=Batcher(), observers=lambda _: None, label=lambda key: key.label)
        self.reference.reap(horizon)
        self.just_released = None

    @rule(place=places, fresh=fresh, owner=owners, payload=payloads, ahead=horizons)
    def expire(self, place: int, fresh: bool, owner: bytes, payload: StoredPayload, ahead: int) -> None:
        """Whoever sweeps by a clock of its own ends nothing before the store's."""
        owner = self.begin(place, owner, fresh=fresh)
        self.claim(place, owner, FINGERPRINT, OnExpiry.QUARANTINE, 30, "fine")
        self.complete(place, owner, payload, 30, "fine")
        self.store.expiry.sweep(horizon=self.clock.now + ahead, limit=1000)
        self.just_released = None


def _seen(found: SeenRecord) -> Seen:
    return found.record.state, found.record.token, round(found.record.deadline)
