"""Define the quota of a tenant, and how stores count it without drift.

A completed record counts under the edge of the time bucket in which it expires, and expires exactly at that edge. After
the edge, the store drops the whole count. So no step counts down, and the counts take room for buckets, not keys.
(The design, and those that drift: correctness.md, section 4.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields
from typing import Final

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.model import MAX_LIMIT
from flask_idempotency.engine.values import valueclass

__all__ = ["Drift", "NewKeys", "Quota", "Usage"]


@dataclass(frozen=True, slots=True)
class NewKeys:
    """At most `count` new keys in each window of `seconds`. Windows are aligned to the store's clock.

    So twice as many may come in a short time, half at the end of one window and half at the start of the next.
    """

    count: int
    """Most new keys in a window: a whole number from 0 on."""
    seconds: float
    """Length of a window."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that one tenant may have. None is no limit. Known keys always pass: limits apply to new ones only."""

    records: int | None = None
    """Live records: in progress, quarantined, and completed ones that have not expired."""
    bytes: int | None = None
    """Stored bytes of plain responses. At the limit no new key is granted; requests in flight still store theirs."""
    in_flight: int | None = None
    """Claims whose lease runs. A vanished worker counts until its lease expires."""
    new_keys: NewKeys | None = None
    """New keys in each window of time."""

    @property
    def unlimited(self) -> bool:
        """Whether no limit is set."""
        return all(getattr(self, limit.name) is None for limit in fields(self))

    def overlaid(self, other: Quota | None) -> Quota:
        """Return this quota with the limits that the other one sets."""
        if other is None:
            return self
        named = {limit.name: getattr(other, limit.name) for limit in fields(other)}
        return Quota(**{name: getattr(self, name) if value is None else value for name, value in named.items()})

    def divided(self, parts: int) -> Quota:
        """Return the quota of each shard of a tenant. It rounds up, so together they may have less than `parts` more."""
        return self._each(lambda limit: -(-limit // parts))

    def multiplied(self, parts: int) -> Quota:
        """Return what so many shards may have together if each has this quota."""
        return self._each(lambda limit: min(limit * parts, MAX_LIMIT))

    def less_than(self, parts: int) -> dict[str, int]:
        """Return the limits too small to divide: rounded up, a tenant may have a multiple of them. 0 divides."""
        rate = None if self.new_keys is None else self.new_keys.count
        named = self._numbers | {"new_keys": rate}
        return {name: limit for name, limit in named.items() if limit is not None and 0 < limit < parts}

    @property
    def _numbers(self) -> dict[str, int | None]:
        return {"records": self.records, "bytes": self.bytes, "in_flight": self.in_flight}

    def _each(self, change: Callable[[int], int]) -> Quota:
        numbers = {name: None if limit is None else change(limit) for name, limit in self._numbers.items()}
        rate = self.new_keys
        return Quota(**numbers, new_keys=None if rate is None else NewKeys(change(rate.count), rate.seconds))

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be a whole number from 0 to 2**53, or None, not {value!r}"
            for name, value in self._numbers.items()
            if value is not None and not _is_count(value)
        ]
        rate = self.new_keys
        if rate is not None and not (_is_count(rate.count) and 0 < rate.seconds < 1e10):
            faults.append(
                "new_keys must be NewKeys(count, seconds): a whole number from 0 to 2**53, and seconds above 0"
            )
        if faults:
            raise ConfigurationError(*(f"Quota: {fault}." for fault in faults))


@valueclass(frozen=True, slots=True)
class Usage:
    """What one tenant has now. Claims granted without a quota do not count."""

    records: int = 0
    bytes: int = 0
    in_flight: int = 0
    new_keys: int = 0
    """In the current window. If windows of several lengths are open: the highest number."""

    @classmethod
    def together(cls, parts: Iterable[Usage]) -> Usage:
        """Return the sum of these."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))


@valueclass(frozen=True, slots=True)
class Drift:
    """The difference between the counts and a recount of the records. Always 0, unless someone deleted records by hand."""

    records: int = 0
    bytes: int = 0
    unsettled: int = 0
    busy: int = field(default=0, compare=False)
    """Buckets that changed while they were recounted. They keep their count this time."""

    @property
    def none(self) -> bool:
        """Whether counts and records agree."""
        return self == Drift()


def window_of(now_us: int, rate: NewKeys) -> tuple[int, int]:
    """Return the number of the current window, and the microseconds until it ends."""
    length = max(round(rate.seconds * 1_000_000), 1)
    return now_us // length, length - now_us % length


LIMITS: Final[Mapping[str, str]] = {
    "records": "live records",
    "bytes": "stored bytes",
    "in-flight": "requests in flight",
    "new-keys": "new keys in this window",
}
"""What each limit counts, by its name in `OverQuota`, in the order in which stores check them."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_LIMIT
