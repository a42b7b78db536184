"""What an endpoint or a consumer may write about its steps."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.policy import Policy, merge
from flask_idempotency.engine.step_rules import Step
from flask_idempotency.settings.consumers import load_consumer_policy
from flask_idempotency.settings.loading import load_override

CHARGE = Step("charge")


def load(**values: Any) -> Policy:
    return merge(Policy(), load_override(values, where="@idempotent"))


def test_steps_imply_their_effects() -> None:
    assert "steps" == load(steps=(CHARGE,)).effects == load_consumer_policy({"steps": (CHARGE,)}, where="x").effects


def test_without_steps_the_effects_stay_plain() -> None:
    assert ("plain", ()) == (load().effects, load().steps)
    assert "plain" == load(steps=()).effects


@pytest.mark.parametrize(
    "written",
    (CHARGE, "charge", [CHARGE], ("charge",), SimpleNamespace(step=CHARGE)),
    ids=lambda each: type(each).__name__,
)
def test_a_step_is_written_as_a_function_a_step_or_a_name(written: Any) -> None:
    assert (CHARGE,) == load(steps=written).steps


def test_other_values_are_no_steps() -> None:
    def undecorated() -> None:
        """A function without `@durable_step`."""

    with pytest.raises(ConfigurationError, match=r"@idempotent: steps: must list .*undecorated is none of them"):
        load(steps=[undecorated])


def test_a_name_that_no_step_may_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="steps: the step name 'a b' must be"):
        load(steps=["a b"])


def test_other_options_about_steps_are_read() -> None:
    policy = load(steps=["pay"], dropped_steps="quote", steps_in_any_order=True, resume_within=timedelta(hours=2))

    assert (frozenset({"quote"}), True, 7200.0) == (
        policy.dropped_steps,
        policy.steps_in_any_order,
        policy.resume_within,
    )


@pytest.mark.parametrize(
    ("values", "fault"),
    (
        ({"effects": "plain"}, 'steps= and effects="plain" exclude each other'),
        ({"effects": "transactional"}, "exclude each other"),
        ({"on_abandoned": "takeover"}, "on_abandoned exclude each other"),
        ({"steps": ["charge", "charge"]}, "lists 'charge' twice"),
        ({"dropped_steps": ["charge"]}, "dropped_steps names 'charge'"),
        ({"steps": [], "effects": "steps"}, "needs steps="),
    ),
)
def test_what_contradicts_steps_is_refused_in_a_sentence(values: dict[str, Any], fault: str) -> None:
    written = {"steps": ["charge"], **values}

    assert any(fault in each for each in load(**written).faults(joint=True))
    with pytest.raises(ConfigurationError, match=fault):
        load_consumer_policy(written, where="inbox('x')")


def test_a_store_without_journals_refuses_steps() -> None:
    (fault,) = load(steps=["charge"]).faults(joint=True, journals=False)

    assert "needs a store that remembers steps" in fault
    assert [] == load(steps=["charge"]).faults(joint=True, journals=True)


@pytest.mark.parametrize("seconds", (0, -1, float("inf"), "1 h"))
def test_resume_within_is_a_duration(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="resume_within"):
        load(steps=["charge"], resume_within=seconds)
