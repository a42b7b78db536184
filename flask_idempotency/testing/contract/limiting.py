"""Quotas: who is refused, when, and what is never refused."""

from __future__ import annotations

import threading

import pytest

from flask_idempotency.engine.model import Claimed, InFlight, Mismatched, OnLapse, OverQuota, Replayed, Unknown
from flask_idempotency.engine.quota import NewKeys, Quota, Usage
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.counting import EXTRA, LedgerStore, Tenant
from flask_idempotency.testing.contract.examples import (
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    near,
)


class Limiting:
    """Limits are checked in the claim itself, and are for new keys only."""

    @pytest.fixture
    def tenant(self, store: LedgerStore) -> Tenant:
        return Tenant(store)

    @pytest.mark.parametrize(
        ("quota", "limit", "allowed"),
        (
            (Quota(records=2), "records", 2),
            (Quota(in_flight=2), "in-flight", 2),
            (Quota(new_keys=NewKeys(2, 60)), "new-keys", 2),
        ),
        ids=("records", "in flight", "new keys"),
    )
    def test_a_limit_is_reached_and_not_passed(
        self, store: LedgerStore, quota: Quota, limit: str, allowed: int
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

    def test_stored_bytes_are_a_limit_too(self, store: LedgerStore, clock: FrozenClock) -> None:
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

    def test_no_limit_of_zero_lets_anything_in(self, store: LedgerStore) -> None:
        """A tenant that is shut out."""
        for quota in (Quota(records=0), Quota(bytes=0), Quota(in_flight=0), Quota(new_keys=NewKeys(0, 60))):
            assert isinstance(Tenant(store, quota).ask(), OverQuota)

    def test_known_keys_always_pass(self, store: LedgerStore, clock: FrozenClock) -> None:
        """Whoever is over every limit is told what became of its payments, and may finish them."""
        tenant = Tenant(store)
        done = tenant.complete()
        held, token = tenant.claim()
        store.hold(held, token, "why")
        lapsed, _ = tenant.claim(on_lapse=OnLapse.TAKEOVER)
        clock.advance(LEASE)
        flying, owner = tenant.claim()
        tenant.quota = Quota(0, 0, 0, NewKeys(0, 60))
        other = a_request(done, fingerprint=OTHER_FINGERPRINT)

        assert isinstance(tenant.ask(done), Replayed)
        assert isinstance(store.claim(other, token=a_token(), lease=LEASE, quota=tenant.quota), Mismatched)
        assert isinstance(tenant.ask(held), Unknown)
        assert isinstance(tenant.ask(flying), InFlight)
        assert isinstance(tenant.ask(flying, token=owner), Claimed)
        assert isinstance(tenant.ask(lapsed, on_lapse=OnLapse.TAKEOVER), Claimed)
        assert isinstance(tenant.ask(), OverQuota)

    def test_a_key_that_was_released_or_has_expired_is_a_new_one(self, store: LedgerStore, clock: FrozenClock) -> None:
        """Nothing is known of it."""
        tenant = Tenant(store)
        released, token = tenant.claim()
        store.release(released, token)
        expired = tenant.complete()
        clock.advance(KEEP + EXTRA)
        tenant.quota = Quota(records=0)

        assert isinstance(tenant.ask(released), OverQuota)
        assert isinstance(tenant.ask(expired), OverQuota)

    def test_new_keys_are_counted_in_windows_of_the_stores_clock(self, store: LedgerStore, clock: FrozenClock) -> None:
        """Whatever became of them. A new window begins at a multiple of its length."""
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

    def test_windows_of_two_lengths_are_counted_apart(self, store: LedgerStore, clock: FrozenClock) -> None:
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

    def test_who_is_refused_is_told_when_to_come_again(self, store: LedgerStore, clock: FrozenClock) -> None:
        """When a lease ends, or the first answers do; the store cannot know more."""
        flying, full = Tenant(store, Quota(in_flight=1)), Tenant(store, Quota(records=1))
        flying.claim()
        key = full.complete()
        clock.advance(10)
        busy, kept = flying.ask(), full.ask()

        assert isinstance(busy, OverQuota)
        assert isinstance(kept, OverQuota)
        assert near(LEASE - 10) == busy.retry_after
        assert near(found(store, key).remaining) == kept.retry_after

    def test_a_tenants_own_limits_go_first(self, tenant: Tenant, store: LedgerStore) -> None:
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

    def test_of_many_at_once_as_many_are_granted_as_are_allowed(self, store: LedgerStore) -> None:
        """The limit is checked in the claim itself: whoever looks first and writes later lets too many in."""
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
            len([each for each in outcomes if isinstance(each, Claimed)]),
            len([each for each in outcomes if isinstance(each, OverQuota)]),
        ) == (5, 7)
        assert tenant.usage.records == 5
