"""What becomes of each way a view can end."""

from __future__ import annotations

from enum import Enum
from itertools import product

import pytest

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import Identity, Scope
from flask_idempotency.engine.model import OnExpiry
from flask_idempotency.engine.policy import RELEASED_BY_DEFAULT, Decision, Policy, merge
from tests.decisions import decision_of

KEEP, RELEASE, QUARANTINE = Decision.KEEP, Decision.RELEASE, Decision.QUARANTINE


def decide(policy: Policy, status: int, *, error: BaseException | None = None, past_point: bool = False) -> Decision:
    return decision_of(policy, status=status, error=error, past_point=past_point)


REFUSED = {307, 308, 401, 403, 407, 408, 409, 419, 421, 425, 429, 501, 503}
EFFECTS = ("plain", "marked", "deduplicated", "transactional")


def unknown(effects: str) -> Decision:
    """Return what becomes of a record if the status does not show how far the view came."""
    return QUARANTINE if effects == "plain" else RELEASE


def test_p45_default_outcome_of_every_status() -> None:
    """Release if the status says that nothing happened, keep a final one. Other 5xx do not show how far the view came."""
    wrong = []
    for effects, status in product(EFFECTS, range(200, 600)):
        expected = RELEASE if status in REFUSED else unknown(effects) if status >= 500 else KEEP
        if decide(merge(Policy(), {"effects": effects}), status) is not expected:
            wrong.append((effects, status))

    assert [] == wrong
    assert REFUSED == RELEASED_BY_DEFAULT


@pytest.mark.parametrize("effects", EFFECTS)
def test_effects_decide_what_an_unhandled_exception_leaves(effects: str) -> None:
    policy = merge(Policy(), {"effects": effects})

    assert [unknown(effects)] * 3 == [decide(policy, status, error=ValueError()) for status in (200, 500, 503)]


@pytest.mark.parametrize("on_error", ["release", "keep", "quarantine"])
def test_p47_on_error_decides_for_exceptions_and_for_5xx(on_error: str) -> None:
    for effects in ("plain", "deduplicated"):
        policy = merge(Policy(), {"on_error": on_error, "effects": effects})

        assert Decision(on_error) == decide(policy, 500, error=ValueError())
        assert [Decision(on_error)] * 2 == [decide(policy, status) for status in (502, 503)]


@pytest.mark.parametrize(("named", "expected"), [("keep_statuses", KEEP), ("release_statuses", RELEASE)])
def test_the_status_lists_come_before_on_error(named: str, expected: Decision) -> None:
    policy = merge(Policy(), {named: frozenset({502}), "on_error": "quarantine"})

    assert expected == decide(policy, 502)
    assert QUARANTINE == decide(policy, 500)


def test_a_status_that_a_hook_put_over_a_success_does_not_say_that_nothing_happened() -> None:
    """`effects` decide, unless the application has named the status."""
    status = 503

    def overruled(**values: object) -> Decision:
        policy = merge(Policy(), values)
        return decision_of(policy, status=status, error=None, past_point=False, overruled=True)

    assert QUARANTINE == overruled()
    assert RELEASE == overruled(effects="deduplicated")
    assert RELEASE == overruled(release_statuses=frozenset({status}))
    assert KEEP == overruled(keep_statuses=frozenset({status}))


def test_nothing_is_released_past_the_point_of_no_return() -> None:
    assert [QUARANTINE] * 4 == [decide(Policy(), status, past_point=True) for status in (409, 429, 500, 503)]
    assert QUARANTINE == decide(merge(Policy(), {"effects": "marked"}), 500, error=ValueError(), past_point=True)
    assert QUARANTINE == decide(merge(Policy(), {"decide": lambda response, error: RELEASE}), 201, past_point=True)
    assert KEEP == decide(Policy(), 201, past_point=True)


def test_named_statuses_come_before_the_defaults() -> None:
    policy = merge(Policy(), {"keep_statuses": frozenset({429}), "release_statuses": frozenset({402})})

    assert KEEP == decide(policy, 429)
    assert RELEASE == decide(policy, 402)


def test_keep_statuses_do_not_freeze_a_crash() -> None:
    """A 500 that nobody chose is an error, whatever its number; `on_error` decides."""
    policy = merge(Policy(), {"keep_statuses": frozenset({500})})

    assert QUARANTINE == decide(policy, 500, error=ValueError())
    assert KEEP == decide(policy, 500)


def test_decide_comes_first_and_may_decline() -> None:
    policy = merge(Policy(), {"decide": lambda response, error: "quarantine" if error else None})

    assert QUARANTINE == decide(policy, 500, error=ValueError())
    assert KEEP == decide(policy, 201)


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
    assert expected == merge(Policy(), {"effects": effects, "on_abandoned": on_abandoned}).on_expiry


def test_the_innermost_layer_that_names_a_value_decides() -> None:
    policy = merge(Policy(), {"keep": 1.0, "lease": 2.0}, {"keep": 3.0}, {"required": True})

    assert (3.0, 2.0, True) == (policy.keep, policy.lease, policy.required)


def test_transactional_effects_are_refused_without_their_store() -> None:
    with pytest.raises(ConfigurationError, match=r"needs a SQL store.*deduplicated"):
        merge(Policy(), {"effects": "transactional"}).check(joint=False)


@pytest.mark.parametrize("values", [{"lease": 0.0}, {"keep": -1.0}, {"lease": 60.0, "max_runtime": 30.0}])
def test_p05_durations_that_cannot_hold_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        merge(Policy(), values).check(joint=False)


class Tenant(str, Enum):  # noqa: UP042 - the `str()` of a StrEnum's member is its value
    """What a loader may return."""

    ACME = "acme"


@pytest.mark.parametrize("hashed", [False, True])
def test_a_record_names_its_caller_as_the_loaders_do(hashed: bool) -> None:
    identity = Identity(b"secret")
    scope = Scope("shop", Tenant.ACME, Tenant.ACME)
    (request,) = Policy().claim_requests(
        scope, "k", [identity], [b"print"], method="POST", operation="pay", hashed=hashed, timestamp=None
    )

    name = identity.pseudonym("acme") if hashed else "acme"
    assert (name, name) == (request.info.tenant, request.info.principal)
    assert identity.storage_key(Scope("shop", "acme", "acme"), "k") == request.key
