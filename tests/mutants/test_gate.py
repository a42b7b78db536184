"""The gate passes for a fault that a named test notices, and for no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.catalogue import PACKAGE, Mutant
from tests.mutants.gate import Gate

CODE = "def pay(amount: int) -> int:\n    return amount\n"
TESTS = """
import pytest
from flask_idempotency.till import pay

@pytest.fixture
def paid():
    assert pay(2) == 2
    return 2

def test_notices():
    assert pay(1) == 1

def test_notices_nothing():
    assert pay(0) == 0

def test_notices_at_the_second_run(pytestconfig):
    mark = pytestconfig.rootpath / "faulty-run"
    assert pay(1) == 1 or not mark.exists() and not mark.touch()

def test_cannot_be_set_up(paid):
    assert paid

@pytest.mark.skipif(pay(1) == 1, reason="no server here")
def test_is_skipped():
    assert pay(1) == 1
"""
NOTICED = Mutant(
    name="pays-double",
    replaced="return amount",
    by="return 2 * amount",
    killed_by=("test_till.py::test_notices",),
    harm="It is made twice.",
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / PACKAGE).mkdir(parents=True)
    (folder / PACKAGE / "__init__.py").touch()
    (folder / PACKAGE / "till.py").write_text(CODE)
    (folder / "test_till.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def judged(repository: Path, tmp_path: Path, *mutants: Mutant) -> tuple[int, str]:
    """Return the exit code of the gate, and its output."""
    told: list[str] = []
    code = Gate(repository, tmp_path, tell=told.append).judge(mutants, workers=2)
    return code, "\n".join(told)


@pytest.mark.slow
def test_a_fault_that_is_noticed_passes_and_leaves_nothing_behind(repository: Path, tmp_path: Path) -> None:
    """Neither in the repository nor in the copy, where the next one is tried."""
    code, told = judged(repository, tmp_path, NOTICED, replace(NOTICED, name="pays-nothing", by="return 0"))

    assert (0, True) == (code, "2 faults, 2 noticed" in told)
    assert {CODE} == {(folder / PACKAGE / "till.py").read_text() for folder in (repository, tmp_path / "copy-0")}


@pytest.mark.slow
def test_a_fault_that_no_failing_test_notices_fails_the_gate(repository: Path, tmp_path: Path) -> None:
    """A test that passes, one that cannot be set up, code that cannot be imported: none of these has noticed anything."""
    survivor = replace(NOTICED, name="survivor", killed_by=("test_till.py::test_notices_nothing",))
    fixture = replace(NOTICED, name="fixture", killed_by=("test_till.py::test_cannot_be_set_up",))
    unimportable = replace(NOTICED, name="unimportable", by="return (")

    code, told = judged(repository, tmp_path, survivor, fixture, unimportable)

    assert (1, True) == (code, "3 faults, 0 noticed" in told)
    assert "survivor SURVIVES" in told
    assert "fixture was noticed by no test" in told
    assert "unimportable was noticed by no test" in told


@pytest.mark.slow
def test_a_fault_that_only_some_runs_notice_is_named_and_passes(repository: Path, tmp_path: Path) -> None:
    rarely = replace(NOTICED, name="rarely", killed_by=("test_till.py::test_notices_at_the_second_run",))

    code, told = judged(repository, tmp_path, rarely)

    assert (0, True) == (code, "UNSTEADY: rarely was noticed by run 2 of its tests only" in told), told


@pytest.mark.parametrize("replaced", ("return what", "amount"), ids=("nowhere", "twice"))
def test_a_fault_whose_place_is_not_found_once_is_stale(repository: Path, tmp_path: Path, replaced: str) -> None:
    """The code has changed, and the fault would be another one, or none."""
    code, told = judged(repository, tmp_path, replace(NOTICED, replaced=replaced))

    assert (1, True) == (code, "pays-double is stale" in told)


@pytest.mark.slow
@pytest.mark.parametrize("test", ("test_is_skipped", "test_is_not_there"))
def test_a_named_test_has_to_pass_first(repository: Path, tmp_path: Path, test: str) -> None:
    """One that was skipped would notice nothing; nor would one that is gone."""
    code, told = judged(repository, tmp_path, replace(NOTICED, killed_by=(f"test_till.py::{test}",)))

    assert (1, True) == (code, "do not pass on the code as it is" in told)
