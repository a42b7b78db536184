"""How the database is, for whoever asks: its tables, what it does with a commit, and what stands in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, inspect, text

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.sql.admin import janitor, schema_check
from flask_idempotency.stores.sql.database import Database, transaction
from flask_idempotency.stores.sql.dialects import POSTGRESQL, SQLITE
from flask_idempotency.stores.sql.schema import RECORDS, lacks, metadata

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
    faults = [fault for fault in schema_check.structural(connection) if not fault.startswith(schema_check.INDEX)]
    if not faults:
        return Finding("schema", Verdict.FINE, "The tables are as this release needs them.")
    said, remedies = zip(*(_parted(fault) for fault in faults), strict=True)
    return Finding("schema", Verdict.FAULT, " ".join(said), " ".join(dict.fromkeys(remedies)))


def indexes(connection: Connection) -> Finding:
    """Whether each of ours is there, and can be used by a query."""
    if not inspect(connection).has_table(RECORDS):
        return Finding("indexes", Verdict.UNKNOWN, "There is no table that could have them.", "Do what `schema` says.")
    missing = [fault for fault in schema_check.structural(connection) if fault.startswith(schema_check.INDEX)]
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
    advice = schema_check.advice(connection)
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
    if synchronous < schema_check.FULL:
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
    with transaction(other):
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


OVERDUE_SECONDS: Final = 3600
"""A janitor that is behind by less is at work."""

Look: TypeAlias = Callable[[Connection], Finding]

_EVERYWHERE: Final[tuple[tuple[str, Look], ...]] = (
    ("schema", schema),
    ("indexes", indexes),
    ("durability", durability),
)
_ON_POSTGRESQL: Final[tuple[tuple[str, Look], ...]] = (
    ("isolation", isolation),
    ("dead-rows", dead_rows),
    ("storage", storage),
)


class SqlHealth:
    """Implements `capabilities.Health`. `now` as for `SqlDataKeys`."""

    def __init__(self, database: Database, *, now: Callable[[], int | None]) -> None:
        self._database = database
        self._now = now

    def findings(self) -> Sequence[Finding]:
        if self._database.dialect.name == SQLITE:
            # Whoever connects for records first has the file log ahead from then on.
            self._database.run(lambda connection: None)
            return [*self._all(_EVERYWHERE), self._found("expiry", self._expiry)]
        return [
            *self._all(_EVERYWHERE),
            self._found("pooling", self._pooling),
            *self._all(_ON_POSTGRESQL),
            self._found("expiry", self._expiry),
        ]

    def _all(self, looks: Sequence[tuple[str, Look]]) -> list[Finding]:
        return [self._found(check, look) for check, look in looks]

    def _found(self, check: str, look: Look) -> Finding:
        try:
            return self._database.run(look, long=True)
        except ConfigurationError:
            return Finding(
                check,
                Verdict.UNKNOWN,
                "This could not be looked at: tables are missing, or the database's role may not read them.",
                "Do what `schema` and `durability` say, and ask again.",
            )

    def _pooling(self, connection: Connection) -> Finding:
        return self._database.run(lambda another: inspect_pooling(connection, another))

    def _expiry(self, connection: Connection) -> Finding:
        dialect, told = self._database.dialect, {"now": self._now()}
        now = connection.execute(janitor.time(dialect), told).scalar_one()
        horizon = now - OVERDUE_SECONDS * 1_000_000
        if connection.execute(janitor.is_overdue(dialect), {**told, "my_horizon": horizon}).scalar_one():
            return Finding(
                "expiry",
                Verdict.ADVICE,
                "Records that were over an hour ago are still there: nobody removes them, or not fast enough.",
                "Have the janitor expire, or run `flask idempotency expire` now and then; see that IDEMPOTENCY_EXPIRE_RATE is "
                "above what comes in.",
            )
        return Finding("expiry", Verdict.FINE, "What is over is removed within the hour.")
