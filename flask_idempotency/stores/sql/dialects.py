"""Describe the databases where they differ: the clock, the wait for a lock, and how a connection commits.

`mysql.py` has what a server of MariaDB or MySQL must be, and `writes.py` how a write there returns rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import sqlalchemy as sa

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import printable

POSTGRESQL: Final = "postgresql"
SQLITE: Final = "sqlite"
MYSQL: Final = "mysql"
"""MariaDB and MySQL. SQLAlchemy has another name for MariaDB if the URL says so: see `kind_of`."""

MYSQL_NAMES: Final = (MYSQL, "mariadb")
"""SQLAlchemy's names of it."""

LOCK_TIMEOUT_MS: Final = 2000
"""How long a write waits for another transaction's lock on its row. Ours last a millisecond. After two seconds the holder is
frozen, and a worker that goes on waiting hangs with it."""

SHORT_LOCK_TIMEOUT_MS: Final = 100
"""How long a connection waits for a tenant's lock, or for a row that another worker deletes. It must queue behind the other
processes, because a bare try would find the lock taken each time. It is short, because the pool lacks the connection."""


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """One kind of database. Times are whole microseconds since the epoch, by the server's clock."""

    name: str
    clock: str
    random: str
    """A random number of 60 bits or more, as no other database has."""
    returns: bool = True
    """Whether a write can return the rows that it has changed."""

    @property
    def now(self) -> sa.ColumnElement[int]:
        """Return the server's time, or the parameter `now` if it is set. Only tests set it."""
        given = bigint("now")
        return sa.func.coalesce(given, sa.literal_column(self.clock, sa.BigInteger))

    def larger(self, one: sa.ColumnElement[Any], other: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
        function = sa.func.max if self.name == SQLITE else sa.func.greatest
        return function(one, other, type_=sa.BigInteger)

    def smaller(self, one: sa.ColumnElement[Any], other: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
        function = sa.func.min if self.name == SQLITE else sa.func.least
        return function(one, other, type_=sa.BigInteger)

    def quotient(self, one: sa.ColumnElement[int], other: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
        """Divide two whole numbers, and round down. MySQL's `/` rounds to four decimals, which may round up."""
        if self.name == MYSQL:
            return one.op("DIV", precedence=8, return_type=sa.BigInteger())(other)
        return one // other

    def in_session(self, statement: sa.Select[Any]) -> sa.Select[Any]:
        """Let this read, in a transaction of the application's, see what others have committed since it began.

        Where MySQL keeps a snapshot, as it does by default, a write sees that. So does a read that locks.
        """
        return statement.with_for_update(read=True) if self.name == MYSQL else statement

    def all_but_one(self, name: str) -> sa.ColumnElement[int]:
        """Return this parameter less one, for OFFSET. MySQL takes no expression there, but a second parameter."""
        return integer(f"{name}_less_one") if self.name == MYSQL else integer(name) - sa.literal_column("1")

    def assigned(self, statement: sa.Update, values: dict[Any, Any], *, last: sa.ColumnElement[Any]) -> sa.Update:
        """Set these values, of which some read the column `last`. MySQL assigns in order, and a later one sees the earlier."""
        if self.name != MYSQL:
            return statement.values({each.key: value for each, value in values.items()})
        return statement.ordered_values(*sorted(values.items(), key=lambda item: item[0] is last))

    def moment(self, *, bounded: bool, lock_timeout_ms: int | None = None) -> sa.Select[Any]:
        """Select one row with `now`, read once. `bounded`: on PostgreSQL also limit how long this transaction waits for a lock.

        The setting is local to the transaction, so a pooler's next client does not inherit it. `set_config` is volatile, so
        the planner runs it although no statement uses its result.
        """
        moment = sa.select(self.now.label("now"))
        if not bounded or self.name != POSTGRESQL:
            return moment
        timeout = LOCK_TIMEOUT_MS if lock_timeout_ms is None else lock_timeout_ms
        waits = ("'lock_timeout'", f"'{timeout}'", "true")
        lock_timeout = sa.func.set_config(*map(sa.literal_column, waits))
        return moment.add_columns(lock_timeout.label("lock_timeout"))


DIALECTS: Final = {
    POSTGRESQL: Dialect(
        POSTGRESQL,
        # Not now(): that is when the transaction began, and it may have waited for a lock since.
        clock="(extract(epoch from clock_timestamp()) * 1000000)::bigint",
        # In a version 4 UUID every bit of the first twelve digits and of the last four is random.
        random="(SELECT ('x' || left(hex, 12) || right(hex, 4))::bit(64)::bigint & 9223372036854775807"
        " FROM replace(gen_random_uuid()::text, '-', '') AS hex)",
    ),
    SQLITE: Dialect(
        SQLITE,
        # unixepoch('subsec') would need SQLite 3.42.
        clock="cast((julianday('now') - 2440587.5) * 86400000000 as integer)",
        random="random() & 9223372036854775807",
    ),
    MYSQL: Dialect(
        MYSQL,
        # When the statement began. UNIX_TIMESTAMP(SYSDATE(6)) would go on during a wait for a lock, and would be an hour off
        # where the session's time zone sets its clocks back. A time from before the wait only keeps others' leases longer.
        clock="timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))",
        random="cast(conv(left(sha2(concat(uuid(), rand()), 256), 15), 16, 10) as signed)",
        returns=False,
    ),
}


@cache
def made(make: Callable[..., Any], dialect: Dialect, *form: Any, **options: Any) -> Any:
    """Return the statement that `make` makes for this dialect, in this form.

    It is the same object each time, so that SQLAlchemy and `Driver` compile it once. The first two threads may both make it.
    """
    return make(dialect, *form, **options)


def kind_of(name: str) -> str:
    """Return the name in `DIALECTS` of a dialect of SQLAlchemy's."""
    return MYSQL if name in MYSQL_NAMES else name


def dialect_of(name: str) -> Dialect:
    """Return the dialect of this name. Raise `ConfigurationError` if the store does not support it."""
    if kind_of(name) not in SUPPORTED:
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: {name} is not supported. Use PostgreSQL (postgresql+psycopg://…), MariaDB or MySQL "
            "(mysql+pymysql://…), SQLite (sqlite:////path/to/file.db), or Redis."
        )
    return DIALECTS[kind_of(name)]


SUPPORTED: Final = (POSTGRESQL, SQLITE, MYSQL)
"""What a store may be opened on."""


_RELATIVES: Final = (
    ("YugabyteDB", "-YB-", "each of its connections caches 100 numbers of a sequence, so fences do not rise"),
    ("CockroachDB", "CockroachDB", "it has no advisory locks"),
    ("Amazon Redshift", "Redshift", "it enforces no primary key, so two workers could be granted one claim"),
    ("Greenplum", "Greenplum", "its sequences and locks are not those of PostgreSQL"),
    ("Apache Cloudberry", "Cloudberry", "its sequences and locks are not those of PostgreSQL"),
    ("Materialize", "Materialize", "it has no transactions that lock rows"),
    ("RisingWave", "RisingWave", "it has no transactions that lock rows"),
    ("QuestDB", "QuestDB", "it has no transactions that lock rows"),
    ("CrateDB", "CrateDB", "it has no transactions that lock rows"),
    ("YDB", "YDB", "its sequences and locks are not those of PostgreSQL"),
    ("openGauss", "openGauss", "its sequences and locks are not those of PostgreSQL"),
    ("GaussDB", "GaussDB", "its sequences and locks are not those of PostgreSQL"),
)
"""Servers that speak PostgreSQL's protocol: the name, what `version()` says, and why they cannot keep claims."""

_IS_POSTGRESQL: Final = re.compile(r"(?:PostgreSQL|EnterpriseDB) \d")


def refuse_relative(version: str) -> None:
    """Raise `ConfigurationError` if a server that says this of itself is no PostgreSQL, although it speaks its protocol."""
    name, why = next(((name, why) for name, word, why in _RELATIVES if word in version), ("", ""))
    if not name and not _IS_POSTGRESQL.match(version):
        name, why = version.split(" ")[0], "the store is not known to be safe there"
    if name:
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: this server is {printable(name)} and no PostgreSQL: {why}. Keep the records in PostgreSQL "
            f"(Aurora, Neon, Supabase and EDB are), in SQLite or in Redis. Its version() is {printable(version[:80])!r}."
        )


def commits_each_statement(connection: sa.Connection) -> bool:
    """Return whether this connection commits each statement by itself, so that no rollback is possible."""
    driver: Any = connection.connection.dbapi_connection
    if getattr(driver, "autocommit", False) is True:
        return True
    if kind_of(connection.dialect.name) == MYSQL:
        # A function of PyMySQL and mysqlclient. Others have the attribute above.
        return bool(getattr(driver, "get_autocommit", bool)())
    return connection.dialect.name == SQLITE and driver.isolation_level is None and not driver.in_transaction


def in_microseconds(seconds: float) -> int:
    """Return these seconds as whole microseconds. It restores a stored number exactly, up to the year 2106 at least."""
    return round(seconds * 1_000_000)


# A parameter of a statement, by its type in SQL. Times and durations are `bigint`.


def bigint(name: str) -> sa.BindParameter[int]:
    return sa.bindparam(name, type_=sa.BigInteger)


def integer(name: str) -> sa.BindParameter[int]:
    return sa.bindparam(name, type_=sa.Integer)


def binary(name: str) -> sa.BindParameter[bytes]:
    return sa.bindparam(name, type_=sa.LargeBinary)


def string(name: str) -> sa.BindParameter[str]:
    return sa.bindparam(name, type_=sa.Text)
