"""Does the same to a store and to the reference, in any order and in any weather, and compares all answers and records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias, cast

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from flask_idempotency.engine.capabilities import Expiry, Recovery, SeenRecord
from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    ClaimRequest,
    Expired,
    Grant,
    InFlight,
    Mismatched,
    OnExpiry,
    OtherCaller,
    OverQuota,
    Record,
    State,
    StoredPayload,
    Unknown,
    Voided,
)
from flask_idempotency.engine.store import Store, StoreOutcome
from flask_idempotency.testing.contract.support import FINGERPRINT, OTHER_FINGERPRINT, a_key, a_request, a_token, near
from flask_idempotency.testing.doubles import FaultyStore, FrozenClock, Verb
from tests.model.reference import UNSAID, Reference, Row, Told

Weather: TypeAlias = Literal["fine", "request lost", "reply lost"]

places = st.sampled_from((0, 0, 0, 1))
"""Two keys: what befalls one must leave the other alone. Most befalls the first, or little would meet."""
fresh = st.sampled_from((True, True, False))
"""Whether a life begins with a key that is. Most others are completed or quarantined before long, and stay so."""
weather: st.SearchStrategy[Weather] = st.sampled_from(("fine", "fine", "fine", "request lost", "reply lost"))
durations = st.integers(1, 40)
fingerprints = st.sampled_from((FINGERPRINT, FINGERPRINT, FINGERPRINT, OTHER_FINGERPRINT))
payloads = st.builds(
    StoredPayload,
    data=st.binary(max_size=8),
    status=st.sampled_from((200, 204, 422)),
    success=st.booleans(),
    byte_size=st.integers(0, 9),
)


class KeptStore(Store, Protocol):
    """A store that can be looked after."""

    @property
    def recovery(self) -> Recovery: ...

    @property
    def expiry(self) -> Expiry: ...


class OwnersMachine(RuleBasedStateMachine):
    """Owners, and time. What others do is in `others.py`."""

    owners = Bundle("owners")
    goes_back = True
    """Whether the clock may. An answer that is over may then be in one half of a store of two halves, and not in the other."""

    def make(self, clock: FrozenClock) -> KeptStore:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.clock = FrozenClock()
        self.reference = Reference(int(self.clock.now))
        self.store = self.make(self.clock)
        self.line = FaultyStore(self.store)
        self.keys = [a_key(), a_key()]
        self.fences: dict[StorageKey, tuple[bytes, int]] = {}
        self.answers: dict[tuple[StorageKey, bytes], StoredPayload] = {}
        self.given_up = set[bytes]()
        self.just_released: tuple[StorageKey, bytes] | None = None

    # Who is there.

    @initialize(target=owners)
    def first_owners(self) -> Any:
        return multiple(a_token(), a_token())

    @rule(target=owners)
    def another_owner(self) -> bytes:
        return a_token()

    @rule(owner=consumes(owners))
    def crash(self, owner: bytes) -> None:
        """It is never heard of again. What it has claimed is for others to settle."""

    # What owners do.

    @rule(
        place=places,
        owner=owners,
        fingerprint=fingerprints,
        on_expiry=st.sampled_from(OnExpiry),
        lease=durations,
        weather=weather,
    )
    def claim(
        self, place: int, owner: bytes, fingerprint: bytes, on_expiry: OnExpiry, lease: int, weather: Weather
    ) -> None:
        key = self.keys[place]
        request = a_request(key, fingerprint=fingerprint, on_expiry=on_expiry)
        gone = self.just_released == (key, owner) and self.reference.would_grant(request, owner)
        if owner in self.given_up and self.reference.would_grant(request, owner):
            self.claim_what_was_given_up(request, owner, lease, surely_refused=gone)
            return
        self.just_released = None
        told = self.ask("claim", weather, lambda: self.line.claim(request, token=owner, lease=lease))
        if weather == "request lost":
            return
        expected = self.reference.claim(request, owner, lease)
        if told is not None:
            assert expected == self.as_told(key, told)

    @rule(place=places, owner=owners, lease=durations, weather=weather)
    def renew(self, place: int, owner: bytes, lease: int, weather: Weather) -> None:
        key = self.keys[place]
        self.write(
            "renew",
            weather,
            lambda: self.line.renew(key, owner, lease=lease),
            lambda: self.reference.renew(key, owner, lease),
        )

    @rule(place=places, owner=owners, weather=weather)
    def mark_point_of_no_return(self, place: int, owner: bytes, weather: Weather) -> None:
        key = self.keys[place]
        self.write(
            "mark_point_of_no_return",
            weather,
            lambda: self.line.mark_point_of_no_return(key, owner),
            lambda: self.reference.mark_point_of_no_return(key, owner),
        )

    @rule(place=places, owner=owners, payload=payloads, keep=durations, weather=weather)
    def complete(self, place: int, owner: bytes, payload: StoredPayload, keep: int, weather: Weather) -> None:
        key = self.keys[place]
        self.write(
            "complete",
            weather,
            lambda: self.line.complete(key, owner, payload, keep=keep),
            lambda: self.reference.complete(key, owner, payload, keep),
        )

    @rule(place=places, owner=owners, weather=weather)
    def release(self, place: int, owner: bytes, weather: Weather) -> None:
        key = self.keys[place]
        row = self.reference.row(key)
        mine = row is not None and row.token == owner and not row.answered
        self.write(
            "release", weather, lambda: self.line.release(key, owner), lambda: self.reference.release(key, owner)
        )
        if weather != "request lost":
            self.given_up.add(owner)
            self.just_released = (key, owner) if mine else None

    @rule(place=places, owner=owners, reason=st.sampled_from(("lost", "crashed")), weather=weather)
    def quarantine(self, place: int, owner: bytes, reason: str, weather: Weather) -> None:
        key = self.keys[place]
        self.write(
            "quarantine",
            weather,
            lambda: self.line.quarantine(key, owner, reason),
            lambda: self.reference.quarantine(key, owner, reason),
        )

    # Lives as they are lived: left to chance few keys would come so far.

    def begin(self, place: int, owner: bytes, *, fresh: bool) -> bytes:
        """Whose life it is: to a token that was given up nothing would be granted."""
        if fresh:
            self.put_away(self.keys[place])
            self.keys[place] = a_key()
        return a_token() if owner in self.given_up else owner

    def put_away(self, key: StorageKey) -> None:
        record = self.store.read(key)
        if record is not None:
            self.reference.free(key, (record.state, record.token, round(record.deadline)))
            self.store.recovery.force_release(SeenRecord(key, record))

    @rule(
        place=places,
        fresh=fresh,
        owner=owners,
        payloads=st.tuples(payloads, payloads),
        on_expiry=st.sampled_from(OnExpiry),
        leases=st.tuples(durations, durations),
        back=st.sampled_from((0, 0, 50)),
        keep=durations,
    )
    def live(
        self,
        place: int,
        fresh: bool,
        owner: bytes,
        payloads: tuple[StoredPayload, StoredPayload],
        on_expiry: OnExpiry,
        leases: tuple[int, int],
        back: int,
        keep: int,
    ) -> None:
        owner = self.begin(place, owner, fresh=fresh)
        self.claim(place, owner, FINGERPRINT, on_expiry, leases[0], "fine")
        self.renew(place, owner, leases[1], "fine")
        self.records_are_as_they_should_be()
        if back:
            self.the_clock_is_set_back(back)
        for payload in payloads:
            self.complete(place, owner, payload, keep, "fine")
        self.claim(place, owner, FINGERPRINT, on_expiry, leases[0], "fine")

    @rule(place=places, fresh=fresh, owner=owners, lease=durations, then=st.sampled_from(("claim", "hold")))
    def give_up(self, place: int, fresh: bool, owner: bytes, lease: int, then: str) -> None:
        owner = self.begin(place, owner, fresh=fresh)
        self.claim(place, owner, FINGERPRINT, OnExpiry.QUARANTINE, lease, "fine")
        if then == "hold":
            self.quarantine(place, owner, "lost", "fine")
            self.quarantine(place, owner, "lost again", "fine")
            return
        self.release(place, owner, "reply lost")
        self.claim(place, owner, FINGERPRINT, OnExpiry.QUARANTINE, lease, "fine")

    @rule(
        place=places,
        fresh=fresh,
        owner=owners,
        on_expiry=st.sampled_from(OnExpiry),
        marks=st.booleans(),
        lease=durations,
    )
    def vanish(self, place: int, fresh: bool, owner: bytes, on_expiry: OnExpiry, marks: bool, lease: int) -> None:
        """And the next one asks, a moment before its lease ends or after that."""
        owner = self.begin(place, owner, fresh=fresh)
        self.claim(place, owner, FINGERPRINT, on_expiry, lease, "fine")
        if marks:
            self.mark_point_of_no_return(place, owner, "fine")
        self.time_passes(lease - 1 or 1)
        self.claim(place, a_token(), FINGERPRINT, on_expiry, lease, "fine")
        self.time_passes(1)
        self.claim(place, a_token(), FINGERPRINT, on_expiry, lease, "fine")

    # What time does.

    @rule(seconds=st.integers(1, 60))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.reference.now += seconds
        self.just_released = None

    @rule(seconds=st.integers(1, 60))
    def the_clock_is_set_back(self, seconds: int) -> None:
        if not self.goes_back:
            return
        ended = self.reference.ended()
        self.clock.advance(-seconds)
        self.reference.now -= seconds
        self.just_released = None
        for key in ended:
            # It may have been thrown away, or not. Whichever it is, from now on it is so.
            if self.reference.row(key) is not None and self.store.read(key) is None:
                self.reference.forget(key)

    # What must hold.

    @invariant()
    def records_are_as_they_should_be(self) -> None:
        for key in self.keys:
            record, row = self.store.read(key), self.reference.row(key)
            if record is None or row is None:
                assert (row, record) == (None, None)
                continue
            assert _facts_of(row) == _facts(record)
            if row.deadline == UNSAID:
                self.reference.hear(key, round(record.deadline))
                continue
            assert (near(row.first_seen), near(row.deadline)) == (record.requested_at, record.deadline)
            assert near(row.deadline - self.clock.now) == record.remaining
            self.fence_rises(key, record.token, record.fence, settled=record.state is State.COMPLETED)
            if record.state is State.COMPLETED:
                assert near(cast(int, row.completed_at)) == record.completed_at

    def fence_rises(self, key: StorageKey, token: bytes, fence: int, *, settled: bool = False) -> None:
        """Whoever settles a key in its owner's place has a token of its own, and the owner's fence."""
        owner, highest = self.fences.get(key, (token, 0))
        anew = fence > highest
        assert anew or (fence == highest and (owner == token or settled))
        self.fences[key] = token, fence

    # How a call is made, and compared.

    def write(self, verb: Verb, weather: Weather, ask: Callable[[], object], expected: Callable[[], bool]) -> None:
        self.just_released = None
        try:
            self.ask(verb, weather, ask)
        except LeaseLost:
            assert not expected()
            return
        if weather != "request lost":
            assert expected()

    def ask(self, verb: Verb, weather: Weather, ask: Callable[[], Any]) -> Any:
        """What came back, or None where nothing did."""
        match weather:
            case "request lost":
                self.line.lose_request(verb)
            case "reply lost":
                self.line.lose_reply(verb)
            case _:
                return ask()
        try:
            ask()
        except StoreUnavailable:
            return None
        raise AssertionError("what was lost has come back")

    def claim_what_was_given_up(self, request: ClaimRequest, owner: bytes, lease: int, *, surely_refused: bool) -> None:
        """For a while a store refuses it. For how long, and beside whom, is its own affair."""
        try:
            told = self.store.claim(request, token=owner, lease=lease)
        except StoreUnavailable:
            return
        assert not surely_refused
        assert self.reference.claim(request, owner, lease) == self.as_told(request.key, told)

    def as_told(self, key: StorageKey, outcome: StoreOutcome) -> Told:
        match outcome:
            case Grant(token, fence, attempt, lease):
                row = self.reference.row(key)
                assert row is not None
                assert near(max(row.deadline - self.clock.now, 0)) == lease
                self.fence_rises(key, token, fence)
                return Grant, attempt
            case Record() as record:
                return Record, record.payload
            case InFlight(retry_after):
                return InFlight, near(retry_after)
            case OtherCaller():
                raise AssertionError("every key here has one caller")
            case Expired():
                raise AssertionError("nothing here is remembered")
            case Mismatched(first_seen):
                return Mismatched, near(first_seen)
            case Unknown(reason):
                return Unknown, reason
            case OverQuota() | Voided():
                raise AssertionError("nothing here has a quota, and no key is voided")

    def teardown(self) -> None:
        for key in self.keys:
            self.put_away(key)


def _facts(record: Record) -> tuple[object, ...]:
    whose = record.token, record.attempt, record.fingerprint
    return record.state, *whose, record.on_expiry, record.reason, record.payload


def _facts_of(row: Row) -> tuple[object, ...]:
    return row.state, row.token, row.attempt, row.fingerprint, row.on_expiry, row.reason, row.payload
