"""What a database's refusals mean."""

from __future__ import annotations

import sqlite3
from typing import Final

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
from flask_idempotency.stores.sql import rights

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


def contended(error: DBAPIError) -> bool:
    return sqlstate(error) in CONTENDED


def waited_in_vain(error: DBAPIError) -> bool:
    """Whether somebody else held a lock for longer than our patience."""
    return sqlstate(error) == _LOCK_TIMEOUT or _is_busy(error)


def asks_again(error: BaseException) -> bool:
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
    if state in _NO_TABLE_OR_COLUMN or _sqlite_lacks_a_table(error):
        return ConfigurationError(
            "the database has no tables for idempotency records, or old ones: run `flask idempotency db upgrade`"
        )
    if state == _NOT_PERMITTED:
        return ConfigurationError(rights.REMEDY)
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


def _sqlite_lacks_a_table(error: DBAPIError) -> bool:
    return isinstance(error, OperationalError) and any(text in str(error.orig) for text in _SQLITE_NO_TABLE)
