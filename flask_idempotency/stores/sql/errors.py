"""What the errors of a database mean: a log line without secrets, missing privileges, and the errors of this package."""

from __future__ import annotations

import re
import sqlite3
from typing import Final
from urllib.parse import quote, quote_plus

from sqlalchemy import URL, Connection, text
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, IdempotencyError, StoreUnavailable
from flask_idempotency.stores.sql.dialects import SQLITE

_HIDDEN: Final = "***"
_HOST: Final = re.compile(r"[\w.-]+|[0-9A-Fa-f:.]+")
_NAME: Final = re.compile(r"[\w.-]+")


def error_text(error: SQLAlchemyError, url: URL) -> str:
    """Where the database is and what it says, without its password: not whole, and not in pieces."""
    if _is_torn(url):
        # What drivers say quotes host and database, which are pieces of the password here.
        return (
            "The database (not named here, because its URL may be torn in the middle of a password: write @ in it as "
            f"%40, / as %2F, ? as %3F and % as %25): {type(getattr(error, 'orig', None) or error).__name__}."
        )
    place = f"The database {url.database!r}" if url.host is None else f"The database {url.database!r} on {url.host}"
    # The first line, without its full stop: what follows quotes the statement.
    words = str(getattr(error, "orig", None) or error).partition("\n")[0].rstrip(".")
    for secret in (url.password, *(value for name, value in url.query.items() if "pass" in name)):
        if secret:
            for spelling in (str(secret), quote(str(secret), safe=""), quote_plus(str(secret))):
                words = words.replace(spelling, _HIDDEN)
    return f"{place}: {words}."


def _is_torn(url: URL) -> bool:
    """Whether host and database may be the rest of a password: a URL is split at its first @, be it the password's.

    The @ that was meant is then in what follows, or went with a query of no parameters, and the database with it.
    """
    if url.get_backend_name() == SQLITE and url.password is None:
        return False
    plain = _NAME.fullmatch(url.database or "") and (url.host is None or _HOST.fullmatch(url.host))
    return not plain or "@" in str(dict(url.query))


REMEDY: Final = (
    "the database's role may not use the tables of idempotency records: grant it SELECT, INSERT, UPDATE and DELETE on "
    "idempotency_records, idempotency_meta, idempotency_tenants, idempotency_data_keys, idempotency_quota and "
    "idempotency_tasks, and USAGE on the sequence idempotency_fence_numbers_number_seq"
)

# Of what is not there nothing is lacking: to_regclass gives NULL. A sequence counts for whoever has either right.
_LACKING: Final = text(
    "SELECT tables.name, rights.name"
    " FROM (VALUES ('idempotency_records'), ('idempotency_meta'), ('idempotency_tenants'), ('idempotency_data_keys'),"
    " ('idempotency_quota'), ('idempotency_tasks')) AS tables (name),"
    " (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) AS rights (name)"
    " WHERE NOT has_table_privilege(to_regclass(tables.name), rights.name)"
    " UNION ALL SELECT 'idempotency_fence_numbers_number_seq', 'USAGE'"
    " WHERE NOT has_sequence_privilege(to_regclass('idempotency_fence_numbers_number_seq'), 'USAGE, UPDATE')"
)

_LIFTS: Final = text(
    "SELECT coalesce(has_sequence_privilege(to_regclass('idempotency_fence_numbers_number_seq'), 'UPDATE')"
    " AND has_sequence_privilege(to_regclass('idempotency_fence_numbers_number_seq'), 'USAGE, SELECT'), false)"
)


def may_set_sequence(connection: Connection) -> bool:
    """Whether this role may set the sequence of fences, as the first claim does where a migration has not."""
    return bool(connection.scalar(_LIFTS))


def missing_privileges(connection: Connection) -> dict[str, list[str]]:
    """The rights that this role does not have, by what they are on. SQLite knows no roles."""
    found: dict[str, list[str]] = {}
    if connection.dialect.name == "postgresql":
        for name, right in connection.execute(_LACKING):
            found.setdefault(name, []).append(right)
    return found


CONTENDED: Final = frozenset({"40001", "40P01"})
"""Serialization failure and deadlock: nothing was done, and once more may well succeed."""

