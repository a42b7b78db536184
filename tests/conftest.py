"""Fixtures that every test may use, and an orderly end when the run is stopped."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import pytest

# The first starts servers, and imports what it needs for one only when a test uses it.
pytest_plugins = ["tests.lab.fixtures", "tests.stages"]


def pytest_configure(config: pytest.Config) -> None:
    # Ctrl-C lets fixtures put their servers and folders away; a SIGTERM from run.py or CI should as well.
    signal.signal(signal.SIGTERM, _interrupt)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Its summary imports all of Hypothesis, a third of the time of one unit test file. Workers of xdist report to a
    # process that has imported nothing, so there it stays.
    manager = session.config.pluginmanager
    if "hypothesis" not in sys.modules and not manager.has_plugin("dsession"):
        manager.unregister(name="hypothesispytest")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")
