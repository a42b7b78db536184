"""Rows, and who may change them.

A store decides one key at a time, atomically, and only by what the record itself says. Code here does not wait, retry,
encode or interpret a payload, does not know what a policy, a header or a request is, and never compares its own host's
clock with a server's.
"""

from __future__ import annotations


def microseconds(seconds: float) -> int:
    """This duration in whole microseconds. Raises `ValueError` unless it is finite and longer than nothing.

    Without this a `lease` of infinity or not-a-number would make a record without a deadline: nobody could ever take it
    over, or everybody could.
    """
    if not 0 < seconds < 1e10:
        raise ValueError(f"a duration must be longer than 0 s and shorter than 300 years, not {seconds!r}")
    return max(1, round(seconds * 1_000_000))
