"""Configuration: read once, checked whole, frozen. The only reader of configuration in the house.

One schema describes every policy keyword. `Idempotency(…)`, `configure(…)`, `@idempotent(…)` and `IDEMPOTENCY_*` all go
through it, so that a value means the same wherever it is written, and `docs/` renders its reference from it.
"""

from flask_idempotency.settings.loading import Settings, derived_secret, load_override, load_settings, summary

__all__ = ["Settings", "derived_secret", "load_override", "load_settings", "summary"]
