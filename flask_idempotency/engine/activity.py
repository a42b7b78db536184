"""Count what happens at each endpoint, by minute and by hour: counters, histograms of durations, and where a store keeps them.

A process counts in memory and adds its counts to the store every few seconds. What it has not added is lost with it.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Final, Protocol

from flask_idempotency.engine.values import valueclass

__all__ = ["ActivityBucket", "ActivityLog", "ActivityPage"]

_log = logging.getLogger("flask_idempotency")

MINUTE: Final = 60
HOUR: Final = 3600

KEPT_SECONDS: Final[Mapping[int, int]] = {MINUTE: 24 * HOUR, HOUR: 30 * 24 * HOUR}
"""How long a bucket of each length is kept after its end."""

LONGEST_COUNTER: Final = 60
"""The most characters of a counter's name. They come from this package, views and steps, and never from a request."""

MOST_ENDPOINTS: Final = 200
"""The most endpoints that a process counts apart; it counts the rest under `OTHER_ENDPOINTS`."""

OTHER_ENDPOINTS: Final = "(other)"

EDGES: Final = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1,
    0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0,
)  # fmt: skip
"""The upper edges of the histograms, in seconds. They never change, so that histograms of all processes and releases merge."""


def slot(seconds: float) -> int:
    """Return the number of the histogram slot of this duration. A duration on an edge is below it."""
    return bisect_left(EDGES, seconds)


def percentile(counts: Mapping[int, int], fraction: float) -> float | None:
    """Return the upper edge below which this fraction of the durations lie; `inf` past the last. None: there are none.

    The true value lies between the edge before and this one.
    """
    total, seen = sum(counts.values()), 0
    for number in sorted(counts):
        seen += counts[number]
        if counts[number] and seen >= fraction * total:
            return EDGES[number] if number < len(EDGES) else inf
    return None


Counts = Mapping[str, Mapping[str, int]]
"""The counters of each endpoint: endpoint → counter → number, all above 0."""


UNREADABLE: Final = "(unreadable)"
"""Stands for the endpoints of a bucket that is damaged."""


def read_counts(text: Any) -> Counts:
    """Return the counters of a stored bucket, which are a JSON object.

    Whatever stands there, it hides no other bucket: a damaged one has one counter, of the endpoint `UNREADABLE`.
    """
    try:
        counts: dict[str, dict[str, int]] = json.loads(text)
        if all(type(number) is int for counters in counts.values() for number in counters.values()):
            return counts
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    _log.error("The counts of a minute or an hour of activity are damaged in the store, and missing in what is shown.")
    return {UNREADABLE: {"unreadable": 1}}


def merged(parts: Iterable[Counts]) -> dict[str, dict[str, int]]:
    """Return the sum of these counts."""
    total: dict[str, dict[str, int]] = {}
    for part in parts:
        for endpoint, counters in part.items():
            mine = total.setdefault(endpoint, {})
            for name, number in counters.items():
                mine[name] = mine.get(name, 0) + number
    return total


@valueclass(frozen=True, slots=True)
class ActivityBucket:
    """What was counted in one minute or hour. `start` is in seconds since the epoch, and a multiple of its length."""

    start: int
    counts: Counts


@valueclass(frozen=True, slots=True)
class ActivityPage:
    """The buckets of a time span, the oldest first, without empty ones; and the store's time when it read them."""

    now: float
    buckets: Sequence[ActivityBucket]


class ActivityLog(Protocol):
    """Adds up what the processes of an application count. Found as `activity`.

    Several applications may share the store: `owner` is the mark of the application (`keys.owner_mark`). Every method raises
    `StoreUnavailable` if the store does not answer.
    """

    def add(self, owner: bytes, counts: Counts, *, token: bytes) -> None:
        """Add these counts to the bucket of this minute and to that of this hour, by the store's clock, in one step.

        The same 16-byte token within some seconds adds nothing: a client may send a call again when its reply was lost.
        Concurrent calls lose no count. The store removes a bucket `KEPT_SECONDS` after its end, or `Expiry.sweep` does.
        """
        ...

    def read(self, owner: bytes, *, length: int, seconds: float) -> ActivityPage:
        """Return the buckets of this length, `MINUTE` or `HOUR`, which ended less than `seconds` ago or have not ended."""
        ...


