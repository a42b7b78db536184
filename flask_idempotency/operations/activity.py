"""Sum up the activity of a time span: totals, endpoints, a series over time, and percentiles of times.

The command `stats --since` and the console show the same summary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

from flask_idempotency.engine import activity as names
from flask_idempotency.engine.activity import ActivityLog, merged, percentile
from flask_idempotency.engine.values import valueclass
from flask_idempotency.operations.times import moment

SHORTEST_SPAN: Final = names.MINUTE
LONGEST_SPAN: Final = names.KEPT_SECONDS[names.HOUR]
"""The spans that can be summed up, in seconds."""

MINUTES_UP_TO: Final = 3 * names.HOUR
"""The longest span, in seconds, that is shown by minute. A chart of more minutes has no room for them."""

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "new": (names.NEW, names.TAKEN_OVER),
    "replayed": (names.REPLAYED,),
    "conflicts": (names.CONFLICT,),
    "mismatches": (names.MISMATCH,),
    "outcome-unknown": (names.UNKNOWN,),
    "missing-key": (names.MISSING_KEY,),
    "refused": (
        names.OVER_QUOTA, names.ERASED, names.VOIDED, names.EXPIRED, names.DATA_LOSS, names.CORRUPT, names.FORBIDDEN,
        names.BAD_REQUEST, names.STORE_FAILED,
    ),
    "unprotected": (names.UNPROTECTED,),
}  # fmt: skip
"""What became of requests when they came, and the counters that each group adds up.

Each of `OUTCOMES` is in one group, so the groups of an endpoint or a bucket add up to its `requests`. How a run ended is in no
group: it began in one bucket and may end in another, or never if its worker died.
"""

REFUSED: Final = tuple(
    outcome
    for outcome in names.OUTCOMES
    if outcome not in (names.NEW, names.TAKEN_OVER, names.REPLAYED, names.UNPROTECTED)
)
"""The outcomes of requests whose view did not run, and whose client got no stored response."""

_OBSERVED_WITH_KEY: Final = frozenset(names.OBSERVED) - {
    *names.ENDINGS, names.NOT_KEPT, names.SETS_COOKIE, names.UNKEYED, names.MISSING_KEY,
}  # fmt: skip


def slots_of(counts: Mapping[str, int], *prefixes: str) -> Counter[int]:
    """Return how many durations fell into each slot, by the counters whose names begin so."""
    slots = Counter[int]()
    for counter, number in counts.items():
        for prefix in filter(counter.startswith, prefixes):
            slots[int(counter.removeprefix(prefix))] += number
    return slots


@valueclass(frozen=True, slots=True)
class Times:
    """How long requests took, in seconds.

    Each percentile is the upper edge of its slot: the true value is below it and above the edge before. None: no request was
    measured. `inf`: longer than the last edge, 60 s.
    """

    count: int
    p50: float | None
    p95: float | None
    p99: float | None


@valueclass(frozen=True, slots=True)
class Figures:
    """What was counted: in all, for one endpoint, or in one bucket. `counts` has every counter above 0, by name."""

    counts: Mapping[str, int]

    def of(self, *counters: str) -> int:
        """Return the sum of these counters."""
        return sum(self.counts.get(counter, 0) for counter in counters)

    @property
    def requests(self) -> int:
        """Requests with a key, requests that lack the key they need, and messages."""
        return self.of(*names.OUTCOMES)

    @property
    def observed(self) -> int:
        """Requests with a key of endpoints in mode `observe` or `warn`. `requests` leaves them out; `report` has more."""
        return sum(
            number
            for counter, number in self.counts.items()
            if counter.startswith(names.WOULD)
            and counter.removeprefix(names.WOULD).partition("@")[0] in _OBSERVED_WITH_KEY
        )

    @property
    def outcomes(self) -> dict[str, int]:
        """What became of them when they came, also with 0."""
        return {outcome: self.of(outcome) for outcome in names.OUTCOMES}

    @property
    def endings(self) -> dict[str, int]:
        """How claims ended, also with 0. `not-kept` is a part of `completed`."""
        return {ending: self.of(ending) for ending in (*names.ENDINGS, names.NOT_KEPT)}

    @property
    def groups(self) -> dict[str, int]:
        """What became of the requests when they came: see `GROUPS`. They add up to `requests`."""
        return {group: self.of(*counters) for group, counters in GROUPS.items()}

    @property
    def new_times(self) -> Times:
        """From the claim to the final response, of requests that ran. Messages are not measured."""
        return self._times(names.NEW_TIME)

    @property
    def replayed_times(self) -> Times:
        """From the look at the key to the final response, of requests that got a stored response."""
        return self._times(names.REPLAYED_TIME)

    def _times(self, prefix: str) -> Times:
        slots = slots_of(self.counts, prefix)
        return Times(sum(slots.values()), percentile(slots, 0.50), percentile(slots, 0.95), percentile(slots, 0.99))


@valueclass(frozen=True, slots=True)
class Point:
    """One bucket of the series. `start` is in seconds since the epoch, by the store's clock."""

    start: int
    figures: Figures


