"""A private copy of the repository, in which one file at a time is made faulty and tests are run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tests.mutants.mutant import Mutant

ROOT: Final = Path(__file__).resolve().parents[2]
GRACE_SECONDS: Final = 10.0
"""What a run that is ended may take to stop its servers."""

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "instance")
_PYTEST = ("-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=short")


class Verdict(Enum):
    PASSED = "passed"
    FAILED = "failed"
    """An assertion did, or the code under test: not a fixture, and not the collection."""
    SKIPPED = "skipped"
    HUNG = "hung"
    BROKEN = "broken"
    """It says nothing of the code: a test was not found, could not be imported, or could not be set up."""


@dataclass(frozen=True, slots=True)
class Run:
    verdict: Verdict
    output: str


class Copy:
    """Used by one thread. What runs in it imports its code from it, in its own child processes too."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        self._report = folder.with_suffix(".xml")
        shutil.copytree(root, folder, ignore=_LEFT_OUT)

    @contextmanager
    def faulty(self, mutant: Mutant) -> Iterator[None]:
        """With this fault in it. Afterwards the file is as it was, to the time of its last change."""
        file = self._folder / mutant.file
        text, before = file.read_text("utf-8"), file.stat()
        file.write_text(mutant.applied(text), "utf-8")
        try:
            yield
        finally:
            file.write_text(text, "utf-8")
            # The bytecode that was kept of it is good again.
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    def run(self, tests: Sequence[str], *, seconds: float, keep_bytecode: bool = False) -> Run:
        """What comes of these tests, as soon as one of them has failed."""
        # In front of whatever run.py has put there: another version of Flask, for one.
        paths = filter(None, [str(self._folder), os.environ.get("PYTHONPATH")])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if not keep_bytecode:
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        self._report.unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, *_PYTEST, f"--junitxml={self._report}", *tests],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Run(Verdict.HUNG, _ended(process))
        except BaseException:
            _ended(process)
            raise
        return Run(self._verdict(process.returncode), output)

    def _verdict(self, code: int) -> Verdict:
        # 1 is said of a fixture that fails, too, and 0 of a test that was skipped.
        if code not in (0, 1) or not self._report.exists():
            return Verdict.BROKEN
        suite = ElementTree.parse(self._report).getroot().find("testsuite")  # noqa: S314 - pytest has just written it
        counts = {} if suite is None else {name: int(suite.get(name, "0")) for name in ("tests", "failures", "skipped")}
        if code == 1:
            return Verdict.FAILED if counts.get("failures") else Verdict.BROKEN
        if not counts.get("tests"):
            return Verdict.BROKEN
        return Verdict.SKIPPED if counts["skipped"] else Verdict.PASSED


def _ended(process: subprocess.Popen[str]) -> str:
    """What it has said until now. Asked first: fixtures stop the servers that they have started."""
    process.terminate()
    try:
        output, _ = process.communicate(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return output
