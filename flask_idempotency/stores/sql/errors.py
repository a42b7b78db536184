"""What the errors of a database mean: a log line without secrets, missing privileges, and the errors of this package."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from shlex import quote as quoted
from typing import Final
from urllib.parse import quote, quote_plus

from sqlalchemy import URL, exc

from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, IdempotencyError, StoreUnavailable
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.outages import sqlstate as state_of
from flask_idempotency.stores.sql.dialects import SQLITE
from flask_idempotency.stores.sql.schema import FENCES, RECORD_TABLES, fence_numbers

_HIDDEN: Final = "***"
_HOST: Final = re.compile(r"[\w.-]+|[0-9A-Fa-f:.]+")
_NAME: Final = re.compile(r"[\w.-]+")


def error_text(error: exc.SQLAlchemyError, url: URL) -> str:
    """Return where the database is and its message, without any part of its password."""
    if _is_torn(url):
        # Drivers quote host and database in their messages. Here these are parts of the password.
        return (
            "The database (not named here, because its URL may be torn in the middle of a password: write @ in it as "
            f"%40, / as %2F, ? as %3F and % as %25): {type(getattr(error, 'orig', None) or error).__name__}."
        )
    place = f"The database {url.database!r}" if url.host is None else f"The database {url.database!r} on {url.host}"
    # Only the first line: the others quote the statement.
    words = str(getattr(error, "orig", None) or error).partition("\n")[0].rstrip(".")
    for secret in (url.password, *(value for name, value in url.query.items() if "pass" in name)):
        if secret:
            for spelling in (str(secret), quote(str(secret), safe=""), quote_plus(str(secret))):
                words = words.replace(spelling, _HIDDEN)
    return f"{place}: {words}."


def _is_torn(url: URL) -> bool:
    """Return True if host and database may be parts of a password that contains an @ or a /.

    A URL is split at its first @. The real one is then in the host, the database or the query.
    """
    if url.get_backend_name() == SQLITE and url.password is None:
        return False
    plain = _NAME.fullmatch(url.database or "") and (url.host is None or _HOST.fullmatch(url.host))
    return not plain or "@" in str(dict(url.query))


TABLES: Final = [name for name in RECORD_TABLES if name != fence_numbers.name]
TABLES_REMEDY: Final = (
    "the database's role may not use the tables of idempotency records: grant it SELECT, INSERT, UPDATE and DELETE on "
    f"{', '.join(TABLES[:-1])} and {TABLES[-1]}"
)
REMEDY: Final = f"{TABLES_REMEDY}, and USAGE on the sequence {FENCES}"
_MADE: Final = (
    f"the sequence {FENCES} of MariaDB, which `flask idempotency db upgrade` makes as a role that may create tables"
)

CONTENDED: Final = frozenset({"40001", "40P01"})
"""Serialization failure and deadlock: the server rolled the transaction back, and a retry may succeed."""

_NOT_PREPARED: Final = frozenset({"26000", "42P05"})
_CHANGED_PLAN: Final = "0A000"
_LOCK_TIMEOUT: Final = "55P03"
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_NO_TABLE_OR_COLUMN: Final = frozenset({"42P01", "42703"})
_NOT_PERMITTED: Final = "42501"
_DAMAGE: Final = frozenset({"22003"})
"""A number is out of range. No undamaged sum is."""
_SQLITE_DAMAGE: Final = frozenset({sqlite3.SQLITE_CONSTRAINT_NOTNULL, sqlite3.SQLITE_CONSTRAINT_CHECK})
"""Constraints that a statement of ours breaks only on a damaged row. On SQLite another client can turn constraints off."""
_SQLITE_UNREADABLE: Final = ("Could not decode to UTF-8", "integer overflow")
MYSQL_CONTENDED: Final = frozenset({1213, 1020})
"""Deadlock, and a row that has changed since the snapshot of this transaction: the server rolled the transaction back."""
_MYSQL_LOCK_TIMEOUT: Final = 1205
"""The server rolled only the statement back. The caller must roll back the transaction."""
_MYSQL_DUPLICATE: Final = 1062
_MYSQL_NO_SEQUENCE: Final = 4091
_MYSQL_NO_TABLE_OR_COLUMN: Final = frozenset({1146, 1054, 1932, _MYSQL_NO_SEQUENCE})
_MYSQL_NOT_PERMITTED: Final = frozenset({1044, 1142, 1143})
_MYSQL_DAMAGE: Final = frozenset({1690, 1264})
"""A number is out of range."""
_MYSQL_ABSENT: Final = frozenset({1040, 1053, 1080, 1152, 1159, 1161, 1927, 2002, 2003, 2005, 2006, 2013, 2055})
"""There is no server, it is shutting down or full, or the connection is lost."""
_GALERA_APART: Final = 1047
"""This node of a Galera cluster is not in the majority, or has not caught up with it."""
_GALERA_BROKEN_COMMIT: Final = 1180
"""The group did not say what became of a COMMIT, or the disk is full."""
_SQLITE_NO_TABLE: Final = ("no such table: idempotency_", "no such column: ", "has no column named ")


def mysql_code(error: exc.DBAPIError) -> int:
    """Return the number of an error of MariaDB or MySQL. It is 0 for errors of other databases."""
    given = getattr(error.orig, "args", ())
    # The connectors of MariaDB and of MySQL have it in an attribute.
    given = (getattr(error.orig, "errno", None) or given[0],) if given else ()
    code = given[0] if given and type(error.orig).__module__.startswith(_MYSQL_DRIVERS) else 0
    return code if isinstance(code, int) else 0


_MYSQL_DRIVERS: Final = ("pymysql", "MySQLdb", "mysql", "mariadb")


def sqlstate(error: exc.DBAPIError) -> str:
    """Return PostgreSQL's five-character error code. It is empty on SQLite and for errors without a code."""
    return state_of(error.orig)


