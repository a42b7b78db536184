"""Contract of data keys: adding, disabling, deleting and shredding them, with sealed records."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis.stateful import rule

from flask_idempotency.engine.capabilities import DataKey, SeenRecord
from flask_idempotency.engine.errors import DataKeyMissing
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, OnExpiry, Record, SealedBy, State, StoredPayload
from flask_idempotency.engine.quota import Drift, Usage
from flask_idempotency.testing.contract.quota import EXTRA, Tenant
from flask_idempotency.testing.contract.stress import (
    RECOUNT_EXAMPLES,
    RECOUNT_STEPS,
    LedgerMachine,
    keys,
    recount_durations,
    run,
    sizes,
)
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    OTHER_PAYLOAD,
    PAYLOAD,
    STANDINGS,
    CapableStore,
    Contract,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
    lost,
    near,
    placed,
    seen,
    stand,
    stood,
)
from flask_idempotency.testing.doubles import FrozenClock

WRAPPED = bytes(range(256))
SEALED = replace(PAYLOAD, sealed_by=SealedBy("2026-11", 1))


def add(store: CapableStore, tid: bytes, number: int = 1, kid: str = "2026-11") -> bool:
    shelf = store.data_keys.read_keys(tid)
    return store.data_keys.add(tid, DataKey(number, kid, WRAPPED), store=shelf.store, after=shelf.last)


def complete(store: CapableStore, key: StorageKey, payload: StoredPayload = SEALED) -> None:
    token = a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, payload, keep=KEEP)


def replayed(store: CapableStore, key: StorageKey) -> Record:
    outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)
    assert isinstance(outcome, Record)
    return outcome


class DataKeysContract(Contract):
    """The contract of `flask_idempotency.engine.capabilities.DataKeys`. Override `store`."""

    def test_a_tenant_begins_without_keys(self, store: CapableStore) -> None:
        """No number was used."""
        shelf = store.data_keys.read_keys(a_key().tid)

        assert (shelf.keys, shelf.last) == ((), 0)

    def test_a_data_key_is_returned_unchanged(self, store: CapableStore) -> None:
        """All bytes of it, and only for its tenant."""
        tid, other = a_key().tid, a_key().tid

        assert add(store, tid)
        assert ((DataKey(1, "2026-11", WRAPPED),), 1) == (
            store.data_keys.read_keys(tid).keys,
            store.data_keys.read_keys(tid).last,
        )
        assert store.data_keys.read_keys(other).keys == ()

    def test_numbers_rise(self, store: CapableStore) -> None:
        """The store never reuses a number, with one worker or many."""
        tid = a_key().tid

        assert [add(store, tid, number) for number in (0, 7, 7, 6, 2**30)] == [False, True, False, False, True]
        assert [key.number for key in store.data_keys.read_keys(tid).keys] == [7, 2**30]

    def test_who_has_not_seen_the_last_key_adds_none(self, store: CapableStore) -> None:
        """Another process was faster, and its key may serve."""
        tid = a_key().tid
        seen = store.data_keys.read_keys(tid)
        add(store, tid, 7)

        assert not store.data_keys.add(tid, DataKey(9, "2026-11", WRAPPED), store=seen.store, after=seen.last)
        assert store.data_keys.add(tid, DataKey(9, "2026-11", WRAPPED), store=seen.store, after=7)

    def test_of_several_who_add_the_same_number_one_does(self, store: CapableStore) -> None:
        """The others look again, and find the key that is there."""
        tid, start, added = a_key().tid, threading.Barrier(6), list[bool]()

        def work() -> None:
            start.wait()
            added.append(add(store, tid))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert ([each for each in added if each], len(store.data_keys.read_keys(tid).keys)) == ([True], 1)

    def test_the_store_has_an_id_that_does_not_change(self, store: CapableStore) -> None:
        """What was wrapped for this store cannot be unwrapped for another; and a key for another is not added here."""
        tid = a_key().tid
        add(store, tid)
        shelf = store.data_keys.read_keys(tid)

        assert (shelf.store, True) == (store.data_keys.read_keys(tid).store, len(shelf.store) >= 8)
        assert not store.data_keys.add(tid, DataKey(2, "2026-11", WRAPPED), store=shelf.store + b"x", after=1)

    def test_a_closed_key_opens_and_seals_no_more(self, store: CapableStore, clock: FrozenClock) -> None:
        """The store returns the time of the change, and the worker seals with another key."""
        key, token = a_key(), a_token()
        add(store, key.tid), add(store, key.tid, 2)
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        store.data_keys.disable(key.tid, 1)
        clock.advance(10)
        for number in (1, 7):
            store.data_keys.disable(key.tid, number)
        with pytest.raises(DataKeyMissing) as refused:
            store.complete(key, token, SEALED, keep=KEEP)
        closed, still_open = store.data_keys.read_keys(key.tid).keys

        assert (refused.value.erased, still_open.closed_for) == (False, None)
        assert (1, near(10), WRAPPED) == (closed.number, closed.closed_for, closed.wrapped)
        store.complete(key, token, replace(PAYLOAD, sealed_by=SealedBy("2026-11", 2)), keep=KEEP)

    def test_keys_under_other_keys_of_the_ring_are_found(self, store: CapableStore, clock: FrozenClock) -> None:
        """With their tenants, closed or not, so that they can be closed and retired."""
        tid, other, kid = a_key().tid, a_key().tid, a_token().hex()
        add(store, tid, 1, "2025-11"), add(store, tid, 2, kid), add(store, other, 1, "2025-11")
        store.data_keys.disable(other, 1)
        clock.advance(5)
        found_here = {tenant: key for tenant, key in store.data_keys.wrapped_by_other(kid) if tenant in (tid, other)}

        assert {tid: DataKey(1, "2025-11", WRAPPED)} == {tid: found_here.pop(tid)}
        assert (1, near(5)) == (found_here[other].number, found_here[other].closed_for)
        assert [key.number for tenant, key in store.data_keys.wrapped_by_other("2025-11") if tenant == tid] == [2]

    def test_some_keys_under_a_key_of_the_ring_are_found(self, store: CapableStore) -> None:
        """So that an operator learns whether the ring opens them."""
        tids, kid = [a_key().tid for _ in range(3)], a_token().hex()
        for tid in tids:
            add(store, tid, 1, "2025-11"), add(store, tid, 2, kid)
        every, some = (store.data_keys.sample(kid, limit=limit) for limit in (9, 2))

        assert sorted(tids) == sorted(tid for tid, _ in every)
        assert {DataKey(2, kid, WRAPPED)} == {key for _, key in every}
        assert (len(some), {*some} <= {*every}) == (2, True)
        assert list(store.data_keys.sample(a_token().hex(), limit=9)) == []

    def test_a_retired_key_is_gone_and_its_number_is_not_given_again(self, store: CapableStore) -> None:
        """Harmless when repeated, and for a number that never was. One that may still seal is not retired."""
        tid = a_key().tid
        add(store, tid)
        store.data_keys.delete(tid, 1)
        assert [key.number for key in store.data_keys.read_keys(tid).keys] == [1]
        store.data_keys.disable(tid, 1)
        for number in (1, 1, 7):
            store.data_keys.delete(tid, number)

        assert (store.data_keys.read_keys(tid).keys, store.data_keys.read_keys(tid).last) == ((), 1)
        assert [add(store, tid, number) for number in (1, 2)] == [False, True]

    def test_an_answer_is_stored_while_its_data_key_is_there(self, store: CapableStore) -> None:
        """With the id and number of the key that opens it."""
        key = a_key()
        add(store, key.tid)
        complete(store, key)

        assert (replayed(store, key).payload, replayed(store, key).erased) == (SEALED, False)

    def test_a_response_without_its_data_key_is_not_stored(self, store: CapableStore) -> None:
        """After a data loss, no key could open the response. The worker seals it again under a new key."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        before = found(store, key)
        with pytest.raises(DataKeyMissing) as refused:
            store.complete(key, token, SEALED, keep=KEEP)

        assert (False, before) == (refused.value.erased, found(store, key))
        add(store, key.tid)
        store.complete(key, token, SEALED, keep=KEEP)
        assert replayed(store, key).payload == SEALED

    def test_a_completion_that_is_repeated_after_its_key_has_gone_is_done(self, store: CapableStore) -> None:
        """The first response stays, and its owner must not store it again."""
        key, token = a_key(), a_token()
        add(store, key.tid)
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        store.complete(key, token, SEALED, keep=KEEP)
        store.data_keys.disable(key.tid, 1)
        store.data_keys.delete(key.tid, 1)
        store.complete(key, token, SEALED, keep=KEEP)

        assert found(store, key).payload == SEALED

    def test_destroyed_keys_are_gone_and_their_numbers_too(self, store: CapableStore) -> None:
        """The call returns how many there were. A second call returns 0."""
        tid = a_key().tid
        add(store, tid), add(store, tid, 2)

        assert (store.data_keys.shred(tid), store.data_keys.shred(tid)) == (2, 0)
        assert (store.data_keys.read_keys(tid).keys, store.data_keys.read_keys(tid).last) == ((), 2)

    @for_each("payload", (SEALED, PAYLOAD), ids=("sealed", "plain"))
    def test_responses_of_an_erased_tenant_are_reported_as_erased(
        self, store: CapableStore, clock: FrozenClock, payload: StoredPayload
    ) -> None:
        """Every response of the tenant is erased from now on, plain ones too; those of other tenants stay."""
        key, other = a_key(), a_key()
        add(store, key.tid), add(store, other.tid)
        complete(store, key, payload)
        complete(store, other, payload)
        store.data_keys.shred(key.tid)

        assert (replayed(store, key).erased, found(store, key).erased) == (True, True)
        assert (replayed(store, other).erased, found(store, other).erased) == (False, False)

    def test_an_erased_answer_lives_as_long_as_it_would_have(self, store: CapableStore, clock: FrozenClock) -> None:
        """Its key never runs again until then, and is free afterwards."""
        key = a_key()
        add(store, key.tid)
        complete(store, key)
        store.data_keys.shred(key.tid)
        clock.advance(KEEP - 0.125)
        assert replayed(store, key).erased
        clock.advance(0.125)

        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))

    @for_each("standing", ("in flight", "quarantined", "lapsed, takeover"))
    def test_a_late_worker_cannot_bring_back_an_erased_tenant(
        self, store: CapableStore, clock: FrozenClock, standing: str
    ) -> None:
        """Neither the old key nor a new one seals it. The record may still show that the request completed."""
        key = a_key()
        add(store, key.tid)
        token = stand(store, clock, key, standing)  # type: ignore[arg-type]
        store.data_keys.shred(key.tid)
        clock.advance(1)
        add(store, key.tid, 2)
        for number in (1, 2):
            with pytest.raises(DataKeyMissing) as refused:
                store.complete(key, token, replace(PAYLOAD, sealed_by=SealedBy("2026-11", number)), keep=KEEP)
            assert refused.value.erased
        store.complete(key, token, StoredPayload(b"", 201, True, 0, ERASED), keep=KEEP)

        assert State.COMPLETED is found(store, key).state

    def test_an_erased_tenant_may_come_back(self, store: CapableStore, clock: FrozenClock) -> None:
        """With keys and responses that were not used before."""
        key, tid = a_key(), a_key().tid
        add(store, tid)
        store.data_keys.shred(tid)
        clock.advance(1)
        key = a_key(tid=tid)
        add(store, tid, 2)
        payload = replace(PAYLOAD, sealed_by=SealedBy("2026-11", 2))
        complete(store, key, payload)

        assert (payload, False) == (replayed(store, key).payload, replayed(store, key).erased)

    def test_a_lost_lease_precedes_any_key_error(self, store: CapableStore, clock: FrozenClock) -> None:
        """Another token, or an absent record: sealing again would not help."""
        key, _ = placed(store, clock, "in flight")
        assert lost(lambda: store.complete(key, a_token(), SEALED, keep=KEEP))
        assert lost(lambda: store.complete(a_key(), a_token(), SEALED, keep=KEEP))

    def test_data_keys_are_counted_by_the_key_of_the_ring(self, store: CapableStore) -> None:
        """This count tells an operator when a key of the ring may go."""
        tid, kid = a_key().tid, a_token().hex()
        add(store, tid, 1, kid), add(store, tid, 2, kid)
        other = a_key().tid
        add(store, other, 1, kid)

        assert store.data_keys.count()[kid] == 3
        store.data_keys.shred(other)
        assert store.data_keys.count()[kid] == 2


