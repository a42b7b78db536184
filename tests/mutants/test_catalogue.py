"""The catalogue fits the code and the tests of today. No fault is tried here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.mutants.__main__ import changed_since
from tests.mutants.catalogue import CATALOGUE, Mutant, sources
from tests.mutants.copies import ROOT


def test_every_place_is_found_once() -> None:
    """If it is not: the code has changed, so say in the *.toml file how it reads now; or name a function with `at`."""
    known = sources(ROOT)
    places = {mutant.name: len(mutant.places(known)) for mutant in CATALOGUE}

    assert {name: found for name, found in places.items() if found != 1} == {}


def test_every_fault_changes_the_code() -> None:
    assert [mutant.name for mutant in CATALOGUE if mutant.by == mutant.replaced] == []


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


def test_a_change_chooses_the_faults_of_its_files() -> None:
    assert changed_since("HEAD", [CATALOGUE[0]]) in ([], [CATALOGUE[0]])


def exists(node_id: str) -> bool:
    path, *names = node_id.partition("[")[0].split("::")
    found: object = import_module(path.removesuffix(".py").replace("/", "."))
    for name in names:
        found = getattr(found, name, None)
    return callable(found) and names[-1].startswith("test_")
