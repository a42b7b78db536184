"""A store's clock is set forwards, backwards and back again while somebody works: nothing is paid twice."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import pytest

from flask_idempotency.engine.model import OnExpiry, State
from flask_idempotency.testing.contract.support import PAYLOAD, a_key, a_request, a_token, found, granted
from tests.e2e.till import LEASE, Till
from tests.lab.clock import DAY, HOUR, Place

IN_FLIGHT, UNKNOWN = (409, "in-flight"), (409, "outcome-unknown")

STEPS = {"hour-on": HOUR, "hour-back": -HOUR, "two-days-on": 2 * DAY}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


def clocked(*view: str) -> list[Any]:
    """Return cases of a view: the clock goes forwards and backwards, and comes back or does not."""
    return [
        pytest.param(*view, seconds, name != "two-days-on", id=" ".join((*view, name)))
        for name, seconds in STEPS.items()
    ]


@pytest.fixture
def till(place: Place) -> Till:
    return Till(place.store)


@pytest.fixture
def key() -> str:
    return str(uuid4())


@pytest.mark.parametrize(
    ("path", "at", "step", "comes_back"), (*clocked("/plain", "effect"), clocked("/marked", "point")[0])
)
def test_38_a_view_that_may_not_run_again_does_not(
    place: Place, till: Till, key: str, path: str, at: str, step: float, *, comes_back: bool
) -> None:
    """
    A clock that ends its lease quarantines the key; its owner is believed when it has finished, and never anybody else.
    """
    owner = till.begin(path, key, at=at)
    place.set_ahead(step)
    told = [till.ask(path, key).told]
    till.sweep()
    told.append(till.ask(path, key).told)
    if comes_back:
        place.set_ahead(0)
        till.sweep()
        told.append(till.ask(path, key).told)
    late = owner.finish()
    till.sweep()
    again = till.ask(path, key)

    assert {UNKNOWN if step > 0 else IN_FLIGHT} == set(told)
    assert (201, None, False) == (*late.told, late.replayed)
    assert (201, True, late.body) == (again.status, again.replayed, again.body)
    assert (1, 1) == (len(till.executions), len(till.effects))


@pytest.mark.parametrize(("path", "step", "comes_back"), (*clocked("/deduplicated"), clocked("/marked")[0]))
def test_38_a_view_that_may_run_again_has_its_effect_once(
    place: Place, till: Till, key: str, path: str, step: float, *, comes_back: bool
) -> None:
    """Taken over by a clock, its owner delivers the other's answer; the other side has heard one downstream key."""
    owner = till.begin(path, key)
    place.set_ahead(step)
    till.sweep()
    second = till.ask(path, key)
    if comes_back:
        place.set_ahead(0)
    till.sweep()
    third = till.ask(path, key)
    late = owner.finish()
    again = till.ask(path, key)

    if step > 0:
        assert [(201, False), (201, True)] == [(each.status, each.replayed) for each in (second, third)]
        assert (second.body, second.body) == (late.body, third.body)
        assert 2 == len(till.executions)
    else:
        assert {IN_FLIGHT} == {second.told, third.told}
        assert 1 == len(till.executions)
    assert (201, True, late.body) == (again.status, again.replayed, again.body)
    assert 1 == len(set(till.effects))
    assert path == "/deduplicated" or len(till.effects) == 1
    assert sorted(set(till.fences)) == till.fences


@every_step
def test_38_a_resolver_does_not_free_what_its_owner_still_works_at(
    place: Place, till: Till, key: str, step: float
) -> None:
    """
    By a clock that was set forward the owner is long gone. The other side has not heard of it yet; it will in a moment.
    """
    till.resolve("plain")
    owner = till.begin("/plain", key)
    place.set_ahead(step)
    told = [till.ask("/plain", key).told]
    till.sweep()
    told.append(till.ask("/plain", key).told)
    late = owner.finish()

    assert {UNKNOWN if step > 0 else IN_FLIGHT} == set(told)
    assert (201, None, False) == (*late.told, late.replayed)
    assert (1, 1) == (len(till.executions), len(till.effects))


def test_38_a_resolver_does_not_free_what_was_claimed_while_the_clock_was_behind(
    place: Place, till: Till, key: str
) -> None:
    """
    An hour behind, and then put right: both clocks agree that the lease was over long ago, and its owner is at work.
    """
    till.resolve("plain")
    place.set_ahead(-HOUR)
    owner = till.begin("/plain", key)
    place.set_ahead(0)
    till.ask("/plain", key)
    till.sweep()
    told = till.ask("/plain", key).told
    owner.finish()

    assert UNKNOWN == told
    assert (1, 1) == (len(till.executions), len(till.effects))


