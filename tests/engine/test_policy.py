"""What becomes of each way a view can end."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.engine.policy import RELEASED_BY_DEFAULT, Decision, Policy, merge

KEEP, RELEASE, QUARANTINE = Decision.KEEP, Decision.RELEASE, Decision.QUARANTINE


def decide(policy: Policy, status: int, *, error: BaseException | None = None, past_point: bool = False) -> Decision:
    return policy.decision(response=None, status=status, error=error, past_point=past_point)


@pytest.mark.parametrize("effects", ["plain", "marked", "deduplicated", "transactional"])
@pytest.mark.parametrize("status", range(200, 600))
def test_p45_default_outcome_of_every_status(status: int, effects: str) -> None:
    """A status that says that nothing happened releases, a final one is kept. The other 5xx do not say how far it came."""
    unknown = QUARANTINE if effects == "plain" else RELEASE
    refused = {307, 308, 401, 403, 407, 408, 409, 419, 421, 425, 429, 501, 503}
    expected = RELEASE if status in refused else unknown if status >= 500 else KEEP

    assert expected == decide(merge(Policy(), {"effects": effects}), status)


@pytest.mark.parametrize(
    ("effects", "expected"),
    [("plain", QUARANTINE), ("marked", RELEASE), ("deduplicated", RELEASE), ("transactional", RELEASE)],
)
@pytest.mark.parametrize("status", [200, 500, 503])
def test_effects_decide_what_an_unhandled_exception_leaves(effects: str, expected: Decision, status: int) -> None:
    """Whatever page the application shows for it: that was not the view's word."""
    assert expected == decide(merge(Policy(), {"effects": effects}), status, error=ValueError())


@pytest.mark.parametrize("effects", ["plain", "deduplicated"])
@pytest.mark.parametrize("on_error", ["release", "keep", "quarantine"])
def test_p47_on_error_decides_for_exceptions_and_for_5xx(on_error: str, effects: str) -> None:
    """Written out it comes before `effects`, and an unhandled exception and a 5xx that the view chose are treated alike."""
    policy = merge(Policy(), {"on_error": on_error, "effects": effects})

    assert Decision(on_error) == decide(policy, 500, error=ValueError())
    assert Decision(on_error) == decide(policy, 503)
    assert Decision(on_error) == decide(policy, 502)


@pytest.mark.parametrize(("named", "expected"), [("keep_statuses", KEEP), ("release_statuses", RELEASE)])
def test_the_status_lists_come_before_on_error(named: str, expected: Decision) -> None:
    """A number is more exact than a class of them."""
    policy = merge(Policy(), {named: frozenset({502}), "on_error": "quarantine"})

    assert expected == decide(policy, 502)
    assert QUARANTINE == decide(policy, 500)


@pytest.mark.parametrize("status", sorted(RELEASED_BY_DEFAULT))
def test_a_status_that_a_hook_put_over_a_success_does_not_say_that_nothing_happened(status: int) -> None:
    """`effects` decide, unless the application has named the status."""

    def overruled(**values: object) -> Decision:
        policy = merge(Policy(), values)
        return policy.decision(response=None, status=status, error=None, past_point=False, overruled=True)

    assert QUARANTINE == overruled()
    assert RELEASE == overruled(effects="deduplicated")
    assert RELEASE == overruled(release_statuses=frozenset({status}))
    assert KEEP == overruled(keep_statuses=frozenset({status}))


@pytest.mark.parametrize("status", [409, 429, 500, 501, 502, 503])
def test_nothing_is_released_past_the_point_of_no_return(status: int) -> None:
    """What would be released is quarantined: the effect may have happened."""
    assert QUARANTINE == decide(Policy(), status, past_point=True)


def test_a_kept_answer_is_kept_past_the_point_of_no_return() -> None:
    """A known answer is better than an unknown outcome."""
    assert KEEP == decide(Policy(), 201, past_point=True)


def test_an_exception_past_the_point_quarantines() -> None:
    """The exception says nothing about whether the effect took place."""
    assert QUARANTINE == decide(Policy(), 500, error=ValueError(), past_point=True)


def test_named_statuses_come_before_the_defaults() -> None:
    """`keep_statuses` and `release_statuses` overrule the table."""
    policy = merge(Policy(), {"keep_statuses": frozenset({429}), "release_statuses": frozenset({402})})

    assert KEEP == decide(policy, 429)
    assert RELEASE == decide(policy, 402)


def test_keep_statuses_do_not_freeze_a_crash() -> None:
    """A 500 that nobody chose is an error, whatever its number; `on_error` decides."""
    policy = merge(Policy(), {"keep_statuses": frozenset({500})})

    assert QUARANTINE == decide(policy, 500, error=ValueError())
    assert KEEP == decide(policy, 500)


def test_decide_comes_first_and_may_decline() -> None:
    """A function may name the decision, or leave it to the rules with None."""
    policy = merge(Policy(), {"decide": lambda response, error: "quarantine" if error else None})

    assert QUARANTINE == decide(policy, 500, error=ValueError())
    assert KEEP == decide(policy, 201)


def test_decide_cannot_release_past_the_point() -> None:
    """The view's word that an effect may have begun outranks a rule written beforehand."""
    policy = merge(Policy(), {"decide": lambda response, error: Decision.RELEASE})

    assert QUARANTINE == decide(policy, 201, past_point=True)


@pytest.mark.parametrize(
    ("effects", "on_abandoned", "expected"),
    [
        ("plain", None, OnExpiry.QUARANTINE),
        ("plain", "takeover", OnExpiry.TAKEOVER),
        ("marked", None, OnExpiry.TAKEOVER),
        ("deduplicated", None, OnExpiry.TAKEOVER),
        ("deduplicated", "quarantine", OnExpiry.QUARANTINE),
    ],
)
def test_effects_decide_what_a_vanished_worker_leaves(
    effects: str, on_abandoned: str | None, expected: OnExpiry
) -> None:
    """A plain effect is taken over only where somebody wrote so in so many words."""
    assert expected == merge(Policy(), {"effects": effects, "on_abandoned": on_abandoned}).on_expiry


def test_the_innermost_layer_that_names_a_value_decides() -> None:
    """app → blueprint → view; what a layer does not name shines through."""
    policy = merge(Policy(), {"keep": 1.0, "lease": 2.0}, {"keep": 3.0}, {"required": True})

    assert (3.0, 2.0, True) == (policy.keep, policy.lease, policy.required)


def test_transactional_effects_are_refused_without_their_store() -> None:
    """The sentence says why, and what to use instead."""
    with pytest.raises(ConfigurationError, match=r"needs a SQL store.*deduplicated"):
        merge(Policy(), {"effects": "transactional"}).check(joint=False)


@pytest.mark.parametrize("values", [{"lease": 0.0}, {"keep": -1.0}, {"lease": 60.0, "max_runtime": 30.0}])
def test_p05_durations_that_cannot_hold_are_refused(values: dict[str, float]) -> None:
    """A lease of nothing would let everybody in."""
    with pytest.raises(ConfigurationError):
        merge(Policy(), values).check(joint=False)
