"""The tables of a SQL store: whether they are as this release needs them, and bringing them there."""

from __future__ import annotations

from dataclasses import dataclass

from flask_idempotency.engine.store import Schema


@dataclass(frozen=True, slots=True)
class SchemaReport:
    """How the schema stands, and what was done to bring it there."""

    done: tuple[str, ...]
    faults: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def in_order(self) -> bool:
        return not self.faults


def db_upgrade(schema: Schema) -> SchemaReport:
    """Bring the schema to this release, and look at it afterwards: what an upgrade cannot mend is a fault still."""
    return _report(schema, done=schema.upgrade())


def db_check(schema: Schema) -> SchemaReport:
    """How the schema stands. Never writes."""
    return _report(schema, done=[])


def _report(schema: Schema, *, done: list[str]) -> SchemaReport:
    return SchemaReport(done=tuple(done), faults=tuple(schema.faults()), advice=tuple(schema.advice()))
