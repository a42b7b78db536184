"""Refuse a server of MariaDB or MySQL that cannot keep claims, and set up a connection for records there.

The facts are in `research/correctness.md`, section 1.3. Their defaults differ from PostgreSQL's in four ways that matter:

* A transaction keeps the snapshot of its first read (REPEATABLE READ). Connections for records use READ COMMITTED.
* A lock timeout (1205) rolls back a statement, and not its transaction. `transaction` rolls back after every error.
* DDL commits the transaction that it runs in, so an upgrade is not one transaction.
* Outside strict mode a value that does not fit is cut, without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import printable
from flask_idempotency.stores.sql.dialects import LOCK_TIMEOUT_MS, MYSQL, kind_of

RECORDS: Final = "flask_idempotency_records"
"""The entry of a connection's `info` that shows that it was opened for records."""

NUMBERED: Final = "flask_idempotency_numbered"
"""The entry of a connection's `info` with the `Numbers` of its store, if its server has a sequence for fences."""

_OLDEST: Final = {"MariaDB": (10, 6), "MySQL": (8, 0, 13)}
"""Both have FOR UPDATE SKIP LOCKED from there on, and enforce what a row must hold."""

_SETTINGS: Final = ("sql_mode", "innodb_flush_log_at_trx_commit", "log_bin", "binlog_format", "max_allowed_packet")
READ_SETTINGS: Final = f"SELECT version() AS version, {', '.join(f'@@{name} AS {name}' for name in _SETTINGS)}"

IN_CLUSTER: Final = "SHOW GLOBAL VARIABLES LIKE 'wsrep\\_on'"
"""Not every server has this variable, and only SHOW says so without an error."""

SYNC_WAIT: Final = 7
"""The `wsrep_sync_wait` of connections for records: reads, updates and inserts wait for what other nodes have committed."""

FEWEST_NODES: Final = 3

FOUND_ROWS: Final = 2
"""The flag by which a client asks for the number of rows that an UPDATE has met."""

PACKET: Final = 16 * 2**20
"""The least `max_allowed_packet` that `doctor` finds good: MariaDB's default. A statement holds the whole response, and a
driver may write each of its bytes as two."""


def faults(settings: Mapping[Any, Any]) -> Iterator[str]:
    """Return why the store must refuse claims on a server with these settings: a sentence for each, with its remedy."""
    version = str(settings["version"])
    found = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.(\d+)", version)
    name = "MariaDB" if "mariadb" in version.lower() else "MySQL"
    oldest = _OLDEST[name]
    if found is None or tuple(map(int, found.groups()))[: len(oldest)] < oldest:
        needed = ".".join(map(str, oldest))
        yield f"This server is {name} {printable(version[:40])}, and the store needs {name} {needed} or later. Upgrade it."
    modes = str(settings["sql_mode"]).split(",")
    if not {"STRICT_TRANS_TABLES", "STRICT_ALL_TABLES"} & set(modes):
        yield (
            "sql_mode is not strict here: the server would cut a value that does not fit, and say nothing. Add "
            "STRICT_TRANS_TABLES to sql_mode on the server, or where the application's connections are made."
        )
    if int(settings["innodb_flush_log_at_trx_commit"]) != 1:
        yield (
            "innodb_flush_log_at_trx_commit is not 1 here: a crash could lose a claim that was granted, and the payment would "
            "run again. Set it to 1 on the server."
        )
    if int(settings["log_bin"]) and settings["binlog_format"] == "STATEMENT":
        yield (
            "binlog_format is STATEMENT here: the server refuses writes at READ COMMITTED, which claims need. Set it to ROW or "
            "MIXED."
        )


def is_on(found: Sequence[Any] | None) -> bool:
    """Return True if this row of SHOW says that a variable is there, and on."""
    return found is not None and str(found[1]).upper() == "ON"


def has_sequences(version: str, *, in_cluster: bool) -> bool:
    """Return True if the numbers of a sequence rise on this server. MySQL has none, and in Galera each node has its own."""
    return "mariadb" in version.lower() and not in_cluster


