"""Seconds since the epoch, as records tell them, back into the microseconds that rows hold."""

from __future__ import annotations

from fractions import Fraction


def in_microseconds(seconds: float) -> int:
    """The very number that was divided by a million, up to the year 2106: in floats it would be one off from 2041 on."""
    return round(Fraction(seconds) * 1_000_000)