# What others than owners do to records is counted, and is sealed with keys that are there.


class SettledLedger:
    """The ledger is right after `quarantine_expired`, `resolve` and `force_release`."""

    @pytest.fixture
    def tenant(self, store: CapableStore) -> Tenant:
        return Tenant(store)

    def lapsed(self, tenant: Tenant, store: CapableStore, clock: FrozenClock) -> SeenRecord:
        key, _ = tenant.claim()
        clock.advance(LEASE)
        return seen(store, key)

    def test_a_quarantine_by_a_janitor_changes_no_count(
        self, tenant: Tenant, store: CapableStore, clock: FrozenClock
    ) -> None:
        """The place in flight was free when the lease ended; the record is there as before."""
        lapsed = self.lapsed(tenant, store, clock)
        assert Usage(1, 0, 0) == tenant.usage
        assert store.recovery.quarantine_expired(lapsed, horizon=clock.now)

        assert (Usage(1, 0, 0), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))

    def test_a_resolved_response_is_counted_as_its_owners(
        self, tenant: Tenant, store: CapableStore, clock: FrozenClock
    ) -> None:
        """With its bytes, once, from now to its expiry; and it lives a little longer."""
        lapsed = self.lapsed(tenant, store, clock)
        assert store.recovery.quarantine_expired(lapsed, horizon=clock.now)
        quarantined, token = seen(store, lapsed.key), a_token()
        for _ in range(2):
            assert store.recovery.resolve(quarantined, token=token, payload=PAYLOAD, keep=KEEP)

        assert (Usage(1, PAYLOAD.byte_size, 0), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))
        remaining = found(store, lapsed.key).remaining
        assert KEEP <= remaining <= KEEP + EXTRA + 0.002
        clock.advance(remaining + 0.01)
        assert (Usage(), None) == (tenant.usage, store.read(lapsed.key))

    def test_an_answer_in_the_place_of_a_condemned_one_is_counted(self, tenant: Tenant, store: CapableStore) -> None:
        """By its own bytes; those of the other were not counted any more."""
        key = tenant.complete()
        store.mark_corrupt(key, PAYLOAD)
        assert Usage(1, 0, 0) == tenant.usage
        assert store.recovery.resolve(seen(store, key), token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)

        assert (Usage(1, OTHER_PAYLOAD.byte_size, 0), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))

    @for_each("standing", (*STANDINGS, "condemned"))
    def test_who_is_freed_is_counted_no_more(self, store: CapableStore, clock: FrozenClock, standing: str) -> None:
        """Its record, its bytes and its place in flight are subtracted once."""
        tenant = Tenant(store)
        tenant.complete()
        key, token = tenant.claim(
            on_expiry=OnExpiry.TAKEOVER if standing == "lapsed, takeover" else OnExpiry.QUARANTINE
        )
        if standing in ("completed", "condemned"):
            store.complete(key, token, PAYLOAD, keep=KEEP)
        if standing == "condemned":
            store.mark_corrupt(key, PAYLOAD)
        if standing == "quarantined":
            store.quarantine(key, token, "view-crashed")
        if standing.startswith("lapsed"):
            clock.advance(LEASE)
        stood_so = seen(store, key)

        assert [store.recovery.force_release(stood_so) for _ in range(2)] == [True, False]
        assert (Usage(1, PAYLOAD.byte_size, 0), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))

    def test_who_is_refused_counts_nothing(self, tenant: Tenant, store: CapableStore, clock: FrozenClock) -> None:
        """A repeated call does not either."""
        key, token = tenant.claim()
        before = seen(store, key)
        store.complete(key, token, PAYLOAD, keep=KEEP)
        usage = tenant.usage

        assert not store.recovery.force_release(before)
        assert not store.recovery.quarantine_expired(before, horizon=clock.now)
        assert not store.recovery.resolve(before, token=a_token(), payload=OTHER_PAYLOAD, keep=KEEP)
        assert (usage, Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))

    def test_who_is_not_counted_stays_so(self, store: CapableStore, clock: FrozenClock) -> None:
        """No count is negative, and the response's expiry is not rounded."""
        tenant = Tenant(store, quota=None)
        lapsed, freed = self.lapsed(tenant, store, clock), self.lapsed(tenant, store, clock)
        assert store.recovery.quarantine_expired(lapsed, horizon=clock.now)
        assert store.recovery.resolve(seen(store, lapsed.key), token=a_token(), payload=PAYLOAD, keep=KEEP)
        assert store.recovery.force_release(freed)

        assert (Usage(), Drift()) == (tenant.usage, store.ledger.reconcile(tenant.tid))
        assert found(store, lapsed.key).remaining == pytest.approx(KEEP, abs=0.002)

    def test_after_any_sequence_of_settlements_the_ledger_is_a_recount(
        self, store: CapableStore, clock: FrozenClock
    ) -> None:
        """In any order, by any worker, with a recent or an old view of the record."""
        run(lambda: SettledMachine(store, clock), examples=RECOUNT_EXAMPLES, steps=RECOUNT_STEPS)


