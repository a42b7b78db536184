"""Contract of `remember`: a key whose response has expired is refused, and does not run again."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from flask_idempotency.engine.capabilities import DataKey, Void
from flask_idempotency.engine.errors import LeaseLost
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
from flask_idempotency.testing.contract.support import (
    ABOUT,
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    OTHER_PAYLOAD,
    PAYLOAD,
    CapableStore,
    Contract,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
    near,
    seen,
    walked,
)
from flask_idempotency.testing.doubles import FrozenClock

REMEMBER = 30 * KEEP
PLENTY = Quota(records=1_000_000)
COUNTED = (None, PLENTY)
SHARE = 32
"""A counted record lives for up to this part of its time longer."""


class RemembersContract(Contract):
    """The contract of stores with `capabilities.Capabilities.remembers`.

    Override `store`: it has `recovery`, `expiry` and `ledger`.
    """

    def test_the_response_is_replayed_until_keep(self, store: CapableStore, clock: FrozenClock) -> None:
        """Not a moment less or more than without `remember`, although the record stays for longer."""
        key, _ = completed(store)
        clock.advance(KEEP - 0.01)
        replayed = store.claim(a_request(key), token=a_token(), lease=LEASE)
        assert isinstance(replayed, Record)
        assert (PAYLOAD, near(0.01)) == (replayed.payload, replayed.remaining)
        clock.advance(0.02)

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Expired)

    @for_each("quota", COUNTED, ids=("without a quota", "in a quota"))
    def test_the_same_request_is_expired_and_never_granted_until_the_end(
        self, store: CapableStore, clock: FrozenClock, quota: Quota | None
    ) -> None:
        """Whether the janitor ran or not, with a quota and without. Then the key is free, and its fence rises."""
        key, first = completed(store, quota=quota)
        first_seen = found(store, key).requested_at
        for passed in (KEEP * (1 + 1 / SHARE) + 1, REMEMBER / 2, REMEMBER - 1):
            clock.advance(passed - (clock.now - first_seen))
            outcome = store.claim(a_request(key), token=a_token(), lease=LEASE, quota=quota)
            assert outcome == Expired(near(first_seen))
            store.expiry.sweep(horizon=clock.now, limit=1000)
        clock.advance(2 + REMEMBER / SHARE)

        again = store.claim(a_request(key), token=a_token(), lease=LEASE, quota=quota)
        assert isinstance(again, Grant)
        assert (again.attempt, again.fence > first.fence) == (1, True)
        assert found(store, key).remembered_until is None

    def test_another_request_is_still_another(self, store: CapableStore, clock: FrozenClock) -> None:
        """And another caller is another caller: only the same request learns that it was done."""
        key, _ = completed(store)
        clock.advance(KEEP)
        stranger = Callers(shown=frozenset({("acme", "mallory")}))
        unnamed = Callers(shown=frozenset(), unnamed=frozenset({(ABOUT.tenant, ABOUT.principal)}))
        other = store.claim(a_request(key, fingerprint=OTHER_FINGERPRINT), token=a_token(), lease=LEASE)
        of_other = store.claim(a_request(key, callers=stranger), token=a_token(), lease=LEASE)

        assert isinstance(other, Mismatched)
        assert isinstance(of_other, OtherCaller)
        assert isinstance(store.claim(a_request(key, callers=unnamed), token=a_token(), lease=LEASE), Expired)

    def test_what_is_read_is_a_skeleton(self, store: CapableStore, clock: FrozenClock) -> None:
        """Before the janitor has removed the response, and after. The rest of the record stays."""
        key, _ = completed(store)
        before = found(store, key)
        assert (before.is_skeleton, before.remembered_until) == (False, near(before.requested_at + REMEMBER))
        clock.advance(KEEP + 1)
        after = found(store, key)
        swept(store, clock)

        for record in (after, found(store, key)):
            assert (record.is_skeleton, record.state, record.erased) == (True, State.COMPLETED, False)
            assert (record.payload, record.remaining) == (StoredPayload(b"", 201, True, 0, ERASED), near(-1))
            assert (before.token, before.fence, before.attempt) == (record.token, record.fence, record.attempt)
            assert (before.info, before.fingerprint) == (record.info, record.fingerprint)
            assert (before.requested_at, before.completed_at) == (record.requested_at, record.completed_at)
            assert (before.deadline, before.remembered_until) == (record.deadline, record.remembered_until)

    def test_the_response_goes_in_batches(self, store: CapableStore, clock: FrozenClock) -> None:
        """Each call handles at most `limit` records, and a swept record is no work for the next call."""
        swept(store, clock)
        keys = [completed(store)[0] for _ in range(5)]
        clock.advance(KEEP)
        first = store.expiry.sweep(horizon=clock.now, limit=2)
        swept(store, clock)

        assert (first <= 2, store.expiry.sweep(horizon=clock.now, limit=2)) == (True, 0)
        assert [found(store, key).is_skeleton for key in keys] == [True] * 5

    @for_each("quota", COUNTED, ids=("without a quota", "in a quota"))
    def test_a_sealed_response_goes_with_its_seal(
        self, store: CapableStore, clock: FrozenClock, quota: Quota | None
    ) -> None:
        """What is left needs no data key. A store without data keys has nothing to show."""
        data_keys = capabilities_of(store).data_keys
        if data_keys is None:
            return
        key, token = a_key(), a_token()
        kept = data_keys.read_keys(key.tid)
        assert data_keys.add(key.tid, DataKey(1, "kek", b"wrapped", None), store=kept.store, after=kept.last)
        granted(store.claim(a_request(key), token=token, lease=LEASE, quota=quota))
        sealed = replace(PAYLOAD, sealed_by=SealedBy("kek", 1))
        store.complete(key, token, sealed, keep=KEEP, remember=REMEMBER)
        assert found(store, key).payload == sealed
        clock.advance(2 * KEEP)
        data_keys.shred(key.tid)
        swept(store, clock)

        assert found(store, key).payload == skeleton_of(PAYLOAD)
        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Expired)

    def test_an_early_horizon_removes_no_response(self, store: CapableStore, clock: FrozenClock) -> None:
        """A host whose clock is behind must not end what is replayed there, and one that is ahead no life."""
        key, _ = completed(store)
        clock.advance(KEEP)
        store.expiry.sweep(horizon=clock.now - 1, limit=1000)
        clock.advance(-1)
        store.expiry.sweep(horizon=clock.now + 10, limit=1000)

        replayed = store.claim(a_request(key), token=a_token(), lease=LEASE)
        assert isinstance(replayed, Record)
        assert replayed.payload == PAYLOAD

    def test_the_worker_changes_nothing_any_more(self, store: CapableStore, clock: FrozenClock) -> None:
        """Its late calls are those of a completed record: none of them frees the key or brings a response back."""
        key, grant = completed(store)
        clock.advance(KEEP + 1)
        for _ in range(2):
            before = found(store, key)
            for late in (
                partial(store.complete, payload=OTHER_PAYLOAD, keep=KEEP, remember=REMEMBER),
                store.release,
                partial(store.quarantine, reason="late"),
                store.mark_point_of_no_return,
                partial(store.renew, lease=LEASE),
            ):
                with suppress(LeaseLost):
                    late(key, grant.token)
            store.mark_corrupt(key, PAYLOAD)
            assert before == found(store, key)
            assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Expired)
            swept(store, clock)

    def test_a_damaged_response_is_quarantined_as_ever(self, store: CapableStore, clock: FrozenClock) -> None:
        """Then time does not end the record, and the resolver's policy says how long it is remembered."""
        for remember in (None, 2 * REMEMBER):
            key, _ = completed(store, quota=PLENTY)
            store.mark_corrupt(key, PAYLOAD)
            held = seen(store, key)
            assert (held.record.state, held.record.remembered_until) == (State.QUARANTINED, None)
            assert store.ledger.usage(key.tid) == Usage(1)
            clock.advance(2 * REMEMBER)
            assert store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=KEEP, remember=remember)
            until = found(store, key).remembered_until
            assert until is None if remember is None else until is not None and until > clock.now + remember - 1
            assert store.ledger.reconcile(key.tid) == Drift()

    def test_a_repeated_completion_changes_nothing(self, store: CapableStore, clock: FrozenClock) -> None:
        """Not the response, and not how long it is kept and remembered."""
        key, grant = completed(store)
        before = found(store, key)
        clock.advance(1)
        store.complete(key, grant.token, OTHER_PAYLOAD, keep=2 * KEEP, remember=3 * REMEMBER)
        clock.advance(-1)

        assert before == found(store, key)

    def test_an_equal_remember_is_none(self, store: CapableStore, clock: FrozenClock) -> None:
        """The record is as without it, and its key is free after `keep`."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        store.complete(key, token, PAYLOAD, keep=KEEP, remember=KEEP)
        assert found(store, key).remembered_until is None
        clock.advance(KEEP)

        assert store.read(key) is None
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))

    def test_no_duration_is_valid_that_a_store_cannot_count(self, store: CapableStore) -> None:
        """As for `keep`."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        with pytest.raises(ValueError):  # noqa: PT011 - as for `keep`
            store.complete(key, token, PAYLOAD, keep=KEEP, remember=math.inf)

        assert found(store, key).state is State.PROCESSING

    def test_a_resolved_record_is_remembered_too(self, store: CapableStore, clock: FrozenClock) -> None:
        """A resolver found that it was done."""
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        store.quarantine(key, token, "view-crashed")
        resolved = seen(store, key)
        assert store.recovery.resolve(resolved, token=a_token(), payload=PAYLOAD, keep=KEEP, remember=REMEMBER)
        clock.advance(KEEP + 1)

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Expired)

    @for_each("quota", COUNTED, ids=("without a quota", "in a quota"))
    def test_an_operator_can_free_the_key(self, store: CapableStore, clock: FrozenClock, quota: Quota | None) -> None:
        """By force, as for any completed record, before the janitor ran and after; what it counted is given back."""
        for sweeps in (False, True):
            key, _ = completed(store, quota=quota)
            clock.advance(2 * KEEP)
            if sweeps:
                swept(store, clock)
            assert store.recovery.force_release(seen(store, key))

            assert store.ledger.usage(key.tid) == Usage()
            assert store.ledger.reconcile(key.tid) == Drift()
            granted(store.claim(a_request(key), token=a_token(), lease=LEASE))

    def test_it_is_released_before_its_response_expires(self, store: CapableStore) -> None:
        """Then the quota gets the record and its bytes back, although they end at different times."""
        key, _ = completed(store, quota=PLENTY)
        assert store.ledger.usage(key.tid) == Usage(1, PAYLOAD.byte_size)
        assert store.recovery.force_release(seen(store, key))

        assert (store.ledger.usage(key.tid), store.ledger.reconcile(key.tid)) == (Usage(), Drift())

    def test_it_is_not_voided(self, store: CapableStore, clock: FrozenClock) -> None:
        """The request ran, although its response is gone. A store that cannot void keys has nothing to show."""
        void: Void | None = capabilities_of(store).void
        key, _ = completed(store)
        clock.advance(KEEP + 1)
        before = found(store, key)
        if void is not None:
            request = a_request(key, fingerprint=VOIDED)
            assert isinstance(void(request, token=a_token(), keep=KEEP), Mismatched)

        assert before == found(store, key)

    def test_it_is_listed_among_the_completed(self, store: CapableStore, clock: FrozenClock) -> None:
        """An operator finds what is remembered, without a response."""
        key, _ = completed(store)
        clock.advance(KEEP + 1)
        for _ in range(2):
            listed = walked(store, State.COMPLETED, tid=key.tid)
            assert (list(listed), listed[key].is_skeleton) == ([key], True)
            assert listed[key].payload == skeleton_of(PAYLOAD)
            swept(store, clock)

    def test_a_quota_counts_the_record_and_no_bytes(self, store: CapableStore, clock: FrozenClock) -> None:
        """Its bytes until the response expires, whether the janitor ran or not; the record until the end."""
        key, _ = completed(store, quota=PLENTY)
        usages = list[Usage]()
        for passed in (0, KEEP - 1, 3 + KEEP / SHARE, REMEMBER - KEEP - 6, 6 + REMEMBER / SHARE):
            clock.advance(passed)
            usage = store.ledger.usage(key.tid)
            usages.append(usage)
            assert (store.ledger.reconcile(key.tid), store.ledger.usage(key.tid)) == (Drift(), usage)
            if passed > KEEP:
                swept(store, clock)
                assert (store.ledger.usage(key.tid), store.ledger.reconcile(key.tid)) == (usage, Drift())
        kept = Usage(1, PAYLOAD.byte_size)

        assert usages == [kept, kept, Usage(1), Usage(1), Usage()]

    def test_a_wrong_count_is_corrected(self, store: CapableStore, clock: FrozenClock) -> None:
        """A recount finds the same with and without responses."""
        tid = a_key().tid
        for _ in range(3):
            completed(store, tid=tid, quota=PLENTY)
        clock.advance(2 * KEEP)
        completed(store, tid=tid, quota=PLENTY)
        for _ in range(2):
            assert store.ledger.usage(tid) == Usage(4, PAYLOAD.byte_size)
            assert store.ledger.reconcile(tid) == Drift()
            swept(store, clock)


def completed(store: CapableStore, *, tid: bytes | None = None, quota: Quota | None = None) -> tuple[StorageKey, Grant]:
    """Return a new key whose record is completed, and remembered for longer than its response."""
    key, token = a_key(tid=tid), a_token()
    grant = granted(store.claim(a_request(key), token=token, lease=LEASE, quota=quota))
    store.complete(key, token, PAYLOAD, keep=KEEP, remember=REMEMBER)
    return key, grant


def swept(store: CapableStore, clock: FrozenClock) -> None:
    """Let the janitor remove what has expired."""
    while store.expiry.sweep(horizon=clock.now, limit=1000):
        pass
