"""`python3 run.py test`: the core tests, or every stage, or what pytest's arguments choose.

python3 run.py test                      the core stage, on all processors
python3 run.py test --all                every stage that CI and releases run
python3 run.py test --all --since COMMIT the same, without what tests/selection.py leaves out
python3 run.py test ARGUMENTS            pytest with these arguments

SEED=7 repeats the order of a run that printed this seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.selection import Selection

ROOT: Final = Path(__file__).resolve().parents[1]
CONTRACT: Final = "tests/stores/test_contract.py"

STAGE_SECONDS: Final = 2000
"""A stage that hangs must not hide the others."""

REPEATS: Final = 5
REPEAT_AT_MOST: Final = 5
"""A test that failed beside others runs again by itself, this often, and must pass each time. It is reported all the same.
More failures than this are no accident."""

OLDEST_SQLALCHEMY: Final = "2.0.23" if sys.version_info < (3, 13) else "2.0.31"  # the first that runs on Python 3.13


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A run of pytest."""

    name: str
    arguments: Sequence[str]
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of packages other than the pinned ones, as the variables that run.py reads."""
    always: bool = False
    """Whether it runs whole, whatever changed."""
    in_turn: bool = False
    """Whether only the contract and a sixth of the files run when a change is named."""
    seconds: int | None = None
    """When a change is named, tests that have not begun after this time are left out. Those of changed files are the first,
    the commit decides about the others."""

    def left_out(self, selection: Selection) -> list[str]:
        """Return the test files that do not run."""
        if self.always:
            return []
        others = (file for file in selection.not_in_turn if file != CONTRACT) if self.in_turn else ()
        return sorted({*selection.left_out, *others})


CORE: Final = Stage(
    name="core",
    arguments=("-n", "logical", "--dist", "worksteal", "-m", "core"),
    always=True,
    seconds=1500,
)

STAGES: Final = (
    CORE,
    # These mostly wait for processes and leases, so more of them than there are processors run at a time.
    Stage(
        name="slow",
        seconds=480,
        arguments=(
            "-n",
            "6",
            "--dist",
            "loadgroup",
            "--durations=20",
            "--durations-min=10",
            "-m",
            "slow and not matrix and not soak",
        ),
    ),
    Stage(
        name="matrix",
        arguments=("-n", "logical", "--dist", "loadgroup", "-m", "matrix and not soak"),
        in_turn=True,
        seconds=180,
    ),
    Stage(
        name="oldest Flask",
        seconds=90,
        versions={"FLASK_VERSION": "3.0.3"},
        arguments=("-n", "logical", "--dist", "worksteal", "-m", "core", "tests/web", "tests/cli"),
    ),
    Stage(
        name="oldest marshmallow",
        versions={"MARSHMALLOW_VERSION": "3.20.0"},
        arguments=(
            "-n",
            "logical",
            "--dist",
            "worksteal",
            "-m",
            "core",
            "tests/settings",
            "tests/web/test_policies.py",
            "tests/cli/test_policy.py",
        ),
    ),
    Stage(
        name="oldest SQLAlchemy",
        seconds=90,
        versions={"SQLALCHEMY_VERSION": OLDEST_SQLALCHEMY},
        arguments=(
            "-n",
            "logical",
            "--dist",
            "worksteal",
            "-m",
            "core or (repeated and not matrix and not soak)",
            "tests/stores/sql",
            CONTRACT,
            "-k",
            "not test_contract or sqlite or postgres",
        ),
    ),
)


def main(arguments: Sequence[str]) -> int:
    if arguments and "--all" not in arguments:
        # Before anything else is imported: a file of tests ends within a second.
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])  # noqa: S606
    parser = argparse.ArgumentParser(prog="run.py test", usage=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--since", metavar="COMMIT")
    options = parser.parse_args(arguments)
    from tests.selection import Selection, select

    # A signal ends the pytest of the stage first, with its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(select(ROOT, options.since) if options.since else Selection())
    for stage in STAGES if options.all else (CORE,):
        run.stage(stage)
    return run.close(everything=options.all)


class Run:
    """Stages one after the other, and what came of them."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.seed = os.environ.get("SEED", "random")
        if self.seed == "random":
            self.seed = str(random.randrange(2**32))
        self.failed: list[str] = []
        self.unsteady: list[str] = []
        self.began = time.monotonic()

    def stage(self, stage: Stage) -> None:
        """Run the tests of a stage. Run the few that failed again, by themselves."""
        say(f"=== {stage.name}")
        began = time.monotonic()
        left_out = stage.left_out(self.selection)
        arguments = [*stage.arguments, *(f"--ignore={file}" for file in left_out)]
        within = []
        if self.selection.explanation and stage.seconds is not None:
            within = [f"--until={began + stage.seconds:.0f}", *(f"--sooner={file}" for file in self.selection.changed)]
        with tempfile.TemporaryDirectory(prefix="idempotency-tests-") as folder:
            code = self._pytest(stage, *arguments, *within, cache=folder)
            if code == 1 and self._pass_alone(stage, arguments, folder):
                code = 0
        # 5: no test is left of this stage.
        passed = code == 0 or (code == 5 and bool(left_out))
        say(
            f"=== {stage.name}: {'passed' if passed else f'FAILED with exit code {code}'} in {time.monotonic() - began:.0f} s"
        )
        if not passed:
            self.failed.append(stage.name)

    def _pass_alone(self, stage: Stage, arguments: Sequence[str], cache: str) -> bool:
        """Return True if no more than a few tests failed and each of them passes by itself, each time."""
        # pytest writes this list only after a run to its end.
        last = Path(cache, "v/cache/lastfailed")
        tests = sorted(json.loads(last.read_text(encoding="utf-8"))) if last.exists() else []
        if not 0 < len(tests) <= REPEAT_AT_MOST:
            return False
        for number in range(1, REPEATS + 1):
            say(f"=== {stage.name}: run again by themselves, {number} of {REPEATS}")
            if self._pytest(stage, *tests, "-n", "0", "-p", "no:cacheprovider", cache=None):
                return False
        self.unsteady += [f"{stage.name}: {test}" for test in tests]
        return True

    def _pytest(self, stage: Stage, *arguments: str, cache: str | None) -> int:
        command = [
            sys.executable,
            str(ROOT / "run.py"),
            "test",
            "-q",
            "--progress",
            "--override-ini=console_output_style=classic",
            f"--randomly-seed={self.seed}",
        ]
        if cache is not None:
            command += ["-o", f"cache_dir={cache}"]
        process = subprocess.Popen([*command, *arguments], env={**os.environ, **stage.versions})
        try:
            return process.wait(STAGE_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"=== {stage.name}: ended after {STAGE_SECONDS} s")
            return 124
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()

    def close(self, *, everything: bool) -> int:
        """Say what failed and what did not run. Return the exit code."""
        for test in self.unsteady:
            say(f"=== UNSTEADY, failed once and then passed {REPEATS} times: {test}")
        left_out = ["the soak stage: python3 run.py test -m soak"]
        if not everything:
            left_out = ["the stages slow, matrix and soak, and the oldest versions: python3 run.py test --all"]
        elif self.selection.explanation:
            say(f"=== {self.selection.explanation}")
            for stage in STAGES:
                if files := stage.left_out(self.selection):
                    say(f"=== Left out of {stage.name}: {' '.join(files)}")
            left_out.append("the files above, and what a stage had no time for: python3 run.py test --all")
        verdict = f"FAILED: {', '.join(self.failed)}" if self.failed else "passed"
        say(f"=== {verdict}, {time.monotonic() - self.began:.0f} s, SEED={self.seed}. Left out: {'; '.join(left_out)}")
        return 1 if self.failed else 0


def say(line: str) -> None:
    # At once, because the output may go through a pipe.
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
