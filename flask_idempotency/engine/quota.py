"""How much of a store one tenant may take, and how stores count it so that the count cannot drift.

What is kept for a while is counted by the edge of the bucket in which its life ends, and ends exactly at that edge: when
the edge has passed, everything that was counted under it is over. Nothing needs to be counted down for it, and a ledger
is as long as there are buckets, not keys. (The design, and those that drift: correctness.md, section 4.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields
from typing import Final

from flask_idempotency.engine.errors import ConfigurationError

BUCKETS_PER_LIFE: Final = 32
"""Lives end up to a thirty-second later than asked, and there are 64 buckets at most for each length of life."""


MAX_LIMIT: Final = 2**53
"""What every store can count to, and every database hold."""


@dataclass(frozen=True, slots=True)
class NewKeys:
    """`count` keys that were not there before, in each window of `seconds`. Windows are aligned to the store's clock.

    So twice as many may come in a short while, half at the end of one window and half at the beginning of the next.
    """

    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may have at once. None is no limit. Known keys always pass: a limit is on new ones only."""

    records: int | None = None
    """Live records: in progress, quarantined, and answers whose life has not ended."""
    bytes: int | None = None
    """Stored bytes of plain answers. Reached, no new key is granted; answers of those in flight are still kept."""
    in_flight: int | None = None
    """Claims whose lease is running. A worker that vanished holds its place until then, and no longer."""
    new_keys: NewKeys | None = None

    @property
    def unlimited(self) -> bool:
        return all(getattr(self, limit.name) is None for limit in fields(self))

    def overlaid(self, other: Quota | None) -> Quota:
        """This quota with the limits that the other one names."""
        if other is None:
            return self
        named = {limit.name: getattr(other, limit.name) for limit in fields(other)}
        return Quota(**{name: getattr(self, name) if value is None else value for name, value in named.items()})

    def divided(self, parts: int) -> Quota:
        """What each of a tenant's parts may have: rounded up, so that together they may have less than `parts` more."""
        return self._each(lambda limit: -(-limit // parts))

    def multiplied(self, parts: int) -> Quota:
        """What so many parts may have together, each of which may have this."""
        return self._each(lambda limit: min(limit * parts, MAX_LIMIT))

    def less_than(self, parts: int) -> dict[str, int]:
        """The limits that cannot be divided by so many: rounded up, a tenant might have a multiple of them. 0 can."""
        rate = None if self.new_keys is None else self.new_keys.count
        named = {"records": self.records, "bytes": self.bytes, "in_flight": self.in_flight, "new_keys": rate}
        return {name: limit for name, limit in named.items() if limit is not None and 0 < limit < parts}

    def _each(self, change: Callable[[int], int]) -> Quota:
        records, size, in_flight = (
            None if limit is None else change(limit) for limit in (self.records, self.bytes, self.in_flight)
        )
        rate = self.new_keys
        return Quota(records, size, in_flight, None if rate is None else NewKeys(change(rate.count), rate.seconds))

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be a whole number from 0 to 2**53, or None, not {value!r}"
            for name, value in (("records", self.records), ("bytes", self.bytes), ("in_flight", self.in_flight))
            if value is not None and not _is_count(value)
        ]
        if self.new_keys is not None and not _is_rate(self.new_keys):
            faults.append(
                "new_keys must be NewKeys(count, seconds): a whole number from 0 to 2**53, and seconds above 0"
            )
        if faults:
            raise ConfigurationError(*(f"Quota: {fault}." for fault in faults))


@dataclass(frozen=True, slots=True)
class Usage:
    """What one tenant has now, of what is counted. Claims granted without a quota are not."""

    records: int = 0
    bytes: int = 0
    in_flight: int = 0
    new_keys: int = 0
    """In the window that is open now; of windows of several lengths, the most."""

    @classmethod
    def together(cls, parts: Iterable[Usage]) -> Usage:
        """What these have in all."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))


@dataclass(frozen=True, slots=True)
class Drift:
    """What a ledger said and a recount of the records did not. Zero for ever, unless records were deleted by hand."""

    records: int = 0
    bytes: int = 0
    unsettled: int = 0
    busy: int = field(default=0, compare=False)
    """Buckets that changed while they were counted, and so were left alone this time."""

    @property
    def none(self) -> bool:
        return self == Drift()


def bucket_width_ms(keep: float) -> int:
    """The width of the buckets in which lives of `keep` seconds end: a power of two of milliseconds, for exact sums."""
    return 1 << max(int(keep * 1000 / BUCKETS_PER_LIFE), 1).bit_length() - 1


def bucket_edge_ms(now_us: int, keep_us: int, *, width_ms: int) -> int:
    """When a life of `keep_us` that begins now ends, in whole milliseconds: at the next edge after it would have."""
    width_us = width_ms * 1000
    return -(-(now_us + keep_us) // width_us) * width_ms


def window_of(now_us: int, rate: NewKeys) -> tuple[int, int]:
    """The number of the window that is open now, and the microseconds until it closes."""
    length = max(round(rate.seconds * 1_000_000), 1)
    return now_us // length, length - now_us % length


LIMITS: Final[Mapping[str, str]] = {
    "records": "live records",
    "bytes": "stored bytes",
    "in-flight": "requests in flight",
    "new-keys": "new keys in this window",
}
"""By the name that an `OverQuota` gives, in the order in which they are looked at: what each counts."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_LIMIT


def _is_rate(rate: NewKeys) -> bool:
    return _is_count(rate.count) and 0 < rate.seconds < 1e10
