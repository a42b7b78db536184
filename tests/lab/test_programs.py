"""A green run in CI means that everything was run."""

from __future__ import annotations

import pytest

from tests.lab.programs import missing


@pytest.fixture(autouse=True)
def _on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("REQUIRE_SERVICES", raising=False)


def test_a_missing_service_skips_on_a_laptop() -> None:
    """Nobody has to have every server to try a change, and the skip says what to do."""
    with pytest.raises(pytest.skip.Exception, match=r"missing service: clock tower\. Build one\."):
        missing("clock tower", remedy="Build one.")


@pytest.mark.parametrize("name", ("CI", "REQUIRE_SERVICES"))
def test_a_missing_service_fails_where_everything_must_run(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A skip in CI would be a test that nobody ever runs."""
    monkeypatch.setenv(name, "1")

    with pytest.raises(pytest.fail.Exception, match="clock tower"):
        missing("clock tower", remedy="Build one.")
