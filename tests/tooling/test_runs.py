"""`run.py test`: which stages it runs, how often, and what its last line says."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis.strategies import none

from tests import __main__ as runs
from tests.selection import Selection

CONTRACT = runs.CONTRACT
MATRIX = next(stage for stage in runs.STAGES if stage.name == "matrix")


class Scripted(runs.Run):
    """A run whose pytest ends as a test says: how many tests fail at first, and again by themselves."""

    def __init__(
        self,
        failing: int = 0,
        *,
        again: Sequence[int] = (),
        code: int = 1,
        left_out: Sequence[str] = (),
        changed: Sequence[str] = (),
    ) -> None:
        super().__init__(
            Selection(
                tuple(left_out), tuple(left_out), tuple(changed), "2 files changed" if left_out or changed else ""
            )
        )
        self.failing, self.again, self.code = failing, list(again), code
        self.calls: list[tuple[str, ...]] = []

    def _pytest(self, stage: runs.Stage, *arguments: str, cache: str | None) -> int:
        self.calls.append(arguments)
        if cache is None:
            return self.again.pop(0)
        if self.failing:
            last = Path(cache, "v/cache/lastfailed")
            last.parent.mkdir(parents=True)
            last.write_text(json.dumps({f"tests/test_{number}.py::test": True for number in range(self.failing)}))
            return 1
        return self.code


@pytest.mark.parametrize(
    ("run", "failed"),
    [
        (Scripted(code=0), False),
        (Scripted(1, again=[0] * 5), False),
        (Scripted(5, again=[0] * 5), False),
        (Scripted(1, again=[0, 0, 0, 0, 1]), True),
        # No accident.
        (Scripted(6), True),
        # Interrupted, or a usage error: no list of failed tests.
        (Scripted(code=2), True),
        (Scripted(code=1), True),
        # No test is left of the stage: of the change's choice, or because something is wrong.
        (Scripted(code=5, left_out=["tests/web/test_a.py"]), False),
        (Scripted(code=5), True),
    ],
)
def test_a_stage_fails_unless_each_failed_test_passes_by_itself(run: Scripted, failed: bool) -> None:
    run.stage(MATRIX)

    assert run.close(everything=True) == failed
    assert run.again == []


def test_the_last_lines_name_what_did_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    unsteady = Scripted(1, again=[0] * 5)
    unsteady.stage(runs.CORE)
    unsteady.close(everything=False)
    *_, named, last = capsys.readouterr().out.splitlines()
    assert named == "=== UNSTEADY, failed once and then passed 5 times: core: tests/test_0.py::test"
    assert last.startswith("=== passed")
    assert last.endswith("oldest versions: python3 run.py test --all")

    Scripted(left_out=["tests/e2e/test_kills.py"]).close(everything=True)
    *lines, last = capsys.readouterr().out.splitlines()
    assert "=== Left out of slow: tests/e2e/test_kills.py" in lines
    assert last.endswith("the files above, and what a stage had no time for: python3 run.py test --all")


def test_the_core_and_the_contract_run_whatever_changed() -> None:
    selection = Selection(("tests/a.py",), (CONTRACT, "tests/a.py", "tests/b.py"))

    assert runs.CORE.left_out(selection) == []
    assert MATRIX.left_out(selection) == ["tests/a.py", "tests/b.py"]
    assert MATRIX.left_out(Selection((CONTRACT,), (CONTRACT,))) == [CONTRACT]
    assert MATRIX.left_out(Selection()) == []


def test_a_named_change_bounds_each_stage_and_its_own_files_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000)
    bounded, whole = Scripted(0, again=[], code=0, changed=["tests/a.py"]), Scripted(code=0)
    for run in (bounded, whole):
        run.stage(runs.CORE)
        run.stage(MATRIX)

    assert [call[-2:] for call in bounded.calls] == [(f"--until={end}", "--sooner=tests/a.py") for end in (2500, 1180)]
    assert not any(word.startswith("--until") for call in whole.calls for word in call)


def test_one_order_of_tests_for_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "7")
    assert runs.Run(Selection()).seed == "7"
    monkeypatch.setenv("SEED", "random")
    assert runs.Run(Selection()).seed.isdecimal()


@given(none())
def example(_: None) -> None:
    """What a test with examples looks like."""


def test_an_example_may_take_its_time() -> None:
    """On a busy machine. `given` has taken its settings when this module was imported."""
    assert example._hypothesis_internal_use_settings.deadline is None  # type: ignore[attr-defined]
