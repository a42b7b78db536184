"""`flask idempotency …`: parse, call a verb, print. What a verb does is in `operations.py`.

Exit codes: 0 when all is in order, 1 when it is not or was refused, 2 when nobody can tell.
"""

from flask_idempotency.web.cli.chores import reconcile_command, rotate_command
from flask_idempotency.web.cli.db import db
from flask_idempotency.web.cli.group import cli
from flask_idempotency.web.cli.keys import keys
from flask_idempotency.web.cli.purge import purge
from flask_idempotency.web.cli.quota import quota

for command in (db, keys, purge, quota, reconcile_command, rotate_command):
    cli.add_command(command)

__all__ = ["cli"]
