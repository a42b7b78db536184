"""What an application says of a store that may lose its memory."""

from __future__ import annotations

from typing import Any

import pytest

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.settings import Settings, load_settings


def loaded(*, lenient: bool = False, **config: Any) -> Settings:
    named = {f"IDEMPOTENCY_{name.upper()}": value for name, value in config.items()}
    return load_settings(
        {"IDEMPOTENCY_SECRET": "s", "IDEMPOTENCY_STORE": "redis://localhost", **named},
        {},
        app_name="shop",
        lenient=lenient,
    )


@pytest.mark.parametrize(("lenient", "after_loss"), ((False, "refuse"), (True, "run")))
def test_unless_it_is_said_otherwise_only_developers_run_what_may_have_run(lenient: bool, after_loss: str) -> None:
    assert after_loss == loaded(lenient=lenient).after_loss
    assert "hold" == loaded(lenient=lenient, after_loss="hold").after_loss


@pytest.mark.parametrize(
    ("setting", "sentence"),
    (
        ({"after_loss": "forget"}, "IDEMPOTENCY_AFTER_LOSS: must be one of: refuse, hold, run"),
        ({"loss_hold": 0}, "IDEMPOTENCY_LOSS_HOLD: must be more than 0"),
        ({"key_clock_skew": -1}, "IDEMPOTENCY_KEY_CLOCK_SKEW: must not be negative"),
        ({"store_id": ""}, "IDEMPOTENCY_STORE_ID: must be 1 to 64 visible ASCII characters"),
        ({"store_id": "prod\n"}, "IDEMPOTENCY_STORE_ID: must be 1 to 64 visible ASCII characters"),
        ({"store_id": "x" * 65}, "IDEMPOTENCY_STORE_ID: must be 1 to 64 visible ASCII characters"),
    ),
)
def test_what_cannot_hold_is_refused_at_the_start(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        loaded(**setting)
