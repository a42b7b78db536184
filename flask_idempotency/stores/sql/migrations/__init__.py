"""The tables, made and changed step by step: one frozen file for each step, its SQL spelt out.

A file here is never edited once it was released, and imports nothing that is: a step that followed `schema.py` would
make other tables tomorrow than it made yesterday. Each step only adds what is not there, so that tables which
`create_all` or Alembic made are taken over as they stand.
"""

from flask_idempotency.stores.sql.migrations.runner import LATEST, upgrade, version

__all__ = ["LATEST", "upgrade", "version"]
