"""Text that is safe on a terminal and in a log.

Names, reasons and messages come from clients, from stores and from other libraries. A terminal acts on control characters
in them, a log takes a line break for another entry, and a reader is deceived by text that changes direction. So every
place where text leaves calls one of these: logs, commands, problems, metrics, and the text of our exceptions. Events and
JSON keep the text as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    """Escape what is not printable, line breaks too: control characters, marks of direction, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """As `printable`, but keep line breaks: for text of ours that has several lines."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def printable_values(value: Any) -> Any:
    """The same value with every text in it escaped, in mappings and sequences too."""
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
