"""Contract of `remember`: a key whose response has expired is refused, and does not run again."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flask_idempotency.engine.capabilities import Void
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    ERASED,
    VOIDED,
    Callers,
    Expired,
    Grant,
    Mismatched,
    OtherCaller,
    Record,
    SealedBy,
    State,
    StoredPayload,
    skeleton_of,
)
from flask_idempotency.engine.offered import capabilities_of
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.testing.contract.quota import PLENTY, OfTenant, Tenant
from flask_idempotency.testing.contract.support import (
    ABOUT,
    KEEP,
    KID,
    OTHER_FINGERPRINT,
    OTHER_PAYLOAD,
    PAYLOAD,
    Kit,
    a_request,
    a_token,
    for_each,
    lost,
    near,
)

REMEMBER = 30 * KEEP
SHARE = 32
"""A counted record lives for up to this part of its time longer."""


class RemembersContract(OfTenant):
    """The contract of stores with `capabilities.Capabilities.remembers`.

    Override `store`: it has `recovery`, `expiry` and `ledger`.
    """

    def test_the_response_is_replayed_until_keep(self, kit: Kit) -> None:
        """Not a moment less or more than without `remember`, although the record stays for longer."""
        key, _ = completed(kit)
        kit.advance(KEEP - 0.01)
        replayed = kit.ask(key)
        assert isinstance(replayed, Record)
        assert (PAYLOAD, near(0.01)) == (replayed.payload, replayed.remaining)
        kit.advance(0.02)

        assert isinstance(kit.ask(key), Expired)

    @for_each("quota", (None, PLENTY), ids=("without a quota", "in a quota"))
    def test_the_same_request_is_expired_and_never_granted_until_the_end(self, kit: Kit, quota: Quota | None) -> None:
        """Whether the janitor ran or not, with a quota and without. Then the key is free, and its fence rises."""
        tenant = Tenant(kit, quota)
        key, first = completed(tenant)
        first_seen = tenant.found(key).requested_at
        for passed in (KEEP * (1 + 1 / SHARE) + 1, REMEMBER / 2, REMEMBER - 1):
            tenant.advance(passed - (tenant.now - first_seen))
            outcome = tenant.ask(key)
            assert outcome == Expired(near(first_seen))
            tenant.store.expiry.sweep(horizon=tenant.now, limit=1000)
        tenant.advance(2 + REMEMBER / SHARE)

        again = tenant.ask(key)
        assert isinstance(again, Grant)
        assert (again.attempt, again.fence > first.fence) == (1, True)
        assert tenant.found(key).remembered_until is None

    def test_another_request_is_still_another(self, kit: Kit) -> None:
        """And another caller is another caller: only the same request learns that it was done."""
        key, _ = completed(kit)
        kit.advance(KEEP)
        stranger = Callers(shown=frozenset({("acme", "mallory")}))
        unnamed = Callers(shown=frozenset(), unnamed=frozenset({(ABOUT.tenant, ABOUT.principal)}))
        other = kit.ask(key, fingerprint=OTHER_FINGERPRINT)
        of_other = kit.ask(key, callers=stranger)

        assert isinstance(other, Mismatched)
        assert isinstance(of_other, OtherCaller)
        assert isinstance(kit.ask(key, callers=unnamed), Expired)

    def test_what_is_read_is_a_skeleton(self, kit: Kit) -> None:
        """Before the janitor has removed the response, and after. The rest of the record stays."""
        key, _ = completed(kit)
        before = kit.found(key)
        assert (before.is_skeleton, before.remembered_until) == (False, near(before.requested_at + REMEMBER))
        kit.advance(KEEP + 1)
        after = kit.found(key)
        kit.sweep()

        for record in (after, kit.found(key)):
            assert (record.is_skeleton, record.state, record.erased) == (True, State.COMPLETED, False)
            assert (record.payload, record.remaining) == (StoredPayload(b"", 201, True, 0, ERASED), near(-1))
            assert (before.token, before.fence, before.attempt) == (record.token, record.fence, record.attempt)
            assert (before.info, before.fingerprint) == (record.info, record.fingerprint)
            assert (before.requested_at, before.completed_at) == (record.requested_at, record.completed_at)
            assert (before.deadline, before.remembered_until) == (record.deadline, record.remembered_until)

    def test_the_response_goes_in_batches(self, kit: Kit) -> None:
        """Each call handles at most `limit` records, and a swept record is no work for the next call."""
        kit.sweep()
        keys = [completed(kit)[0] for _ in range(5)]
        kit.advance(KEEP)
        first = kit.store.expiry.sweep(horizon=kit.now, limit=2)
        kit.sweep()

        assert (first <= 2, kit.store.expiry.sweep(horizon=kit.now, limit=2)) == (True, 0)
        assert [kit.found(key).is_skeleton for key in keys] == [True] * 5

    @for_each("quota", (None, PLENTY), ids=("without a quota", "in a quota"))
    def test_a_sealed_response_goes_with_its_seal(self, kit: Kit, quota: Quota | None) -> None:
        """What is left needs no data key. A store without data keys has nothing to show."""
        tenant = Tenant(kit, quota)
        data_keys = capabilities_of(tenant.store).data_keys
        if data_keys is None:
            return
        key, token = tenant.begin()
        assert tenant.add_data_key(key.tid)
        sealed = replace(PAYLOAD, sealed_by=SealedBy(KID, 1))
        tenant.store.complete(key, token, sealed, keep=KEEP, remember=REMEMBER)
        assert tenant.found(key).payload == sealed
        tenant.advance(2 * KEEP)
        data_keys.shred(key.tid)
        tenant.sweep()

        assert tenant.found(key).payload == skeleton_of(PAYLOAD)
        assert isinstance(tenant.ask(key), Expired)

    def test_an_early_horizon_removes_no_response(self, kit: Kit) -> None:
        """A host whose clock is behind must not end what is replayed there, and one that is ahead no life."""
        key, _ = completed(kit)
        kit.advance(KEEP)
        kit.store.expiry.sweep(horizon=kit.now - 1, limit=1000)
        kit.advance(-1)
        kit.store.expiry.sweep(horizon=kit.now + 10, limit=1000)

        replayed = kit.ask(key)
        assert isinstance(replayed, Record)
        assert replayed.payload == PAYLOAD

    def test_the_worker_changes_nothing_any_more(self, kit: Kit) -> None:
        """Its late calls are those of a completed record: none of them frees the key or brings a response back."""
        key, grant = completed(kit)
        kit.advance(KEEP + 1)
        for _ in range(2):
            with kit.unchanged(key):
                kit.accepted(key, grant.token)
                lost(lambda: kit.store.complete(key, grant.token, OTHER_PAYLOAD, keep=KEEP, remember=REMEMBER))
                kit.store.mark_corrupt(key, PAYLOAD)
            assert isinstance(kit.ask(key), Expired)
            kit.sweep()

    def test_a_damaged_response_is_quarantined_as_ever(self, kit: Kit) -> None:
        """Then time does not end the record, and the resolver's policy says how long it is remembered."""
        for remember in (None, 2 * REMEMBER):
            tenant = Tenant(kit)
            key, _ = completed(tenant)
            tenant.store.mark_corrupt(key, PAYLOAD)
            held = tenant.seen(key)
            assert (held.record.state, held.record.remembered_until) == (State.QUARANTINED, None)
            assert tenant.usage == Usage(1)
            tenant.advance(2 * REMEMBER)
            assert tenant.store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=KEEP, remember=remember)
            until = tenant.found(key).remembered_until
            assert until is None if remember is None else until is not None and until > tenant.now + remember - 1
            assert tenant.drift == Drift()

    def test_a_repeated_completion_changes_nothing(self, kit: Kit) -> None:
        """Not the response, and not how long it is kept and remembered."""
        key, grant = completed(kit)
        with kit.unchanged(key):
            kit.advance(1)
            kit.store.complete(key, grant.token, OTHER_PAYLOAD, keep=2 * KEEP, remember=3 * REMEMBER)
            kit.advance(-1)

    def test_an_equal_remember_is_none(self, kit: Kit) -> None:
        """The record is as without it, and its key is free after `keep`."""
        key, token = kit.begin()
        kit.store.complete(key, token, PAYLOAD, keep=KEEP, remember=KEEP)
        assert kit.found(key).remembered_until is None
        kit.advance(KEEP)

        assert kit.store.read(key) is None
        kit.granted(key)

    def test_no_duration_is_valid_that_a_store_cannot_count(self, kit: Kit) -> None:
        """As for `keep`."""
        key, token = kit.begin()
        with pytest.raises(ValueError):  # noqa: PT011 - as for `keep`
            kit.store.complete(key, token, PAYLOAD, keep=KEEP, remember=math.inf)

        assert kit.found(key).state is State.PROCESSING

    def test_a_resolved_record_is_remembered_too(self, kit: Kit) -> None:
        """A resolver found that it was done."""
        key, token = kit.begin()
        kit.store.quarantine(key, token, "view-crashed")
        resolved = kit.seen(key)
        assert kit.store.recovery.resolve(resolved, token=a_token(), payload=PAYLOAD, keep=KEEP, remember=REMEMBER)
        kit.advance(KEEP + 1)

        assert isinstance(kit.ask(key), Expired)

    @for_each("quota", (None, PLENTY), ids=("without a quota", "in a quota"))
    @for_each("age", ("kept", "remembered", "swept"))
    def test_an_operator_can_free_the_key(self, kit: Kit, quota: Quota | None, age: str) -> None:
        """By force, as for any completed record; what it counted is given back.

        Before its response expires, too, and after the janitor ran. Its bytes and its record end at different times.
        """
        tenant = Tenant(kit, quota)
        key, _ = completed(tenant)
        if age != "kept":
            tenant.advance(2 * KEEP)
        if age == "swept":
            tenant.sweep()
        assert tenant.store.recovery.force_release(tenant.seen(key))

        assert (tenant.usage, tenant.drift) == (Usage(), Drift())
        tenant.granted(key)

    def test_it_is_not_voided(self, kit: Kit) -> None:
        """The request ran, although its response is gone. A store that cannot void keys has nothing to show."""
        void: Void | None = capabilities_of(kit.store).void
        key, _ = completed(kit)
        kit.advance(KEEP + 1)
        with kit.unchanged(key):
            if void is not None:
                request = a_request(key, fingerprint=VOIDED)
                assert isinstance(void(request, token=a_token(), keep=KEEP), Mismatched)

    def test_it_is_listed_among_the_completed(self, kit: Kit) -> None:
        """An operator finds what is remembered, without a response."""
        key, _ = completed(kit)
        kit.advance(KEEP + 1)
        for _ in range(2):
            listed = kit.walked(State.COMPLETED, tid=key.tid)
            assert (list(listed), listed[key].is_skeleton) == ([key], True)
            assert listed[key].payload == skeleton_of(PAYLOAD)
            kit.sweep()

    def test_a_quota_counts_the_record_and_no_bytes(self, tenant: Tenant) -> None:
        """Its bytes until the response expires, whether the janitor ran or not; the record until the end."""
        completed(tenant)
        usages = list[Usage]()
        for passed in (0, KEEP - 1, 3 + KEEP / SHARE, REMEMBER - KEEP - 6, 6 + REMEMBER / SHARE):
            tenant.advance(passed)
            usage = tenant.usage
            usages.append(usage)
            assert (tenant.drift, tenant.usage) == (Drift(), usage)
            if passed > KEEP:
                tenant.sweep()
                assert (tenant.usage, tenant.drift) == (usage, Drift())
        kept = Usage(1, PAYLOAD.byte_size)

        assert usages == [kept, kept, Usage(1), Usage(1), Usage()]

    def test_a_wrong_count_is_corrected(self, tenant: Tenant) -> None:
        """A recount finds the same with and without responses."""
        for _ in range(3):
            completed(tenant)
        tenant.advance(2 * KEEP)
        completed(tenant)
        for _ in range(2):
            assert tenant.usage == Usage(4, PAYLOAD.byte_size)
            assert tenant.drift == Drift()
            tenant.sweep()


def completed(kit: Kit) -> tuple[StorageKey, Grant]:
    """Return a new key whose record is completed, and remembered for longer than its response."""
    key = kit.key()
    grant = kit.granted(key)
    kit.store.complete(key, grant.token, PAYLOAD, keep=KEEP, remember=REMEMBER)
    return key, grant
