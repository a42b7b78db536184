"""Quotas as they are configured."""

from __future__ import annotations

from typing import Any

import pytest

from flask_idempotency.engine.quota import NewKeys, Quota
from tests.settings.test_encryption import faults, load


@pytest.mark.parametrize(
    ("settings", "quota"),
    (
        ({}, None),
        ({"quota_records": None}, None),
        ({"quota_records": 5}, Quota(records=5)),
        ({"quota_bytes": 0, "quota_in_flight": 2}, Quota(bytes=0, in_flight=2)),
        ({"quota_new_keys": (10, 60)}, Quota(new_keys=NewKeys(10, 60.0))),
        ({"quota_new_keys": [10, 0.5]}, Quota(new_keys=NewKeys(10, 0.5))),
        ({"quota_new_keys": NewKeys(10, 60)}, Quota(new_keys=NewKeys(10, 60.0))),
    ),
)
def test_quotas_are_whole_numbers_and_a_rate(settings: dict[str, Any], quota: Quota | None) -> None:
    """Nothing set is None, so that nothing is counted."""
    assert quota == load(secret="s-9f2c47d1e8b35a60", **settings).quota


@pytest.mark.parametrize("name", ("quota_records", "quota_bytes", "quota_in_flight"))
@pytest.mark.parametrize("value", (-1, 1.5, "5", True))
def test_what_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    (told,) = faults(secret="s-9f2c47d1e8b35a60", **{name: value})

    assert told.startswith(f"IDEMPOTENCY_{name.upper()}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("quota_records", 10**19),
        ("quota_bytes", 2**53 + 1),
        ("quota_in_flight", 2**63),
        ("quota_new_keys", (10**19, 3600)),
    ),
)
def test_what_no_store_can_count_to_is_refused(name: str, value: Any) -> None:
    """Else a database says so at the first claim, and all of them are 500. The remedy is no limit at all."""
    (told,) = faults(secret="s-9f2c47d1e8b35a60", **{name: value})

    assert told.startswith(f"IDEMPOTENCY_{name.upper()}: ")
    assert "2**53" in told
    assert "for no limit, leave it out" in told


def test_what_every_store_can_count_to_is_not() -> None:
    most = 2**53

    quota = load(
        secret="s-9f2c47d1e8b35a60",
        quota_records=most,
        quota_bytes=most,
        quota_in_flight=most,
        quota_new_keys=(most, 1),
    ).quota

    assert Quota(most, most, most, NewKeys(most, 1.0)) == quota


@pytest.mark.parametrize(
    "value",
    (5, "10 60", (10,), (10, 0), (10, -1), (10, float("inf")), (1.5, 60), (True, 60), (-1, 60), (1, "60"), (1, 1e9)),
)
def test_what_is_no_rate_is_refused(value: Any) -> None:
    (told,) = faults(secret="s-9f2c47d1e8b35a60", quota_new_keys=value)

    assert told.startswith("IDEMPOTENCY_QUOTA_NEW_KEYS: ")
