"""`flask idempotency …`: parse, call a verb, print. What a verb does is in `operations/`.

Exit codes: 0 when all is in order, 1 when it is not or was refused, 2 when nobody can tell.
"""

from flask_idempotency.cli.context import cli
from flask_idempotency.cli.maintenance import (
    doctor_command,
    expire_command,
    reap_command,
    reconcile_command,
    rotate_command,
    seal_command,
)
from flask_idempotency.cli.resolve import release_command, resolve_command
from flask_idempotency.cli.show import list_command, policy_command, show_command, stats_command
from flask_idempotency.cli.stores import db, keys, redis
from flask_idempotency.cli.tenants import purge, quota

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
