"""Any sequence of calls on several keys of a tenant: the ledger says what a recount of its records does."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.model import Claimed, OnLapse, OverQuota, Payload, Record, State
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.counting import LedgerStore
from flask_idempotency.testing.contract.examples import PAYLOAD, a_key, a_request, a_token
from flask_idempotency.testing.contract.machine import run

KEYS, TOKENS = 4, 3
RECOUNT_EXAMPLES, RECOUNT_STEPS = 20, 40

keys = st.integers(0, KEYS - 1)
tokens = st.integers(0, TOKENS - 1)
recount_durations = st.sampled_from((0.1, 1.0, 3.0, 20.0))
"""Some that end at once, so that buckets are swept while others fill."""
sizes = st.sampled_from((0, 1, 31, 4096))
quotas = st.sampled_from((None, Quota(), Quota(records=3), Quota(in_flight=1), Quota(bytes=4096)))


class LedgerMachine(RuleBasedStateMachine):
    """Counts from the records alone, which the rest of the contract is about, and compares."""

    def __init__(self, store: LedgerStore, clock: FrozenClock) -> None:
        super().__init__()
        self.store, self.clock = store, clock
        self.tid = a_key().tid
        self.keys = [a_key(tid=self.tid) for _ in range(KEYS)]
        self.tokens = [a_token() for _ in range(TOKENS)]

    @rule(seconds=recount_durations)
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(key=keys, token=tokens, on_lapse=st.sampled_from(OnLapse), lease=recount_durations, quota=quotas)
    def claim(self, key: int, token: int, on_lapse: OnLapse, lease: float, quota: Quota | None) -> None:
        before, live = self.usage, self.store.read(self.keys[key])
        request = a_request(self.keys[key], on_lapse=on_lapse)
        outcome = self.store.claim(request, token=self.tokens[token], lease=lease, quota=quota)
        if live is not None:
            assert not isinstance(outcome, OverQuota)
        elif quota is not None:
            assert self.is_over(before, quota) == isinstance(outcome, OverQuota)
        else:
            assert isinstance(outcome, Claimed)

    @rule(key=keys, token=tokens, lease=recount_durations)
    def renew(self, key: int, token: int, lease: float) -> None:
        with suppress(LeaseLost):
            self.store.renew(self.keys[key], self.tokens[token], lease=lease)

    @rule(key=keys, token=tokens, keep=recount_durations, size=sizes)
    def complete(self, key: int, token: int, keep: float, size: int) -> None:
        payload = Payload(b"paid", 201, True, size)
        with suppress(LeaseLost):
            self.store.complete(self.keys[key], self.tokens[token], payload, keep=keep)

    @rule(key=keys, token=tokens)
    def release(self, key: int, token: int) -> None:
        with suppress(LeaseLost):
            self.store.release(self.keys[key], self.tokens[token])
        # What becomes of a claim that was given up is not counted here: see `GivingUp`.
        self.tokens[token] = a_token()

    @rule(key=keys, token=tokens)
    def hold(self, key: int, token: int) -> None:
        with suppress(LeaseLost):
            self.store.hold(self.keys[key], self.tokens[token], "why")

    @rule(key=keys)
    def condemn(self, key: int) -> None:
        record = self.store.read(self.keys[key])
        self.store.condemn(self.keys[key], PAYLOAD if record is None or record.payload is None else record.payload)

    @rule()
    def reconcile(self) -> None:
        assert Drift() == self.store.ledger.reconcile(self.tid)

    @invariant()
    def the_ledger_is_a_recount(self) -> None:
        records = [record for key in self.keys if (record := self.store.read(key)) is not None and record.counted]
        assert (
            Usage(
                records=len(records),
                bytes=sum(map(_size, records)),
                in_flight=sum(record.state is State.PROCESSING and record.remaining > 0 for record in records),
            )
            == self.usage
        )

    @property
    def usage(self) -> Usage:
        return self.store.ledger.usage(self.tid)

    @staticmethod
    def is_over(usage: Usage, quota: Quota) -> bool:
        limits = ((quota.records, usage.records), (quota.bytes, usage.bytes), (quota.in_flight, usage.in_flight))
        return any(limit is not None and used >= limit for limit, used in limits)


def _size(record: Record) -> int:
    return record.payload.byte_size if record.state is State.COMPLETED and record.payload is not None else 0


class Recounted:
    """What no example of `LedgerContract` thought of."""

    def test_after_any_sequence_of_calls_the_ledger_is_a_recount(self, store: LedgerStore, clock: FrozenClock) -> None:
        """Not too much, not too little, and never below zero: after lapses, take-overs, expiry and everything else."""

        class ThisLedgerMachine(LedgerMachine):
            def __init__(self) -> None:
                super().__init__(store, clock)

        run(ThisLedgerMachine, examples=RECOUNT_EXAMPLES, steps=RECOUNT_STEPS)
