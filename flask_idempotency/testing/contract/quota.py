"""Contract of quotas: limits that `claim` checks, counts of each tenant, and recounts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, InFlight, Mismatched, OnExpiry, OverQuota, Record, State, Unknown
from flask_idempotency.engine.quota import Drift, NewKeys, Quota, Usage
from flask_idempotency.testing.contract.stress import at_once
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    PAYLOAD,
    Contract,
    Kit,
    a_key,
    a_token,
    for_each,
    near,
)

PLENTY = Quota(records=1_000_000)
EXTRA = KEEP / 32
"""The extra time that a counted response may live."""


class Tenant(Kit):
    """A tenant that has used no key yet, with the calls of its requests."""

    def __init__(self, kit: Kit, quota: Quota | None = PLENTY) -> None:
        super().__init__(kit.store, kit.clock, quota)
        self.tid: bytes = kit.key().tid

    def key(self, tid: bytes | None = None) -> StorageKey:
        return a_key(tid=tid or self.tid)

    def refused(self) -> OverQuota:
        """Claim a new key, which a limit must refuse."""
        outcome = self.ask()
        assert isinstance(outcome, OverQuota)
        return outcome

    @property
    def usage(self) -> Usage:
        return self.store.ledger.usage(self.tid)

    @property
    def drift(self) -> Drift:
        """What a recount finds."""
        return self.store.ledger.reconcile(self.tid)


class OfTenant(Contract):
    """The contract of one tenant with a quota."""

    @pytest.fixture
    def tenant(self, kit: Kit) -> Tenant:
        return Tenant(kit)


class Counting(OfTenant):
    """The ledger counts each record of a tenant with a quota."""

    def test_what_is_claimed_without_a_quota_is_not_counted(self, kit: Kit) -> None:
        """The ledger counts no record of a tenant without a quota, and its expiry is not rounded."""
        tenant = Tenant(kit, quota=None)
        key = tenant.complete()
        tenant.begin()

        assert (Usage(), False) == (tenant.usage, kit.found(key).in_quota)
        assert near(KEEP) == kit.found(key).remaining

    def test_a_record_is_counted_from_claim_to_expiry(self, tenant: Tenant) -> None:
        """In flight while its lease runs, and with its bytes until its response expires.

        The response lives never shorter than requested, and longer by a thirty-second at most.
        """
        assert Usage() == tenant.usage
        key, token = tenant.begin()
        assert (Usage(1, 0, 1), True) == (tenant.usage, tenant.found(key).in_quota)
        tenant.store.complete(key, token, PAYLOAD, keep=KEEP)
        assert Usage(1, PAYLOAD.byte_size, 0) == tenant.usage
        remaining = tenant.found(key).remaining
        assert KEEP <= remaining <= KEEP + EXTRA + 0.002
        tenant.advance(remaining - 0.01)
        assert (Usage(1, PAYLOAD.byte_size, 0), True) == (tenant.usage, isinstance(tenant.ask(key), Record))
        tenant.advance(0.02)
        assert (Usage(), None) == (tenant.usage, tenant.store.read(key))

    def test_a_release_gives_everything_back(self, tenant: Tenant) -> None:
        """Once, however often it is repeated."""
        key, token = tenant.begin()
        tenant.store.release(key, token)
        tenant.store.release(key, token)

        assert Usage() == tenant.usage

    def test_who_vanishes_holds_its_place_for_one_lease(self, tenant: Tenant) -> None:
        """No janitor is needed. The record stays, and stays counted."""
        tenant.begin()
        tenant.advance(LEASE - 0.125)
        assert Usage(1, 0, 1) == tenant.usage
        tenant.advance(0.125)
        assert Usage(1, 0, 0) == tenant.usage

    def test_a_renewed_claim_keeps_its_place(self, tenant: Tenant) -> None:
        """As long as its lease runs, and with each renewal."""
        key, token = tenant.begin()
        tenant.advance(LEASE / 2)
        tenant.store.renew(key, token, lease=LEASE)
        tenant.advance(LEASE - 1)
        assert tenant.usage.in_flight == 1
        tenant.advance(2)
        assert tenant.usage.in_flight == 0

    def test_the_quarantined_are_counted(self, tenant: Tenant) -> None:
        """Quarantined by its owner, after an expired lease, or as corrupt, it counts until it is resolved."""
        held, token = tenant.placed("quarantined")
        tenant.placed("noticed")
        tenant.placed("condemned")

        assert Usage(3, 0, 0) == tenant.usage
        tenant.advance(KEEP * 2)
        assert Usage(3, 0, 0) == tenant.usage
        tenant.store.complete(held, token, PAYLOAD, keep=KEEP)
        assert Usage(3, PAYLOAD.byte_size, 0) == tenant.usage

    def test_who_takes_over_is_not_counted_again(self, tenant: Tenant) -> None:
        """One key is one record, whichever worker owns it. The late worker changes no count."""
        key, late = tenant.begin(on_expiry=OnExpiry.TAKEOVER)
        tenant.advance(LEASE)
        token = a_token()
        tenant.granted(key, token=token, on_expiry=OnExpiry.TAKEOVER)

        assert Usage(1, 0, 1) == tenant.usage
        assert tenant.accepted(key, late, "release", "complete") == []
        assert Usage(1, 0, 1) == tenant.usage
        tenant.store.complete(key, token, PAYLOAD, keep=KEEP)
        assert Usage(1, PAYLOAD.byte_size, 0) == tenant.usage

    def test_what_was_claimed_uncounted_stays_so(self, kit: Kit) -> None:
        """Quotas may be switched on while claims are in flight: what was not counted up is not counted down."""
        tenant = Tenant(kit, quota=None)
        key, _ = tenant.begin(on_expiry=OnExpiry.TAKEOVER)
        kit.advance(LEASE)
        tenant.quota, token = PLENTY, a_token()
        tenant.granted(key, token=token, on_expiry=OnExpiry.TAKEOVER)
        kit.store.complete(key, token, PAYLOAD, keep=KEEP)

        assert (Usage(), False) == (tenant.usage, kit.found(key).in_quota)

    def test_a_repeated_call_counts_once(self, tenant: Tenant) -> None:
        """After a lost reply, a client does not know whether its first call was applied."""
        key, token = tenant.begin()
        tenant.granted(key, token=token)
        assert Usage(1, 0, 1) == tenant.usage
        tenant.store.complete(key, token, PAYLOAD, keep=KEEP)
        tenant.store.complete(key, token, PAYLOAD, keep=KEEP)
        assert Usage(1, PAYLOAD.byte_size, 0) == tenant.usage

    def test_a_key_that_is_used_again_is_counted_again(self, tenant: Tenant) -> None:
        """Its first life is over, whether or not its record is still lying about."""
        key = tenant.complete()
        tenant.advance(KEEP + EXTRA)
        tenant.granted(key)

        assert Usage(1, 0, 1) == tenant.usage

    def test_a_recount_finds_what_the_ledger_says(self, tenant: Tenant) -> None:
        """It is right for every state of a record. `tenants` lists every tenant with a ledger."""
        tenant.complete()
        tenant.advance(KEEP + EXTRA)
        tenant.complete()
        tenant.begin()
        tenant.placed("quarantined")
        tenant.placed("condemned")
        released, token = tenant.begin()
        tenant.store.release(released, token)
        usage = tenant.usage

        assert Usage(4, PAYLOAD.byte_size, 2 - 1) == replace(usage, new_keys=0)
        assert (Drift(), usage) == (tenant.drift, tenant.usage)
        assert tenant.tid in tenant.store.ledger.tenants()
        assert Drift() == tenant.store.ledger.reconcile(a_key().tid)

    def test_no_state_is_left_out(self) -> None:
        """A new one would have to be counted somewhere."""
        assert {"processing", "completed", "quarantined"} == {state.value for state in State}


# Quotas: which claims the store refuses, when, and which it never refuses.


class Limiting(OfTenant):
    """The claim itself checks the limits, for new keys only."""

    @for_each(
        ("quota", "limit", "allowed"),
        (
            (Quota(records=2), "records", 2),
            (Quota(in_flight=2), "in-flight", 2),
            (Quota(new_keys=NewKeys(2, 60)), "new-keys", 2),
        ),
        ids=("records", "in flight", "new keys"),
    )
    def test_a_limit_is_reached_and_not_passed(self, kit: Kit, quota: Quota, limit: str, allowed: int) -> None:
        """As many as are allowed, and not one more. Others have their own."""
        tenant = Tenant(kit, quota)
        first, _ = tenant.begin()
        tenant.begin()
        refused, key = tenant.refused(), kit.key(tenant.tid)

        assert (limit, allowed) == (refused.limit, refused.allowed)
        assert isinstance(tenant.ask(key), OverQuota)
        assert (kit.store.read(key), tenant.usage.records) == (None, 2)
        assert isinstance(tenant.ask(first), InFlight)
        Tenant(kit, quota).granted()

    def test_stored_bytes_are_a_limit_too(self, kit: Kit) -> None:
        """Reached, no new key is granted. What is in flight then is kept all the same: it has been done."""
        tenant = Tenant(kit, Quota(bytes=PAYLOAD.byte_size))
        key, token = tenant.begin()
        tenant.complete()
        refused = tenant.refused()

        assert ("bytes", PAYLOAD.byte_size) == (refused.limit, refused.allowed)
        kit.store.complete(key, token, PAYLOAD, keep=KEEP)
        assert Usage(2, 2 * PAYLOAD.byte_size, 0) == tenant.usage
        kit.advance(KEEP + EXTRA)
        tenant.granted()

    def test_no_limit_of_zero_lets_anything_in(self, kit: Kit) -> None:
        """A tenant that is shut out."""
        for quota in (Quota(records=0), Quota(bytes=0), Quota(in_flight=0), Quota(new_keys=NewKeys(0, 60))):
            Tenant(kit, quota).refused()

    def test_known_keys_always_pass(self, tenant: Tenant) -> None:
        """A tenant over every limit still gets its responses, and may complete its claims."""
        done = tenant.complete()
        held, _ = tenant.placed("quarantined")
        lapsed, _ = tenant.begin(on_expiry=OnExpiry.TAKEOVER)
        tenant.advance(LEASE)
        flying, owner = tenant.begin()
        tenant.quota = Quota(0, 0, 0, NewKeys(0, 60))

        assert isinstance(tenant.ask(done), Record)
        assert isinstance(tenant.ask(done, fingerprint=OTHER_FINGERPRINT), Mismatched)
        assert isinstance(tenant.ask(held), Unknown)
        assert isinstance(tenant.ask(flying), InFlight)
        assert isinstance(tenant.ask(flying, token=owner), Grant)
        assert isinstance(tenant.ask(lapsed, on_expiry=OnExpiry.TAKEOVER), Grant)
        tenant.refused()

    def test_a_key_that_was_released_or_has_expired_is_a_new_one(self, tenant: Tenant) -> None:
        """The store knows no record of it."""
        released, token = tenant.begin()
        tenant.store.release(released, token)
        expired = tenant.complete()
        tenant.advance(KEEP + EXTRA)
        tenant.quota = Quota(records=0)

        assert isinstance(tenant.ask(released), OverQuota)
        assert isinstance(tenant.ask(expired), OverQuota)

    def test_new_keys_are_counted_in_windows_of_the_stores_clock(self, kit: Kit) -> None:
        """They count even if they were released. A new window begins at a multiple of its length."""
        tenant = Tenant(kit, Quota(new_keys=NewKeys(2, 60)))
        kit.advance(60 - kit.now % 60 + 50)
        for _ in range(2):
            key, token = tenant.begin()
            kit.store.release(key, token)
        refused = tenant.refused()

        assert (refused.window, tenant.usage.new_keys) == (60, 2)
        assert near(10) == refused.retry_after
        kit.advance(10)
        assert tenant.usage.new_keys == 0
        tenant.begin()
        assert tenant.usage.new_keys == 1

    def test_windows_of_two_lengths_are_counted_apart(self, tenant: Tenant) -> None:
        """While a setting is rolled out half of the processes have another one: neither limit is passed for it."""
        tenant.advance(60 - tenant.now % 60 + 5)
        for _ in range(2):
            for seconds in (60, 30):
                tenant.quota = Quota(new_keys=NewKeys(2, seconds))
                tenant.begin()

        for seconds in (60, 30):
            tenant.quota = Quota(new_keys=NewKeys(2, seconds))
            tenant.refused()
        assert tenant.usage.new_keys == 2

    def test_a_refused_claim_gets_a_retry_time(self, kit: Kit) -> None:
        """Wait until a lease or the first responses expire: the store cannot know more."""
        flying, full = Tenant(kit, Quota(in_flight=1)), Tenant(kit, Quota(records=1))
        flying.begin()
        key = full.complete()
        kit.advance(10)
        busy, kept = flying.refused(), full.refused()

        assert near(LEASE - 10) == busy.retry_after
        assert near(kit.found(key).remaining) == kept.retry_after

    def test_a_tenants_own_limits_go_first(self, tenant: Tenant) -> None:
        """As an operator has set them, one by one; taken back, it is as before."""
        own = Quota(records=1, new_keys=NewKeys(9, 0.5))
        tenant.quota = Quota(records=5, in_flight=1)
        assert Quota() == tenant.store.ledger.limits(tenant.tid)
        tenant.store.ledger.limit(tenant.tid, own)
        assert own == tenant.store.ledger.limits(tenant.tid)
        key, token = tenant.begin()
        refused = tenant.refused()
        assert (refused.limit, refused.allowed) == ("records", 1)
        tenant.store.ledger.limit(tenant.tid, Quota())
        refused = tenant.refused()
        assert ("in-flight", Quota()) == (refused.limit, tenant.store.ledger.limits(tenant.tid))
        tenant.store.complete(key, token, PAYLOAD, keep=KEEP)
        tenant.granted()

    def test_parallel_claims_do_not_exceed_the_limit(self, kit: Kit) -> None:
        """`claim` itself checks the limit. A separate check before the write would let too many in."""
        tenant = Tenant(kit, Quota(records=5))
        outcomes = Counter(map(type, at_once(*[tenant.ask] * 12)))

        assert (outcomes, tenant.usage.records) == ({Grant: 5, OverQuota: 7}, 5)
