"""The wheel as a release builds it, and environments that have only the wheel and its requirements."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = {"flask_idempotency": "flask_idempotency", "janitor": "flask_idempotency/janitor"}
BUILT_FROM = {"setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"}


def sources(copy: Path) -> Path:
    """Copy what goes into the package, so that building leaves nothing in the checkout."""
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("*"):
        if file.name in BUILT_FROM:
            shutil.copy(file, copy)
    return copy


def build(out: Path) -> Path:
    """Build through an sdist, as a release does, so that a file missing there is missing here."""
    # setuptools is in our environment already; an isolated build would only fetch it again.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(sources(out / "tree"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "would be ignored" not in done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


class EmptyEnvironment:
    """A virtual environment with the wheel and the packages that it needs, and an empty folder in which programs run.

    `requirements` may name `flask-idempotency[extra]`. Their packages are links to those of our environment, which takes
    no network and no seconds. With `newest`, pip installs them instead.
    """

    def __init__(self, folder: Path, wheel: Path, *requirements: str, newest: bool = False) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.programs = folder / "venv" / "bin"
        self.python = self.programs / "python"
        venv.EnvBuilder(symlinks=True).create(folder / "venv")
        self.packages = next((folder / "venv").glob("lib/*/site-packages"))
        if newest:
            # run.py puts pip into .venv only if the interpreter behind it has none.
            pip = sys.executable if importlib.util.find_spec("pip") else str(Path(sys.executable).resolve())
            options = ["-qq", "--disable-pip-version-check", "--no-compile", "--only-binary", ":all:"]
            command = [pip, "-m", "pip", "--python", str(self.python), "install", *options, str(wheel), *requirements]
            subprocess.run(command, cwd=self.folder, env=_outside(), check=True)
            return
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.packages)
        (ours,) = Distribution.discover(name="flask-idempotency", path=[str(self.packages)])
        for package in _closure(ours, requirements):
            self._link(package)

    def _link(self, package: Distribution) -> None:
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (self.packages / top).exists():  # of a namespace package there is one link
                (self.packages / top).symlink_to(str(package.locate_file(top)))
        for script in package.entry_points.select(group="console_scripts"):
            program = self.programs / script.name
            program.write_text(f"#!{self.python}\nfrom {script.module} import {script.attr} as main\nmain()\n")
            program.chmod(0o755)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment."""
        program, *arguments = command
        return subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.folder,
            env=_outside(),
            capture_output=True,
            text=True,
            check=False,
        )


def _closure(ours: Distribution, requirements: Sequence[str]) -> list[Distribution]:
    """Return every installed package that these requirements and the wheel need, directly or through another one."""
    found: dict[tuple[str, str], Distribution] = {}
    waiting = [Requirement("flask-idempotency"), *map(Requirement, requirements)]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        package = ours if name == "flask-idempotency" else distribution(name)
        assert requirement.specifier.contains(package.version), f"{requirement}, but {package.version} is installed"
        for extra in {"", *requirement.extras} - {extra for other, extra in found if other == name}:
            found[name, extra] = package
            needs = map(Requirement, package.requires or ())
            waiting += [each for each in needs if each.marker is None or each.marker.evaluate({"extra": extra})]
    return [package for (name, extra), package in found.items() if not extra and package is not ours]


def _outside() -> dict[str, str]:
    """Return the environment without what would let packages of ours in."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
