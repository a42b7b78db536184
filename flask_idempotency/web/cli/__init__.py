"""`flask idempotency …`: parse, call a verb, print. What a verb does is in `operations/`.

Exit codes: 0 when all is in order, 1 when it is not or was refused, 2 when nobody can tell.
"""

from flask_idempotency.web.cli.chores import expire_command, reap_command, reconcile_command, rotate_command
from flask_idempotency.web.cli.db import db
from flask_idempotency.web.cli.doctor import doctor_command
from flask_idempotency.web.cli.group import cli
from flask_idempotency.web.cli.keys import keys
from flask_idempotency.web.cli.policy import policy_command
from flask_idempotency.web.cli.purge import purge
from flask_idempotency.web.cli.quota import quota
from flask_idempotency.web.cli.records import list_command, show_command
from flask_idempotency.web.cli.redis import redis
from flask_idempotency.web.cli.sealing import seal_command
from flask_idempotency.web.cli.settling import release_command, resolve_command
from flask_idempotency.web.cli.stats import stats_command

for command in (
    db,
    doctor_command,
    expire_command,
    keys,
    list_command,
    policy_command,
    purge,
    quota,
    reap_command,
    reconcile_command,
    redis,
    release_command,
    resolve_command,
    rotate_command,
    seal_command,
    show_command,
    stats_command,
):
    cli.add_command(command)

__all__ = ["cli"]
