"""Escape text for terminals and logs.

Clients, stores and other libraries choose names, reasons and messages. A terminal obeys control characters, a log takes a
line break for a new entry, and text that changes direction deceives a reader. So logs, commands, problems, metrics and our
exceptions call these functions. Events and JSON keep the text unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    """Escape characters that are not printable: control characters, line breaks, marks of direction, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """Escape as `printable` does, but keep line breaks. Use it for our own texts of several lines."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def printable_values(value: Any) -> Any:
    """Return the same value with every text in it escaped, in mappings and sequences too."""
    match value:
        case str():
            return printable(value)
        case Mapping():
            return {printable_values(name): printable_values(each) for name, each in value.items()}
        case tuple() | list() | frozenset() | set():
            return type(value)(map(printable_values, value)) if type(value) in _PLAIN else value
        case _:
            return value


_PLAIN = tuple, list, frozenset, set
