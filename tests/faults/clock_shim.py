"""A real server's wall clock, set by a test: forwards, backwards and back again, while the server runs."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import pytest

from tests.services import missing

SOURCE: Final = Path(__file__).with_suffix(".c")
COMPILE_SECONDS: Final = 60

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


class WallClock:
    """The wall clock of every program that was started with this `environment`, children included.

    Clocks that nobody can set go on as they are, so such a program finds what an operator or a bad NTP server does.
    """

    def __init__(self, shim: Path, file: Path) -> None:
        self._file = file
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(shim), "IDEMPOTENCY_TEST_CLOCK": str(file)}
        self.ahead = 0.0
        file.chmod(0o644)

    @property
    def ahead(self) -> float:
        """By how many seconds it is ahead of ours. Setting this sets the clock at once."""
        return self._ahead

    @ahead.setter
    def ahead(self, seconds: float) -> None:
        self._ahead = seconds
        with self._file.open("r+b") as file:
            # In one write, and never truncated: the servers have it mapped.
            file.write(struct.pack("=q", round(seconds * 1_000_000)))


def compiled(folder: Path) -> Path:
    """The shim, built for this machine."""
    compiler = shutil.which("cc")
    if compiler is None:
        missing("a C compiler", remedy="Install your system's package of gcc or clang, with the headers of its libc.")
    if sys.platform != "linux":
        missing("Linux", remedy="The wall clock of a server can be shifted there alone.")
    shim = folder / "clock_shim.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(shim), str(SOURCE)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    assert built.returncode == 0, built.stderr
    return shim


@pytest.fixture(scope="session")
def clock_folder() -> Iterator[Path]:
    """Where the shim and its clocks are, for everybody to read: servers may run as another user than we do."""
    with tempfile.TemporaryDirectory(prefix="idempotency-clocks-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture(scope="session")
def clock_shim(clock_folder: Path) -> Path:
    return compiled(clock_folder)


class MakeWallClock(Protocol):
    def __call__(self) -> WallClock: ...


@pytest.fixture(scope="session")
def make_wall_clock(clock_shim: Path, clock_folder: Path) -> MakeWallClock:
    """Clocks for servers that outlive a test."""

    def make() -> WallClock:
        descriptor, name = tempfile.mkstemp(dir=clock_folder)
        os.close(descriptor)
        return WallClock(clock_shim, Path(name))

    return make


@pytest.fixture
def wall_clock(make_wall_clock: MakeWallClock) -> WallClock:
    """A clock for the servers of this test: start them with its `environment`."""
    return make_wall_clock()
