"""Whether a pooler stands in front of the database that gives each transaction to another server connection."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, text

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.stores.sql.database import together

LOOKS: Final = 3
"""Beside others that use the pooler, two of ours need not be given the same server connection each time."""

_BACKEND: Final = text("SELECT pg_backend_pid()")


def inspect_pooling(one: Connection, other: Connection) -> Finding:
    """By two connections that commit each statement by itself. The first is made as the application's are."""
    if not any(_is_shared(one, other) for _ in range(LOOKS)):
        return Finding("pooling", Verdict.FINE, "Connections have a server of their own.")
    hazards = list(_hazards(one))
    if not hazards:
        return Finding(
            "pooling",
            Verdict.FINE,
            "A pooler gives each transaction to some server connection, and nothing here needs a session.",
        )
    said, remedies = zip(*hazards, strict=True)
    return Finding(
        "pooling",
        Verdict.ADVICE,
        f"A pooler gives each transaction to some server connection, and {' and '.join(said)}.",
        " ".join(remedies),
    )


def _is_shared(one: Connection, other: Connection) -> bool:
    before = one.execute(_BACKEND).scalar_one()
    with together(other):
        held = other.execute(_BACKEND).scalar_one()
        after = one.execute(_BACKEND).scalar_one()
    return held in (before, after) or before != after


def _hazards(connection: Connection) -> list[tuple[str, str]]:
    driver: Any = connection.connection.dbapi_connection
    found = []
    # psycopg alone prepares by itself; other drivers have no such attribute.
    if getattr(driver, "prepare_threshold", None) is not None:
        found.append(
            (
                "psycopg prepares what the application sends often, of which the next server connection has not heard",
                'Set connect_args={"prepare_threshold": None}, or have PgBouncer 1.21 or later keep what is prepared '
                "(max_prepared_statements).",
            )
        )
    if _parameters(driver).get("options"):
        found.append(
            (
                "connections are made with options=…, which a pooler ignores or gives to strangers",
                "Set them for the role instead: ALTER ROLE … SET ….",
            )
        )
    return found


def _parameters(driver: Any) -> dict[str, str]:
    info: Any = getattr(driver, "info", None)
    if hasattr(info, "get_parameters"):  # psycopg 3
        return dict(info.get_parameters())
    return dict(getattr(info, "dsn_parameters", None) or {})  # psycopg2
