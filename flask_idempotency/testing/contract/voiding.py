"""Contract of voiding: a key that no request has used is voided, and none ever runs under it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import (
    VOID,
    VOIDED,
    Callers,
    Grant,
    Mismatched,
    OtherCaller,
    OverQuota,
    Record,
    State,
    Voided,
)
from flask_idempotency.engine.quota import Quota, Usage
from flask_idempotency.testing.contract.quota import Tenant
from flask_idempotency.testing.contract.stress import ROUNDS, THREADS, at_once
from flask_idempotency.testing.contract.support import (
    FINGERPRINT,
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    PAYLOAD,
    STANDINGS,
    Contract,
    Kit,
    Standing,
    a_token,
    for_each,
    near,
)

SCHEDULES = 300


class VoidContract(Contract):
    """The contract of `flask_idempotency.engine.capabilities.Void`, for a store that has quotas and recovery too."""

    def test_no_request_runs_under_a_voided_key(self, kit: Kit) -> None:
        """Whatever its fingerprint, and for as long as it is kept. Then the key is free, and the fence is higher."""
        key = kit.key()
        outcome = kit.void(key)
        record = kit.found(key)

        assert Voided(near(kit.now)) == outcome
        assert (record.state, record.fingerprint, record.payload) == (State.COMPLETED, VOIDED, VOID)
        assert near(KEEP) == record.remaining
        kit.advance(KEEP - 1)
        for fingerprint in (FINGERPRINT, OTHER_FINGERPRINT):
            assert outcome == kit.ask(key, fingerprint=fingerprint)
        kit.advance(2)
        assert kit.store.read(key) is None
        assert kit.granted(key).fence > record.fence

    def test_a_voided_key_is_voided_again_without_a_change(self, kit: Kit) -> None:
        """Under the same token, as after a lost reply, and under another one."""
        key, token = kit.key(), a_token()
        first = kit.void(key, token=token)
        record = kit.found(key)
        kit.advance(5)

        assert [first] * 2 == [kit.void(key, token=each, keep=2 * KEEP) for each in (token, a_token())]
        assert record == replace(kit.found(key), remaining=record.remaining)

    @for_each("standing", STANDINGS)
    def test_a_key_with_a_record_is_not_voided(self, kit: Kit, standing: Standing) -> None:
        """Its record stays as it is, and so does the right of its worker."""
        first_seen = kit.now
        key, token = kit.placed(standing)
        before = kit.found(key)

        outcome = kit.void(key)
        assert (Mismatched(near(first_seen)), before) == (outcome, kit.found(key))
        kit.store.complete(key, token, PAYLOAD, keep=KEEP)
        assert kit.found(key).payload == PAYLOAD

    def test_a_key_that_is_free_again_is_voided(self, kit: Kit) -> None:
        """After a release, and after its response has expired. The fence rises."""
        (released, token), expired = kit.begin(), kit.complete()
        fences = [kit.found(key).fence for key in (released, expired)]
        kit.store.release(released, token)
        kit.advance(KEEP + 1)

        for key, fence in zip((released, expired), fences, strict=True):
            assert isinstance(kit.void(key), Voided)
            assert kit.found(key).fence > fence
            assert isinstance(kit.ask(key), Voided)

    def test_the_key_of_another_caller_is_left_alone(self, kit: Kit) -> None:
        """Whether that caller voided it or used it. A record of the caller itself is found."""
        mine, others = (Callers(shown=frozenset({(tenant, "alice")})) for tenant in ("acme", "globex"))
        key, (used, _) = kit.key(), kit.begin()
        kit.void(key, callers=mine)

        for each in (key, used):
            assert isinstance(kit.void(each, callers=others), OtherCaller)
        assert isinstance(kit.void(key, callers=mine), Voided)
        assert [Voided, OtherCaller] == [type(kit.ask(key, callers=callers)) for callers in (mine, others)]

    def test_it_counts_as_a_key_of_its_tenant(self, kit: Kit) -> None:
        """Until it expires, without a byte. Above the limit nothing is written, and a voided key is still found."""
        tenant = Tenant(kit, Quota(records=1))
        first, second = tenant.key(), tenant.key()

        assert isinstance(tenant.void(first), Voided)
        assert (Usage(1, 0, 0), True) == (tenant.usage, tenant.found(first).in_quota)
        refused = tenant.void(second)
        assert isinstance(refused, OverQuota)
        assert (refused.limit, refused.allowed, kit.store.read(second)) == ("records", 1, None)
        assert isinstance(tenant.void(first), Voided)
        assert tenant.drift.none
        kit.advance(tenant.found(first).remaining + 0.01)
        assert Usage() == tenant.usage
        assert isinstance(tenant.void(second), Voided)

    def test_an_operator_finds_it_and_frees_it(self, kit: Kit) -> None:
        """It is among the completed records. By force it is released, and a request runs, with a higher fence."""
        key = kit.key()
        kit.void(key)

        fence = kit.found(key).fence
        # All pages: a store that others use may return one without a record of this tenant.
        assert [key] == list(kit.walked(State.COMPLETED, tid=key.tid))
        assert kit.store.recovery.force_release(kit.seen(key))
        assert kit.granted(key).fence > fence

    def test_of_a_request_and_a_void_one_wins(self, kit: Kit) -> None:
        """Either the request runs and nothing was voided, or the key is voided and no request runs."""
        for _ in range(ROUNDS):
            key = kit.key()
            outcomes = at_once(*[partial(kit.ask, key), partial(kit.void, key)] * (THREADS // 2))
            runs = sum(isinstance(each, Grant) for each in outcomes)
            assert (runs, sum(isinstance(each, Voided) for each in outcomes)) in ((1, 0), (0, THREADS))

    def test_no_schedule_runs_a_voided_key(self, kit: Kit) -> None:
        """Packets of requests and voids come late, twice and in any order, and replies are lost."""
        for seed in range(SCHEDULES):
            run_schedule(kit, seed)


def run_schedule(kit: Kit, seed: int) -> None:
    """Let a client send, retry and void by a random schedule. Fail if a voided key runs, or if one that ran is voided.

    A packet is a call that the store gets once or twice, immediately or much later. Its reply may be lost. Between them the
    worker that won completes, vanishes or gives its key up.
    """
    choose, key = random.Random(seed), kit.key()  # noqa: S311 - a schedule is no secret
    late: list[Callable[[], None]] = []
    runs: list[bytes] = []
    released: set[bytes] = set()
    confirmed = False

    def request(token: bytes) -> None:
        try:
            outcome = kit.ask(key, token=token)
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
        outcome = kit.void(key, token=token)
        if isinstance(outcome, Voided):
            assert not runs, f"schedule {seed}: a key was voided although its request ran"
            confirmed = confirmed or not lost

    def settle() -> None:
        if runs and (token := runs[-1]) and (record := kit.store.read(key)) is not None and record.token == token:
            if choose.random() < 0.5:
                kit.store.complete(key, token, PAYLOAD, keep=KEEP)
            elif choose.random() < 0.5 and record.payload is None:
                # The view had no effect: nothing ran under this key so far.
                kit.store.release(key, token)
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
            kit.advance(LEASE + 1)
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
