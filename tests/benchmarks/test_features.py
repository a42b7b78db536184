"""The cost of optional features is measured."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import budgets_of, cases_of, measured


def test_what_a_redis_pays_to_notice_a_loss_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert ["as it is", "without the check", "one replica waited for"] == cases_of(measured(capsys, "promises"))


def test_what_compliance_costs_is_measured(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Encryption for small and large answers, quotas, and a tenant beside one that floods."""
    document = measured(capsys, "compliance", "--redis-url", url)
    cases = cases_of(document)
    sizes = [f"{path}, {size}" for size in ("2 KB", "256 KB") for path in ("first", "replay")]

    for settings in ("as it comes", "no compression", "encrypted", "with quotas", "both"):
        assert {f"{settings}: {size}" for size in sizes} <= set(cases)
    assert {f"{store}: {path}" for store in ("memory", "Redis") for path in ("first", "replay")} <= set(cases)
    assert {"with quotas: over quota", "encrypted, 2 KB", "encrypted, 256 KB"} <= set(cases)
    assert budgets_of(document) == {
        **{f"encrypted: {path}, 2 KB": ["≤ +15 µs CPU"] for path in ("first", "replay")},
        **{store: ["p99 within 10 %"] for store in ("memory", "Redis")},
    }


def test_every_mode_is_timed_beside_the_bare_application(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A retry that is replayed in mode observe, or runs under enforce, would be refused as a wrong response."""
    cases = cases_of(measured(capsys, "modes", "--redis-url", url))

    guises = ("without the extension", "observe", "warn", "enforce")
    assert {f"{path}: {guise}" for path in ("no key", "first", "retry") for guise in guises} == set(cases)
