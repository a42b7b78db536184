"""A secret is added while a request is paused, so that the janitor finds it under two names: it runs once."""

from __future__ import annotations

from typing import Any

import pytest

from flask_idempotency import current_claim
from flask_idempotency.engine import events
from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.model import State
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.web.janitor import janitor_of
from tests.web.finishing import SECRET, Shop, counts

NEWER = "only-tests-7be21c9f2c47d1e8b35a60c1"
KEYS = tuple(f"key-{number}" for number in range(6))
"""Several, because the order in which the janitor meets two records of one request follows from their names."""
KEEP_SECONDS = 86_400


def another(shop: Shop, *secrets: str, failing: bool, keep: int = KEEP_SECONDS) -> Shop:
    """The shop on a host with these secrets. Its view stops before the charge if it is `failing`."""
    policy = {"keep": keep, "resume_within": 30 * KEEP_SECONDS}
    host = Shop(shop.store, shop.clock, secret=list(secrets), policy=policy)

    def checkout() -> Any:
        current_claim.step("reserve", host.run, "reserve")
        if failing:
            return {}, 503
        return Shop.checkout_after_reserve(host)

    host.failing = False
    host.checkout = checkout  # type: ignore[method-assign]
    return host


def paused_under_both(key: str) -> Shop:
    """The shop on a new host, with a request that stopped under the old secret and, after a retry, under both."""
    first = another(Shop(), SECRET, failing=True)
    assert "paused" == first.post(key).headers["Idempotency-Status"]
    assert "paused" == another(first, NEWER, SECRET, failing=True).post(key).headers["Idempotency-Status"]
    return another(first, NEWER, SECRET, failing=False)


def states(shop: Shop) -> list[State]:
    return [record.state for record in shop.store._shared.records.values()]


def day_by_day(shop: Shop) -> None:
    janitor = janitor_of(shop.app, host_clock=shop.clock)
    for _ in range(30):
        for task in ("finish", "expire"):
            janitor.run(task, Batcher())
        shop.clock.advance(3600)


def test_a_request_that_paused_before_and_after_a_secret_was_added_is_finished_under_both() -> None:
    for key in KEYS:
        shop = paused_under_both(key)
        report = shop.finish()
        assert (1, 0) == (report.completed, report.unreadable)
        assert [State.COMPLETED] * 2 == states(shop)
        assert 1 == len(shop.told(events.FinishTried))
        day_by_day(shop)
        assert {"charge": 1, "mail": 1} == shop.ran
        assert 201 == another(shop, NEWER, failing=False).post(key).status_code


def test_a_record_that_completed_and_expired_is_not_run_again() -> None:
    """A host of before finishes it for its client: under the old name alone, and with a shorter keep."""
    for key in KEYS:
        shop = paused_under_both(key)
        old = another(shop, SECRET, failing=False, keep=7200)
        assert 201 == old.post(key).status_code
        day_by_day(shop)
        assert ({"charge": 1, "mail": 1}, {}) == (old.ran, shop.ran)
        assert [] == shop.told(events.FinishTried)
        granted = shop.told(events.ClaimGranted)
        assert 2 > len(granted), "each claim puts off the end of the record"


def test_a_janitor_that_is_killed_before_it_hands_back_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record that had expired is at its second attempt then, and has no steps."""

    class Killed(BaseException):
        pass

    def die(claim: Claim) -> None:
        raise Killed

    shop = paused_under_both(KEYS[0])
    another(shop, SECRET, failing=False, keep=60).post(KEYS[0])
    shop.clock.advance(7200)
    janitor_of(shop.app, host_clock=shop.clock).run("expire", Batcher())
    with monkeypatch.context() as patched:
        patched.setattr(Claim, "release_unstarted", die)
        patched.setattr(Claim, "release", lambda claim, reason: None)
        with pytest.raises(Killed):
            shop.finish()
    shop.clock.advance(7200)
    assert 1 == shop.finish().overtaken
    assert {} == shop.ran


def test_a_janitor_that_is_killed_hides_no_newer_record_that_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that lists the new secret alone completed it, and it has expired. The older one was put off by replays."""

    class Killed(BaseException):
        pass

    def die(claim: Claim) -> None:
        raise Killed

    for key in KEYS:
        shop = paused_under_both(key)
        assert 201 == another(shop, NEWER, failing=False).post(key).status_code
        shop.clock.advance(KEEP_SECONDS - 3600)
        assert "true" == shop.post(key).headers["Idempotency-Replayed"]
        shop.clock.advance(3601)
        with monkeypatch.context() as patched:
            patched.setattr(Claim, "release_unstarted", die)
            patched.setattr(Claim, "release", lambda claim, reason: None)
            with pytest.raises(Killed):
                shop.finish()
        shop.clock.advance(7200)
        later = another(shop, NEWER, SECRET, failing=False)
        assert not {"completed", "quarantined"} & counts(later.finish()).keys()
        assert ({}, {}) == (shop.ran, later.ran)


def test_a_request_that_stopped_before_the_newest_secret_is_left_to_its_client() -> None:
    """Completed under the old name alone, it would run again once the old secret is no longer listed."""
    first = another(Shop(), SECRET, failing=True)
    first.post()
    shop = another(first, NEWER, SECRET, failing=False)
    assert {"unreadable": 1} == counts(shop.finish())
    assert 201 == shop.post().status_code
    first.clock.advance(KEEP_SECONDS - 1)
    later = another(first, NEWER, failing=False)
    assert ("true", {}) == (later.post().headers["Idempotency-Replayed"], later.ran)


def test_a_host_without_the_newer_secret_leaves_it_to_the_others() -> None:
    for key in KEYS:
        shop = paused_under_both(key)
        old = another(shop, SECRET, failing=False)
        assert "completed" not in counts(old.finish())
        assert {} == old.ran
        assert 1 == shop.finish().completed


def test_no_try_begins_after_keep() -> None:
    """By then the record of another secret may be gone that alone knew how the request ended."""
    shop = another(Shop(), SECRET, failing=True)
    shop.post()
    shop.clock.advance(KEEP_SECONDS)
    assert {"waiting": 1} == counts(another(shop, SECRET, failing=False).finish())


def test_a_request_that_the_janitor_does_not_begin_is_not_renewed() -> None:
    """A renewal would hold it against its client."""
    shop = paused_under_both(KEYS[0])
    store = shop.store
    read = store.journals.read

    def and_then(key: Any) -> Any:
        journal = read(key)
        for found in store.recovery.expired_leases(horizon=shop.clock.now, limit=9).found:
            assert store.recovery.force_release(found)
        return journal

    store.journals.read = and_then  # type: ignore[method-assign]
    assert 1 <= shop.finish().overtaken
    store.journals.read = read  # type: ignore[method-assign]
    renewer: Any = shop.app.extensions["idempotency"].built.engine._deps.renewer
    assert [] == list(renewer._due)
