"""What differs from one database to the next: how to ask it for the time, and how to wait no longer than is good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import BigInteger, ColumnElement, Select, bindparam, func, literal_column, select

from flask_idempotency.engine.errors import ConfigurationError

POSTGRESQL: Final = "postgresql"
SQLITE: Final = "sqlite"

LOCK_TIMEOUT_MS: Final = 2000
"""How long a write waits for somebody else's lock on its row. Ours are held for a millisecond: after two seconds their
holder is frozen, and a worker that waits for it is lost as well."""

SHORT_LOCK_TIMEOUT_MS: Final = 100
"""How long a connection is kept for a tenant's lock, or for a row that is being removed. Long enough to queue there behind
the other processes: who only tried it would find it taken each time; and short enough not to be missed."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of database. Times are whole microseconds since the epoch, by the server's clock."""

    name: str
    clock: str
    greatest: str
    """The function that tells the larger of two numbers."""
    least: str
    """The one that tells the smaller."""

    @property
    def now(self) -> ColumnElement[int]:
        """The server's time, unless whoever executes the statement says otherwise: tests do, production never."""
        told = bindparam("now", type_=BigInteger)
        return func.coalesce(told, literal_column(self.clock, BigInteger))

    def moment(self, *, bounded: bool, lock_timeout_ms: int = LOCK_TIMEOUT_MS) -> Select[Any]:
        """One row: `now`, read once. Patient on PostgreSQL: this transaction waits for no lock longer than that.

        Transaction-local, so that a pooler's next client does not inherit it. The function is volatile, so the planner
        evaluates it although nobody looks at what it returns.
        """
        moment = select(self.now.label("now"))
        if not bounded or self.name != POSTGRESQL:
            return moment
        waits = ("'lock_timeout'", f"'{lock_timeout_ms}'", "true")
        patience = func.set_config(*map(literal_column, waits))
        return moment.add_columns(patience.label("lock_timeout"))


DIALECTS: Final = {
    POSTGRESQL: Dialect(
        POSTGRESQL,
        # Never now(): that is when the transaction began, and it may have waited for a lock since.
        clock="(extract(epoch from clock_timestamp()) * 1000000)::bigint",
        greatest="greatest",
        least="least",
    ),
    SQLITE: Dialect(
        SQLITE,
        # unixepoch('subsec') would need SQLite 3.42.
        clock="cast((julianday('now') - 2440587.5) * 86400000000 as integer)",
        greatest="max",
        least="min",
    ),
}


def dialect_of(name: str) -> Dialect:
    """What we know of this kind of database. Raises `ConfigurationError` for one that records cannot be kept in."""
    if name not in DIALECTS:
        raise ConfigurationError(
            f"IDEMPOTENCY_STORE: records cannot be kept in {name}. Use PostgreSQL (postgresql+psycopg://…), SQLite "
            "(sqlite:////path/to/file.db), or Redis."
        )
    return DIALECTS[name]


def in_microseconds(seconds: float) -> int:
    """Return the microseconds of a row that a record tells as these seconds. Exact up to the year 2106 at least."""
    return round(seconds * 1_000_000)
