"""Which test files a change can reach, by the import graph. The commit chooses a sixth of the others, which run as well.

A test file reaches a module if it imports it, directly or not, or if it or a module of ours that it imports names it in a
string, as a process that it starts. The `conftest.py` files beside and above it count as imported.
A changed file that is no module counts for the package that it lies in. Elsewhere, it counts for the test files that name it,
or whose neighbours do.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import grimp

PACKAGES: Final = ("flask_idempotency", "janitor", "example_app", "benchmarks", "tests")

FOR_ALL: Final = (
    *("requirements", "setup.py", "pyproject.toml", "run.py", ".ci/"),
    *("tests/__main__.py", "tests/conftest.py", "tests/stages.py", "tests/selection.py", "tests/lab/"),
)
"""A change in a file whose path begins so may change every test. What fixtures of all tests import only when they start a
server does not count as imported by every test."""

SHARES: Final = 6

_NAMED: Final = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
_IMPORTS_WHAT_LIES_BELOW: Final = re.compile(r'import_module\(f"\{__name__\}\.')


@dataclass(frozen=True)
class Selection:
    """The test files that a run leaves out. By default none."""

    left_out: tuple[str, ...] = ()
    """Those that no change reaches and whose turn it is not."""
    not_in_turn: tuple[str, ...] = ()
    """All whose turn it is not, reached or not."""
    changed: tuple[str, ...] = ()
    """Those that the change touched."""
    explanation: str = ""


def select(root: Path, since: str) -> Selection:
    """Compare the work tree with a commit. Raise `subprocess.CalledProcessError` if git does not know it."""
    changed = _git(root, "diff", "--name-only", "--no-renames", since).splitlines()
    head = _git(root, "rev-parse", "HEAD").strip()
    tree = Tree(root)
    reached = tree.reached(changed)
    share = int(head, 16) % SHARES
    rest = [file for file in tree.test_files if file not in reached]
    not_in_turn = tuple(file for file in tree.test_files if share_of(file) != share)
    left_out = tuple(file for file in rest if file in not_in_turn)
    explanation = (
        f"{len(changed)} files changed since {since}. They reach {len(reached)} of {len(tree.test_files)} test files; "
        f"of the others, {len(rest) - len(left_out)} ran as share {share + 1} of {SHARES}"
    )
    touched = tuple(file for file in tree.test_files if file in changed)
    return Selection(left_out, not_in_turn, touched, explanation)


def share_of(file: str) -> int:
    """Return which share a test file belongs to. It stays the same from commit to commit."""
    return int.from_bytes(hashlib.sha256(file.encode()).digest()) % SHARES


class Tree:
    """The modules and test files of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.test_files = sorted(str(path.relative_to(root)) for path in root.glob("tests/**/test_*.py"))

    @cached_property
    def graph(self) -> grimp.ImportGraph:
        """The imports, with the modules that ours name in strings, and the conftest files of each test."""
        present = [name for name in PACKAGES if (self.root / name / "__init__.py").exists()]
        graph = grimp.build_graph(*present, cache_dir=None)
        for name in graph.modules:
            source = self._source(name)
            # The package names its modules in texts only, and itself imports below it what it names for the type checker.
            if not name.startswith("flask_idempotency"):
                for word in _NAMED.findall(source):
                    if known := next((each for each in _with_parents(word)[:-1] if each in graph.modules), None):
                        graph.add_import(importer=name, imported=known)
            elif name != "flask_idempotency" and _IMPORTS_WHAT_LIES_BELOW.search(source):
                for below in graph.find_descendants(name):
                    graph.add_import(importer=name, imported=below)
            for parent in _with_parents(name):
                if parent.startswith("tests.") and f"{parent}.conftest" in graph.modules:
                    graph.add_import(importer=name, imported=f"{parent}.conftest")
        return graph

    def reached(self, changed: Iterable[str]) -> set[str]:
        """Return the test files that these changed files can reach."""
        modules, names = set(), set()
        for file in changed:
            if file.startswith(FOR_ALL):
                return set(self.test_files)
            if (module := self._module_of(file)) is not None:
                modules.add(module)
            else:
                names.add(Path(file).name)
        return {file for file in self.test_files if self._reaches(file, modules, names)}

    def _reaches(self, file: str, modules: set[str], names: set[str]) -> bool:
        test = _dotted(file)
        imported = {test, *self.graph.find_upstream_modules(test)}
        # Python runs the packages around a module first. What they import in turn counts where it is imported.
        if modules & {parent for name in imported for parent in _with_parents(name)}:
            return True
        beside = [name for name in imported if _with_parents(name)[1:2] == _with_parents(test)[1:2]]
        return any(name in self._source(module) for name in names for module in beside)

    def _module_of(self, file: str) -> str | None:
        """Return the module of a file, or the package that it lies in."""
        if not file.startswith(tuple(f"{name}/" for name in PACKAGES)):
            return None
        return next((each for each in _with_parents(_dotted(file)) if each in self.graph.modules), None)

    def _source(self, module: str) -> str:
        path = self.root / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return path.read_text(encoding="utf-8")


def _dotted(file: str) -> str:
    return str(Path(file).with_suffix("")).replace("/", ".").removesuffix(".__init__")


def _with_parents(module: str) -> list[str]:
    """Return a module's name and the names of the packages around it, inmost first."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout
