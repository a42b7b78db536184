"""The seeded faults: where each is put, and the tests that must fail then. The entries are in the *.toml files beside this.

[redis-completes-for-any-token]     the name, for the command line
at = "complete.lua"                 only if the place is not unique: the file, or the function as Class.method
replaced = "= owned(token)"         found exactly once in the package, wherever it moves
by = "= true"                       stands there instead
killed_by = "tests/…::test_…[…]"    a quick test, or a list of them; one that needs no server is best
harm = "…"                          what would happen to a payment
may_hang = true                     if a test that does not end has noticed the fault
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Final, TypeAlias

PACKAGE: Final = "flask_idempotency"
TOLD: Final = "testing"
"""The folder of the package that holds tests. No fault is put there."""

Sources: TypeAlias = Mapping[Path, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One place of the package, and the text that is put there."""

    name: str
    replaced: str
    by: str
    killed_by: tuple[str, ...]
    harm: str
    at: str = ""
    may_hang: bool = False

    def places(self, sources: Sources) -> list[tuple[Path, int]]:
        """Return the file and the offset of every place that fits."""
        return [
            (path, place)
            for path, text in sources.items()
            if self.replaced in text
            for start, end in _spans(path, text, self.at)
            for place in _found(text, self.replaced, start, end)
        ]


def sources(root: Path) -> Sources:
    """Return the text of every file that may hold a fault."""
    files = [path for path in sorted((root / PACKAGE).rglob("*")) if path.suffix in (".py", ".lua")]
    return {path: path.read_text("utf-8") for path in files if TOLD not in path.relative_to(root).parts}


def parse(toml: str) -> Iterator[Mutant]:
    """Yield the entries of a file."""
    for name, entry in tomllib.loads(toml).items():
        tests = entry.pop("killed_by")
        yield Mutant(name=name, killed_by=(tests,) if isinstance(tests, str) else tuple(tests), **entry)


def _found(text: str, wanted: str, start: int, end: int) -> Iterator[int]:
    place = text.find(wanted, start, end)
    while place >= 0:
        yield place
        place = text.find(wanted, place + 1, end)


def _spans(path: Path, text: str, at: str) -> Iterator[tuple[int, int]]:
    """Yield where a file or a function begins and ends."""
    if at in ("", path.name):
        yield 0, len(text)
    elif path.suffix == ".py":
        *classes, function = at.split(".")
        for around, name, start, end in _functions(text):
            if name == function and set(classes) <= set(around):
                yield start, end


@cache
def _functions(text: str) -> list[tuple[tuple[str, ...], str, int, int]]:
    """Return of each function the classes around it, its name, and where it begins and ends."""
    offsets = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    found: list[tuple[tuple[str, ...], str, int, int]] = []
    left: list[tuple[tuple[str, ...], ast.AST]] = [((), ast.parse(text))]
    while left:
        around, node = left.pop()
        if isinstance(node, ast.FunctionDef):
            found.append((around, node.name, offsets[node.lineno - 1], offsets[node.end_lineno or node.lineno]))
        inside = (*around, node.name) if isinstance(node, ast.ClassDef) else around
        left += [
            (inside, each)
            for each in ast.iter_child_nodes(node)
            if isinstance(each, ast.stmt | ast.ExceptHandler | ast.match_case)
        ]
    return sorted(found, key=lambda each: each[2])


FILES: Final = sorted(Path(__file__).parent.glob("*.toml"))
CATALOGUE: Final = tuple(mutant for file in FILES for mutant in parse(file.read_text("utf-8")))
