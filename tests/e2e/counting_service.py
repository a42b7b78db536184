"""The victim, whose processes add their activity to the store as often as a test wants."""

from __future__ import annotations

import os

from flask import Flask

from flask_idempotency import activity
from tests.e2e import service


def from_environment() -> Flask:
    """Return the application of the environment. `E2E_FLUSH_SECONDS` replaces the ten seconds between two flushes."""
    activity.FLUSH_SECONDS = float(os.environ["E2E_FLUSH_SECONDS"])  # type: ignore[misc]
    return service.from_environment()
