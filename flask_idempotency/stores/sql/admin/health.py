"""Check a running database for `doctor`: tables, indexes, durability, poolers, dead rows and expired records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, inspect, text

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import printable
from flask_idempotency.stores.sql import mysql
from flask_idempotency.stores.sql import schema as declared
from flask_idempotency.stores.sql.admin import janitor, schema_check
from flask_idempotency.stores.sql.capability import SqlCapability
from flask_idempotency.stores.sql.database import transaction
from flask_idempotency.stores.sql.dialects import MYSQL, POSTGRESQL, SQLITE, kind_of
from flask_idempotency.stores.sql.naming import named, schema_of
from flask_idempotency.stores.sql.statements import server_time

Said: TypeAlias = tuple[Verdict, *tuple[str, ...]]
"""What a check has found: all of a `Finding` but its name."""

MANY_DEAD: Final = 10_000
"""Fewer dead rows are normal: autovacuum lets a table of some thousand rows have as many dead ones."""

_DEAD_TO_LIVE: Final = 2

_INVALID: Final = (
    "SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"
    " WHERE indrelid = ANY (SELECT to_regclass('{schema}' || name) FROM unnest(CAST(:tables AS text[])) AS tables (name))"
    " AND NOT (indisvalid AND indisready AND indislive) ORDER BY relname"
)
_SETTINGS: Final = text(
    "SELECT current_setting('synchronous_commit') AS synchronous_commit, current_setting('fsync') AS fsync,"
    " current_setting('full_page_writes') AS full_page_writes"
)
_ROWS: Final = (
    "SELECT n_live_tup AS live, n_dead_tup AS dead FROM pg_stat_user_tables"
    " WHERE relid = to_regclass('{schema}idempotency_records')"
)
_VERSION: Final = text("SELECT version()")
_PRAGMAS: Final = ("journal_mode", "synchronous")

_OFF: Final = {
    "synchronous_commit": (
        "a crash of the server could lose a claim that was granted",
        "set synchronous_commit to on for the role that the application connects as",
    ),
    "fsync": (
        "a crash of its machine could lose or damage all that it holds",
        "set fsync to on in postgresql.conf, and check everything that was written since it was off",
    ),
    "full_page_writes": (
        "a crash of its machine in the middle of a write could damage the page for good",
        "set full_page_writes to on in postgresql.conf, unless the file system writes whole pages",
    ),
}
"""Settings of PostgreSQL: what may happen where one is off, and the remedy."""


def schema(connection: Connection) -> Said:
    """Check that the tables are those of this release, and that the role may use them."""
    faults = [fault for fault in schema_check.structural(connection) if not fault.startswith(schema_check.INDEX)]
    if not faults:
        return Verdict.FINE, "The tables are as this release needs them."
    return _all_of(faults)


def indexes(connection: Connection) -> Said:
    """Check that each index exists, and that queries can use it."""
    if not inspect(connection).has_table(declared.records.name, schema=schema_of(connection)):
        return Verdict.UNKNOWN, "The table of the records is missing.", "Do what `schema` says."
    missing = [fault for fault in schema_check.structural(connection) if fault.startswith(schema_check.INDEX)]
    if missing:
        return _all_of(missing)
    invalid: Sequence[str] = ()
    if connection.dialect.name == POSTGRESQL:
        invalid = (
            connection.execute(named(connection, _INVALID), {"tables": list(declared.metadata.tables)}).scalars().all()
        )
    if invalid:
        return (
            Verdict.FAULT,
            f"These indexes are unfinished, and no query uses them: {', '.join(invalid)}.",
            f"Run {' and '.join(f'REINDEX INDEX CONCURRENTLY {name}' for name in invalid)}.",
        )
    return Verdict.FINE, "Every index exists and can be used."


def durability(connection: Connection) -> Said:
    """Check that a commit survives a crash."""
    fine = Verdict.FINE, "A commit is on disk when it is acknowledged."
    if kind_of(connection.dialect.name) == MYSQL:
        faults = list(mysql.faults(connection.exec_driver_sql(mysql.READ_SETTINGS).one()._mapping))
        return _all_of(faults) if faults else fine
    if connection.dialect.name == SQLITE:
        journal, synchronous = (connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in _PRAGMAS)
        if journal != "wal":
            return (
                Verdict.FAULT,
                f"This SQLite database has journal_mode {journal}: readers and writers wait for each other, and time out.",
                "Run `PRAGMA journal_mode=WAL` on it once, and set no other where connections are made.",
            )
        if synchronous < schema_check.FULL:
            return (
                Verdict.FAULT,
                "Connections of the application have PRAGMA synchronous below FULL: a power failure could lose rows that a "
                "view has committed together with its record.",
                "Set it to FULL where connections are made.",
            )
        return fine
    settings = connection.execute(_SETTINGS).one()._mapping
    off = [name for name in _OFF if settings[name] == "off"]
    if not off:
        return fine
    said = "; ".join(f"{name} is off: {_OFF[name][0]}" for name in off)
    remedy = "; ".join(_OFF[name][1] for name in off)
    return Verdict.FAULT, f"{said}.", f"{remedy[0].upper()}{remedy[1:]}."


def server(connection: Connection) -> Said:
    """Say which server this is, and how many numbers of the fences' sequence a connection takes at once."""
    version = printable(str(connection.scalar(_VERSION)).partition(" on ")[0])
    if fault := declared.cache_fault(connection, declared.FENCES, declared.FENCES_DO_NOT_RISE):
        said, remedy = _fault_and_remedy(fault)
        return Verdict.FAULT, f"This is {version}. {said}", remedy
    if declared.cached_numbers(connection, declared.FENCES) is None:
        return (
            Verdict.UNKNOWN,
            f"This is {version}. The cache of the sequence {declared.FENCES} cannot be read, and must be 1.",
            "Let the database role read pg_sequence, and do what `schema` says.",
        )
    return Verdict.FINE, f"This is {version}, and each fence is higher than the one before."


