"""The catalogue of faults is about the code and the tests that there are: told in a second, without running any."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

from tests.mutants.catalogue import CATALOGUE
from tests.mutants.copies import ROOT


def test_every_place_is_found_once() -> None:
    """
    A fault whose place is gone would be applied to nothing; one with two places says less than it seems to.
    """
    places = {mutant.name: mutant.places((ROOT / mutant.file).read_text("utf-8")) for mutant in CATALOGUE}

    assert {} == {name: found for name, found in places.items() if found != 1}


def test_every_fault_changes_something() -> None:
    """
    Code of ours, and no test.
    """
    assert [] == [mutant.name for mutant in CATALOGUE if mutant.by == mutant.replaced]
    assert [] == [mutant.file for mutant in CATALOGUE if not mutant.file.startswith("flask_idempotency/")]


def test_every_named_test_is_there() -> None:
    """
    By file and function; whether its parameters are as named is found out when it is run.
    """
    assert [] == [test for mutant in CATALOGUE for test in mutant.killed_by if not is_there(test)]
    assert [] == [mutant.name for mutant in CATALOGUE if not mutant.killed_by]


def test_names_are_unique() -> None:
    """
    They are what the command line takes.
    """
    assert [] == [name for name, count in Counter(mutant.name for mutant in CATALOGUE).items() if count > 1]


def test_every_fault_tells_what_becomes_of_a_payment() -> None:
    """
    In a sentence: a fault of which nobody can say that need not be looked for.
    """
    assert [] == [mutant.name for mutant in CATALOGUE if not mutant.harm.endswith(".")]


def is_there(node_id: str) -> bool:
    path, *names = node_id.partition("[")[0].split("::")
    found: object = import_module(path.removesuffix(".py").replace("/", "."))
    for name in names:
        found = getattr(found, name, None)
    return callable(found) and names[-1].startswith("test_")
