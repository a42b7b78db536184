"""Contract of data keys: adding, disabling, deleting and shredding them, with sealed records."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis.stateful import rule

from flask_idempotency.engine.capabilities import DataKey, SeenRecord
from flask_idempotency.engine.errors import DataKeyMissing
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, Record, SealedBy, State, StoredPayload
from flask_idempotency.engine.quota import Drift, Usage
from flask_idempotency.testing.contract.quota import EXTRA, OfTenant, Tenant
from flask_idempotency.testing.contract.stress import (
    RECOUNT_EXAMPLES,
    RECOUNT_STEPS,
    LedgerMachine,
    at_once,
    keys,
    recount_durations,
    run,
    sizes,
)
from flask_idempotency.testing.contract.support import (
    KEEP,
    KID,
    LEASE,
    OTHER_PAYLOAD,
    PAYLOAD,
    STANDINGS,
    WRAPPED,
    Contract,
    Kit,
    Quarantined,
    Standing,
    a_token,
    for_each,
    lost,
    near,
)

SEALED = replace(PAYLOAD, sealed_by=SealedBy(KID, 1))
WIPED = replace(PAYLOAD, data=b"", byte_size=0, sealed_by=ERASED)


def replayed(kit: Kit, key: StorageKey) -> Record:
    outcome = kit.ask(key)
    assert isinstance(outcome, Record)
    return outcome


def erased(kit: Kit, key: StorageKey) -> None:
    """Erase the tenant of this key, and give it another data key then."""
    kit.add_data_key(key.tid)
    kit.store.data_keys.shred(key.tid)
    kit.advance(1)
    kit.add_data_key(key.tid, 2)


class DataKeysContract(Contract):
    """The contract of `flask_idempotency.engine.capabilities.DataKeys`. Override `store`."""

    def test_a_data_key_is_returned_unchanged(self, kit: Kit) -> None:
        """All bytes of it, and only for its tenant. Another has none, and has used no number."""
        tid = kit.key().tid

        assert kit.add_data_key(tid)
        shelf, other = kit.store.data_keys.read_keys(tid), kit.store.data_keys.read_keys(kit.key().tid)
        assert ((DataKey(1, KID, WRAPPED),), 1) == (shelf.keys, shelf.last)
        assert (other.keys, other.last) == ((), 0)

    def test_numbers_rise(self, kit: Kit) -> None:
        """The store never reuses a number, with one worker or many."""
        tid = kit.key().tid

        assert [kit.add_data_key(tid, number) for number in (0, 7, 7, 6, 2**30)] == [False, True, False, False, True]
        assert [key.number for key in kit.store.data_keys.read_keys(tid).keys] == [7, 2**30]

    def test_who_has_not_seen_the_last_key_adds_none(self, kit: Kit) -> None:
        """Another process was faster, and its key may serve."""
        tid = kit.key().tid
        seen = kit.store.data_keys.read_keys(tid)
        kit.add_data_key(tid, 7)

        assert not kit.store.data_keys.add(tid, DataKey(9, KID, WRAPPED), store=seen.store, after=seen.last)
        assert kit.store.data_keys.add(tid, DataKey(9, KID, WRAPPED), store=seen.store, after=7)

    def test_of_several_who_add_the_same_number_one_does(self, kit: Kit) -> None:
        """The others look again, and find the key that is there."""
        tid = kit.key().tid
        added = at_once(*[lambda: kit.add_data_key(tid)] * 6)

        assert (added.count(True), len(kit.store.data_keys.read_keys(tid).keys)) == (1, 1)

    def test_the_store_has_an_id_that_does_not_change(self, kit: Kit) -> None:
        """What was wrapped for this store cannot be unwrapped for another; and a key for another is not added here."""
        tid = kit.key().tid
        kit.add_data_key(tid)
        shelf = kit.store.data_keys.read_keys(tid)

        assert (shelf.store, True) == (kit.store.data_keys.read_keys(tid).store, len(shelf.store) >= 8)
        assert not kit.store.data_keys.add(tid, DataKey(2, KID, WRAPPED), store=shelf.store + b"x", after=1)

    def test_a_closed_key_opens_and_seals_no_more(self, kit: Kit) -> None:
        """The store returns the time of the change, and the worker seals with another key."""
        key, token = kit.begin()
        kit.add_data_key(key.tid), kit.add_data_key(key.tid, 2)
        kit.store.data_keys.disable(key.tid, 1)
        kit.advance(10)
        for number in (1, 7):
            kit.store.data_keys.disable(key.tid, number)
        with pytest.raises(DataKeyMissing) as refused:
            kit.store.complete(key, token, SEALED, keep=KEEP)
        closed, still_open = kit.store.data_keys.read_keys(key.tid).keys

        assert (refused.value.erased, still_open.closed_for) == (False, None)
        assert (1, near(10), WRAPPED) == (closed.number, closed.closed_for, closed.wrapped)
        kit.store.complete(key, token, replace(PAYLOAD, sealed_by=SealedBy(KID, 2)), keep=KEEP)

    def test_keys_under_other_keys_of_the_ring_are_found(self, kit: Kit) -> None:
        """With their tenants, closed or not, so that they can be closed and retired."""
        tid, other, kid = kit.key().tid, kit.key().tid, a_token().hex()
        kit.add_data_key(tid, 1, "2025-11"), kit.add_data_key(tid, 2, kid), kit.add_data_key(other, 1, "2025-11")
        kit.store.data_keys.disable(other, 1)
        kit.advance(5)
        found_here = {
            tenant: key for tenant, key in kit.store.data_keys.wrapped_by_other(kid) if tenant in (tid, other)
        }

        assert {tid: DataKey(1, "2025-11", WRAPPED)} == {tid: found_here.pop(tid)}
        assert (1, near(5)) == (found_here[other].number, found_here[other].closed_for)
        assert [key.number for tenant, key in kit.store.data_keys.wrapped_by_other("2025-11") if tenant == tid] == [2]

    def test_some_keys_under_a_key_of_the_ring_are_found(self, kit: Kit) -> None:
        """So that an operator learns whether the ring opens them."""
        tids, kid = [kit.key().tid for _ in range(3)], a_token().hex()
        for tid in tids:
            kit.add_data_key(tid, 1, "2025-11"), kit.add_data_key(tid, 2, kid)
        every, some = (kit.store.data_keys.sample(kid, limit=limit) for limit in (9, 2))

        assert sorted(tids) == sorted(tid for tid, _ in every)
        assert {DataKey(2, kid, WRAPPED)} == {key for _, key in every}
        assert (len(some), {*some} <= {*every}) == (2, True)
        assert list(kit.store.data_keys.sample(a_token().hex(), limit=9)) == []

    def test_a_retired_key_is_gone_and_its_number_is_not_given_again(self, kit: Kit) -> None:
        """Harmless when repeated, and for a number that never was. One that may still seal is not retired."""
        tid = kit.key().tid
        kit.add_data_key(tid)
        kit.store.data_keys.delete(tid, 1)
        assert [key.number for key in kit.store.data_keys.read_keys(tid).keys] == [1]
        kit.store.data_keys.disable(tid, 1)
        for number in (1, 1, 7):
            kit.store.data_keys.delete(tid, number)

        assert (kit.store.data_keys.read_keys(tid).keys, kit.store.data_keys.read_keys(tid).last) == ((), 1)
        assert [kit.add_data_key(tid, number) for number in (1, 2)] == [False, True]

    def test_an_answer_is_stored_while_its_data_key_is_there(self, kit: Kit) -> None:
        """With the id and number of the key that opens it."""
        key = kit.key()
        kit.add_data_key(key.tid)
        kit.complete(key, SEALED)

        assert (replayed(kit, key).payload, replayed(kit, key).erased) == (SEALED, False)

    def test_a_response_without_its_data_key_is_not_stored(self, kit: Kit) -> None:
        """After a data loss, no key could open the response. The worker seals it again under a new key."""
        key, token = kit.begin()
        before = kit.found(key)
        with pytest.raises(DataKeyMissing) as refused:
            kit.store.complete(key, token, SEALED, keep=KEEP)

        assert (False, before) == (refused.value.erased, kit.found(key))
        kit.add_data_key(key.tid)
        kit.store.complete(key, token, SEALED, keep=KEEP)
        assert replayed(kit, key).payload == SEALED

    def test_a_completion_that_is_repeated_after_its_key_has_gone_is_done(self, kit: Kit) -> None:
        """The first response stays, and its owner must not store it again."""
        key, token = kit.begin()
        kit.add_data_key(key.tid)
        kit.store.complete(key, token, SEALED, keep=KEEP)
        kit.store.data_keys.disable(key.tid, 1)
        kit.store.data_keys.delete(key.tid, 1)
        kit.store.complete(key, token, SEALED, keep=KEEP)

        assert kit.found(key).payload == SEALED

    def test_destroyed_keys_are_gone_and_their_numbers_too(self, kit: Kit) -> None:
        """The call returns how many there were. A second call returns 0."""
        tid = kit.key().tid
        kit.add_data_key(tid), kit.add_data_key(tid, 2)

        assert (kit.store.data_keys.shred(tid), kit.store.data_keys.shred(tid)) == (2, 0)
        assert (kit.store.data_keys.read_keys(tid).keys, kit.store.data_keys.read_keys(tid).last) == ((), 2)

    @for_each("payload", (SEALED, PAYLOAD), ids=("sealed", "plain"))
    def test_responses_of_an_erased_tenant_are_reported_as_erased(self, kit: Kit, payload: StoredPayload) -> None:
        """Every response of the tenant is erased from now on, plain ones too; those of other tenants stay."""
        key, other = kit.key(), kit.key()
        kit.add_data_key(key.tid), kit.add_data_key(other.tid)
        kit.complete(key, payload)
        kit.complete(other, payload)
        kit.store.data_keys.shred(key.tid)

        assert (replayed(kit, key).erased, kit.found(key).erased) == (True, True)
        assert (replayed(kit, other).erased, kit.found(other).erased) == (False, False)

    def test_an_erased_answer_lives_as_long_as_it_would_have(self, kit: Kit) -> None:
        """Its key never runs again until then, and is free afterwards."""
        key = kit.key()
        kit.add_data_key(key.tid)
        kit.complete(key, SEALED)
        kit.store.data_keys.shred(key.tid)
        kit.advance(KEEP - 0.125)
        assert replayed(kit, key).erased
        kit.advance(0.125)

        kit.granted(key)

    @for_each("standing", ("in flight", "quarantined", "lapsed, takeover"))
    def test_a_late_worker_cannot_bring_back_an_erased_tenant(self, kit: Kit, standing: Standing) -> None:
        """Neither the old key nor a new one seals it. The record may still show that the request completed."""
        key, token = kit.placed(standing)
        erased(kit, key)
        for number in (1, 2):
            with pytest.raises(DataKeyMissing) as refused:
                kit.store.complete(key, token, replace(PAYLOAD, sealed_by=SealedBy(KID, number)), keep=KEEP)
            assert refused.value.erased
        kit.store.complete(key, token, WIPED, keep=KEEP)

        assert State.COMPLETED is kit.found(key).state

    def test_an_erased_tenant_may_come_back(self, kit: Kit) -> None:
        """With keys and responses that were not used before."""
        key = kit.key()
        erased(kit, key)
        payload = replace(PAYLOAD, sealed_by=SealedBy(KID, 2))
        kit.complete(key, payload)

        assert (payload, False) == (replayed(kit, key).payload, replayed(kit, key).erased)

    def test_a_lost_lease_precedes_any_key_error(self, kit: Kit) -> None:
        """Another token, or an absent record: sealing again would not help."""
        key, _ = kit.placed("in flight")
        assert lost(lambda: kit.store.complete(key, a_token(), SEALED, keep=KEEP))
        assert lost(lambda: kit.store.complete(kit.key(), a_token(), SEALED, keep=KEEP))

    def test_data_keys_are_counted_by_the_key_of_the_ring(self, kit: Kit) -> None:
        """This count tells an operator when a key of the ring may go."""
        tid, kid = kit.key().tid, a_token().hex()
        kit.add_data_key(tid, 1, kid), kit.add_data_key(tid, 2, kid)
        other = kit.key().tid
        kit.add_data_key(other, 1, kid)

        assert kit.store.data_keys.count()[kid] == 3
        kit.store.data_keys.shred(other)
        assert kit.store.data_keys.count()[kid] == 2


# What others than owners do to records is counted, and is sealed with keys that are there.


class SettledLedger(OfTenant):
    """The ledger is right after `quarantine_expired`, `resolve` and `force_release`."""

    def lapsed(self, tenant: Tenant) -> SeenRecord:
        key, _ = tenant.begin()
        tenant.advance(LEASE)
        return tenant.seen(key)

    def test_a_quarantine_by_a_janitor_changes_no_count(self, tenant: Tenant) -> None:
        """The place in flight was free when the lease ended; the record is there as before."""
        lapsed = self.lapsed(tenant)
        assert Usage(1, 0, 0) == tenant.usage
        assert tenant.store.recovery.quarantine_expired(lapsed, horizon=tenant.now)

        assert (Usage(1, 0, 0), Drift()) == (tenant.usage, tenant.drift)

    def test_a_resolved_response_is_counted_as_its_owners(self, tenant: Tenant) -> None:
        """With its bytes, once, from now to its expiry; and it lives a little longer."""
        (reaped, _), token = tenant.stood("reaped"), a_token()
        for _ in range(2):
            assert tenant.resolve(reaped, token=token)

        assert (Usage(1, PAYLOAD.byte_size, 0), Drift()) == (tenant.usage, tenant.drift)
        remaining = tenant.found(reaped.key).remaining
        assert KEEP <= remaining <= KEEP + EXTRA + 0.002
        tenant.advance(remaining + 0.01)
        assert (Usage(), None) == (tenant.usage, tenant.store.read(reaped.key))

    def test_an_answer_in_the_place_of_a_condemned_one_is_counted(self, tenant: Tenant) -> None:
        """By its own bytes; those of the other were not counted any more."""
        damaged, _ = tenant.stood("condemned")
        assert Usage(1, 0, 0) == tenant.usage
        assert tenant.resolve(damaged, OTHER_PAYLOAD)

        assert (Usage(1, OTHER_PAYLOAD.byte_size, 0), Drift()) == (tenant.usage, tenant.drift)

    @for_each("standing", (*STANDINGS, "condemned"))
    def test_who_is_freed_is_counted_no_more(self, kit: Kit, standing: Standing | Quarantined) -> None:
        """Its record, its bytes and its place in flight are subtracted once."""
        tenant = Tenant(kit)
        tenant.complete()
        stood_so, _ = tenant.stood(standing)

        assert [tenant.store.recovery.force_release(stood_so) for _ in range(2)] == [True, False]
        assert (Usage(1, PAYLOAD.byte_size, 0), Drift()) == (tenant.usage, tenant.drift)

    def test_who_is_refused_counts_nothing(self, tenant: Tenant) -> None:
        """A repeated call does not either."""
        key, token = tenant.begin()
        before = tenant.seen(key)
        tenant.store.complete(key, token, PAYLOAD, keep=KEEP)
        usage = tenant.usage

        assert not tenant.store.recovery.force_release(before)
        assert not tenant.store.recovery.quarantine_expired(before, horizon=tenant.now)
        assert not tenant.resolve(before, OTHER_PAYLOAD)
        assert (usage, Drift()) == (tenant.usage, tenant.drift)

    def test_who_is_not_counted_stays_so(self, kit: Kit) -> None:
        """No count is negative, and the response's expiry is not rounded."""
        tenant = Tenant(kit, quota=None)
        (reaped, _), freed = tenant.stood("reaped"), self.lapsed(tenant)
        assert kit.resolve(reaped)
        assert kit.store.recovery.force_release(freed)

        assert (Usage(), Drift()) == (tenant.usage, tenant.drift)
        assert kit.found(reaped.key).remaining == pytest.approx(KEEP, abs=0.002)

    def test_after_any_sequence_of_settlements_the_ledger_is_a_recount(self, kit: Kit) -> None:
        """In any order, by any worker, with a recent or an old view of the record."""
        run(lambda: SettledMachine(kit), examples=RECOUNT_EXAMPLES, steps=RECOUNT_STEPS)


