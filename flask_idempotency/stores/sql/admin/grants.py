"""Find out what a role of PostgreSQL lacks that an application sets for a tenant, as in `SET LOCAL ROLE`.

The last statements of a transactional view run as that role: they complete the record, in the view's own transaction. A
claim runs as it only if the application's pool sets the role when it gives a connection out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from sqlalchemy import Connection, text

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.store import MissingGrant
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.dialects import POSTGRESQL
from flask_idempotency.stores.sql.naming import prefix, schema_of

ALL: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")

IN_A_VIEW: Final[Mapping[str, tuple[str, ...]]] = {
    schema.records.name: ("SELECT", "UPDATE"),
    schema.steps.name: ALL,
    schema.tenants.name: ("SELECT",),
    schema.data_keys.name: ("SELECT",),
    schema.quota_buckets.name: ("SELECT", "INSERT", "UPDATE"),
}
"""What runs in the transaction of a view: its steps, the completion of its record, and the quota that counts it."""

IN_A_CLAIM: Final = dict.fromkeys(schema.RECORD_TABLES, ALL)
"""What the store does on its own connections."""

TO_PUBLISH: Final[Mapping[str, tuple[str, ...]]] = {schema.outbox.name: ("SELECT", "INSERT")}

OUTBOX_NUMBERS: Final = "idempotency_outbox_seq_seq"

# A missing table lacks no privilege, because to_regclass returns NULL. For a sequence either privilege is enough.
_LACKING: Final = text(
    "SELECT wanted->>0, wanted->>1 FROM json_array_elements(CAST(:wanted AS json)) AS wanted,"
    " to_regclass(CAST(:at AS text) || (wanted->>0)) AS place, coalesce(CAST(:role AS name), current_user) AS role"
    " WHERE NOT CASE wanted->>1 WHEN 'USAGE' THEN has_sequence_privilege(role, place, 'USAGE, UPDATE')"
    " ELSE has_table_privilege(role, place, wanted->>1) END"
)
_LIFTS: Final = text(
    "SELECT coalesce(has_sequence_privilege(to_regclass(:name), 'UPDATE')"
    " AND has_sequence_privilege(to_regclass(:name), 'USAGE, SELECT'), false)"
)
_HOME: Final = text(
    "SELECT nspname FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace"
    " WHERE pg_class.oid = to_regclass(:name)"
)
_LACKS_SCHEMA: Final = text("SELECT NOT has_schema_privilege(CAST(:role AS name), CAST(:name AS text), 'USAGE')")
_IS_ROLE: Final = text("SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_roles WHERE rolname = CAST(:role AS name))")


def may_set_sequence(connection: Connection) -> bool:
    """Return True if this role may set the sequence of fences, as the first claim does if no migration did."""
    return bool(connection.scalar(_LIFTS, {"name": f"{prefix(connection)}{schema.FENCES}"}))


def lacking(
    connection: Connection, tables: Mapping[str, Sequence[str]], sequence: str | None, *, role: str | None = None
) -> dict[str, list[str]]:
    """Return the privileges that this role lacks, by table or sequence. None: the role of the connection.

    Only PostgreSQL is asked: SQLite has no roles.
    """
    found: dict[str, list[str]] = {}
    if connection.dialect.name == POSTGRESQL:
        wanted = [(name, right) for name, rights in tables.items() for right in rights]
        wanted += [] if sequence is None else [(sequence, "USAGE")]
        given = {"wanted": json.dumps(wanted), "role": role, "at": prefix(connection)}
        for name, right in connection.execute(_LACKING, given):
            found.setdefault(name, []).append(right)
    return found


def missing(
    connection: Connection, role: str, tables: Mapping[str, Sequence[str]], sequence: str | None
) -> Iterator[MissingGrant]:
    """Yield what this role lacks to use these tables and the sequence."""
    if connection.dialect.name != POSTGRESQL:
        raise ConfigurationError("--role is for PostgreSQL: no other database of this store has roles.")
    if not connection.scalar(_IS_ROLE, {"role": role}):
        raise ConfigurationError(f"There is no role {printable(role)} in this database.")
    quote = connection.dialect.identifier_preparer.quote
    grantee, at = quote(role), prefix(connection)

    home = schema_of(connection) or connection.scalar(_HOME, {"name": next(iter(tables))})
    if home is not None and connection.scalar(_LACKS_SCHEMA, {"role": role, "name": home}):
        yield MissingGrant("schema", home, ("USAGE",), f"GRANT USAGE ON SCHEMA {quote(home)} TO {grantee};")
    for name, rights in lacking(connection, tables, sequence, role=role).items():
        kind, at_kind = ("sequence", "SEQUENCE ") if name == sequence else ("table", "")
        statement = f"GRANT {', '.join(rights)} ON {at_kind}{at}{name} TO {grantee};"
        yield MissingGrant(kind, name, tuple(rights), statement)
