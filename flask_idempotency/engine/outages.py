"""Say which service is away when a store does not grant a claim, and log it a few times a minute."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable
from threading import Lock
from typing import Final, Literal, TypeAlias

from flask_idempotency.engine.errors import (
    ConfigurationError,
    IdempotencyError,
    KeyProviderUnavailable,
    RingMismatch,
    StoreDataLoss,
    StoreUnavailable,
)
from flask_idempotency.engine.forks import after_fork

INTERVAL_SECONDS: Final = 10
"""An outage lasts minutes: a line every ten seconds shows when it began and ended, and does not flood the log."""

# Servers begin an error with its code, as in `OOM command not allowed`. Anything else may be a name or an argument.
_CODE = re.compile(r"[A-Z]{2,20}(?= |$)")
_SQLSTATE = re.compile(r"[0-9A-Z]{5}")

# These classes of the Redis client have taken the code from the server's text. Others, as `NoPermissionError`, say it all.
_REDIS_CODES: Final = {
    "AskError": "ASK",
    "BusyLoadingError": "LOADING",
    "ClusterCrossSlotError": "CROSSSLOT",
    "ClusterDownError": "CLUSTERDOWN",
    "ExecAbortError": "EXECABORT",
    "MasterDownError": "MASTERDOWN",
    "MovedError": "MOVED",
    "NoScriptError": "NOSCRIPT",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "TryAgainError": "TRYAGAIN",
}

_LOCKED: Final = (5, 6)
"""SQLITE_BUSY and SQLITE_LOCKED. Not every Python has the module that names them."""
_IS_LOCKED = re.compile(r"database (?:table )?is locked")
ONE_WRITER: Final = "database is locked: SQLite has one writer"

_log = logging.getLogger("flask_idempotency")

Outage: TypeAlias = Literal["store-unavailable", "memory-lost", "keys-unavailable"]


def outage_of(error: StoreUnavailable) -> Outage:
    """Return what is away: the store, its memory, or the provider of its encryption keys."""
    match error:
        case StoreDataLoss():
            return "memory-lost"
        case KeyProviderUnavailable():
            return "keys-unavailable"
        case _:
            return "store-unavailable"


def cause_of(error: BaseException) -> str:
    """Return what names this error in a log or an event: what the server called it, and its class.

    `25006 ReadOnlySqlTransaction`, `ReadOnlyError: READONLY`, `database is locked: SQLite has one writer`. Never its text,
    which may quote a statement, a row or an address. An error of ours is named by the error below it.
    """
    below = error
    while isinstance(below, IdempotencyError) and not isinstance(below, RingMismatch) and below.__cause__ is not None:
        below = below.__cause__
    if isinstance(below, RingMismatch):
        return str(below)  # the id of a key helps, and is no secret
    # SQLAlchemy wraps the error of the driver.
    driver = getattr(below, "orig", None)
    named = driver if isinstance(driver, BaseException) else below
    name, parents = type(named).__name__, type(named).__mro__
    if any(parent.__module__ == "sqlite3" for parent in parents):
        # The low byte: extended codes are above it.
        if getattr(named, "sqlite_errorcode", 0) & 0xFF in _LOCKED or _IS_LOCKED.match(str(named)):
            return ONE_WRITER
        return " ".join(filter(None, (getattr(named, "sqlite_errorname", ""), name)))
    # Compared by name, because this module does not know the store, or whether its client is installed.
    if any(parent.__name__ == "ResponseError" or parent.__name__ in _REDIS_CODES for parent in parents):
        code = _REDIS_CODES.get(name)
        found = _CODE.match(str(named)) if code is None else None
        code = found[0] if found is not None else code
        return name if code is None else f"{name}: {code}"
    state = sqlstate(named)
    return f"{state} {name}" if state else name


def sqlstate(error: BaseException | None) -> str:
    """Return the five characters by which PostgreSQL names this error of a driver. Empty for errors without them."""
    found: object = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)  # psycopg 3, psycopg2
    if not found and error is not None and error.args and isinstance(error.args[0], dict):
        found = error.args[0].get("C")  # pg8000
    return found if isinstance(found, str) and _SQLSTATE.fullmatch(found) else ""


class LogLimit:
    """Lets through one of many equal log lines in each interval, by name, and counts the others."""

    def __init__(self, seconds: float = math.inf, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Without `seconds`, one line of each name is let through in the life of the process."""
        self._seconds = seconds
        self._monotonic = monotonic
        self._names: dict[str, tuple[float, int]] = {}
        """When the next line may come, and how many were left out since the last."""
        self._unlock()
        after_fork(self._unlock)

    def _unlock(self) -> None:
        self._lock = Lock()

    def take(self, name: str) -> int | None:
        """Return how many lines of this name were left out since the last one. None: leave this one out too."""
        with self._lock:
            now = self._monotonic()
            due, left_out = self._names.get(name, (now, 0))
            if now < due:
                self._names[name] = due, left_out + 1
                return None
            self._names[name] = now + self._seconds, 0
            return left_out


class OutageLog:
    """Logs refusals of one application while the store does not answer, at most one line in ten seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, *, said: str = "was refused with 503") -> None:
        """`said` is what became of the request or message."""
        self._said = said
        self._limit = LogLimit(INTERVAL_SECONDS, monotonic=monotonic)

    def refused(self, operation: str, error: StoreUnavailable | ConfigurationError) -> None:
        """Log this refusal, or count it. Names no key and quotes no server text."""
        more = self._limit.take("")
        if more is None:
            return
        _log.warning(
            "%s %s: the %s is not available (%s)%s",
            operation,
            self._said,
            "key provider" if isinstance(error, KeyProviderUnavailable) else "store",
            # Its text is ours alone, and says what to do.
            error if isinstance(error, StoreDataLoss | ConfigurationError) else cause_of(error),
            f"; {more} more since the last such line" if more else "",
        )
