"""What a user of the package receives."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"flask_idempotency": "flask_idempotency", "janitor": "flask_idempotency/janitor"}
BUILT_FROM = {"setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built through an sdist, as a release is, so that a file missing there is missing here."""
    out = tmp_path_factory.mktemp("dist")
    # setuptools is in our environment already; an isolated build would only fetch it again.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(sources(out / "tree"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "would be ignored" not in done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def sources(copy: Path) -> Path:
    """A copy of what goes into the package, so that building leaves nothing in the checkout."""
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("*"):
        if file.name in BUILT_FROM:
            shutil.copy(file, copy)
    return copy


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_every_file_of_the_packages_is_shipped(wheel: Path, tmp_path: Path) -> None:
    """
    Scripts, type markers and templates do not go missing when somebody adds a folder.
    """
    tree = sources(tmp_path)
    expected = {
        f"{target}/{file.relative_to(tree / folder).as_posix()}"
        for folder, target in PACKAGES.items()
        for file in (tree / folder).rglob("*")
        if file.is_file() and file.suffix != ".md"  # which are for who reads the sources
    }

    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert shipped == expected


def test_the_type_marker_is_shipped(wheel: Path) -> None:
    """
    Without py.typed a user's type checker ignores all our annotations.
    """
    with zipfile.ZipFile(wheel) as archive:
        assert "flask_idempotency/py.typed" in archive.namelist()


def test_no_top_level_name_but_ours_is_taken(wheel: Path) -> None:
    """
    A top-level `janitor` would overwrite pyjanitor, silently, and delete it when we are uninstalled.
    """
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" not in name}

    assert tops == {"flask_idempotency"}


def test_the_base_asks_for_little(wheel: Path) -> None:
    """
    Stores and codecs are chosen by extras; the base is what every user needs.
    """
    needed = metadata(wheel).get_all("Requires-Dist", [])
    base = {requirement.partition("<")[0].partition(">")[0] for requirement in needed if "extra ==" not in requirement}

    assert base == {"flask", "marshmallow"}


def test_what_the_documentation_installs_for_postgresql_can_connect(wheel: Path) -> None:
    """
    Plain psycopg has no libpq, and fails at its import where the system has none either.
    """
    needed = metadata(wheel).get_all("Requires-Dist", [])
    drivers = [
        requirement for requirement in needed if requirement.startswith("psycopg") and "postgresql" in requirement
    ]

    assert ["psycopg[binary]"] == [driver.partition("<")[0].partition(">")[0] for driver in drivers]


def test_all_is_the_sum_of_the_extras(wheel: Path) -> None:
    """
    `flask-idempotency[all]` leaves no feature out.
    """
    wanted: dict[str, set[str]] = {}
    for requirement in metadata(wheel).get_all("Requires-Dist", []):
        name, _, extra = requirement.partition("; extra == ")
        if extra:
            wanted.setdefault(extra.strip("'\""), set()).add(name)

    everything = wanted.pop("all")

    assert everything == set().union(*wanted.values())


def test_the_quickstart_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """
    The wheel and what the base asks for, in any folder: the README's first snippet runs a payment once.
    """
    target = tmp_path / "installed"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # run.py puts pip into .venv only where the interpreter behind it has none.
    python = sys.executable if importlib.util.find_spec("pip") else str(Path(sys.executable).resolve())
    install = ["install", "-qq", "--only-binary", ":all:", "--target", str(target), str(wheel)]
    # The base alone, so that an optional import at the top of a base module shows here.
    subprocess.run([python, "-m", "pip", *install], cwd=elsewhere, check=True)

    done = subprocess.run(
        [sys.executable, "-S", "-c", QUICKSTART, str(ROOT / "README.md")],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert [*[str(target / "flask_idempotency")] * 2, "201", "None", "201", "true"] == done.stdout.split()


QUICKSTART = """
import re, sys
from pathlib import Path
import flask_idempotency
import flask_idempotency.janitor
print(Path(flask_idempotency.__file__).parent, Path(flask_idempotency.janitor.__file__).parents[1])

names = {"__name__": "quickstart"}
readme = Path(sys.argv[1]).read_text("utf-8")
exec(re.search("^```python\\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[1], names)
client = names["app"].test_client()
for _ in range(2):
    answer = client.post("/payments", headers={"Idempotency-Key": "k"})
    print(answer.status_code, answer.headers.get("Idempotency-Replayed"))
"""