def isolation(connection: Connection) -> Said:
    """Check that the store need not repeat conflicting claims."""
    advice = schema_check.advice(connection)
    if not advice:
        return Verdict.FINE, "Transactions are READ COMMITTED by default."
    said, remedy = _fault_and_remedy(advice[0])
    return Verdict.ADVICE, said, remedy


def dead_rows(connection: Connection) -> Said:
    """Check that autovacuum keeps up with deleted and updated rows."""
    found: Any = connection.execute(named(connection, _ROWS)).one_or_none()
    if found is None:
        return (
            Verdict.UNKNOWN,
            "The server has no statistics of idempotency_records.",
            "Do what `schema` says, and set track_counts to on.",
        )
    if found.dead > max(MANY_DEAD, _DEAD_TO_LIVE * found.live):
        return (
            Verdict.ADVICE,
            f"idempotency_records has {found.dead} dead rows and {found.live} live ones: autovacuum does not keep up.",
            "Find transactions in pg_stat_activity that have been open for long, and let autovacuum run more often: "
            "ALTER TABLE idempotency_records SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0).",
        )
    return Verdict.FINE, "Autovacuum keeps up."


def storage(connection: Connection) -> Said:
    """Check that the tables have their storage parameters. Alembic does not write them."""
    if not declared.lacks(connection).storage:
        return Verdict.FINE, "The tables have their storage parameters."
    return (
        Verdict.ADVICE,
        "The tables have no fillfactor, as Alembic creates them: rows that are written twice take more space and time.",
        "Run `flask idempotency db upgrade` once, which sets it.",
    )


def packets(connection: Connection) -> Said:
    """Check that the server takes statements with large responses."""
    largest = int(connection.exec_driver_sql(mysql.READ_SETTINGS).one().max_allowed_packet)
    said = f"The server takes statements of up to {largest} bytes (max_allowed_packet)"
    if largest >= mysql.PACKET:
        return Verdict.FINE, f"{said}."
    return (
        Verdict.ADVICE,
        f"{said}: a larger response cannot be stored, and its record stays in flight until its lease expires.",
        "Set max_allowed_packet to twice IDEMPOTENCY_MAX_BODY or more, or lower that setting.",
    )


