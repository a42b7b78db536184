"""What `schema.py` declares and this database does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from sqlalchemy import Connection, Inspector, inspect, text

from flask_idempotency.stores.sql.dialects import POSTGRESQL
from flask_idempotency.stores.sql.schema import FENCES, META, metadata

SEEDED: Final = 10**15
"""The clock passed this in 2001. A sequence that started from one will never get there."""

# As a view and not from the sequence itself: whoever may take the next number need not be allowed to read it.
_UNSEEDED_SEQUENCE: Final = text(
    "SELECT coalesce(last_value < :seeded, has_sequence_privilege(:name, 'USAGE, SELECT')) FROM pg_sequences"
    " WHERE to_regclass(quote_ident(schemaname) || '.' || quote_ident(sequencename)) = to_regclass(:name)"
)
# What an operator has set differently stays.
_UNTOLD: Final = text(
    "SELECT EXISTS (SELECT 1 FROM pg_class WHERE oid IN (to_regclass('idempotency_records'),"
    " to_regclass('idempotency_quota')) AND NOT coalesce(array_to_string(reloptions, ',') ~ 'fillfactor=', false))"
)
_NAMELESS: Final = text("SELECT NOT EXISTS (SELECT 1 FROM idempotency_meta WHERE name = 'store')")


@dataclass(frozen=True, slots=True)
class Lacks:
    """What is missing, by name. False when nothing is."""

    tables: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    indexes: tuple[str, ...] = ()
    sequences: tuple[str, ...] = ()
    seed: bool = False
    """Fences would start from one, below those that were granted before."""
    store: bool = False
    """There is no number to tell this database from others by."""
    storage: bool = False
    """Nothing says how rows are to be stored. It costs speed, not correctness."""

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    @property
    def parts(self) -> bool:
        """Whether something is missing that only a migration makes."""
        return bool(self.tables or self.columns or self.indexes or self.sequences)


def lacks(connection: Connection) -> Lacks:
    """Reads the catalogue only; what has another type or another predicate is not noticed."""
    catalogue = inspect(connection)
    tables = tuple(name for name in metadata.tables if not catalogue.has_table(name))
    sequences = _sequences(catalogue)
    return Lacks(
        tables=tables,
        columns=tuple(_columns(catalogue, tables)),
        indexes=tuple(_indexes(catalogue, tables)),
        sequences=sequences,
        seed=not (tables or sequences) and _unseeded(connection),
        store=META not in tables and bool(connection.scalar(_NAMELESS)),
        storage=not tables and connection.dialect.name == POSTGRESQL and bool(connection.scalar(_UNTOLD)),
    )


def _columns(catalogue: Inspector, absent: tuple[str, ...]) -> Iterator[str]:
    for name, table in metadata.tables.items():
        if name not in absent:
            found = {column["name"] for column in catalogue.get_columns(name)}
            yield from (str(column) for column in table.columns if column.name not in found)


def _indexes(catalogue: Inspector, absent: tuple[str, ...]) -> Iterator[str]:
    for name, table in metadata.tables.items():
        if name not in absent:
            found = {index["name"] for index in catalogue.get_indexes(name)}
            yield from sorted(str(index.name) for index in table.indexes if index.name not in found)


def _sequences(catalogue: Inspector) -> tuple[str, ...]:
    dialect = catalogue.dialect
    return (FENCES,) if dialect.supports_sequences and not catalogue.has_sequence(FENCES) else ()


def _unseeded(connection: Connection) -> bool:
    # Without sequences each fence is taken from the clock if that is ahead, and there is nothing to seed.
    if not connection.dialect.supports_sequences:
        return False
    return bool(connection.scalar(_UNSEEDED_SEQUENCE, {"seeded": SEEDED, "name": FENCES}))
