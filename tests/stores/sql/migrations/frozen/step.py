"""Describe one step of the schema: its statements for each database, and how they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from sqlalchemy import Connection

BINARY: Final = {"postgresql": "BYTEA", "sqlite": "BLOB"}


@dataclass(frozen=True, slots=True)
class Where:
    """Statements to run only if a query returns true. They take a lock even if they change no row."""

    condition: str
    statements: tuple[str, ...]

    def run(self, connection: Connection) -> None:
        if connection.exec_driver_sql(self.condition).scalar():
            for statement in self.statements:
                connection.exec_driver_sql(statement)


Part: TypeAlias = Mapping[str, str | Where]
"""What a step runs, by dialect. A dialect that is missing runs nothing."""


def new_table(statement: str, **words: tuple[str, str]) -> Part:
    """Create this table if it is missing. `words` has the text of each placeholder for PostgreSQL and for SQLite."""
    return {
        dialect: statement.format(bytes=binary, **{name: each[at] for name, each in words.items()})
        for at, (dialect, binary) in enumerate(BINARY.items())
    }


def new_index(table: str, name: str, rest: str, *, unique: bool = False) -> Part:
    """Create this index if it is missing.

    On PostgreSQL look first: even with IF NOT EXISTS it waits for all writers, and new writers wait for it.
    """
    statement = f"CREATE {'UNIQUE ' if unique else ''}INDEX IF NOT EXISTS {name} ON {table} {rest}"
    is_missing = (
        "SELECT NOT EXISTS (SELECT 1 FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"  # noqa: S608 - our own words
        f" WHERE indrelid = to_regclass('{table}') AND relname = '{name}')"
    )
    return {"postgresql": Where(is_missing, (statement,)), "sqlite": statement}


def new_column(table: str, name: str, kind: str) -> Part:
    """Add this column if it is missing.

    On PostgreSQL look first: even with IF NOT EXISTS it locks the table for all other transactions. SQLite has no such
    words.
    """
    is_missing = {
        "postgresql": "SELECT NOT EXISTS (SELECT 1 FROM pg_attribute"  # noqa: S608 - our own words
        f" WHERE attrelid = to_regclass('{table}') AND attname = '{name}' AND NOT attisdropped)",
        "sqlite": f"SELECT NOT EXISTS (SELECT 1 FROM pragma_table_info('{table}') WHERE name = '{name}')",  # noqa: S608
    }
    return {
        dialect: Where(condition, (f"ALTER TABLE {table} ADD COLUMN {name} {kind.format(bytes=BINARY[dialect])}",))
        for dialect, condition in is_missing.items()
    }


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    what: str
    """What this step adds, in a few words for the operator."""
    parts: tuple[Part, ...]
    """In order. A second run changes nothing."""

    def run(self, connection: Connection) -> str:
        for part in self.parts:
            match part.get(connection.dialect.name):
                case Where() as where:
                    where.run(connection)
                case str(statement):
                    connection.exec_driver_sql(statement)
        return f"{self.number:04}: {self.what}"
