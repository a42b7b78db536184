"""Say which service is away when a store does not grant a claim, and log it a few times a minute."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from threading import Lock
from typing import Final, Literal, TypeAlias

from flask_idempotency.engine.errors import KeyProviderUnavailable, StoreDataLoss, StoreUnavailable

INTERVAL_SECONDS: Final = 10
"""An outage lasts minutes: a line every ten seconds shows when it began and ended, and does not flood the log."""

# Servers begin an error with its code, as in `OOM command not allowed`. Anything else may be a name or an argument.
_CODE = re.compile(r"[A-Z]{2,20}(?= |$)")

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


def cause_of(error: StoreUnavailable) -> str:
    """Return the name of the error below this one, for events. Its text may quote a server, so it is left out."""
    return type(error.__cause__ or error).__name__


class OutageLog:
    """Logs refusals of one application while the store does not answer, at most one line in ten seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, *, said: str = "was refused with 503") -> None:
        """`said` is what became of the request or message."""
        self._monotonic = monotonic
        self._said = said
        self._lock = Lock()
        self._next = float("-inf")
        self._suppressed = 0

    def refused(self, operation: str, error: StoreUnavailable) -> None:
        """Log this refusal, or count it. Names no key and quotes no server text."""
        with self._lock:
            now = self._monotonic()
            if now < self._next:
                self._suppressed += 1
                return
            self._next = now + INTERVAL_SECONDS
            more, self._suppressed = self._suppressed, 0
        _log.warning(
            "%s %s: the %s is not available (%s)%s",
            operation,
            self._said,
            "key provider" if isinstance(error, KeyProviderUnavailable) else "store",
            # Its text is ours alone, and says what to do.
            error if isinstance(error, StoreDataLoss) else _named(error.__cause__ or error),
            f"; {more} more since the last such line" if more else "",
        )


def _named(error: BaseException) -> str:
    name = type(error).__name__
    # Compared by name, because this module does not know the store, or whether its client is installed.
    from_server = any(parent.__name__ == "ResponseError" for parent in type(error).__mro__)
    code = _CODE.match(str(error)) if from_server else None
    return name if code is None else f"{name}: {code[0]}"
