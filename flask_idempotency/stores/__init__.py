"""Stores keep records and decide, atomically, which token may change each of them.

A store decides one key at a time, and only from the record itself. It does not wait, retry, encode or interpret a
payload. It does not know policies, headers or requests. It never compares its host's clock with a server's.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=64)  # a policy has few durations
def microseconds(seconds: float) -> int:
    """Convert a duration to whole microseconds. Raises `ValueError` unless it is finite and longer than 0 seconds.

    An infinite or not-a-number `lease` would make a record without a deadline. Then either no request or every request
    could take it over.
    """
    if not 0 < seconds < 1e10:
        raise ValueError(f"a duration must be longer than 0 s and shorter than 300 years, not {seconds!r}")
    return max(1, round(seconds * 1_000_000))
