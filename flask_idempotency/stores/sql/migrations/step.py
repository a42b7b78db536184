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
