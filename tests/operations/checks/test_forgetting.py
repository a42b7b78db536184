"""Stores that have forgotten something, and settings under which nobody would notice or survive it."""

from __future__ import annotations

from typing import Any

import pytest

from flask_idempotency.engine.capabilities import DataLossStatus, Verdict
from flask_idempotency.engine.policy import Policy
from flask_idempotency.operations.doctor import Endpoint, after_loss, canary
from tests.operations.checks.judging import worst
from tests.operations.memories import PARTS, Kept, Told, standing

MISSING = standing(missing=PARTS, store_id=None)


@pytest.mark.parametrize(
    ("how", "rule", "verdict"),
    (
        pytest.param(standing(), "refuse", Verdict.FINE, id="fine"),
        pytest.param(standing(acknowledged=PARTS), "refuse", Verdict.FINE, id="acknowledged"),
        pytest.param(MISSING, "refuse", Verdict.FAULT, id="missing"),
        pytest.param(standing(missing=1), "refuse", Verdict.FAULT, id="a part is missing"),
        pytest.param(standing(changed=1), "refuse", Verdict.FAULT, id="changed"),
        pytest.param(standing(foreign=PARTS), "refuse", Verdict.FAULT, id="foreign"),
        pytest.param(standing(changed=1), "hold", Verdict.FAULT, id="changed, held"),
        pytest.param(standing(changed=1, hold=1.0), "hold", Verdict.ADVICE, id="nobody has looked"),
        pytest.param(MISSING, "run", Verdict.FINE, id="whatever it is"),
        pytest.param(standing(foreign=PARTS), "run", Verdict.FAULT, id="but foreign"),
        pytest.param(standing(blind=True), "refuse", Verdict.UNKNOWN, id="not told which process"),
        pytest.param(standing(blind=True, missing=1), "refuse", Verdict.FAULT, id="which hides no other"),
    ),
)
def test_a_store_that_has_forgotten_is_judged_by_whether_new_keys_run(
    how: DataLossStatus, rule: str, verdict: Verdict
) -> None:
    assert verdict is worst(canary(Kept(how, Told(after_loss=rule))))


@pytest.mark.parametrize(
    ("rules", "lenient", "verdict"),
    (
        pytest.param({}, False, Verdict.FINE, id="named, and held for longer than a lease"),
        pytest.param({"store_id": None}, False, Verdict.ADVICE, id="any store will do"),
        pytest.param({"after_loss": "run"}, False, Verdict.ADVICE, id="run"),
        pytest.param({"after_loss": "run", "store_id": None}, True, Verdict.FINE, id="run, in debug mode"),
        pytest.param({"grace": 30.0}, False, Verdict.FINE, id="as long as a lease"),
        pytest.param({"grace": 29.0}, False, Verdict.ADVICE, id="acknowledged too early"),
        pytest.param({"grace": 29.0, "after_loss": "hold"}, False, Verdict.FAULT, id="by itself too early"),
    ),
)
def test_settings_are_judged_by_what_a_loss_would_do(rules: dict[str, Any], lenient: bool, verdict: Verdict) -> None:
    endpoints = [Endpoint("pay", Policy(lease=30.0)), Endpoint("refund", Policy(lease=10.0))]

    assert verdict is worst(after_loss(Kept(standing(), Told(**rules)), endpoints, lenient=lenient))


def test_it_names_the_store_and_the_endpoints_that_it_is_about() -> None:
    endpoints = [Endpoint("pay", Policy(lease=30.0)), Endpoint("refund", Policy(lease=10.0))]

    unnamed, hasty = after_loss(Kept(standing(), Told(store_id=None, grace=20.0)), endpoints, lenient=False)

    assert "IDEMPOTENCY_STORE_ID to shop." in unnamed.remedy
    assert [True, False] == [name in hasty.text for name in ("pay", "refund")]
    assert "IDEMPOTENCY_DATA_LOSS_GRACE to 30" in hasty.remedy


def test_a_store_that_has_no_name_yet_is_asked_for_it() -> None:
    assert "redis status" in after_loss(Kept(MISSING, Told(store_id=None)), [], lenient=False)[0].remedy
