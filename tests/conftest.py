"""What every test may ask for, and an orderly end when the run is told to stop."""

from __future__ import annotations

import signal
from types import FrameType

import pytest

pytest_plugins = [
    "tests.services",
    "tests.faults.clock_shim",
    "tests.faults.clocked",
    "tests.faults.cluster",
    "tests.faults.sentinel",
]


def pytest_configure(config: pytest.Config) -> None:
    # Ctrl-C lets fixtures put their servers and folders away; a SIGTERM from run.py or CI should as well.
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")