def forbidden(error: BaseException, schema: str | None = None) -> tuple[str, ...]:
    """Return the tables, the sequence or the schema of ours that PostgreSQL did not let this role use.

    Empty for other errors.
    """
    found = _of_driver(error)
    if found is None or sqlstate(found) != _NOT_PERMITTED:
        return ()
    # The server quotes no value in this message, and its words may be of any language.
    message = str(found.orig).partition("\n")[0]
    if names := re.findall(r"idempotency_\w+", message):
        return tuple(dict.fromkeys(names))
    # PostgreSQL tells a role without USAGE on a schema the name of the schema, and of no table.
    denied = schema is not None and re.search(rf"(?<!\w){re.escape(schema)}(?!\w)", message)
    return (f"the schema {schema}",) if denied else ()


def lacks_grants(role: str | None, what: Sequence[str]) -> str:
    """Return what to do if this role may not use these tables of ours. None: the role is not known."""
    named, argument = ("of this transaction", "NAME") if role is None else (printable(role), quoted(printable(role)))
    return (
        f"the database's role {named} may not use {', '.join(what)}: `flask idempotency db check --role {argument}` prints "
        "what to grant"
    )


def is_serialization_failure(error: exc.DBAPIError) -> bool:
    return sqlstate(error) in CONTENDED or mysql_code(error) in MYSQL_CONTENDED


def is_apart(error: exc.DBAPIError) -> bool:
    """Return True if this node of a Galera cluster takes no statement, so that another node must be asked."""
    return mysql_code(error) == _GALERA_APART


def is_unprepared(error: exc.DBAPIError) -> bool:
    """Return True if the session lacks a prepared statement, or has another one of its name. Nothing was done."""
    return sqlstate(error) in _NOT_PREPARED


def is_outdated(error: exc.DBAPIError) -> bool:
    """Return True if a prepared statement may be older than a change of its table's columns. Nothing was done.

    PostgreSQL has the same code for what it does not support.
    """
    return sqlstate(error) == _CHANGED_PLAN


def is_duplicate(error: exc.DBAPIError) -> bool:
    """Return True if MySQL refused a row because there is one with its key."""
    return mysql_code(error) == _MYSQL_DUPLICATE