# The names of the counters. A store adds up whatever names it is given.

NEW: Final = "new"
TAKEN_OVER: Final = "taken-over"
REPLAYED: Final = "replayed"
CONFLICT: Final = "conflict"
MISMATCH: Final = "mismatch"
UNKNOWN: Final = "unknown"
OVER_QUOTA: Final = "over-quota"
ERASED: Final = "erased"
VOIDED: Final = "voided"
EXPIRED: Final = "expired"
DATA_LOSS: Final = "data-loss"
CORRUPT: Final = "corrupt"
FORBIDDEN: Final = "forbidden"
MISSING_KEY: Final = "missing-key"
BAD_REQUEST: Final = "bad-request"
"""Its key is malformed, its body is truncated or too large, or its caller is unknown."""
STORE_FAILED: Final = "store-failed"
UNPROTECTED: Final = "unprotected"

OUTCOMES: Final = (
    NEW, TAKEN_OVER, REPLAYED, CONFLICT, MISMATCH, UNKNOWN, OVER_QUOTA, ERASED, VOIDED, EXPIRED, DATA_LOSS, CORRUPT,
    FORBIDDEN, MISSING_KEY, BAD_REQUEST, STORE_FAILED, UNPROTECTED,
)  # fmt: skip
"""What became of a keyed request, or of a message, when it came."""

COMPLETED: Final = "completed"
RELEASED: Final = "released"
QUARANTINED: Final = "quarantined"
PAUSED: Final = "paused"

ENDINGS: Final = (COMPLETED, RELEASED, QUARANTINED, PAUSED)
"""How claims ended."""

NOT_KEPT: Final = "not-kept"
"""Of the completed ones: only a tombstone could be stored."""

NEW_TIME: Final = "t:new:"
REPLAYED_TIME: Final = "t:replayed:"
"""The beginning of the counters of a histogram. The number of a `slot` follows."""

UNKEPT: Final = "unkept:"
"""The beginning of a counter for each response header that the view sets and a replay lacks. Its name follows. A process
counts each once."""

IN_DOUBT: Final = "in-doubt:"
"""The beginning of a counter for each step that a worker left in doubt. The step's name follows."""

# The counters of requests that are only observed, in `mode` `observe` or `warn`.

WOULD: Final = "would:"
"""Begins the name of each counter of an observed request. The outcome follows, then `@` and the kind of its caller."""

WAIT: Final = "wait"
"""The duplicate of a running request would have waited for its response: `in_flight="wait"`."""
UNKEYED: Final = "unkeyed"
"""It had no key, and needs none."""
FAILED: Final = "failed"
"""It could not be observed: the store did not answer, a loader raised, or this package has a fault."""
SETS_COOKIE: Final = "sets-cookie"
"""Of the completed ones: the view set a cookie or changed the session, and no replay would carry that."""

OBSERVED: Final = (
    NEW, TAKEN_OVER, REPLAYED, CONFLICT, WAIT, MISMATCH, UNKNOWN, MISSING_KEY, UNKEYED, BAD_REQUEST, FAILED, OVER_QUOTA,
    COMPLETED, RELEASED, QUARANTINED, NOT_KEPT, SETS_COOKIE,
)  # fmt: skip
"""What is counted of an observed request: one of the first twelve when it comes, and the others when it ends.

`OVER_QUOTA`: it was not recorded, because its tenant has as many observed keys as it may.
"""

UNREMARKABLE: Final = frozenset({NEW, UNKEYED, COMPLETED})
"""Those of requests that enforcing would not have changed, and that say little of the endpoint."""

CALLERS: Final = ("anonymous", "cookie", "authorization", "api-key", "certificate", "remote-user", "other")
"""The kinds of callers, by the credential that the request carries. Never by its value."""

APART_TIME: Final = "apart:"
"""The beginning of the counters of a histogram: how long after the first request a concurrent duplicate came."""
RAN_TIME: Final = "ran:"
"""The beginning of the counters of a histogram: how long observed views ran."""


def would(outcome: str, caller: str) -> str:
    """Return the counter of an observed request."""
    return f"{WOULD}{outcome}@{caller}"


def without_key(caller: str) -> str:
    """Return the counter of an enforced request that lacked its key, by kind of caller. `MISSING_KEY` counts it too."""
    return f"{MISSING_KEY}@{caller}"
