"""The layers: which way imports may go, and that the check would notice."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "flask_idempotency" / "engine"
TREES = ("flask_idempotency", "janitor", "example_app")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages for a test to spoil."""
    for name in TREES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_module_without_a_layer_fails(tree: Path) -> None:
    (tree / "flask_idempotency" / "helpers.py").touch()

    result = lint(tree)

    assert (result.returncode, "flask_idempotency.helpers" in result.stdout) == (1, True)


HIGHER = (
    ("flask_idempotency/engine/store.py", "flask_idempotency.stores"),
    ("flask_idempotency/engine/store.py", "flask"),
    ("flask_idempotency/stores/memory/store.py", "flask_idempotency.codec"),
    ("flask_idempotency/codec/envelope.py", "flask_idempotency.web"),
    ("flask_idempotency/web/guard.py", "flask_idempotency.extension"),
    ("flask_idempotency/web/guard.py", "flask_idempotency.testing"),
    ("flask_idempotency/extension.py", "janitor"),
    ("flask_idempotency/extension.py", "example_app"),
)


@pytest.mark.slow
def test_each_import_of_a_higher_layer_fails(tree: Path) -> None:
    """Not even under TYPE_CHECKING: what two modules share belongs on a lower layer."""
    for importer, imported in HIGHER:
        with (tree / importer).open("a") as file:
            file.write(f"\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {imported}\n")

    result = lint(tree)

    arrows = [f"{importer.removesuffix('.py').replace('/', '.')} -> {imported}" for importer, imported in HIGHER]
    assert 1 == result.returncode
    assert [arrow for arrow in arrows if arrow not in result.stdout] == [], result.stdout


def test_the_engine_imports_only_the_standard_library_and_itself() -> None:
    """So its rules can be read, tested and trusted without knowing Flask, Redis or SQL."""
    foreign = {
        f"{file.name}: {module}"
        for file in ENGINE.rglob("*.py")
        for module in imported_modules(file)
        if module.partition(".")[0] not in sys.stdlib_module_names
        and not f"{module}.".startswith("flask_idempotency.engine.")
    }

    assert foreign == set()


def imported_modules(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                found.append(module)
            case ast.ImportFrom(level=level) if level > 0:
                # Relative imports would need resolving here; absolute ones can be searched for.
                found.append(f"relative import in {file.name}")
    return found
