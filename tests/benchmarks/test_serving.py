"""Every application is served by gunicorn."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import budgets_of, cases_of, measured


@pytest.mark.slow
def test_every_application_is_served(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Under gunicorn the same floors stand beside ours."""
    document = measured(capsys, "serving", "--seconds", "0.1", "--redis-url", url)

    assert (cases_of(document), budgets_of(document)) == (
        ["bare Flask", "by hand: first", "by hand: replay", "ours: first", "ours: replay"],
        {"ours: first": ["≥ 0.55 of bare"], "ours: replay": ["≥ 0.80 of bare"]},
    )
