"""Contract under load: races between threads, and random sequences of calls compared with a model."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    Grant,
    InFlight,
    Mismatched,
    OnExpiry,
    OverQuota,
    Record,
    State,
    StoredPayload,
    Unknown,
)
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.contract.support import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    PAYLOAD,
    CapableStore,
    Contract,
    Kit,
    a_request,
    a_token,
    lost,
    near,
)
from flask_idempotency.testing.doubles import FrozenClock

MACHINE_EXAMPLES = 25
MACHINE_STEPS = 30

fingerprints: Final = st.sampled_from((FINGERPRINT, OTHER_FINGERPRINT))
machine_durations: Final = st.integers(1, 40)
payloads: Final = st.builds(
    StoredPayload,
    data=st.binary(max_size=8),
    status=st.sampled_from((200, 204, 422)),
    success=st.booleans(),
    byte_size=st.integers(0, 9),
)


@dataclass(frozen=True)
class Row:
    """A record in the model. Times are whole seconds, so that no store rounds them."""

    state: State
    token: bytes
    attempt: int
    fingerprint: bytes
    on_expiry: OnExpiry
    first_seen: float
    deadline: float
    payload: StoredPayload | None = None
    reason: str = ""


class Model:
    """A model of the states and transitions of one record."""

    def __init__(self, clock: FrozenClock) -> None:
        self._clock = clock
        self._row: Row | None = None

    @property
    def row(self) -> Row | None:
        if self._row and self._row.state is State.COMPLETED and self._row.deadline <= self._clock.now:
            self._row = None
        return self._row

    def claim(self, token: bytes, fingerprint: bytes, on_expiry: OnExpiry, lease: int) -> object:
        now, row = self._clock.now, self.row
        fresh = Row(State.PROCESSING, token, 1, fingerprint, on_expiry, now, now + lease)
        if row is None:
            self._row = fresh
            return Grant, 1
        if row.fingerprint != fingerprint:
            return Mismatched(near(row.first_seen))
        if row.state is State.COMPLETED:
            return Record, row.payload
        if row.state is State.QUARANTINED:
            return Unknown(row.reason)
        if row.token == token:
            return Grant, row.attempt
        if row.deadline > now:
            return InFlight(near(row.deadline - now))
        if row.on_expiry is OnExpiry.TAKEOVER:
            self._row = replace(fresh, attempt=row.attempt + 1, first_seen=row.first_seen)
            return Grant, row.attempt + 1
        self._row = replace(row, state=State.QUARANTINED, reason="lease-expired")
        return Unknown("lease-expired")

    def renew(self, token: bytes, lease: int) -> bool:
        row = self.row
        if row is None or row.token != token:
            return True
        if row.state is State.PROCESSING or row.reason == "lease-expired":
            self._row = replace(row, deadline=max(row.deadline, self._clock.now + lease))
        return False

    def mark_point_of_no_return(self, token: bytes) -> bool:
        row = self.row
        if row is None or row.token != token or row.state is State.COMPLETED:
            return True
        if row.state is State.PROCESSING:
            self._row = replace(row, on_expiry=OnExpiry.QUARANTINE)
        return False

    def complete(self, token: bytes, payload: StoredPayload, keep: int) -> bool:
        row = self.row
        if row is None or row.token != token:
            return True
        if row.state is not State.COMPLETED:
            deadline = self._clock.now + keep
            self._row = replace(row, state=State.COMPLETED, deadline=deadline, payload=payload, reason="")
        return False

    def release(self, token: bytes) -> bool:
        row = self.row
        if row is not None and (row.token != token or row.state is State.COMPLETED):
            return True
        self._row = None
        return False

    def quarantine(self, token: bytes, reason: str) -> bool:
        row = self.row
        if row is None or row.token != token or row.state is State.COMPLETED:
            return True
        if row.state is State.PROCESSING:
            self._row = replace(row, state=State.QUARANTINED, reason=reason)
        return False


class StoreMachine(RuleBasedStateMachine):
    """Make each call on a store and on the model, with a separate key, and compare outcomes and records."""

    tokens: Bundle[Any] = Bundle("tokens")

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.store: Store = kit.store
        self.clock: FrozenClock = kit.clock
        self.model: Model = Model(kit.clock)
        self.key: StorageKey = kit.key()
        self.fences: list[tuple[bytes, int]] = []
        self.released: set[bytes] = set[bytes]()

    @initialize(target=tokens)
    def first_token(self) -> bytes:
        return a_token()

    @rule(target=tokens)
    def another_token(self) -> bytes:
        return a_token()

    @rule(seconds=st.integers(1, 60))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(token=tokens, fingerprint=fingerprints, on_expiry=st.sampled_from(OnExpiry), lease=machine_durations)
    def claim(self, token: bytes, fingerprint: bytes, on_expiry: OnExpiry, lease: int) -> None:
        # The model has no history, so it leaves cancelled claims out: see `Cancelling`.
        if token in self.released:
            return
        request = a_request(self.key, fingerprint=fingerprint, on_expiry=on_expiry)
        expected = self.model.claim(token, fingerprint, on_expiry, lease)
        match self.store.claim(request, token=token, lease=lease):
            case Grant() as grant:
                assert expected == (Grant, grant.attempt)
                if not self.fences or (token, grant.fence) != self.fences[-1]:
                    assert all(grant.fence > fence for _, fence in self.fences)
                    self.fences.append((token, grant.fence))
            case Record() as record:
                assert expected == (Record, record.payload)
            case other:
                assert expected == other

    @rule(token=tokens, lease=machine_durations)
    def renew(self, token: bytes, lease: int) -> None:
        assert self.model.renew(token, lease) == lost(lambda: self.store.renew(self.key, token, lease=lease))

    @rule(token=tokens)
    def mark_point_of_no_return(self, token: bytes) -> None:
        assert self.model.mark_point_of_no_return(token) == lost(
            lambda: self.store.mark_point_of_no_return(self.key, token)
        )

    @rule(token=tokens, payload=payloads, keep=machine_durations)
    def complete(self, token: bytes, payload: StoredPayload, keep: int) -> None:
        expected = self.model.complete(token, payload, keep)
        assert expected == lost(lambda: self.store.complete(self.key, token, payload, keep=keep))

    @rule(token=tokens)
    def release(self, token: bytes) -> None:
        self.released.add(token)
        assert self.model.release(token) == lost(lambda: self.store.release(self.key, token))

    @rule(token=tokens, reason=st.sampled_from(("lost", "crashed")))
    def quarantine(self, token: bytes, reason: str) -> None:
        assert self.model.quarantine(token, reason) == lost(lambda: self.store.quarantine(self.key, token, reason))

    @invariant()
    def the_record_is_as_modelled(self) -> None:
        record, row = self.store.read(self.key), self.model.row
        if record is None or row is None:
            assert (row, record) == (None, None)
            return
        assert (row.state, row.token, row.attempt) == (record.state, record.token, record.attempt)
        assert (row.fingerprint, row.on_expiry, row.reason) == (record.fingerprint, record.on_expiry, record.reason)
        assert (near(row.deadline), near(row.first_seen)) == (record.deadline, record.requested_at)
        assert row.payload == record.payload


def run(machine: Callable[[], RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """Many short lives of this machine, the same on a laptop and in CI: no deadline, and no memory of earlier runs."""
    run_state_machine_as_test(
        cast("type[RuleBasedStateMachine]", machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


class Modelled(Contract):
    """Random sequences of calls, compared with the model."""

    def test_any_sequence_of_calls_ends_as_modelled(self, kit: Kit) -> None:
        """The store and a model of a hundred lines agree on every outcome and every record."""
        run(lambda: StoreMachine(kit), examples=MACHINE_EXAMPLES, steps=MACHINE_STEPS)


# Races between threads.

THREADS = 16
ROUNDS = 10
MEETING_SECONDS = 30.0

ReturnT = TypeVar("ReturnT")


def at_once(*calls: Callable[[], ReturnT]) -> list[ReturnT]:
    """Return the results of these calls, which start together, each in its own thread."""
    barrier = threading.Barrier(len(calls))

    def started_together(call: Callable[[], ReturnT]) -> ReturnT:
        barrier.wait(MEETING_SECONDS)
        return call()

    usual, collected = sys.getswitchinterval(), gc.isenabled()
    # Python 3.11 crashes when one thread collects garbage while it makes an object's `__dict__`, and another thread
    # reads the same one: both get a dict over one array. SQLAlchemy's statements often do this.
    gc.disable()
    # Python lets a thread run for 5 ms, in which a store in memory handles a hundred calls: no race would ever show.
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(started_together, calls))
    finally:
        sys.setswitchinterval(usual)
        if collected:
            gc.enable()


class Racing(Contract):
    """`claim` is atomic: of many threads, one gets the key."""

    def test_of_many_exactly_one_is_granted(self, kit: Kit) -> None:
        """All other claims get `InFlight`."""
        for _ in range(ROUNDS):
            outcomes = at_once(*[partial(kit.ask, kit.key())] * THREADS)

            assert [True for outcome in outcomes if isinstance(outcome, Grant)] == [True]
            assert sum(isinstance(outcome, InFlight) for outcome in outcomes) == THREADS - 1

    def test_of_many_exactly_one_takes_over(self, kit: Kit) -> None:
        """An expired claim has one successor, however many workers saw it expire."""
        for _ in range(ROUNDS):
            key, _ = kit.placed("lapsed, takeover")

            outcomes = at_once(*[partial(kit.ask, key, on_expiry=OnExpiry.TAKEOVER)] * THREADS)

            assert [outcome.attempt for outcome in outcomes if isinstance(outcome, Grant)] == [2]
            assert sum(isinstance(outcome, InFlight) for outcome in outcomes) == THREADS - 1

    def test_replays_do_not_stand_in_each_others_way(self, kit: Kit) -> None:
        """Many threads may read a response at the same time."""
        key, _ = kit.placed("completed")

        outcomes = at_once(*[partial(kit.ask, key)] * THREADS)

        assert [kit.found(key)] * THREADS == outcomes

    def test_a_late_owner_and_its_successor_do_not_both_win(self, kit: Kit) -> None:
        """Either the response came first and is replayed, or the take-over came first and the response is refused."""
        for _ in range(ROUNDS * 5):
            key, slow = kit.placed("lapsed, takeover")
            finish: Callable[[], object] = partial(kit.completes, key, slow)

            finished, retried = at_once(finish, partial(kit.ask, key))
            assert finished is not isinstance(retried, Grant)

    def test_fences_rise_through_a_crowd(self, kit: Kit) -> None:
        """Claim and release as fast as many threads can: no fence of the key comes twice, or goes back."""
        key = kit.key()

        def claim_and_release() -> list[int]:
            fences = []
            for _ in range(20):
                token = a_token()
                outcome = kit.ask(key, token=token)
                if isinstance(outcome, Grant):
                    fences.append(outcome.fence)
                    kit.store.release(key, token)
            return fences

        taken = at_once(*[claim_and_release] * THREADS)

        assert all(fences == sorted(fences) for fences in taken)
        every = [fence for fences in taken for fence in fences]
        assert len(every) == len(set(every)) > 0
        assert kit.granted(key).fence > max(every)


# Random calls on several keys of a tenant: the ledger must equal a recount of its records.

KEYS, TOKENS = 4, 3
RECOUNT_EXAMPLES, RECOUNT_STEPS = 20, 40

keys: Final = st.integers(0, KEYS - 1)
tokens: Final = st.integers(0, TOKENS - 1)
recount_durations: Final = st.sampled_from((0.1, 1.0, 3.0, 20.0))
"""Some windows end immediately, so that the store sweeps buckets while others fill."""
sizes: Final = st.sampled_from((0, 1, 31, 4096))
quotas: Final = st.sampled_from((None, Quota(), Quota(records=3), Quota(in_flight=1), Quota(bytes=4096)))


class LedgerMachine(RuleBasedStateMachine):
    """Make random calls, and compare the ledger with a recount of the records."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.store: CapableStore = kit.store
        self.clock: FrozenClock = kit.clock
        self.tid: bytes = kit.key().tid
        self.keys: list[StorageKey] = [kit.key(self.tid) for _ in range(KEYS)]
        self.tokens: list[bytes] = [a_token() for _ in range(TOKENS)]

    @rule(seconds=recount_durations)
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(key=keys, token=tokens, on_expiry=st.sampled_from(OnExpiry), lease=recount_durations, quota=quotas)
    def claim(self, key: int, token: int, on_expiry: OnExpiry, lease: float, quota: Quota | None) -> None:
        before, live = self.usage, self.store.read(self.keys[key])
        request = a_request(self.keys[key], on_expiry=on_expiry)
        outcome = self.store.claim(request, token=self.tokens[token], lease=lease, quota=quota)
        if live is not None:
            assert not isinstance(outcome, OverQuota)
        elif quota is not None:
            assert self.is_over(before, quota) == isinstance(outcome, OverQuota)
        else:
            assert isinstance(outcome, Grant)

    @rule(key=keys, token=tokens, lease=recount_durations)
    def renew(self, key: int, token: int, lease: float) -> None:
        with suppress(LeaseLost):
            self.store.renew(self.keys[key], self.tokens[token], lease=lease)

    @rule(key=keys, token=tokens, keep=recount_durations, size=sizes)
    def complete(self, key: int, token: int, keep: float, size: int) -> None:
        payload = StoredPayload(b"paid", 201, True, size)
        with suppress(LeaseLost):
            self.store.complete(self.keys[key], self.tokens[token], payload, keep=keep)

    @rule(key=keys, token=tokens)
    def release(self, key: int, token: int) -> None:
        with suppress(LeaseLost):
            self.store.release(self.keys[key], self.tokens[token])
        # Cancelled claims are left out here: see `Cancelling`.
        self.tokens[token] = a_token()

    @rule(key=keys, token=tokens)
    def quarantine(self, key: int, token: int) -> None:
        with suppress(LeaseLost):
            self.store.quarantine(self.keys[key], self.tokens[token], "why")

    @rule(key=keys)
    def mark_corrupt(self, key: int) -> None:
        record = self.store.read(self.keys[key])
        self.store.mark_corrupt(self.keys[key], PAYLOAD if record is None or record.payload is None else record.payload)

    @rule()
    def reconcile(self) -> None:
        assert Drift() == self.store.ledger.reconcile(self.tid)

    @invariant()
    def the_ledger_is_a_recount(self) -> None:
        records = [record for key in self.keys if (record := self.store.read(key)) is not None and record.in_quota]
        answers = [
            record.payload for record in records if record.state is State.COMPLETED and record.payload is not None
        ]
        flying = [record for record in records if record.state is State.PROCESSING and record.remaining > 0]
        assert Usage(len(records), sum(answer.byte_size for answer in answers), len(flying)) == self.usage

    @property
    def usage(self) -> Usage:
        return self.store.ledger.usage(self.tid)

    @staticmethod
    def is_over(usage: Usage, quota: Quota) -> bool:
        limits = ((quota.records, usage.records), (quota.bytes, usage.bytes), (quota.in_flight, usage.in_flight))
        return any(limit is not None and used >= limit for limit, used in limits)


class Recounted(Contract):
    """Random sequences of calls, with a correct ledger after each."""

    def test_after_any_sequence_of_calls_the_ledger_is_a_recount(self, kit: Kit) -> None:
        """Exactly right, and never below zero: after expired leases, take-overs, expiry and every other call."""
        run(lambda: LedgerMachine(kit), examples=RECOUNT_EXAMPLES, steps=RECOUNT_STEPS)
