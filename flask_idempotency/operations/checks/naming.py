"""Naming some of many."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

NAMED: Final = 5
"""More than that nobody reads in a sentence."""


def some(names: Iterable[str]) -> str:
    """The first few of these names, each once, and how many there are besides."""
    every = sorted(set(names))
    more = len(every) - NAMED
    return ", ".join(every[:NAMED]) + (f" and {more} more" if more > 0 else "")