def test_38_a_janitor_alone_ends_no_lease_that_a_clock_has_ended(place: Place, till: Till, key: str) -> None:
    """
    It goes by the earlier of two clocks: with nobody asking, nothing happens to a key until the clock is right again.
    """
    owner = till.begin("/plain", key)
    place.set_ahead(2 * DAY)
    till.sweep()
    place.set_ahead(0)

    assert IN_FLIGHT == till.ask("/plain", key).told
    assert 201 == owner.finish().status


@pytest.mark.parametrize("host_step", (DAY, -DAY), ids=("day-on", "day-back"))
def test_39_a_janitor_whose_own_clock_is_wrong_does_no_harm(
    place: Place, till: Till, key: str, host_step: float
) -> None:
    """
    Neither a claim in flight nor an answer is touched by a janitor on a host that is a day ahead, or a day behind.
    """
    answered = till.ask("/plain", str(uuid4()))
    owner = till.begin("/plain", key)
    done = till.sweep(host_clock=lambda: time.time() + host_step)

    assert {"reap", "expire", "heartbeat"} == set(done)
    assert IN_FLIGHT == till.ask("/plain", key).told
    assert (201, 201) == (answered.status, owner.finish().status)
    assert 2 == len(till.effects)


@pytest.mark.parametrize("place", ("sqlite", "postgresql"), indirect=True)
@every_step
def test_40_an_answer_outlives_a_clock_that_comes_back(place: Place, till: Till, key: str, step: float) -> None:
    """
    What only the store's clock has ended is not removed by any janitor, so that it is there when the clock is right again.
    """
    first = till.ask("/plain", key)
    place.set_ahead(step)
    till.sweep()
    place.set_ahead(0)
    till.sweep()
    again = till.ask("/plain", key)

    assert (201, True, first.body) == (again.status, again.replayed, again.body)
    assert 1 == len(till.executions)


def test_40_time_ends_nothing_that_is_not_completed(place: Place) -> None:
    """Claims in flight and quarantined ones are there whatever the clock says, and however often a janitor comes."""
    till, (flying, unknown) = Till(place.store), (a_key(), a_key())
    tokens = {each: a_token() for each in (flying, unknown)}
    for each, token in tokens.items():
        granted(place.store.claim(a_request(each), token=token, lease=LEASE))
    place.store.quarantine(unknown, tokens[unknown], "view-crashed")
    for step in STEPS.values():
        place.set_ahead(step)
        till.sweep()
        till.sweep()

        assert State.PROCESSING is found(place.store, flying).state
        assert State.QUARANTINED is found(place.store, unknown).state
    for each, token in tokens.items():
        place.store.complete(each, token, PAYLOAD, keep=DAY)
        assert State.COMPLETED is found(place.store, each).state


def test_41_fences_rise_whatever_the_clock_says(place: Place) -> None:
    """Over take-overs and releases, with a janitor between them, and also after the clock has come back."""
    key, fences, till = a_key(), [], Till(place.store)
    request = a_request(key, on_expiry=OnExpiry.TAKEOVER)
    for ahead in (0, HOUR, -HOUR, 2 * DAY, 0, -HOUR, 0):
        place.set_ahead(ahead)
        till.sweep()
        token = a_token()
        fences.append(granted(place.store.claim(request, token=token, lease=1.0)).fence)
        if ahead:
            place.store.release(key, token)
        else:
            # Left behind, to be taken over by the next one, which comes an hour later.
            place.set_ahead(ahead + HOUR / 2)
            fences.append(granted(place.store.claim(request, token=(token := a_token()), lease=1.0)).fence)
            place.store.release(key, token)

    assert sorted(set(fences)) == fences


@pytest.mark.parametrize("place", ("sqlite", "postgresql", "memory"), indirect=True)
def test_limit_a_clock_that_has_passed_an_answers_end_lets_the_key_run_again(
    place: Place, till: Till, key: str
) -> None:
    """The limit: what was kept for a day is not there for whoever asks while the store says that two have passed."""
    first = till.ask("/plain", key)
    place.set_ahead(2 * DAY)
    second = till.ask("/plain", key)

    assert [(201, False), (201, False)] == [(each.status, each.replayed) for each in (first, second)]
    assert 2 == len(till.effects)