class SettledMachine(LedgerMachine):
    """Make random calls, in which janitors and operators act on records that they read long ago."""

    store: CapableStore

    def __init__(self, store: CapableStore, clock: FrozenClock) -> None:
        super().__init__(store, clock)
        self.seen: dict[StorageKey, SeenRecord] = {}

    @rule(key=keys)
    def look(self, key: int) -> None:
        record = self.store.read(self.keys[key])
        if record is not None:
            self.seen[self.keys[key]] = SeenRecord(self.keys[key], record)

    @rule(key=keys)
    def quarantine_expired(self, key: int) -> None:
        if seen := self.seen.get(self.keys[key]):
            self.store.recovery.quarantine_expired(seen, horizon=self.clock.now)

    @rule(key=keys, keep=recount_durations, size=sizes)
    def resolve(self, key: int, keep: float, size: int) -> None:
        if seen := self.seen.get(self.keys[key]):
            self.store.recovery.resolve(seen, token=a_token(), payload=StoredPayload(b"by", 201, True, size), keep=keep)

    @rule(key=keys)
    def force_release(self, key: int) -> None:
        if seen := self.seen.get(self.keys[key]):
            self.store.recovery.force_release(seen)


class SettledSecrets:
    """`resolve` stores no response that no key opens, and none of an erased tenant."""

    def test_an_answer_by_another_is_sealed_with_a_key_that_is_there(
        self, store: CapableStore, clock: FrozenClock
    ) -> None:
        """Otherwise the store keeps the record unchanged."""
        held, _ = stood(store, clock, "quarantined")
        self.refused(store, held, SEALED, erased=False)
        add(store, held.key.tid)

        assert store.recovery.resolve(held, token=a_token(), payload=SEALED, keep=KEEP)
        assert (found(store, held.key).payload, found(store, held.key).erased) == (SEALED, False)

    def test_a_closed_key_seals_nothing_by_another_either(self, store: CapableStore, clock: FrozenClock) -> None:
        """An operator is about to delete it."""
        held, _ = stood(store, clock, "quarantined")
        add(store, held.key.tid), add(store, held.key.tid, 2)
        store.data_keys.disable(held.key.tid, 1)
        self.refused(store, held, SEALED, erased=False)

        other = replace(SEALED, sealed_by=SealedBy("2026-11", 2))
        assert store.recovery.resolve(held, token=a_token(), payload=other, keep=KEEP)

    def test_no_write_restores_an_erased_tenant(self, store: CapableStore, clock: FrozenClock) -> None:
        """Neither the old key nor a new one seals it. The record may show that the request completed."""
        held, _ = stood(store, clock, "quarantined")
        key = held.key
        add(store, key.tid)
        store.data_keys.shred(key.tid)
        clock.advance(1)
        add(store, key.tid, 2)
        for number in (1, 2):
            self.refused(store, held, replace(PAYLOAD, sealed_by=SealedBy("2026-11", number)), erased=True)

        assert store.recovery.resolve(
            held, token=a_token(), payload=StoredPayload(b"", 201, True, 0, ERASED), keep=KEEP
        )
        assert State.COMPLETED is found(store, key).state

    def test_a_repeated_resolution_succeeds_after_its_key_was_deleted(
        self, store: CapableStore, clock: FrozenClock
    ) -> None:
        """What was stored first stays."""
        held, _ = stood(store, clock, "quarantined")
        add(store, held.key.tid)
        token = a_token()
        assert store.recovery.resolve(held, token=token, payload=SEALED, keep=KEEP)
        store.data_keys.disable(held.key.tid, 1)
        store.data_keys.delete(held.key.tid, 1)

        assert store.recovery.resolve(held, token=token, payload=SEALED, keep=KEEP)
        assert found(store, held.key).payload == SEALED

    def test_a_later_resolver_gets_not_first_before_any_key_error(
        self, store: CapableStore, clock: FrozenClock
    ) -> None:
        """Sealing again would not help."""
        held, token = stood(store, clock, "quarantined")
        store.complete(held.key, token, PAYLOAD, keep=KEEP)

        assert not store.recovery.resolve(held, token=a_token(), payload=SEALED, keep=KEEP)

    def refused(self, store: CapableStore, held: SeenRecord, payload: StoredPayload, *, erased: bool) -> None:
        with pytest.raises(DataKeyMissing) as why:
            store.recovery.resolve(held, token=a_token(), payload=payload, keep=KEEP)
        assert erased is why.value.erased
        assert replace(held.record, remaining=0.0) == replace(found(store, held.key), remaining=0.0)
