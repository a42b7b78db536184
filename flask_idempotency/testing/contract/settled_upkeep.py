"""What others than owners do to records is counted, and is sealed with keys that are there."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import pytest
from hypothesis.stateful import rule

from flask_idempotency.engine.capabilities import Found
from flask_idempotency.engine.errors import DataKeyGone
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, OnLapse, Payload, SealedBy, State
from flask_idempotency.engine.quota import Drift, Usage
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.counting import EXTRA, LedgerStore, Tenant
from flask_idempotency.testing.contract.erasing import SEALED, DataKeyStore, add
from flask_idempotency.testing.contract.examples import KEEP, LEASE, OTHER_PAYLOAD, PAYLOAD, a_token, found
from flask_idempotency.testing.contract.finding import STANDINGS, UnsettledStore, seen, stood
from flask_idempotency.testing.contract.machine import run
from flask_idempotency.testing.contract.recounting import (
    RECOUNT_EXAMPLES,
    RECOUNT_STEPS,
    LedgerMachine,
    keys,
    recount_durations,
    sizes,
)


class SystemStore(UnsettledStore, DataKeyStore, LedgerStore, Protocol):
    """A store that counts, keeps data keys, and lets others settle."""


class SettledLedger:
    """The ledger is right after `lapse`, `settle` and `free`."""

    @pytest.fixture
    def tenant(self, store: SystemStore) -> Tenant:
        return Tenant(store)

    def lapsed(self, tenant: Tenant, store: SystemStore, clock: FrozenClock) -> Found:
        key, _ = tenant.claim()
        clock.advance(LEASE)
        return seen(store, key)

    def test_a_quarantine_by_a_janitor_changes_no_count(
        self, tenant: Tenant, store: SystemStore, clock: FrozenClock
    ) -> None:
        """The place in flight was free when the lease ended; the record is there as before."""
        lapsed = self.lapsed(tenant, store, clock)
        assert Usage(1, 0, 0) == tenant.usage
        assert store.unsettled.lapse(lapsed, horizon=clock.now)

        assert (Usage(1, 0, 0), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))

    def test_an_answer_by_another_is_counted_as_its_owners(
        self, tenant: Tenant, store: SystemStore, clock: FrozenClock
    ) -> None:
        """With its bytes, once, from now to its expiry; and it lives a little longer."""
        lapsed = self.lapsed(tenant, store, clock)
        assert store.unsettled.lapse(lapsed, horizon=clock.now)
        quarantined, token = seen(store, lapsed.key), a_token()
        for _ in range(2):
            assert store.unsettled.settle(quarantined, token=token, payload=PAYLOAD, keep=KEEP)

        assert (Usage(1, PAYLOAD.byte_size, 0), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))
        remaining = found(store, lapsed.key).remaining
        assert KEEP <= remaining <= KEEP + EXTRA + 0.002
        clock.advance(remaining + 0.01)
        assert (Usage(), None) == (tenant.usage, store.read(lapsed.key))

    def test_an_answer_in_the_place_of_a_condemned_one_is_counted(self, tenant: Tenant, store: SystemStore) -> None:
        """By its own bytes; those of the other were not counted any more."""
        key = tenant.complete()
        store.condemn(key, PAYLOAD)
        assert Usage(1, 0, 0) == tenant.usage
        assert store.unsettled.settle(seen(store, key), token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)

        assert (Usage(1, OTHER_PAYLOAD.byte_size, 0), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))

    @pytest.mark.parametrize("standing", (*STANDINGS, "condemned"))
    def test_who_is_freed_is_counted_no_more(
        self, tenant: Tenant, store: SystemStore, clock: FrozenClock, standing: str
    ) -> None:
        """Its record, its bytes and its place in flight are given back, once."""
        tenant.complete()
        key, token = tenant.claim(on_lapse=OnLapse.TAKEOVER if standing == "lapsed, takeover" else OnLapse.QUARANTINE)
        if standing in ("completed", "condemned"):
            store.complete(key, token, PAYLOAD, keep=KEEP)
        if standing == "condemned":
            store.condemn(key, PAYLOAD)
        if standing == "quarantined":
            store.hold(key, token, "view-crashed")
        if standing.startswith("lapsed"):
            clock.advance(LEASE)
        stood_so = seen(store, key)

        assert [store.unsettled.free(stood_so) for _ in range(2)] == [True, False]
        assert (Usage(1, PAYLOAD.byte_size, 0), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))

    def test_who_is_refused_counts_nothing(self, tenant: Tenant, store: SystemStore, clock: FrozenClock) -> None:
        """Nor does who repeats it."""
        key, token = tenant.claim()
        before = seen(store, key)
        store.complete(key, token, PAYLOAD, keep=KEEP)
        usage = tenant.usage

        assert not store.unsettled.free(before)
        assert not store.unsettled.lapse(before, horizon=clock.now)
        assert not store.unsettled.settle(before, token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)
        assert (usage, Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))

    def test_who_is_not_counted_stays_so(self, store: SystemStore, clock: FrozenClock) -> None:
        """Nothing goes below nothing; and its answer's life is not rounded."""
        tenant = Tenant(store, quota=None)
        lapsed, freed = self.lapsed(tenant, store, clock), self.lapsed(tenant, store, clock)
        assert store.unsettled.lapse(lapsed, horizon=clock.now)
        assert store.unsettled.settle(seen(store, lapsed.key), token=a_token(), payload=PAYLOAD, keep=KEEP)
        assert store.unsettled.free(freed)

        assert (Usage(), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))
        assert found(store, lapsed.key).remaining == pytest.approx(KEEP, abs=0.002)

    def test_after_any_sequence_of_settlements_the_ledger_is_a_recount(
        self, store: SystemStore, clock: FrozenClock
    ) -> None:
        """Whoever did what, to what they saw just now or some time ago."""

        class ThisSettledMachine(SettledMachine):
            def __init__(self) -> None:
                super().__init__(store, clock)

        run(ThisSettledMachine, examples=RECOUNT_EXAMPLES, steps=RECOUNT_STEPS)


