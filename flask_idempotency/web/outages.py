"""Says that the store does not answer, and not once for each of the requests that are refused for it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from threading import Lock
from typing import Final

from flask_idempotency.engine.errors import KeysUnavailable, MemoryLost, StoreUnavailable

INTERVAL_SECONDS: Final = 10
"""An outage lasts minutes: a line every ten seconds shows when it began and ended, and drowns nothing."""

# Servers begin an error with its code, as in `OOM command not allowed`. Anything else may be a name or an argument.
_CODE = re.compile(r"[A-Z]{2,20}(?= |$)")

_log = logging.getLogger("flask_idempotency")


class OutageLog:
    """One application's. It is asked on refusals only."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = Lock()
        self._next = float("-inf")
        self._suppressed = 0

    def refused(self, operation: str, error: StoreUnavailable) -> None:
        """Log this refusal, or count it. Names no key and quotes no server."""
        with self._lock:
            now = self._monotonic()
            if now < self._next:
                self._suppressed += 1
                return
            self._next = now + INTERVAL_SECONDS
            more, self._suppressed = self._suppressed, 0
        _log.warning(
            "%s was refused with 503: the %s is not available (%s)%s",
            operation,
            "key provider" if isinstance(error, KeysUnavailable) else "store",
            # Nothing that came from outside is in it, and it says what to do.
            error if isinstance(error, MemoryLost) else _named(error.__cause__ or error),
            f"; {more} more since the last such line" if more else "",
        )


def _named(error: BaseException) -> str:
    name = type(error).__name__
    # By name: which store this is, and whether its client is installed, is no concern of this room.
    from_server = any(parent.__name__ == "ResponseError" for parent in type(error).__mro__)
    code = _CODE.match(str(error)) if from_server else None
    return name if code is None else f"{name}: {code[0]}"
