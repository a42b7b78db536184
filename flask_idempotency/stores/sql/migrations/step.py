"""`Step`: one change of the schema, as each database is told it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class Where:
    """Statements that lock what others use, although they may find nothing to change: only where a look says true."""

    look: str
    statements: tuple[str, ...]

    def run(self, connection: Connection) -> None:
        if connection.exec_driver_sql(self.look).scalar():
            for statement in self.statements:
                connection.exec_driver_sql(statement)


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    what: str
    """What there is afterwards, in a few words for whoever ran it."""
    statements: Mapping[str, tuple[str | Where, ...]]
    """By dialect, in order. Run where everything is there already, they change nothing."""

    def run(self, connection: Connection) -> str:
        for statement in self.statements[connection.dialect.name]:
            if isinstance(statement, Where):
                statement.run(connection)
            else:
                connection.exec_driver_sql(statement)
        return f"{self.number:04}: {self.what}"
