"""What an application says of a store that may lose its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fakeredis
import pytest

from flask_idempotency.assembly import build
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import Observers
from flask_idempotency.settings import Settings, load_settings
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from flask_idempotency.stores.redis.store import RedisStore


def loaded(*, lenient: bool = False, **config: Any) -> Settings:
    named = {f"IDEMPOTENCY_{name.upper()}": value for name, value in config.items()}
    return load_settings(
        {"IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60", "IDEMPOTENCY_STORE": "redis://localhost"} | named,
        {},
        app_name="shop",
        lenient=lenient,
    )


@pytest.mark.parametrize(("lenient", "after_loss"), ((False, "refuse"), (True, "run")))
def test_unless_it_is_said_otherwise_only_developers_run_what_may_have_run(lenient: bool, after_loss: str) -> None:
    assert after_loss == loaded(lenient=lenient).after_loss
    assert "hold" == loaded(lenient=lenient, after_loss="hold").after_loss


@pytest.mark.parametrize("setting", ({"store_id": "a"}, {"data_loss_grace": 9}, {"client_clock_skew": None}))
@pytest.mark.parametrize("store", ("memory://", "sqlite:///shop.db"))
def test_what_only_a_redis_may_forget_is_refused_elsewhere(store: str, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="only Redis stores have this option"):
        loaded(store=store, **setting)


def test_a_store_that_was_made_has_its_rules_already() -> None:
    store = RedisStore(fakeredis.FakeRedis(), rules=RedisDataLossPolicy(after_loss="run"))

    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_STORE_ID: the store is an object"):
        build(replace(loaded(store_id="prod"), store=store), observers=Observers())


@pytest.mark.parametrize(
    ("setting", "sentence"),
    (
        ({"after_loss": "forget"}, "IDEMPOTENCY_AFTER_LOSS: must be one of: refuse, hold, run"),
        ({"data_loss_grace": 0}, "IDEMPOTENCY_DATA_LOSS_GRACE: must be more than 0"),
        ({"client_clock_skew": -1}, "IDEMPOTENCY_CLIENT_CLOCK_SKEW: must not be negative"),
        ({"store_id": ""}, "IDEMPOTENCY_STORE_ID: must be 1 to 64 visible ASCII characters"),
        ({"store_id": "prod\n"}, "IDEMPOTENCY_STORE_ID: must be 1 to 64 visible ASCII characters"),
        ({"store_id": "unnamed"}, "IDEMPOTENCY_STORE_ID: must not be `unnamed`"),
        ({"store_id": "x" * 65}, "IDEMPOTENCY_STORE_ID: must be 1 to 64 visible ASCII characters"),
    ),
)
def test_what_cannot_hold_is_refused_at_the_start(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        loaded(**setting)