_NODE: Final = (
    "SHOW GLOBAL STATUS WHERE variable_name IN ('wsrep_cluster_size', 'wsrep_local_state_comment')",
    "SHOW VARIABLES WHERE variable_name IN ('wsrep_sync_wait', 'innodb_autoinc_lock_mode')",
)
_WITHOUT_KEY: Final = (
    "SELECT t.table_name FROM information_schema.tables t LEFT JOIN information_schema.table_constraints c"
    " ON c.table_schema = t.table_schema AND c.table_name = t.table_name AND c.constraint_type = 'PRIMARY KEY'"
    " WHERE t.table_schema = database() AND t.table_type = 'BASE TABLE' AND c.table_name IS NULL ORDER BY t.table_name"
)


def galera(connection: Connection) -> Said:
    """Check that a Galera cluster survives the loss of a node, and that each node sees what the others have committed.

    Outside the majority, the store does not answer, and so this is not asked.
    """
    if not mysql.is_on(connection.exec_driver_sql(mysql.IN_CLUSTER).first()):
        return Verdict.FINE, "The server is no node of a Galera cluster."
    node = {str(name): str(value) for show in _NODE for name, value in connection.exec_driver_sql(show)}
    size, state = int(node["wsrep_cluster_size"]), printable(node["wsrep_local_state_comment"])
    said = f"This is a node of a Galera cluster of {size}, and its state is {state}"
    found: list[Said] = []
    if size < mysql.FEWEST_NODES or size % 2 == 0:
        few = "with this size a failure may leave no majority"
        found.append((Verdict.ADVICE, few, "Run three nodes or five, or add garbd."))
    if int(node["wsrep_sync_wait"]) & mysql.SYNC_WAIT != mysql.SYNC_WAIT:
        found.append(
            (
                Verdict.ADVICE,
                f"wsrep_sync_wait is {node['wsrep_sync_wait']} on your own connections. The store sets its own. If yours lead "
                "to another node, a view may not see its claim, and its client gets 503",
                f"Set wsrep_sync_wait to {mysql.SYNC_WAIT} where connections are made, or let them lead to one node.",
            )
        )
    if node["innodb_autoinc_lock_mode"] != "2":
        locked = "innodb_autoinc_lock_mode is not 2, so inserts may deadlock"
        found.append((Verdict.ADVICE, locked, "Set innodb_autoinc_lock_mode to 2 on each node."))
    if tables := [printable(str(name)) for name in connection.exec_driver_sql(_WITHOUT_KEY).scalars()]:
        bare = f"these tables have no primary key, and nodes may disagree about their rows: {', '.join(tables)}"
        found.append((Verdict.ADVICE, bare, "Give each of these tables a primary key."))
    if not found:
        return Verdict.FINE, f"{said}."
    _, faults, remedies = zip(*found, strict=True)
    return Verdict.ADVICE, f"{said}: {'; '.join(faults)}.", " ".join(remedies)


def _all_of(faults: Iterable[str]) -> Said:
    """Return all of these sentences as one finding. Faults with the same remedy name it once."""
    said, remedies = zip(*map(_fault_and_remedy, faults), strict=True)
    return Verdict.FAULT, " ".join(said), " ".join(dict.fromkeys(remedies))


def _fault_and_remedy(fault: str) -> tuple[str, str]:
    """Split a sentence of `schema_check` into the fault and its remedy."""
    said, grants, rest = fault.partition(": grant it ")
    if grants:
        what, _, lacking = rest.partition(". ")
        return f"{said}. {lacking}", f"Grant it {what}."
    said, _, remedy = fault.partition(". ")
    return (f"{said}.", remedy) if remedy else (fault, "Run `flask idempotency db check`.")


POOLING_TRIES: Final = 3
"""With other clients at the pooler, two of our connections need not share a server connection each time."""

