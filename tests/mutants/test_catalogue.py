"""The catalogue fits the code and the tests of today. No fault is tried here."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.mutants.__main__ import changed_since
from tests.mutants.catalogue import CATALOGUE, Mutant, parse, sources
from tests.mutants.copies import ROOT


def test_every_place_is_found_once() -> None:
    """If it is not: the code has changed, so say in the *.toml file how it reads now; or name a function with `at`."""
    known = sources(ROOT)
    places = {mutant.name: len(mutant.places(known)) for mutant in CATALOGUE}

    assert {name: found for name, found in places.items() if found != 1} == {}


def test_every_fault_changes_the_code() -> None:
    assert [mutant.name for mutant in CATALOGUE if mutant.by == mutant.replaced] == []


def test_every_fault_in_python_can_be_run(tmp_path: Path) -> None:
    """Else its tests fail for a name that is unknown, and say nothing of the rule that the fault breaks."""
    known = sources(ROOT)
    for mutant in CATALOGUE:
        for file, place in mutant.places(known):
            if file.suffix == ".py":
                text = known[file]
                faulty = text[:place] + mutant.by + text[place + len(mutant.replaced) :]
                (tmp_path / f"{mutant.name}.py").write_text(faulty, "utf-8")

    command = ["ruff", "check", "--isolated", "--no-cache", "--ignore-noqa", "--select", "E9,F821", "-q", str(tmp_path)]
    found = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)

    assert (found.stdout, found.stderr) == ("", "")


def test_every_named_test_exists() -> None:
    """By file and function. Only a run shows whether its parameters exist."""
    assert [test for mutant in CATALOGUE for test in mutant.killed_by if not exists(test)] == []
    assert [mutant.name for mutant in CATALOGUE if not mutant.killed_by] == []


def test_names_are_unique() -> None:
    """The command line takes them. TOML refuses two of a name only within a file."""
    assert len({mutant.name for mutant in CATALOGUE}) == len(CATALOGUE) > 100


def test_every_fault_says_what_becomes_of_a_payment() -> None:
    assert [mutant.name for mutant in CATALOGUE if not mutant.harm.endswith(".")] == []


@pytest.mark.parametrize(
    ("at", "lines"), (("", [2, 4, 6]), ("till.py", [2, 4, 6]), ("Till.pay", [4]), ("pay", [2, 4]), ("Till.refund", []))
)
def test_a_place_is_within_the_named_function(at: str, lines: list[int]) -> None:
    text = (
        "def pay():\n    return 1\nclass Till:\n    def pay(self): return 1\n    def close(self):\n        return 1\n"
    )
    mutant = Mutant(name="m", replaced="return 1", by="", killed_by=(), harm="", at=at)

    places = mutant.places({Path("till.py"): text})

    assert [text.count("\n", 0, place) + 1 for _, place in places] == lines


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A repository of one commit: two functions, a test of each, and the catalogue."""
    texts = {"flask_idempotency/a.py": "A = 1\n", "flask_idempotency/b.py": "B = 1\n", "test_a.py": "", "test_b.py": ""}
    entries = [
        f'[{name}]\nreplaced = "{name.upper()} = 1"\nby = "0"\nkilled_by = "test_{name}.py"\nharm = ""\n'
        for name in "ab"
    ]
    for file, text in {**texts, "mutants.toml": "".join(entries)}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr("tests.mutants.__main__.ROOT", tmp_path)
    monkeypatch.setattr("tests.mutants.__main__.FILES", [tmp_path / "mutants.toml"])
    me = ["-c", "user.name=m", "-c", "user.email=m@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*me, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return "HEAD"


@pytest.mark.parametrize(
    ("file", "change", "chosen"),
    (
        ("flask_idempotency/a.py", ("A = 1", "A = 1  # once"), ["a"]),
        ("test_b.py", ("", "assert True"), ["b"]),
        ("mutants.toml", ('by = "0"', 'by = "2"'), ["a", "b"]),
        ("flask_idempotency/a.py", ("", ""), []),
    ),
)
def test_since_a_commit_chooses_the_faults_that_it_concerns(
    commit: str, tmp_path: Path, file: str, change: tuple[str, str], chosen: list[str]
) -> None:
    path = tmp_path / file
    path.write_text(path.read_text().replace(*change) if change[0] else change[1] + path.read_text())

    mutants = list(parse((tmp_path / "mutants.toml").read_text()))

    assert [mutant.name for mutant in changed_since(commit, mutants)] == chosen


def exists(node_id: str) -> bool:
    path, *names = node_id.partition("[")[0].split("::")
    found: object = import_module(path.removesuffix(".py").replace("/", "."))
    for name in names:
        found = getattr(found, name, None)
    return callable(found) and names[-1].startswith("test_")
