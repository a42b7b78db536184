"""Verbs for people. What they return is said by whoever was asked: the command line, a console.

Nothing here prints, asks back, or knows Flask.
"""

from flask_idempotency.operations.erasing import holds_sealed, shred
from flask_idempotency.operations.finding import SHORT, Case, by_handle, by_key, by_short, with_twins
from flask_idempotency.operations.keys import KeysReport, KeyStatus, Ring, keys_status
from flask_idempotency.operations.memory import (
    Initialised,
    MemoryStatus,
    acknowledge,
    check_acknowledgeable,
    initialise,
    memory_status,
)
from flask_idempotency.operations.quotas import TenantUsage, quota_set, quota_show
from flask_idempotency.operations.records import Shown, Wanted, handle_of, listed, shown
from flask_idempotency.operations.refusal import Refused
from flask_idempotency.operations.settling import (
    Done,
    Word,
    alive,
    check_quarantined,
    complete,
    doubts,
    release,
    reopen,
    way_out,
)
from flask_idempotency.operations.standing import Stats, stats
from flask_idempotency.operations.tables import SchemaReport, db_check, db_upgrade

__all__ = [
    "SHORT",
    "Case",
    "Done",
    "Initialised",
    "KeyStatus",
    "KeysReport",
    "MemoryStatus",
    "Refused",
    "Ring",
    "SchemaReport",
    "Shown",
    "Stats",
    "TenantUsage",
    "Wanted",
    "Word",
    "acknowledge",
    "alive",
    "by_handle",
    "by_key",
    "by_short",
    "check_acknowledgeable",
    "check_quarantined",
    "complete",
    "db_check",
    "db_upgrade",
    "doubts",
    "handle_of",
    "holds_sealed",
    "initialise",
    "keys_status",
    "listed",
    "memory_status",
    "quota_set",
    "quota_show",
    "release",
    "reopen",
    "shown",
    "shred",
    "stats",
    "way_out",
    "with_twins",
]