class SettledMachine(LedgerMachine):
    """Make random calls, in which janitors and operators act on records that they read long ago."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(kit)
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


class SettledSecrets(Contract):
    """`resolve` stores no response that no key opens, and none of an erased tenant."""

    def test_an_answer_by_another_is_sealed_with_a_key_that_is_there(self, kit: Kit) -> None:
        """Otherwise the store keeps the record unchanged."""
        held, _ = kit.stood("quarantined")
        self.refused(kit, held, SEALED, erased=False)
        kit.add_data_key(held.key.tid)

        assert kit.resolve(held, SEALED)
        assert (kit.found(held.key).payload, kit.found(held.key).erased) == (SEALED, False)

    def test_a_closed_key_seals_nothing_by_another_either(self, kit: Kit) -> None:
        """An operator is about to delete it."""
        held, _ = kit.stood("quarantined")
        kit.add_data_key(held.key.tid), kit.add_data_key(held.key.tid, 2)
        kit.store.data_keys.disable(held.key.tid, 1)
        self.refused(kit, held, SEALED, erased=False)

        other = replace(SEALED, sealed_by=SealedBy(KID, 2))
        assert kit.resolve(held, other)

    def test_no_write_restores_an_erased_tenant(self, kit: Kit) -> None:
        """Neither the old key nor a new one seals it. The record may show that the request completed."""
        held, _ = kit.stood("quarantined")
        key = held.key
        erased(kit, key)
        for number in (1, 2):
            self.refused(kit, held, replace(PAYLOAD, sealed_by=SealedBy(KID, number)), erased=True)

        assert kit.resolve(held, WIPED)
        assert State.COMPLETED is kit.found(key).state

    def test_a_repeated_resolution_succeeds_after_its_key_was_deleted(self, kit: Kit) -> None:
        """What was stored first stays."""
        held, _ = kit.stood("quarantined")
        kit.add_data_key(held.key.tid)
        token = a_token()
        assert kit.resolve(held, SEALED, token=token)
        kit.store.data_keys.disable(held.key.tid, 1)
        kit.store.data_keys.delete(held.key.tid, 1)

        assert kit.resolve(held, SEALED, token=token)
        assert kit.found(held.key).payload == SEALED

    def test_a_later_resolver_gets_not_first_before_any_key_error(self, kit: Kit) -> None:
        """Sealing again would not help."""
        held, token = kit.stood("quarantined")
        kit.store.complete(held.key, token, PAYLOAD, keep=KEEP)

        assert not kit.resolve(held, SEALED)

    def refused(self, kit: Kit, held: SeenRecord, payload: StoredPayload, *, erased: bool) -> None:
        with pytest.raises(DataKeyMissing) as why:
            kit.resolve(held, payload)
        assert erased is why.value.erased
        assert replace(held.record, remaining=0.0) == replace(kit.found(held.key), remaining=0.0)
