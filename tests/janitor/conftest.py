"""Crews that go with their test, and whose logs are in its report when it fails."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from tests.janitor.crew import Crew


class HireCrew(Protocol):
    def __call__(self, *, store: str, broker: str | None = None, **config: object) -> Crew: ...


@pytest.fixture
def hire_crew(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HireCrew]:
    """Makes a crew in a folder of the test's own: nothing runs until the test starts it."""
    with ExitStack() as ends:

        def hire(*, store: str, broker: str | None = None, **config: object) -> Crew:
            crew = Crew(tmp_path, store=store, broker=broker, **config)
            request.node.user_properties.append(("crew", crew))
            ends.callback(crew.stop)
            return crew

        yield hire


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    crews = [crew for name, crew in item.user_properties if isinstance(crew, Crew)]
    if report.when == "call" and report.failed:
        report.sections.extend(("logs of Celery", crew.log) for crew in crews)
    # xdist sends them over, and cannot send these.
    report.user_properties = [each for each in report.user_properties if not isinstance(each[1], Crew)]
    return report