@dataclass(eq=False)
class Numbers:
    """Where the fences of a store come from. A server may join a Galera cluster or leave it while the store is in use."""

    raised: bool = False
    """True once the sequence is above all fences. Before that, and in a cluster, they come from a row."""
    due: bool = False
    """True if the next claim must prepare the database again, because its server has left a cluster."""

    def prepare(self, connection: Any, record: Any) -> None:
        """Set up a new connection for records, and note whether its server has a sequence. Raise `ConfigurationError` if it
        cannot keep claims.

        SQLAlchemy closes the connection then, and PyMySQL refuses to close one a second time.
        """
        # Only PyMySQL shows what it has asked for. SQLAlchemy asks for it, unless an application connects by itself.
        if not getattr(connection, "client_flag", FOUND_ROWS) & FOUND_ROWS:
            raise ConfigurationError(
                "IDEMPOTENCY_STORE: the driver counts only rows whose values differ, so a repeated write would look like a "
                "lost claim. Add client_flag=CLIENT.FOUND_ROWS where the application's connections are made."
            )
        cursor = connection.cursor()
        cursor.execute(READ_SETTINGS)
        found = dict(zip([column[0] for column in cursor.description], cursor.fetchone(), strict=True))
        if fault := next(faults(found), None):
            raise ConfigurationError(f"IDEMPOTENCY_STORE: {fault}")
        cursor.execute(IN_CLUSTER)
        in_cluster = is_on(cursor.fetchone())
        if in_cluster:
            cursor.execute("SELECT @@session.wsrep_on")
            if not cursor.fetchone()[0]:
                raise ConfigurationError(
                    "IDEMPOTENCY_STORE: wsrep_on is OFF for this connection to a node of a Galera cluster, so no other node "
                    "would learn of its claims, and would grant them too. Leave wsrep_on as it is where connections are made."
                )
            # A node that lags would say that a key has no record, or that a lease is over. Its vote at the COMMIT prevents a
            # second grant; this prevents wrong refusals, and writes that change no row and so are not voted on.
            cursor.execute(f"SET SESSION wsrep_sync_wait = {SYNC_WAIT}, wsrep_dirty_reads = OFF")
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(_KEEPS_SNAPSHOT)
        if is_on(cursor.fetchone()):
            # Otherwise an update of several rows waits for each locked one that it meets on its way.
            cursor.execute(f"SET SESSION {_SNAPSHOT_ISOLATION} = OFF")
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {LOCK_TIMEOUT_MS // 1000}")
        cursor.close()
        record.info[RECORDS] = True
        if has_sequences(str(found["version"]), in_cluster=in_cluster):
            record.info[NUMBERED] = self
            self.due = not self.raised
        else:
            self.raised = self.due = False


# All databases of the server share one space of these names.
_TURN: Final = "sha1(concat('flask-idempotency outbox of ', database()))"


@contextmanager
def in_turn(connection: Connection) -> Iterator[bool]:
    """On MySQL, hold the lock of relays until the transaction inside has ended. It yields False if another holds it for too
    long.

    No row could be locked in its place: a database with an outbox alone has none that is always there.
    """
    if kind_of(connection.dialect.name) != MYSQL:
        yield True
        return
    mine = bool(connection.exec_driver_sql(f"SELECT GET_LOCK({_TURN}, {LOCK_TIMEOUT_MS // 1000})").scalar_one())
    try:
        yield mine
    finally:
        if mine:
            connection.exec_driver_sql(f"SELECT RELEASE_LOCK({_TURN})")


_SNAPSHOT: Final = "flask_idempotency_snapshot"
"""The entry of a connection's `info`: whether its transactions refuse to write to rows that changed since they began."""

_SNAPSHOT_ISOLATION: Final = "innodb_snapshot_isolation"
_KEEPS_SNAPSHOT: Final = f"SHOW VARIABLES LIKE '{_SNAPSHOT_ISOLATION}'"


@contextmanager
def beside_snapshot(connection: Connection) -> Iterator[None]:
    """On a connection of the application's, let the statements inside write to rows that are newer than its snapshot.

    A claim is, and so is each renewal of its lease. From 11.6.2 on, MariaDB refuses that by default at REPEATABLE READ. The
    token that each of our writes compares makes it safe; the application's own writes keep the protection.
    """
    if kind_of(connection.dialect.name) != MYSQL:
        yield
        return
    if _SNAPSHOT not in connection.info:
        connection.info[_SNAPSHOT] = is_on(connection.exec_driver_sql(_KEEPS_SNAPSHOT).first())
    if not connection.info[_SNAPSHOT]:
        yield
        return
    connection.exec_driver_sql(f"SET SESSION {_SNAPSHOT_ISOLATION} = OFF")
    try:
        yield
    finally:
        # It fails only with the connection.
        with suppress(SQLAlchemyError):
            connection.exec_driver_sql(f"SET SESSION {_SNAPSHOT_ISOLATION} = ON")
