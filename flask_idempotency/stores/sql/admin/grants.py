"""Find out what a role of PostgreSQL lacks that an application sets for a tenant, as in `SET LOCAL ROLE`.

The last statements of a transactional view run as that role: they complete the record, in the view's own transaction. A
claim runs as it only if the application's pool sets the role when it gives a connection out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from sqlalchemy import Connection, text

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.store import MissingGrant
from flask_idempotency.stores.sql import schema
from flask_idempotency.stores.sql.dialects import POSTGRESQL
from flask_idempotency.stores.sql.naming import prefix, schema_of

IN_A_VIEW: Final[Mapping[str, tuple[str, ...]]] = {
    schema.records.name: ("SELECT", "UPDATE"),
    schema.steps.name: ("SELECT", "INSERT", "UPDATE", "DELETE"),
    schema.tenants.name: ("SELECT",),
    schema.data_keys.name: ("SELECT",),
    schema.quota_buckets.name: ("SELECT", "INSERT", "UPDATE"),
}
"""What runs in the transaction of a view: its steps, the completion of its record, and the quota that counts it."""

IN_A_CLAIM: Final = dict.fromkeys(schema.RECORD_TABLES, ("SELECT", "INSERT", "UPDATE", "DELETE"))
"""What the store does on its own connections."""

TO_PUBLISH: Final[Mapping[str, tuple[str, ...]]] = {schema.outbox.name: ("SELECT", "INSERT")}

OUTBOX_NUMBERS: Final = "idempotency_outbox_seq_seq"

_LACKS_TABLE: Final = text("SELECT NOT has_table_privilege(CAST(:role AS name), to_regclass(:name), :right)")
_LACKS_SEQUENCE: Final = text(
    "SELECT NOT has_sequence_privilege(CAST(:role AS name), to_regclass(:name), 'USAGE, UPDATE')"
)
_HOME: Final = text(
    "SELECT nspname FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace"
    " WHERE pg_class.oid = to_regclass(:name)"
)
_LACKS_SCHEMA: Final = text("SELECT NOT has_schema_privilege(CAST(:role AS name), CAST(:name AS text), 'USAGE')")
_IS_ROLE: Final = text("SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_roles WHERE rolname = CAST(:role AS name))")


def for_views(connection: Connection, role: str, *, claims: bool) -> list[MissingGrant]:
    """Return what this role lacks to complete records, and with `claims` to claim them too."""
    return list(_missing(connection, role, IN_A_CLAIM if claims else IN_A_VIEW, (schema.FENCES,) if claims else ()))


def to_publish(connection: Connection, role: str) -> list[MissingGrant]:
    """Return what this role lacks to publish messages of the outbox."""
    return list(_missing(connection, role, TO_PUBLISH, (OUTBOX_NUMBERS,)))


def _missing(
    connection: Connection, role: str, tables: Mapping[str, tuple[str, ...]], sequences: tuple[str, ...]
) -> Iterator[MissingGrant]:
    if connection.dialect.name != POSTGRESQL:
        raise ConfigurationError("--role is for PostgreSQL: no other database of this store has roles.")
    if not connection.scalar(_IS_ROLE, {"role": role}):
        raise ConfigurationError(f"There is no role {printable(role)} in this database.")
    quote = connection.dialect.identifier_preparer.quote
    grantee, at = quote(role), prefix(connection)

    def lacks(statement: object, name: str, **more: str) -> bool:
        found: bool | None = connection.scalar(statement, {"role": role, "name": name, **more})  # type: ignore[call-overload]
        # NULL: it is not there, and the check of the schema says so.
        return bool(found)

    home = schema_of(connection) or connection.scalar(_HOME, {"name": next(iter(tables))})
    if home is not None and lacks(_LACKS_SCHEMA, home):
        yield MissingGrant("schema", home, ("USAGE",), f"GRANT USAGE ON SCHEMA {quote(home)} TO {grantee};")
    for name, rights in tables.items():
        if found := tuple(right for right in rights if lacks(_LACKS_TABLE, f"{at}{name}", right=right)):
            yield MissingGrant("table", name, found, f"GRANT {', '.join(found)} ON {at}{name} TO {grantee};")
    for name in sequences:
        if lacks(_LACKS_SEQUENCE, f"{at}{name}"):
            yield MissingGrant("sequence", name, ("USAGE",), f"GRANT USAGE ON SEQUENCE {at}{name} TO {grantee};")
