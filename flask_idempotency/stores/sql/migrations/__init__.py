"""Create and upgrade the tables step by step, in one frozen file for each step.

Never edit a step after its release, and import no declarations into it. If a step followed `schema.py`, it would create
other tables after each change. Each step only adds what is missing, so it also completes tables of `create_all` or Alembic.
Comments are not part of a step: after the steps, an upgrade sets those of this release.
"""

from flask_idempotency.stores.sql.migrations.runner import LATEST, upgrade, upgrade_outbox, version

__all__ = ["LATEST", "upgrade", "upgrade_outbox", "version"]