def is_lock_timeout(error: exc.DBAPIError) -> bool:
    """Return True if another transaction held a lock for longer than the lock timeout."""
    if sqlstate(error) == _LOCK_TIMEOUT or mysql_code(error) == _MYSQL_LOCK_TIMEOUT:
        return True
    # Compare the low byte: SQLITE_BUSY_SNAPSHOT and others extend it.
    return isinstance(error.orig, sqlite3.Error) and getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _BUSY


def is_missing_table(error: exc.DBAPIError) -> bool:
    """Return True if a table or a column of ours is not there."""
    if sqlstate(error) in _NO_TABLE_OR_COLUMN or mysql_code(error) in _MYSQL_NO_TABLE_OR_COLUMN:
        return True
    return isinstance(error, exc.OperationalError) and any(text in str(error.orig) for text in _SQLITE_NO_TABLE)


def is_missing_sequence(error: exc.DBAPIError) -> bool:
    """Return True if MariaDB has no such sequence."""
    return mysql_code(error) == _MYSQL_NO_SEQUENCE


def is_retryable(error: BaseException) -> bool:
    """Return True if the same transaction may succeed when it is repeated.

    The database preferred another transaction, or the connection broke and the server rolled this one back.
    """
    found = _of_driver(error)
    if found is None:
        return False
    if found.connection_invalidated or is_lock_timeout(found) or is_serialization_failure(found):
        return True
    if not isinstance(found, exc.OperationalError) or isinstance(found.orig, sqlite3.Error):
        return False
    # There was no server, or it was shutting down. A failed connection attempt has no error code.
    if code := mysql_code(found):
        return code in _MYSQL_ABSENT or code in (_GALERA_APART, _GALERA_BROKEN_COMMIT)
    state = sqlstate(found)
    return not state or state.startswith(("08", "57P"))


def is_refusal(error: BaseException) -> bool:
    """Return True if a commit that raised this was certainly refused.

    After a lost connection the commit may be done. The same holds for an error that a commit listener raised.
    """
    found = _of_driver(error)
    if found is None or found.connection_invalidated:
        return False
    if code := mysql_code(found):
        return code in MYSQL_CONTENDED or code == _MYSQL_LOCK_TIMEOUT
    return isinstance(found.orig, sqlite3.Error) or sqlstate(found)[:2] not in ("", "08", "57")


def _of_driver(error: BaseException | None) -> exc.DBAPIError | None:
    while error is not None and not isinstance(error, exc.DBAPIError):
        error = error.__cause__
    return error


def explained(error: exc.SQLAlchemyError) -> IdempotencyError | None:
    """Return the store's error for this one. None for a bug in a statement of ours, which must stay visible.

    The text of the database is left out, because it may quote a row.
    """
    if isinstance(error, exc.TimeoutError):
        return StoreUnavailable("no database connection became free in time: raise the pool's size, or lower the load")
    if not isinstance(error, exc.DBAPIError):
        return None
    state = sqlstate(error)
    code = mysql_code(error)
    if state in _DAMAGE or code in _MYSQL_DAMAGE or _is_sqlite_damage(error):
        return CorruptRecord("a row of the idempotency tables is damaged, or another program wrote it")
    if is_missing_table(error):
        return ConfigurationError(
            "the database has no tables for idempotency records, or old ones: run `flask idempotency db upgrade`"
        )
    if state == _NOT_PERMITTED or code in _MYSQL_NOT_PERMITTED:
        return ConfigurationError(f"{TABLES_REMEDY}, and SELECT and INSERT on {_MADE}" if code else REMEDY)
    # SQLite raises SQLITE_ERROR for a statement that it cannot parse.
    if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:
        return None
    if isinstance(error, exc.ProgrammingError | exc.IntegrityError | exc.DataError | exc.NotSupportedError):
        return None
    if is_apart(error):
        return StoreUnavailable("this node of the Galera cluster is not in its majority, or has not caught up with it")
    return StoreUnavailable(f"the database cannot decide ({cause_of(error)})")


def _is_sqlite_damage(error: exc.DBAPIError) -> bool:
    if not isinstance(error.orig, sqlite3.Error):
        return False
    if getattr(error.orig, "sqlite_errorcode", None) in _SQLITE_DAMAGE:
        return True
    return isinstance(error, exc.OperationalError) and str(error.orig).startswith(_SQLITE_UNREADABLE)
