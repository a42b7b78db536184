"""Stores keep records and decide, atomically, which token may change each of them.

A store decides one key at a time, and only from the record itself. It does not wait, retry, encode or interpret a
payload. It does not know policies, headers or requests. It never compares its host's clock with a server's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

BUCKETS_PER_LIFE: Final = 32
"""Records expire up to a thirty-second of `keep` late, and each `keep` has at most 64 buckets: see `engine.quota`."""


@lru_cache(maxsize=64)  # a policy has few durations
def microseconds(seconds: float) -> int:
    """Convert a duration to whole microseconds. Raises `ValueError` unless it is finite and longer than 0 seconds.

    An infinite or not-a-number `lease` would make a record without a deadline. Then either no request or every request
    could take it over.
    """
    if not 0 < seconds < 1e10:
        raise ValueError(f"a duration must be longer than 0 s and shorter than 300 years, not {seconds!r}")
    return max(1, round(seconds * 1_000_000))


def bucket_width_ms(keep: float) -> int:
    """Return the bucket width for records kept for `keep` seconds: a power of two of milliseconds, for exact sums."""
    return 1 << max(int(keep * 1000 / BUCKETS_PER_LIFE), 1).bit_length() - 1


def bucket_edge_ms(now_us: int, keep_us: int, *, width_ms: int) -> int:
    """Return when a record kept for `keep_us` from now on expires, in milliseconds: the next bucket edge."""
    width_us = width_ms * 1000
    return -(-(now_us + keep_us) // width_us) * width_ms
