"""Contract of voiding: a key that no request has used is voided, and none ever runs under it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    VOID,
    VOIDED,
    Callers,
    ClaimRequest,
    Grant,
    Mismatched,
    OtherCaller,
    OverQuota,
    Record,
    State,
    Voided,
)
from flask_idempotency.engine.quota import Quota, Usage
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.testing.contract.stress import ROUNDS, THREADS, at_once
from flask_idempotency.testing.contract.support import (
    FINGERPRINT,
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    PAYLOAD,
    STANDINGS,
    CapableStore,
    Contract,
    Standing,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
    near,
    seen,
    stand,
    walked,
)
from flask_idempotency.testing.doubles import FrozenClock

SCHEDULES = 300


def to_void(key: StorageKey, *, callers: Callers | None = None) -> ClaimRequest:
    return a_request(key, fingerprint=VOIDED, callers=callers)


def voided(store: CapableStore, key: StorageKey, *, keep: float = KEEP) -> Voided:
    """Void a key that must be free, and return the outcome."""
    outcome = store.void(to_void(key), token=a_token(), keep=keep)
    assert isinstance(outcome, Voided)
    return outcome


class VoidContract(Contract):
    """The contract of `flask_idempotency.engine.capabilities.Void`, for a store that has quotas and recovery too."""

    def test_no_request_runs_under_a_voided_key(self, store: CapableStore, clock: FrozenClock) -> None:
        """Whatever its fingerprint, and for as long as it is kept. Then the key is free, and the fence is higher."""
        key = a_key()
        outcome = voided(store, key)
        record = found(store, key)

        assert near(clock.now) == outcome.first_seen
        assert (record.state, record.fingerprint, record.payload) == (State.COMPLETED, VOIDED, VOID)
        assert near(KEEP) == record.remaining
        clock.advance(KEEP - 1)
        for fingerprint in (FINGERPRINT, OTHER_FINGERPRINT):
            request = a_request(key, fingerprint=fingerprint)
            assert outcome == store.claim(request, token=a_token(), lease=LEASE)
        clock.advance(2)
        assert store.read(key) is None
        assert granted(store.claim(a_request(key), token=a_token(), lease=LEASE)).fence > record.fence

    def test_a_voided_key_is_voided_again_without_a_change(self, store: CapableStore, clock: FrozenClock) -> None:
        """Under the same token, as after a lost reply, and under another one."""
        key, token = a_key(), a_token()
        first = store.void(to_void(key), token=token, keep=KEEP)
        record = found(store, key)
        clock.advance(5)

        assert [first] * 2 == [store.void(to_void(key), token=each, keep=2 * KEEP) for each in (token, a_token())]
        assert replace(record, remaining=record.remaining - 5) == replace(
            found(store, key), remaining=record.remaining - 5
        )

    @for_each("standing", STANDINGS)
    def test_a_key_with_a_record_is_not_voided(
        self, store: CapableStore, clock: FrozenClock, standing: Standing
    ) -> None:
        """Its record stays as it is, and so does the right of its worker."""
        key = a_key()
        first_seen = clock.now
        token = stand(store, clock, key, standing)
        before = found(store, key)

        outcome = store.void(to_void(key), token=a_token(), keep=KEEP)
        assert (Mismatched(near(first_seen)), before) == (outcome, found(store, key))
        store.complete(key, token, PAYLOAD, keep=KEEP)
        assert found(store, key).payload == PAYLOAD

    def test_a_key_that_is_free_again_is_voided(self, store: CapableStore, clock: FrozenClock) -> None:
        """After a release, and after its response has expired. The fence rises."""
        released, expired = a_key(), a_key()
        token = stand(store, clock, released, "in flight")
        fences = [found(store, released).fence]
        store.release(released, token)
        stand(store, clock, expired, "completed")
        fences.append(found(store, expired).fence)
        clock.advance(KEEP + 1)

        for key, fence in zip((released, expired), fences, strict=True):
            voided(store, key)
            assert found(store, key).fence > fence
            assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Voided)

    def test_the_key_of_another_caller_is_left_alone(self, store: CapableStore) -> None:
        """Whether that caller voided it or used it. A record of the caller itself is found."""
        mine, others = (Callers(shown=frozenset({(tenant, "alice")})) for tenant in ("acme", "globex"))
        key, used = a_key(), a_key()
        store.void(to_void(key, callers=mine), token=a_token(), keep=KEEP)
        granted(store.claim(a_request(used), token=a_token(), lease=LEASE))

        for each in (key, used):
            assert isinstance(store.void(to_void(each, callers=others), token=a_token(), keep=KEEP), OtherCaller)
        assert isinstance(store.void(to_void(key, callers=mine), token=a_token(), keep=KEEP), Voided)
        claims = [a_request(key, callers=callers) for callers in (mine, others)]
        outcomes = [store.claim(each, token=a_token(), lease=LEASE) for each in claims]
        assert [Voided, OtherCaller] == [type(each) for each in outcomes]

    def test_it_counts_as_a_key_of_its_tenant(self, store: CapableStore, clock: FrozenClock) -> None:
        """Until it expires, without a byte. Above the limit nothing is written, and a voided key is still found."""
        first, second = (a_key(tid=a_key().tid) for _ in range(2))
        second = replace(second, tid=first.tid)
        quota = Quota(records=1)

        def void(key: StorageKey) -> object:
            return store.void(to_void(key), token=a_token(), keep=KEEP, quota=quota)

        assert isinstance(void(first), Voided)
        assert (Usage(1, 0, 0), True) == (store.ledger.usage(first.tid), found(store, first).in_quota)
        refused = void(second)
        assert isinstance(refused, OverQuota)
        assert (refused.limit, refused.allowed, store.read(second)) == ("records", 1, None)
        assert isinstance(void(first), Voided)
        assert store.ledger.reconcile(first.tid).none
        clock.advance(found(store, first).remaining + 0.01)
        assert Usage() == store.ledger.usage(first.tid)
        assert isinstance(void(second), Voided)

    def test_an_operator_finds_it_and_frees_it(self, store: CapableStore) -> None:
        """It is among the completed records. By force it is released, and a request runs, with a higher fence."""
        key = a_key()
        voided(store, key)

        fence = found(store, key).fence
        # All pages: a store that others use may return one without a record of this tenant.
        assert [key] == list(walked(store, State.COMPLETED, tid=key.tid))
        assert store.recovery.force_release(seen(store, key))
        assert granted(store.claim(a_request(key), token=a_token(), lease=LEASE)).fence > fence

    def test_of_a_request_and_a_void_one_wins(self, store: CapableStore) -> None:
        """Either the request runs and nothing was voided, or the key is voided and no request runs."""
        for _ in range(ROUNDS):
            key = a_key()

            def claim(key: StorageKey = key) -> StoreOutcome:
                return store.claim(a_request(key), token=a_token(), lease=LEASE)

            def void(key: StorageKey = key) -> StoreOutcome:
                return store.void(to_void(key), token=a_token(), keep=KEEP)

            outcomes = at_once(*[claim, void] * (THREADS // 2))
            runs = sum(isinstance(each, Grant) for each in outcomes)
            assert (runs, sum(isinstance(each, Voided) for each in outcomes)) in ((1, 0), (0, THREADS))

    def test_no_schedule_runs_a_voided_key(self, store: CapableStore, clock: FrozenClock) -> None:
        """Packets of requests and voids come late, twice and in any order, and replies are lost."""
        for seed in range(SCHEDULES):
            run_schedule(store, clock, seed)


def run_schedule(store: CapableStore, clock: FrozenClock, seed: int) -> None:
    """Let a client send, retry and void by a random schedule. Fail if a voided key runs, or if one that ran is voided.

    A packet is a call that the store gets once or twice, immediately or much later. Its reply may be lost. Between them the
    worker that won completes, vanishes or gives its key up.
    """
    choose, key = random.Random(seed), a_key()  # noqa: S311 - a schedule is no secret
    late: list[Callable[[], None]] = []
    runs: list[bytes] = []
    released: set[bytes] = set()
    confirmed = False

    def request(token: bytes) -> None:
        try:
            outcome = store.claim(a_request(key), token=token, lease=LEASE)
        except StoreUnavailable:
            assert token in released, f"schedule {seed}: a packet was refused whose claim was not cancelled"
            return
        if isinstance(outcome, Grant):
            assert not confirmed, f"schedule {seed}: a request ran under a voided key"
            runs.append(token)
        elif isinstance(outcome, Voided):
            assert not runs, f"schedule {seed}: a request was told that its key is voided, and it had run"
        elif isinstance(outcome, Record):
            assert outcome.payload == PAYLOAD

    def void(token: bytes, *, lost: bool) -> None:
        nonlocal confirmed
        outcome = store.void(to_void(key), token=token, keep=KEEP)
        if isinstance(outcome, Voided):
            assert not runs, f"schedule {seed}: a key was voided although its request ran"
            confirmed = confirmed or not lost

    def settle() -> None:
        if runs and (token := runs[-1]) and (record := store.read(key)) is not None and record.token == token:
            if choose.random() < 0.5:
                store.complete(key, token, PAYLOAD, keep=KEEP)
            elif choose.random() < 0.5 and record.payload is None:
                # The view had no effect: nothing ran under this key so far.
                store.release(key, token)
                released.add(token)
                runs.clear()

    for _ in range(choose.randrange(2, 9)):
        action = choose.random()
        if action < 0.4:
            packet = partial(request, a_token())
        elif action < 0.8:
            packet = partial(void, a_token(), lost=choose.random() < 0.3)
        elif action < 0.9:
            packet = partial(settle)
        else:
            clock.advance(LEASE + 1)
            continue
        for _ in range(2 if choose.random() < 0.2 else 1):
            if choose.random() < 0.3:
                late.append(packet)
            else:
                packet()
        if late and choose.random() < 0.3:
            late.pop(choose.randrange(len(late)))()
    while late:
        late.pop(choose.randrange(len(late)))()
