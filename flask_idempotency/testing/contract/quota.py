"""Contract of quotas: limits that `claim` checks, counts of each tenant, and recounts."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, InFlight, Mismatched, OnExpiry, OverQuota, Record, State, Unknown
from flask_idempotency.engine.quota import Drift, NewKeys, Quota, Usage
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    PAYLOAD,
    CapableStore,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
    lost,
    near,
)
from flask_idempotency.testing.doubles import FrozenClock

PLENTY = Quota(records=1_000_000)
EXTRA = KEEP / 32
"""The extra time that a counted response may live."""


class Tenant:
    """A tenant that has used no key yet, with the calls of its requests."""

    def __init__(self, store: CapableStore, quota: Quota | None = PLENTY) -> None:
        self.store: CapableStore = store
        self.quota: Quota | None = quota
        self.tid: bytes = a_key().tid

    def ask(
        self, key: StorageKey | None = None, *, token: bytes = b"", on_expiry: OnExpiry = OnExpiry.QUARANTINE
    ) -> StoreOutcome:
        request = a_request(key or a_key(tid=self.tid), on_expiry=on_expiry)
        return self.store.claim(request, token=token or a_token(), lease=LEASE, quota=self.quota)

    def claim(self, *, on_expiry: OnExpiry = OnExpiry.QUARANTINE) -> tuple[StorageKey, bytes]:
        key, token = a_key(tid=self.tid), a_token()
        granted(self.ask(key, token=token, on_expiry=on_expiry))
        return key, token

    def complete(self) -> StorageKey:
        key, token = self.claim()
        self.store.complete(key, token, PAYLOAD, keep=KEEP)
        return key

    @property
    def usage(self) -> Usage:
        return self.store.ledger.usage(self.tid)


class Counting:
    """The ledger counts each record of a tenant with a quota."""

    @pytest.fixture
    def tenant(self, store: CapableStore) -> Tenant:
        return Tenant(store)

    def test_what_is_claimed_without_a_quota_is_not_counted(self, store: CapableStore) -> None:
        """The ledger counts no record of a tenant without a quota, and its expiry is not rounded."""
        tenant = Tenant(store, quota=None)
        key = tenant.complete()
        tenant.claim()

        assert (Usage(), False) == (tenant.usage, found(store, key).in_quota)
        assert near(KEEP) == found(store, key).remaining

    def test_a_record_is_counted_from_claim_to_expiry(
        self, tenant: Tenant, store: CapableStore, clock: FrozenClock
    ) -> None:
        """It counts as in flight while its lease runs, and its bytes count until the response expires."""
        assert Usage() == tenant.usage
        key, token = tenant.claim()
        assert (Usage(1, 0, 1), True) == (tenant.usage, found(store, key).in_quota)
        store.complete(key, token, PAYLOAD, keep=KEEP)
        assert Usage(1, PAYLOAD.byte_size, 0) == tenant.usage
        clock.advance(KEEP - 1)
        assert Usage(1, PAYLOAD.byte_size, 0) == tenant.usage
        clock.advance(EXTRA + 1)
        assert (Usage(), None) == (tenant.usage, store.read(key))

    def test_a_counted_answer_lives_a_little_longer(
        self, tenant: Tenant, store: CapableStore, clock: FrozenClock
    ) -> None:
        """Never shorter than requested, and by a thirty-second at most. Its count ends when the response expires."""
        key = tenant.complete()
        remaining = found(store, key).remaining

        assert KEEP <= remaining <= KEEP + EXTRA + 0.002
        clock.advance(remaining - 0.01)
        assert (Usage(1, PAYLOAD.byte_size, 0), True) == (tenant.usage, isinstance(tenant.ask(key), Record))
        clock.advance(0.02)
        assert (Usage(), None) == (tenant.usage, store.read(key))

    def test_a_release_gives_everything_back(self, tenant: Tenant, store: CapableStore) -> None:
        """Once, however often it is repeated."""
        key, token = tenant.claim()
        store.release(key, token)
        store.release(key, token)

        assert Usage() == tenant.usage

    def test_who_vanishes_holds_its_place_for_one_lease(
        self, tenant: Tenant, store: CapableStore, clock: FrozenClock
    ) -> None:
        """No janitor is needed. The record stays, and stays counted."""
        tenant.claim()
        clock.advance(LEASE - 0.125)
        assert Usage(1, 0, 1) == tenant.usage
        clock.advance(0.125)
        assert Usage(1, 0, 0) == tenant.usage

    def test_a_renewed_claim_keeps_its_place(self, tenant: Tenant, store: CapableStore, clock: FrozenClock) -> None:
        """As long as its lease runs, and with each renewal."""
        key, token = tenant.claim()
        clock.advance(LEASE / 2)
        store.renew(key, token, lease=LEASE)
        clock.advance(LEASE - 1)
        assert tenant.usage.in_flight == 1
        clock.advance(2)
        assert tenant.usage.in_flight == 0

    def test_the_quarantined_are_counted(self, tenant: Tenant, store: CapableStore, clock: FrozenClock) -> None:
        """Quarantined by its owner, after an expired lease, or as corrupt, it counts until it is resolved."""
        held, token = tenant.claim()
        store.quarantine(held, token, "why")
        lapsed, _ = tenant.claim()
        clock.advance(LEASE)
        tenant.ask(lapsed)
        condemned = tenant.complete()
        store.mark_corrupt(condemned, PAYLOAD)

        assert Usage(3, 0, 0) == tenant.usage
        clock.advance(KEEP * 2)
        assert Usage(3, 0, 0) == tenant.usage
        store.complete(held, token, PAYLOAD, keep=KEEP)
        assert Usage(3, PAYLOAD.byte_size, 0) == tenant.usage

    def test_who_takes_over_is_not_counted_again(self, tenant: Tenant, store: CapableStore, clock: FrozenClock) -> None:
        """One key is one record, whichever worker owns it. The late worker changes no count."""
        key, late = tenant.claim(on_expiry=OnExpiry.TAKEOVER)
        clock.advance(LEASE)
        token = a_token()
        granted(tenant.ask(key, token=token, on_expiry=OnExpiry.TAKEOVER))

        assert Usage(1, 0, 1) == tenant.usage
        for write in (store.release, lambda key, token: store.complete(key, token, PAYLOAD, keep=KEEP)):
            assert lost(partial(write, key, late))
        assert Usage(1, 0, 1) == tenant.usage
        store.complete(key, token, PAYLOAD, keep=KEEP)
        assert Usage(1, PAYLOAD.byte_size, 0) == tenant.usage

    def test_what_was_claimed_uncounted_stays_so(self, store: CapableStore, clock: FrozenClock) -> None:
        """Quotas may be switched on while claims are in flight: what was not counted up is not counted down."""
        tenant = Tenant(store, quota=None)
        key, _ = tenant.claim(on_expiry=OnExpiry.TAKEOVER)
        clock.advance(LEASE)
        tenant.quota, token = PLENTY, a_token()
        granted(tenant.ask(key, token=token, on_expiry=OnExpiry.TAKEOVER))
        store.complete(key, token, PAYLOAD, keep=KEEP)

        assert (Usage(), False) == (tenant.usage, found(store, key).in_quota)

    def test_a_repeated_call_counts_once(self, tenant: Tenant, store: CapableStore) -> None:
        """After a lost reply, a client does not know whether its first call was applied."""
        key, token = tenant.claim()
        granted(tenant.ask(key, token=token))
        assert Usage(1, 0, 1) == tenant.usage
        store.complete(key, token, PAYLOAD, keep=KEEP)
        store.complete(key, token, PAYLOAD, keep=KEEP)
        assert Usage(1, PAYLOAD.byte_size, 0) == tenant.usage

    def test_a_key_that_is_used_again_is_counted_again(
        self, tenant: Tenant, store: CapableStore, clock: FrozenClock
    ) -> None:
        """Its first life is over, whether or not its record is still lying about."""
        key = tenant.complete()
        clock.advance(KEEP + EXTRA)
        granted(tenant.ask(key))

        assert Usage(1, 0, 1) == tenant.usage

    def test_a_recount_finds_what_the_ledger_says(
        self, tenant: Tenant, store: CapableStore, clock: FrozenClock
    ) -> None:
        """It is right for every state of a record. `tenants` lists every tenant with a ledger."""
        tenant.complete()
        clock.advance(KEEP + EXTRA)
        tenant.complete()
        tenant.claim()
        held, token = tenant.claim()
        store.quarantine(held, token, "why")
        store.mark_corrupt(tenant.complete(), PAYLOAD)
        released, token = tenant.claim()
        store.release(released, token)
        usage = tenant.usage

        assert Usage(4, PAYLOAD.byte_size, 2 - 1) == replace(usage, new_keys=0)
        assert (Drift(), usage) == (store.ledger.reconcile(tenant.tid), tenant.usage)
        assert tenant.tid in store.ledger.tenants()
        assert Drift() == store.ledger.reconcile(a_key().tid)

    def test_no_state_is_left_out(self) -> None:
        """A new one would have to be counted somewhere."""
        assert {"processing", "completed", "quarantined"} == {state.value for state in State}


# Quotas: which claims the store refuses, when, and which it never refuses.


class Limiting:
    """The claim itself checks the limits, for new keys only."""

    @pytest.fixture
    def tenant(self, store: CapableStore) -> Tenant:
        return Tenant(store)

    @for_each(
        ("quota", "limit", "allowed"),
        (
            (Quota(records=2), "records", 2),
            (Quota(in_flight=2), "in-flight", 2),
            (Quota(new_keys=NewKeys(2, 60)), "new-keys", 2),
        ),
        ids=("records", "in flight", "new keys"),
    )
    def test_a_limit_is_reached_and_not_passed(
        self, store: CapableStore, quota: Quota, limit: str, allowed: int
    ) -> None:
        """As many as are allowed, and not one more. Others have their own."""
        tenant = Tenant(store, quota)
        first, _ = tenant.claim()
        tenant.claim()
        refused, key = tenant.ask(), a_key(tid=tenant.tid)

        assert isinstance(refused, OverQuota)
        assert (limit, allowed) == (refused.limit, refused.allowed)
        assert isinstance(tenant.ask(key), OverQuota)
        assert (store.read(key), tenant.usage.records) == (None, 2)
        assert isinstance(tenant.ask(first), InFlight)
        granted(Tenant(store, quota).ask())

    def test_stored_bytes_are_a_limit_too(self, store: CapableStore, clock: FrozenClock) -> None:
        """Reached, no new key is granted. What is in flight then is kept all the same: it has been done."""
        tenant = Tenant(store, Quota(bytes=PAYLOAD.byte_size))
        key, token = tenant.claim()
        tenant.complete()
        refused = tenant.ask()

        assert isinstance(refused, OverQuota)
        assert ("bytes", PAYLOAD.byte_size) == (refused.limit, refused.allowed)
        store.complete(key, token, PAYLOAD, keep=KEEP)
        assert Usage(2, 2 * PAYLOAD.byte_size, 0) == tenant.usage
        clock.advance(KEEP + EXTRA)
        granted(tenant.ask())

    def test_no_limit_of_zero_lets_anything_in(self, store: CapableStore) -> None:
        """A tenant that is shut out."""
        for quota in (Quota(records=0), Quota(bytes=0), Quota(in_flight=0), Quota(new_keys=NewKeys(0, 60))):
            assert isinstance(Tenant(store, quota).ask(), OverQuota)

    def test_known_keys_always_pass(self, store: CapableStore, clock: FrozenClock) -> None:
        """A tenant over every limit still gets its responses, and may complete its claims."""
        tenant = Tenant(store)
        done = tenant.complete()
        held, token = tenant.claim()
        store.quarantine(held, token, "why")
        lapsed, _ = tenant.claim(on_expiry=OnExpiry.TAKEOVER)
        clock.advance(LEASE)
        flying, owner = tenant.claim()
        tenant.quota = Quota(0, 0, 0, NewKeys(0, 60))
        other = a_request(done, fingerprint=OTHER_FINGERPRINT)

        assert isinstance(tenant.ask(done), Record)
        assert isinstance(store.claim(other, token=a_token(), lease=LEASE, quota=tenant.quota), Mismatched)
        assert isinstance(tenant.ask(held), Unknown)
        assert isinstance(tenant.ask(flying), InFlight)
        assert isinstance(tenant.ask(flying, token=owner), Grant)
        assert isinstance(tenant.ask(lapsed, on_expiry=OnExpiry.TAKEOVER), Grant)
        assert isinstance(tenant.ask(), OverQuota)

    def test_a_key_that_was_released_or_has_expired_is_a_new_one(self, store: CapableStore, clock: FrozenClock) -> None:
        """The store knows no record of it."""
        tenant = Tenant(store)
        released, token = tenant.claim()
        store.release(released, token)
        expired = tenant.complete()
        clock.advance(KEEP + EXTRA)
        tenant.quota = Quota(records=0)

        assert isinstance(tenant.ask(released), OverQuota)
        assert isinstance(tenant.ask(expired), OverQuota)

    def test_new_keys_are_counted_in_windows_of_the_stores_clock(self, store: CapableStore, clock: FrozenClock) -> None:
        """They count even if they were released. A new window begins at a multiple of its length."""
        tenant = Tenant(store, Quota(new_keys=NewKeys(2, 60)))
        clock.advance(60 - clock.now % 60 + 50)
        for _ in range(2):
            key, token = tenant.claim()
            store.release(key, token)
        refused = tenant.ask()

        assert isinstance(refused, OverQuota)
        assert (refused.window, tenant.usage.new_keys) == (60, 2)
        assert near(10) == refused.retry_after
        clock.advance(10)
        assert tenant.usage.new_keys == 0
        tenant.claim()
        assert tenant.usage.new_keys == 1

    def test_windows_of_two_lengths_are_counted_apart(self, store: CapableStore, clock: FrozenClock) -> None:
        """While a setting is rolled out half of the processes have another one: neither limit is passed for it."""
        tenant = Tenant(store)
        clock.advance(60 - clock.now % 60 + 5)
        for _ in range(2):
            for seconds in (60, 30):
                tenant.quota = Quota(new_keys=NewKeys(2, seconds))
                tenant.claim()

        for seconds in (60, 30):
            tenant.quota = Quota(new_keys=NewKeys(2, seconds))
            assert isinstance(tenant.ask(), OverQuota)
        assert tenant.usage.new_keys == 2

    def test_a_refused_claim_gets_a_retry_time(self, store: CapableStore, clock: FrozenClock) -> None:
        """Wait until a lease or the first responses expire: the store cannot know more."""
        flying, full = Tenant(store, Quota(in_flight=1)), Tenant(store, Quota(records=1))
        flying.claim()
        key = full.complete()
        clock.advance(10)
        busy, kept = flying.ask(), full.ask()

        assert isinstance(busy, OverQuota)
        assert isinstance(kept, OverQuota)
        assert near(LEASE - 10) == busy.retry_after
        assert near(found(store, key).remaining) == kept.retry_after

    def test_a_tenants_own_limits_go_first(self, tenant: Tenant, store: CapableStore) -> None:
        """As an operator has set them, one by one; taken back, it is as before."""
        own = Quota(records=1, new_keys=NewKeys(9, 0.5))
        tenant.quota = Quota(records=5, in_flight=1)
        assert Quota() == store.ledger.limits(tenant.tid)
        store.ledger.limit(tenant.tid, own)
        assert own == store.ledger.limits(tenant.tid)
        key, token = tenant.claim()
        refused = tenant.ask()
        assert isinstance(refused, OverQuota)
        assert (refused.limit, refused.allowed) == ("records", 1)
        store.ledger.limit(tenant.tid, Quota())
        refused = tenant.ask()
        assert isinstance(refused, OverQuota)
        assert ("in-flight", Quota()) == (refused.limit, store.ledger.limits(tenant.tid))
        store.complete(key, token, PAYLOAD, keep=KEEP)
        granted(tenant.ask())

    def test_parallel_claims_do_not_exceed_the_limit(self, store: CapableStore) -> None:
        """`claim` itself checks the limit. A separate check before the write would let too many in."""
        tenant, start, outcomes = Tenant(store, Quota(records=5)), threading.Barrier(12), list[StoreOutcome]()

        def work() -> None:
            start.wait()
            outcomes.append(tenant.ask())

        threads = [threading.Thread(target=work) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert (
            len([each for each in outcomes if isinstance(each, Grant)]),
            len([each for each in outcomes if isinstance(each, OverQuota)]),
        ) == (5, 7)
        assert tenant.usage.records == 5
