"""Create and upgrade the tables: add to a database what it lacks of `schema.py`.

Whatever made the tables, an earlier release, `create_all` or Alembic: afterwards they are those of this release.
"""

from flask_idempotency.stores.sql.migrations.runner import LATEST, lacks_sequence, upgrade, upgrade_outbox, version

__all__ = ["LATEST", "lacks_sequence", "upgrade", "upgrade_outbox", "version"]