class SettledMachine(LedgerMachine):
    """Others act on what they saw, which may be long ago."""

    store: SystemStore

    def __init__(self, store: SystemStore, clock: FrozenClock) -> None:
        super().__init__(store, clock)
        self.seen: dict[StorageKey, Found] = {}

    @rule(key=keys)
    def look(self, key: int) -> None:
        record = self.store.read(self.keys[key])
        if record is not None:
            self.seen[self.keys[key]] = Found(self.keys[key], record)

    @rule(key=keys)
    def lapse(self, key: int) -> None:
        if seen := self.seen.get(self.keys[key]):
            self.store.unsettled.lapse(seen, horizon=self.clock.now)

    @rule(key=keys, keep=recount_durations, size=sizes)
    def settle(self, key: int, keep: float, size: int) -> None:
        if seen := self.seen.get(self.keys[key]):
            self.store.unsettled.settle(seen, token=a_token(), payload=Payload(b"by", 201, True, size), keep=keep)

    @rule(key=keys)
    def free(self, key: int) -> None:
        if seen := self.seen.get(self.keys[key]):
            self.store.unsettled.free(seen)


class SettledSecrets:
    """`settle` stores nothing that nobody could open, and nothing of a tenant that was erased."""

    def test_an_answer_by_another_is_sealed_with_a_key_that_is_there(
        self, store: SystemStore, clock: FrozenClock
    ) -> None:
        """Or is not stored: the record stands as it was."""
        held, _ = stood(store, clock, "quarantined")
        self.refused(store, held, SEALED, erased=False)
        add(store, held.key.tid)

        assert store.unsettled.settle(held, token=a_token(), payload=SEALED, keep=KEEP)
        assert (found(store, held.key).payload, found(store, held.key).erased) == (SEALED, False)

    def test_a_closed_key_seals_nothing_by_another_either(self, store: SystemStore, clock: FrozenClock) -> None:
        """Somebody is about to retire it."""
        held, _ = stood(store, clock, "quarantined")
        add(store, held.key.tid), add(store, held.key.tid, 2)
        store.data_keys.close(held.key.tid, 1)
        self.refused(store, held, SEALED, erased=False)

        other = replace(SEALED, sealed_by=SealedBy("2026-11", 2))
        assert store.unsettled.settle(held, token=a_token(), payload=other, keep=KEEP)

    def test_nobody_brings_back_an_erased_tenant(self, store: SystemStore, clock: FrozenClock) -> None:
        """Not with the old key, not with a new one. That the work was done may be said."""
        held, _ = stood(store, clock, "quarantined")
        key = held.key
        add(store, key.tid)
        store.data_keys.destroy(key.tid)
        clock.advance(1)
        add(store, key.tid, 2)
        for number in (1, 2):
            self.refused(store, held, replace(PAYLOAD, sealed_by=SealedBy("2026-11", number)), erased=True)

        assert store.unsettled.settle(held, token=a_token(), payload=Payload(b"", 201, True, 0, ERASED), keep=KEEP)
        assert State.COMPLETED is found(store, key).state

    def test_a_repeated_settlement_whose_key_has_gone_is_done(self, store: SystemStore, clock: FrozenClock) -> None:
        """What was stored first stays."""
        held, _ = stood(store, clock, "quarantined")
        add(store, held.key.tid)
        token = a_token()
        assert store.unsettled.settle(held, token=token, payload=SEALED, keep=KEEP)
        store.data_keys.close(held.key.tid, 1)
        store.data_keys.retire(held.key.tid, 1)

        assert store.unsettled.settle(held, token=token, payload=SEALED, keep=KEEP)
        assert found(store, held.key).payload == SEALED

    def test_who_was_not_first_hears_so_and_nothing_of_keys(self, store: SystemStore, clock: FrozenClock) -> None:
        """To seal it anew would not help."""
        held, token = stood(store, clock, "quarantined")
        store.complete(held.key, token, PAYLOAD, keep=KEEP)

        assert not store.unsettled.settle(held, token=a_token(), payload=SEALED, keep=KEEP)

    def refused(self, store: SystemStore, held: Found, payload: Payload, *, erased: bool) -> None:
        with pytest.raises(DataKeyGone) as why:
            store.unsettled.settle(held, token=a_token(), payload=payload, keep=KEEP)
        assert erased is why.value.erased
        assert replace(held.record, remaining=0.0) == replace(found(store, held.key), remaining=0.0)
