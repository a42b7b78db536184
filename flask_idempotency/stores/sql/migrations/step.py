"""Describe one step of the schema: its statements for each database, and how they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class Where:
    """Statements to run only if a query returns true. They take a lock even if they change no row."""

    condition: str
    statements: tuple[str, ...]

    def run(self, connection: Connection) -> None:
        if connection.exec_driver_sql(self.condition).scalar():
            for statement in self.statements:
                connection.exec_driver_sql(statement)


# For PostgreSQL, where IF NOT EXISTS takes the same locks as the change.


def new_index(table: str, name: str, statement: str) -> Where:
    """Create this index if it is missing: even with IF NOT EXISTS that waits for all writers, and new writers wait for it."""
    condition = (
        "SELECT NOT EXISTS (SELECT 1 FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"  # noqa: S608 - our own words
        f" WHERE indrelid = to_regclass('{table}') AND relname = '{name}')"
    )
    return Where(condition, (statement,))


def new_column(table: str, name: str, statement: str) -> Where:
    """Add this column if it is missing: even with IF NOT EXISTS that locks the table for all other transactions."""
    condition = (
        "SELECT NOT EXISTS (SELECT 1 FROM pg_attribute"  # noqa: S608 - our own words
        f" WHERE attrelid = to_regclass('{table}') AND attname = '{name}' AND NOT attisdropped)"
    )
    return Where(condition, (statement,))


def new_sqlite_column(table: str, name: str, statement: str) -> Where:
    """Add this column if it is missing. SQLite has no IF NOT EXISTS for it."""
    condition = f"SELECT NOT EXISTS (SELECT 1 FROM pragma_table_info('{table}') WHERE name = '{name}')"  # noqa: S608
    return Where(condition, (statement,))


def table_comment(table: str, words: str) -> Where:
    """Set the comment of a table if it is another."""
    return Where(
        f"SELECT obj_description(to_regclass('{table}'), 'pg_class') IS DISTINCT FROM '{words}'",  # noqa: S608
        (f"COMMENT ON TABLE {table} IS '{words}'",),
    )


def column_comment(column: str, words: str) -> Where:
    """Set the comment of `table.column` if it is another."""
    table, _, name = column.partition(".")
    return Where(
        f"SELECT col_description(attrelid, attnum) IS DISTINCT FROM '{words}' FROM pg_attribute"  # noqa: S608
        f" WHERE attrelid = to_regclass('{table}') AND attname = '{name}'",
        (f"COMMENT ON COLUMN {column} IS '{words}'",),
    )


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    what: str
    """What this step adds, in a few words for the operator."""
    statements: Mapping[str, tuple[str | Where, ...]]
    """By dialect, in order. A second run changes nothing."""

    def run(self, connection: Connection) -> str:
        for statement in self.statements[connection.dialect.name]:
            if isinstance(statement, Where):
                statement.run(connection)
            else:
                connection.exec_driver_sql(statement)
        return f"{self.number:04}: {self.what}"
