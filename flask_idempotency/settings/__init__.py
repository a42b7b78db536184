"""Configuration: read it once, check all of it, freeze it.

One schema describes every policy keyword. `Idempotency(…)`, `configure(…)`, `@idempotent(…)` and `IDEMPOTENCY_*` all use
it, so a value means the same wherever you write it. `docs/generate.py` renders the reference from it.
"""

from flask_idempotency.settings.loading import load_override, load_settings, summary
from flask_idempotency.settings.options import Settings
from flask_idempotency.settings.security import derived_secret

__all__ = ["Settings", "derived_secret", "load_override", "load_settings", "summary"]
