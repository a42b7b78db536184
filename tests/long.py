"""How long chance is given: seconds in CI, and a minute with `LONG_TESTS=1`, before a release."""

from __future__ import annotations

import os
from typing import Final

LONG: Final = os.environ.get("LONG_TESTS") == "1"


def unless_long(short: int, *, long: int) -> int:
    """Rounds or seconds, whichever is counted."""
    return long if LONG else short
