"""How a database would go about a statement."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select, text

from flask_idempotency.stores.sql.schema import records

COMPLETED_ROWS = 3000


def fill(connection: Connection) -> None:
    """Many completed rows, as there are where anybody looks for the few that are not."""
    few = connection.execute(select(records).where(records.c.state == "completed").limit(1)).mappings().one()
    rows = [{**few, "record_id": number.to_bytes(32, "big")} for number in range(COMPLETED_ROWS)]
    connection.execute(records.insert(), rows)
    connection.commit()
    connection.execute(text("ANALYZE"))
    connection.commit()


def plan_of(connection: Connection, statement: Any, **brought: object) -> str:
    asked = {"my_horizon": 2**53, "my_limit": 20, "my_after": b"", "my_first": 0, "my_tenant_id": None, "now": None}
    compiled = statement.compile(dialect=connection.dialect)
    parameters = compiled.construct_params({**asked, "least": 1, "most": 2, **brought})
    how = "EXPLAIN" if connection.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    values = [parameters[name] for name in compiled.positiontup] if compiled.positional else parameters
    rows = connection.exec_driver_sql(f"{how} {compiled}", tuple(values) if isinstance(values, list) else values)
    return "\n".join(str(row[-1]) for row in rows)