_BACKEND: Final = text("SELECT pg_backend_pid()")


def inspect_pooling(one: Connection, other: Connection) -> Said:
    """Check for a pooler in transaction mode, with two autocommit connections. The first is made as the application's are."""
    if not shares_sessions(one, other):
        return Verdict.FINE, "Each connection has its own server connection."
    driver: Any = one.connection.dbapi_connection
    hazards = []
    # Only psycopg prepares statements by itself; other drivers have no such attribute.
    if getattr(driver, "prepare_threshold", None) is not None:
        hazards.append(
            (
                "psycopg prepares statements that the application repeats, and the next server connection does not know them",
                'Set connect_args={"prepare_threshold": None}, or let PgBouncer 1.22 or later keep prepared statements '
                "(max_prepared_statements above 0, and libpq 17 or later on this host).",
            )
        )
    info: Any = getattr(driver, "info", None)
    psycopg3 = hasattr(info, "get_parameters")
    if (info.get_parameters() if psycopg3 else getattr(info, "dsn_parameters", None) or {}).get("options"):
        hazards.append(
            (
                "connections are made with options=…, which a pooler ignores or applies to other clients",
                "Set them for the role instead: ALTER ROLE … SET ….",
            )
        )
    if not hazards:
        return (
            Verdict.FINE,
            "A pooler gives each transaction to some server connection: waiting duplicates poll, and no setting here needs a "
            "session.",
        )
    said, remedies = zip(*hazards, strict=True)
    return (
        Verdict.ADVICE,
        f"A pooler gives each transaction to some server connection, and {' and '.join(said)}.",
        " ".join(remedies),
    )


def shares_sessions(one: Connection, other: Connection) -> bool:
    """Return True if a pooler gives these two autocommit connections another session of the server for each transaction."""
    for _ in range(POOLING_TRIES):
        before = one.execute(_BACKEND).scalar_one()
        with transaction(other):
            held = other.execute(_BACKEND).scalar_one()
            after = one.execute(_BACKEND).scalar_one()
        if held in (before, after) or before != after:
            return True
    return False


OVERDUE_SECONDS: Final = 3600
"""A janitor may be behind by this much."""


class SqlHealth(SqlCapability):
    """Implements `Health`."""

    def findings(self) -> Sequence[Finding]:
        kind = self._database.dialect.name
        if kind == SQLITE:
            # The first connection for records sets the file's journal mode, which the checks read.
            self._database.run(lambda connection: None)
        check = self._check
        found = [check("schema", schema), check("indexes", indexes), check("durability", durability)]
        if kind == MYSQL:
            found += [check("packets", packets), check("galera", galera)]
        if kind == POSTGRESQL:
            run = self._database.run
            found.append(check("pooling", lambda one: run(lambda other: inspect_pooling(one, other))))
            found += [check("server", server), check("isolation", isolation)]
            found += [check("dead-rows", dead_rows), check("storage", storage)]
        return [*found, check("expiry", self._expiry)]

    def _check(self, name: str, check: Callable[[Connection], Said]) -> Finding:
        try:
            return Finding(name, *self._database.run(check, long=True))
        except ConfigurationError:
            return Finding(
                name,
                Verdict.UNKNOWN,
                "This could not be checked: tables are missing, or the database role may not read them.",
                "Do what `schema` and `durability` say, and check again.",
            )

    def _expiry(self, connection: Connection) -> Said:
        parameters = {"now": self._now()}
        now = self._send(connection, server_time, parameters).scalar_one()
        horizon = now - OVERDUE_SECONDS * 1_000_000
        if self._send(connection, janitor.has_overdue, {**parameters, "my_horizon": horizon}).scalar_one():
            return (
                Verdict.ADVICE,
                "Records that expired an hour ago are still there: no janitor runs, or it is too slow.",
                "Run the janitor, or `flask idempotency expire` regularly. Set IDEMPOTENCY_EXPIRE_RATE above the rate of new "
                "keys.",
            )
        return Verdict.FINE, "Expired records are removed within the hour."
