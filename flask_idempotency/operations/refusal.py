"""Saying no."""

from __future__ import annotations

from flask_idempotency.engine.errors import IdempotencyError


class Refused(IdempotencyError):
    """A verb cannot be carried out here; the text says why, and what to do. Nothing was done."""
