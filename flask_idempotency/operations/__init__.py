"""Verbs for people. What they return is said by whoever was asked: the command line, a console.

Nothing here prints, asks back, or knows Flask.
"""

from flask_idempotency.operations.erasing import holds_sealed, shred
from flask_idempotency.operations.keys import KeysReport, KeyStatus, Ring, keys_status
from flask_idempotency.operations.quotas import TenantUsage, quota_set, quota_show
from flask_idempotency.operations.refusal import Refused
from flask_idempotency.operations.tables import SchemaReport, db_check, db_upgrade

__all__ = [
    "KeyStatus",
    "KeysReport",
    "Refused",
    "Ring",
    "SchemaReport",
    "TenantUsage",
    "db_check",
    "db_upgrade",
    "holds_sealed",
    "keys_status",
    "quota_set",
    "quota_show",
    "shred",
]
