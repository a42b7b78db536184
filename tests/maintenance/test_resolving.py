"""Resolvers are asked what became of a key, and are believed as far as they may be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from flask_idempotency.engine.errors import KeyProviderUnavailable, LeaseLost, StoreUnavailable
from flask_idempotency.engine.events import Resolved, ResolverAsked
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, Record, SealContext, State, StoredPayload, StoredResponse
from flask_idempotency.engine.recovery import Happened, NeverHappened, StillUnknown, UnknownOutcome
from flask_idempotency.engine.store import Codec
from flask_idempotency.maintenance.reap import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, ReapReport
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import ABOUT, KEEP, LEASE, PAYLOAD, a_request, a_token, near
from tests.maintenance.yard import PAID, POLICY, Yard, label, still


def raises(error: Exception) -> Callable[[UnknownOutcome], Any]:
    def resolver(unknown: UnknownOutcome) -> Any:
        raise error

    return resolver


def test_happened_gives_retries_its_response(yard: Yard, clock: FrozenClock) -> None:
    key, token = yard.held()
    yard.says = (lambda unknown: Happened(PAID),)

    assert ReapReport(asked=1, completed=1) == yard.reap()
    assert (State.COMPLETED, PAID) == (yard.read(key).state, yard.opened(key))
    assert near(POLICY.keep) == yard.read(key).remaining
    assert isinstance(yard.store.claim(a_request(key), token=a_token(), lease=LEASE), Record)
    assert [
        Resolved(label(key), ABOUT.operation, verb="completed", was="quarantined", actor="resolver", reason="resolved")
    ] == yard.events
    with pytest.raises(LeaseLost):
        yard.store.complete(key, token, PAYLOAD, keep=KEEP)


def test_an_expired_claim_is_quarantined_and_resolved_in_one_run(yard: Yard) -> None:
    yard.vanished()
    yard.says = (lambda unknown: Happened(PAID),)

    assert ReapReport(quarantined=1, asked=1, completed=1) == yard.reap()
    assert ["Reaped", "Resolved"] == yard.told()


def test_never_happened_releases_the_key(yard: Yard, clock: FrozenClock) -> None:
    """
    Its owner has said itself that it is done, and does not know. What it has sent has the rest of its lease to arrive.
    """
    key, _ = yard.held()
    yard.says = (lambda unknown: NeverHappened(),)

    assert ReapReport(asked=1, unknown=1) == yard.reap()
    yard.events.clear()
    clock.advance(max(LEASE, FIRST_PAUSE_SECONDS) + 1)
    assert ReapReport(asked=1, released=1) == yard.reap()
    assert yard.store.read(key) is None
    assert [
        Resolved(label(key), ABOUT.operation, verb="released", was="quarantined", actor="resolver", reason="resolved")
    ] == yard.events


def test_never_happened_releases_no_key_while_its_worker_may_run(yard: Yard, clock: FrozenClock) -> None:
    """
    The other side has not heard of it *yet*: until the longest a view may run, that is no more than still unknown.
    """
    key, _ = yard.vanished()
    yard.says = (lambda unknown: NeverHappened(),)

    assert ReapReport(quarantined=1, asked=1, unknown=1) == yard.reap()
    assert [ResolverAsked(label(key), ABOUT.operation, answer="still-unknown")] == yard.events[1:]
    clock.advance(POLICY.max_runtime - LEASE - 1.5)
    assert ReapReport(asked=1, unknown=1) == yard.reap()
    assert State.QUARANTINED is yard.read(key).state
    clock.advance(POLICY.max_runtime)
    assert ReapReport(asked=1, released=1) == yard.reap()
    assert yard.store.read(key) is None


def test_never_happened_releases_no_expired_claim_at_the_first_call(yard: Yard, clock: FrozenClock) -> None:
    """
    The store's clock was behind when it claimed, and has been set right: by both clocks its lease is long over. It lives,
    and renews before it is asked about again.
    """
    key, token = yard.claim()
    clock.advance(86400)
    yard.says = (lambda unknown: NeverHappened(),)

    assert ReapReport(quarantined=1, asked=1, unknown=1) == yard.reap()
    clock.advance(LAST_PAUSE_SECONDS)
    yard.store.renew(key, token, lease=LEASE)
    assert ReapReport(asked=1, unknown=1) == yard.reap()
    yard.store.complete(key, token, PAYLOAD, keep=KEEP)
    assert PAYLOAD == yard.read(key).payload


def test_a_clock_that_jumps_forward_releases_no_live_claim(yard: Yard, clock: FrozenClock) -> None:
    yard.policy = replace(POLICY, max_runtime=2 * LAST_PAUSE_SECONDS)
    key, _ = yard.claim()
    began = clock.now
    clock.advance(86400)
    yard.store.claim(a_request(key), token=a_token(), lease=LEASE)
    yard.says = (lambda unknown: NeverHappened(),)

    assert ReapReport(asked=1, unknown=1) == yard.reap(horizon=began + 1)
    assert ReapReport(asked=1, unknown=1) == yard.reap(horizon=began + 1 + LAST_PAUSE_SECONDS)
    assert State.QUARANTINED is yard.read(key).state


def test_never_happened_of_completed_work_is_an_error(
    yard: Yard, clock: FrozenClock, caplog: pytest.LogCaptureFixture
) -> None:
    """
    A record that holds an answer, which nobody can open, is proof that the work was done: to run it again would do it
    twice.
    """
    key, token = yard.claim()
    yard.store.complete(key, token, PAYLOAD, keep=KEEP)
    yard.store.mark_corrupt(key, PAYLOAD)
    clock.advance(10 * POLICY.max_runtime)
    yard.says = (lambda unknown: NeverHappened(),)

    assert ReapReport(asked=1, failed=1) == yard.reap()
    assert (State.QUARANTINED, CORRUPT) == (yard.read(key).state, yard.read(key).reason)
    assert [ResolverAsked(label(key), ABOUT.operation, answer="ConfigurationError")] == yard.events
    assert "NeverHappened" in caplog.text


def test_a_resolver_can_replace_a_response_that_cannot_be_opened(yard: Yard) -> None:
    key, token = yard.claim()
    yard.store.complete(key, token, PAYLOAD, keep=KEEP)
    yard.store.mark_corrupt(key, PAYLOAD)
    yard.says = (lambda unknown: Happened(PAID),)

    assert ReapReport(asked=1, completed=1) == yard.reap()
    assert yard.opened(key) == PAID


def test_still_unknown_leaves_the_key_quarantined(yard: Yard) -> None:
    key, _ = yard.held()
    before = yard.read(key)
    yard.says = (lambda unknown: StillUnknown(),)

    assert ReapReport(asked=1, unknown=1) == yard.reap()
    assert before == yard.read(key)
    assert [ResolverAsked(label(key), ABOUT.operation, answer="still-unknown")] == yard.events


@pytest.mark.parametrize(
    ("says", "name"),
    (
        (raises(KeyError("what")), "KeyError"),
        (raises(StoreUnavailable("a store of its own")), "StoreUnavailable"),
        (raises(KeyProviderUnavailable("keys of its own")), "KeyProviderUnavailable"),
        (lambda unknown: None, "TypeError"),
        (lambda unknown: Happened, "TypeError"),
        (lambda unknown: Happened("paid"), "TypeError"),
        (lambda unknown: True, "TypeError"),
    ),
    ids=("raises", "its store is away", "its keys are away", "nothing", "the class", "no result", "nonsense"),
)
def test_a_failed_resolver_leaves_the_key_quarantined(
    yard: Yard, caplog: pytest.LogCaptureFixture, says: Callable[[UnknownOutcome], Any], name: str
) -> None:
    first, _ = yard.held()
    second, _ = yard.held()
    before = yard.read(first)
    yard.says = (says, lambda unknown: Happened(PAID))

    assert ReapReport(asked=2, completed=1, failed=1) == yard.reap()
    assert sorted([State.COMPLETED.value, State.QUARANTINED.value]) == sorted(
        yard.read(key).state.value for key in (first, second)
    )
    assert [name] == [event.answer for event in yard.events if isinstance(event, ResolverAsked)]
    assert ["ERROR"] == [record.levelname for record in caplog.records]
    assert before.token.hex() not in caplog.text


def test_no_log_holds_the_result_of_a_resolver(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    yard.held()
    yard.says = (lambda unknown: "4111 1111 1111 1111",)
    yard.reap()

    assert "4111 1111" not in caplog.text
    assert "4111 1111" not in repr(yard.events)
    assert "str" in caplog.text


class Away:
    """A codec whose keys cannot be had for some."""

    def __init__(self, codec: Codec, key: StorageKey) -> None:
        self._codec, self._key = codec, key

    def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
        if binding.key == self._key:
            raise KeyProviderUnavailable("this tenant's keys are damaged")
        return self._codec.seal(result, binding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)


def test_unusable_data_keys_of_a_tenant_do_not_block_other_keys(yard: Yard) -> None:
    damaged, _ = yard.held()
    others = [yard.held()[0] for _ in range(3)]
    yard.codec = Away(yard.codec, damaged)
    yard.says = (lambda unknown: Happened(PAID),)

    assert ReapReport(asked=4, completed=3, failed=1) == yard.reap()
    assert {State.COMPLETED} == {yard.read(key).state for key in others}
    assert State.QUARANTINED is yard.read(damaged).state


def test_a_resolver_gets_the_record_and_the_downstream_key(yard: Yard) -> None:
    key, _ = yard.held()
    yard.says = (lambda unknown: StillUnknown(),)
    seen = yard.read(key)
    yard.reap()
    (unknown,) = yard.asked

    assert (seen, f"charge of {label(key)}") == (unknown.record, unknown.downstream_key("charge"))
    assert "alice" not in repr(unknown)


def test_endpoints_without_a_resolver_are_skipped(yard: Yard) -> None:
    key, _ = yard.held()
    yard.says = (lambda unknown: Happened(PAID),)
    asking = yard.asking()
    yard.asking = lambda: replace(asking, resolvers={"another": yard.resolver})  # type: ignore[method-assign]

    assert ReapReport() == yard.reap()
    assert (State.QUARANTINED, []) == (yard.read(key).state, yard.events)


def test_the_pauses_between_resolver_calls_double(yard: Yard, clock: FrozenClock) -> None:
    """From the first to the last: a run each minute asks about a key ten times in its first hours, and then hourly."""
    yard.held()
    yard.says = (lambda unknown: StillUnknown(),)
    asked = list[float]()
    for _ in range(6 * 60):
        if yard.reap().asked:
            asked.append(clock.now)
        clock.advance(60)
    pauses = [later - earlier for earlier, later in pairwise(asked)]

    assert (pauses, True) == (sorted(pauses), len(asked) <= 14)
    assert pauses[0] <= FIRST_PAUSE_SECONDS + 60
    assert LAST_PAUSE_SECONDS <= pauses[-1] <= LAST_PAUSE_SECONDS + 60


def test_a_janitor_killed_after_a_resolver_call_costs_one_turn(yard: Yard, clock: FrozenClock) -> None:
    class Killed(BaseException):
        pass

    def killed(unknown: UnknownOutcome) -> Any:
        raise Killed

    key, _ = yard.held()
    before = yard.read(key)
    yard.says = (killed, lambda unknown: Happened(PAID))
    with pytest.raises(Killed):
        yard.reap()

    assert (before, []) == (yard.read(key), yard.events)
    assert ReapReport() == yard.reap()
    clock.advance(FIRST_PAUSE_SECONDS)
    assert ReapReport(asked=1, completed=1) == yard.reap()


@pytest.mark.parametrize("said", (Happened(PAID), NeverHappened()))
def test_a_worker_that_completes_before_the_resolver_wins(yard: Yard, clock: FrozenClock, said: Any) -> None:
    key, token = yard.held()
    clock.advance(LEASE)

    def meanwhile(unknown: UnknownOutcome) -> Any:
        yard.store.complete(key, token, PAYLOAD, keep=KEEP)
        return said

    yard.says = (meanwhile,)

    assert ReapReport(asked=1, overtaken=1) == yard.reap()
    assert (PAYLOAD, []) == (yard.read(key).payload, yard.events)


def test_a_store_failure_while_resolving_ends_the_run(yard: Yard) -> None:
    """It is no resolver's fault, and told as none; but as a settlement that may have been."""
    yard.held()
    store = yard.store

    class Silent:
        def __getattr__(self, name: str) -> Any:
            return getattr(store.recovery, name)

        def resolve(self, *arguments: Any, **options: Any) -> bool:
            raise StoreUnavailable("down")

    yard.says = (lambda unknown: Happened(PAID),)
    yard.store = type("", (), {"recovery": Silent()})()
    with pytest.raises(StoreUnavailable):
        yard.reap(drain=still(10))

    assert [False] == [event.certain for event in yard.events if isinstance(event, Resolved)]
    assert ["Resolved"] == yard.told()
