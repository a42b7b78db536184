"""What the application's role must be allowed to do with our tables."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

REMEDY: Final = (
    "the database's role may not use the tables of idempotency records: grant it SELECT, INSERT, UPDATE and DELETE on "
    "idempotency_records, idempotency_meta, idempotency_tenants, idempotency_data_keys, idempotency_quota and "
    "idempotency_tasks, and USAGE on the sequence idempotency_fence_numbers_number_seq"
)

# Of what is not there nothing is lacking: to_regclass gives NULL. A sequence counts for whoever has either right.
_LACKING: Final = text(
    "SELECT tables.name, rights.name"
    " FROM (VALUES ('idempotency_records'), ('idempotency_meta'), ('idempotency_tenants'), ('idempotency_data_keys'),"
    " ('idempotency_quota'), ('idempotency_tasks')) AS tables (name),"
    " (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) AS rights (name)"
    " WHERE NOT has_table_privilege(to_regclass(tables.name), rights.name)"
    " UNION ALL SELECT 'idempotency_fence_numbers_number_seq', 'USAGE'"
    " WHERE NOT has_sequence_privilege(to_regclass('idempotency_fence_numbers_number_seq'), 'USAGE, UPDATE')"
)

_LIFTS: Final = text(
    "SELECT coalesce(has_sequence_privilege(to_regclass('idempotency_fence_numbers_number_seq'), 'UPDATE')"
    " AND has_sequence_privilege(to_regclass('idempotency_fence_numbers_number_seq'), 'USAGE, SELECT'), false)"
)


def may_lift(connection: Connection) -> bool:
    """Whether this role may set the sequence of fences, as the first claim does where a migration has not."""
    return bool(connection.scalar(_LIFTS))


def lacking(connection: Connection) -> dict[str, list[str]]:
    """The rights that this role does not have, by what they are on. SQLite knows no roles."""
    found: dict[str, list[str]] = {}
    if connection.dialect.name == "postgresql":
        for name, right in connection.execute(_LACKING):
            found.setdefault(name, []).append(right)
    return found
