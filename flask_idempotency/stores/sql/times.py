"""Seconds since the epoch, as records tell them, back into the microseconds that rows hold."""

from __future__ import annotations


def in_microseconds(seconds: float) -> int:
    """The very number that was divided by a million, up to the year 2106 at least."""
    return round(seconds * 1_000_000)
