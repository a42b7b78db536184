"""The wheel as a release builds it, and environments with nothing else in them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

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
    """A new virtual environment with these requirements, and an empty folder in which its programs run."""

    def __init__(self, folder: Path, *requirements: str) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.programs = folder / "venv" / "bin"
        venv.EnvBuilder(symlinks=True).create(folder / "venv")
        # run.py puts pip into .venv only if the interpreter behind it has none.
        pip = sys.executable if importlib.util.find_spec("pip") else str(Path(sys.executable).resolve())
        options = ["-qq", "--disable-pip-version-check", "--no-compile", "--only-binary", ":all:"]
        command = [pip, "-m", "pip", "--python", str(self.programs / "python"), "install", *options, *requirements]
        subprocess.run(command, cwd=self.folder, env=_outside(), check=True)

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment."""
        program, *arguments = command
        return subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.folder,
            env={**_outside(), **environment},
            capture_output=True,
            text=True,
            check=False,
        )


def _outside() -> dict[str, str]:
    """Return the environment without what would let packages of ours in."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