_LOCK_TIMEOUT: Final = "55P03"
_AGAIN: Final = CONTENDED | {_LOCK_TIMEOUT}
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_NO_TABLE_OR_COLUMN: Final = frozenset({"42P01", "42703"})
_NOT_PERMITTED: Final = "42501"
_DAMAGE: Final = frozenset({"22003"})
"""A number out of range: no sum of ours is."""
_SQLITE_DAMAGE: Final = frozenset({sqlite3.SQLITE_CONSTRAINT_NOTNULL, sqlite3.SQLITE_CONSTRAINT_CHECK})
"""Rules of our tables that a statement of ours would break. SQLite lets others write what breaks them: PostgreSQL does not."""
_SQLITE_UNREADABLE: Final = ("Could not decode to UTF-8", "integer overflow")
_SQLITE_NO_TABLE: Final = ("no such table: idempotency_", "no such column: ", "has no column named ")


def sqlstate(error: DBAPIError) -> str:
    """The five characters by which PostgreSQL says what went wrong; empty elsewhere."""
    for name in ("sqlstate", "pgcode"):  # psycopg 3, psycopg2
        if found := getattr(error.orig, name, None):
            return str(found)
    return ""


def is_serialization_failure(error: DBAPIError) -> bool:
    return sqlstate(error) in CONTENDED


def is_lock_timeout(error: DBAPIError) -> bool:
    """Whether somebody else held a lock for longer than our patience."""
    return sqlstate(error) == _LOCK_TIMEOUT or _is_busy(error)


def is_retryable(error: BaseException) -> bool:
    """Whether this is the database's way of saying that the same work may succeed if it is only repeated.

    It chose between transactions, and not this one; or the connection broke, and nothing of the transaction is left.
    """
    found = _of_driver(error)
    if found is None:
        return False
    return found.connection_invalidated or _is_busy(found) or sqlstate(found) in _AGAIN or _is_absence(found)


def is_refusal(error: BaseException) -> bool:
    """Whether a commit that raised this was certainly not done. Not so when the connection broke, or was ended; nor when
    it was no database that said it, but somebody who was told of the commit."""
    found = _of_driver(error)
    if found is None or found.connection_invalidated:
        return False
    return isinstance(found.orig, sqlite3.Error) or sqlstate(found)[:2] not in ("", "08", "57")


def _of_driver(error: BaseException | None) -> DBAPIError | None:
    while error is not None and not isinstance(error, DBAPIError):
        error = error.__cause__
    return error


def _is_absence(error: DBAPIError) -> bool:
    """Whether there was no server to talk to, or it was just going: what fails to connect has no state at all."""
    if not isinstance(error, OperationalError) or isinstance(error.orig, sqlite3.Error):
        return False
    state = sqlstate(error)
    return not state or state.startswith(("08", "57P"))


def _is_busy(error: DBAPIError) -> bool:
    # The low byte: SQLITE_BUSY_SNAPSHOT and its like are kinds of it.
    return isinstance(error.orig, sqlite3.Error) and getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _BUSY


def explained(error: SQLAlchemyError) -> IdempotencyError | None:
    """What the store says instead. None for what is a mistake of ours, and must look like one.

    Not a word of the database's own text, which may quote what a row holds.
    """
    if isinstance(error, PoolTimeout):
        return StoreUnavailable("no connection to the database became free in time")
    if not isinstance(error, DBAPIError):
        return None
    state = sqlstate(error)
    if state in _DAMAGE or _sqlite_tells_damage(error):
        return CorruptRecord("the database holds something in our tables that we did not write")
    if state in _NO_TABLE_OR_COLUMN or (
        isinstance(error, OperationalError) and any(text in str(error.orig) for text in _SQLITE_NO_TABLE)
    ):
        return ConfigurationError(
            "the database has no tables for idempotency records, or old ones: run `flask idempotency db upgrade`"
        )
    if state == _NOT_PERMITTED:
        return ConfigurationError(REMEDY)
    # SQLITE_ERROR is what SQLite says to what it cannot parse.
    if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:
        return None
    if isinstance(error, ProgrammingError | IntegrityError | DataError | NotSupportedError):
        return None
    what = " ".join(filter(None, (type(error.orig).__name__, state)))
    return StoreUnavailable(f"the database cannot decide ({what})")


def _sqlite_tells_damage(error: DBAPIError) -> bool:
    if not isinstance(error.orig, sqlite3.Error):
        return False
    if getattr(error.orig, "sqlite_errorcode", None) in _SQLITE_DAMAGE:
        return True
    return isinstance(error, OperationalError) and str(error.orig).startswith(_SQLITE_UNREADABLE)
