"""Looks at a database, each of which comes to one finding. Reads only."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, inspect, text

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.stores.sql import checks
from flask_idempotency.stores.sql.dialects import POSTGRESQL
from flask_idempotency.stores.sql.schema import RECORDS, metadata
from flask_idempotency.stores.sql.structure import lacks

MANY_DEAD: Final = 10_000
"""Autovacuum lets a table of some thousand rows have as many that are dead, and is right to."""

_DEAD_TO_LIVE: Final = 2

_INVALID: Final = text(
    "SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"
    " WHERE indrelid = ANY (SELECT to_regclass(name) FROM unnest(CAST(:tables AS text[])) AS tables (name))"
    " AND NOT (indisvalid AND indisready AND indislive) ORDER BY relname"
)
_SETTINGS: Final = text(
    "SELECT current_setting('synchronous_commit') AS synchronous_commit, current_setting('fsync') AS fsync,"
    " current_setting('full_page_writes') AS full_page_writes"
)
_ROWS: Final = text(
    "SELECT n_live_tup AS live, n_dead_tup AS dead FROM pg_stat_user_tables"
    " WHERE relid = to_regclass('idempotency_records')"
)
_PRAGMAS: Final = ("journal_mode", "synchronous")

_OFF: Final = {
    "synchronous_commit": "a crash of the server could lose a claim that was granted",
    "fsync": "a crash of its machine could lose or damage all that it holds",
    "full_page_writes": "a crash of its machine in the middle of a write could damage the page for good",
}


def schema(connection: Connection) -> Finding:
    """Whether the tables are those of this release, and may be used."""
    faults = [fault for fault in checks.structural(connection) if not fault.startswith(checks.INDEX)]
    if not faults:
        return Finding("schema", Verdict.FINE, "The tables are as this release needs them.")
    said, remedies = zip(*(_parted(fault) for fault in faults), strict=True)
    return Finding("schema", Verdict.FAULT, " ".join(said), " ".join(dict.fromkeys(remedies)))


def indexes(connection: Connection) -> Finding:
    """Whether each of ours is there, and can be used by a query."""
    if not inspect(connection).has_table(RECORDS):
        return Finding("indexes", Verdict.UNKNOWN, "There is no table that could have them.", "Do what `schema` says.")
    missing = [fault for fault in checks.structural(connection) if fault.startswith(checks.INDEX)]
    if missing:
        said, remedies = zip(*(_parted(fault) for fault in missing), strict=True)
        return Finding("indexes", Verdict.FAULT, " ".join(said), remedies[0])
    invalid = _invalid(connection)
    if invalid:
        return Finding(
            "indexes",
            Verdict.FAULT,
            f"Indexes were begun and never finished, and no query uses them: {', '.join(invalid)}.",
            f"Run {' and '.join(f'REINDEX INDEX CONCURRENTLY {name}' for name in invalid)}.",
        )
    return Finding("indexes", Verdict.FINE, "Every index is there and can be used.")


def durability(connection: Connection) -> Finding:
    """Whether what is committed survives a crash."""
    if connection.dialect.name != POSTGRESQL:
        return _durability_of_file(connection)
    settings = connection.execute(_SETTINGS).one()._mapping
    off = [name for name in _OFF if settings[name] == "off"]
    if not off:
        return Finding("durability", Verdict.FINE, "A commit is on disk when it is acknowledged.")
    remedies = {
        "synchronous_commit": "Set synchronous_commit to on for the role that the application connects as",
        "fsync": "set fsync to on in postgresql.conf, and take what was written meanwhile for damaged until it is checked",
        "full_page_writes": "set full_page_writes to on in postgresql.conf, unless the file system writes whole pages",
    }
    remedy = "; ".join(remedies[name] for name in off)
    text_ = "; ".join(f"{name} is off: {_OFF[name]}" for name in off)
    return Finding("durability", Verdict.FAULT, f"{text_}.", f"{remedy[0].upper()}{remedy[1:]}.")


def isolation(connection: Connection) -> Finding:
    """Whether claims that meet have to be repeated."""
    advice = checks.advice(connection)
    if not advice:
        return Finding("isolation", Verdict.FINE, "Transactions are READ COMMITTED by default.")
    said, remedy = _parted(advice[0])
    return Finding("isolation", Verdict.ADVICE, said, remedy)


def dead_rows(connection: Connection) -> Finding:
    """Whether autovacuum keeps up with what is removed and written again."""
    found: Any = connection.execute(_ROWS).one_or_none()
    if found is None:
        return Finding(
            "dead-rows",
            Verdict.UNKNOWN,
            "The server has no statistics of idempotency_records.",
            "See what `schema` says; and that track_counts is on.",
        )
    if found.dead > max(MANY_DEAD, _DEAD_TO_LIVE * found.live):
        return Finding(
            "dead-rows",
            Verdict.ADVICE,
            f"idempotency_records has {found.dead} dead rows beside {found.live}: autovacuum does not keep up.",
            "Look for transactions that have been open for long in pg_stat_activity, and let autovacuum come oftener: "
            "ALTER TABLE idempotency_records SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0).",
        )
    return Finding("dead-rows", Verdict.FINE, "Autovacuum keeps up with what is removed.")


def storage(connection: Connection) -> Finding:
    """Whether the tables say how their rows are to be stored. Alembic does not write that."""
    if not lacks(connection).storage:
        return Finding("storage", Verdict.FINE, "The tables say how their rows are to be stored.")
    return Finding(
        "storage",
        Verdict.ADVICE,
        "The tables have no fillfactor, as Alembic makes them: rows that are written twice take more room and more time.",
        "Run `flask idempotency db upgrade` once, which sets it.",
    )


def _invalid(connection: Connection) -> list[str]:
    if connection.dialect.name != POSTGRESQL:
        return []
    return list(connection.execute(_INVALID, {"tables": list(metadata.tables)}).scalars())


def _durability_of_file(connection: Connection) -> Finding:
    journal, synchronous = (connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in _PRAGMAS)
    if journal != "wal":
        return Finding(
            "durability",
            Verdict.FAULT,
            f"This SQLite database has journal_mode {journal}: readers and writers keep each other waiting, and time out.",
            "Run `PRAGMA journal_mode=WAL` on it once, and set no other where connections are made.",
        )
    if synchronous < checks.FULL:
        return Finding(
            "durability",
            Verdict.FAULT,
            "Connections of the application have PRAGMA synchronous below FULL: a power failure could lose what a view has "
            "committed together with its record.",
            "Set it to FULL where connections are made.",
        )
    return Finding("durability", Verdict.FINE, "A commit is on disk when it is acknowledged.")


def _parted(fault: str) -> tuple[str, str]:
    """What is wrong, and what to do about it: a sentence of `checks` says one after the other."""
    said, grants, rest = fault.partition(": grant it ")
    if grants:
        what, _, lacking = rest.partition(". ")
        return f"{said}. {lacking}", f"Grant it {what}."
    said, _, remedy = fault.partition(". ")
    return (f"{said}.", remedy) if remedy else (fault, "Run `flask idempotency db check`.")