@valueclass(frozen=True, slots=True)
class Summary:
    """The activity of a time span.

    It may begin before the span: the first bucket counts whole. The last bucket has not ended, and processes add what they
    counted in the last seconds later.
    """

    now: float
    """The store's time, in seconds since the epoch."""
    seconds: float
    """The span, which ends now."""
    length: int
    """The seconds of a bucket: a minute or an hour."""
    total: Figures
    endpoints: Mapping[str, Figures]
    """The busiest first. Inboxes and tasks are named as in their records: `inbox:billing`."""
    series: Sequence[Point]
    """Every bucket of the span, the oldest first. One without counts has empty figures."""


def summary(log: ActivityLog, owner: bytes, *, seconds: float) -> Summary:
    """Return the activity of the last `seconds` of the application with this mark: see `keys.owner_mark`.

    A span of up to `MINUTES_UP_TO` has buckets of a minute, and a longer one, up to `LONGEST_SPAN`, buckets of an hour. Raises
    `StoreUnavailable` if the store does not answer.
    """
    length = names.MINUTE if seconds <= MINUTES_UP_TO else names.HOUR
    page = log.read(owner, length=length, seconds=seconds)
    found = {bucket.start: bucket.counts for bucket in page.buckets}
    first, last = (int(time // length * length) for time in (page.now - seconds, page.now))
    by_endpoint = merged(found.values())
    figures = {endpoint: Figures(counts) for endpoint, counts in by_endpoint.items()}
    return Summary(
        page.now,
        seconds,
        length,
        _of_all(by_endpoint),
        dict(sorted(figures.items(), key=lambda pair: (-pair[1].requests, pair[0]))),
        [Point(start, _of_all(found.get(start, {}))) for start in range(first, last + length, length)],
    )


def _of_all(by_endpoint: Mapping[str, Mapping[str, int]]) -> Figures:
    """Return the figures of all endpoints together."""
    return Figures(merged({"": counts} for counts in by_endpoint.values()).get("", {}))


def as_objects(found: Summary) -> dict[str, object]:
    """Return this summary for JSON. A point of the series has only what a chart shows."""
    return {
        "now": moment(found.now),
        "seconds": found.seconds,
        "bucket_seconds": found.length,
        "total": as_object(found.total),
        "endpoints": {endpoint: as_object(figures) for endpoint, figures in found.endpoints.items()},
        "series": [
            {
                "start": moment(point.start),
                "requests": point.figures.requests,
                **point.figures.groups,
                "quarantined": point.figures.of(names.QUARANTINED),
                "times": times_object(point.figures),
            }
            for point in found.series
        ],
    }


def as_object(figures: Figures) -> dict[str, object]:
    """Return these figures for JSON."""
    return {
        "requests": figures.requests,
        "observed": figures.observed,
        "outcomes": figures.outcomes,
        "endings": figures.endings,
        "times": times_object(figures),
    }


def times_object(figures: Figures) -> dict[str, object]:
    """Return the times of these figures for JSON."""
    both = {"new": figures.new_times, "replayed": figures.replayed_times}
    return {name: edges_object(each.count, p50=each.p50, p95=each.p95, p99=each.p99) for name, each in both.items()}


def edges_object(count: int, **edges: float | None) -> dict[str, float | None]:
    """Return percentiles for JSON. One above the last edge is that edge: JSON has no infinity."""
    return {"count": count, **{name: names.EDGES[-1] if edge == inf else edge for name, edge in edges.items()}}
