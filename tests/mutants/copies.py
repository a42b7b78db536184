"""A private copy of the repository, for one fault at a time and the tests that must notice it."""

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

from tests.mutants.catalogue import Mutant, sources

ROOT: Final = Path(__file__).resolve().parents[2]
GRACE_SECONDS: Final = 10.0
"""How long a run that is ended may take to stop its servers."""

_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "instance")
_PYTEST = ("-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=short")


class Verdict(Enum):
    PASSED = "passed"
    FAILED = "failed"
    """An assertion failed, or the code under test: not a fixture, and not the collection."""
    SKIPPED = "skipped"
    HUNG = "hung"
    BROKEN = "broken"
    """A test was not found, could not be imported, or could not be set up."""


@dataclass(frozen=True, slots=True)
class Run:
    verdict: Verdict
    output: str


class Copy:
    """One thread uses it. Tests that run in it import the code of the copy, and so do their child processes."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        self._report = folder.with_suffix(".xml")
        self._process: subprocess.Popen[str] | None = None
        shutil.copytree(root, folder, ignore=_LEFT_OUT)

    @contextmanager
    def faulty(self, mutant: Mutant) -> Iterator[None]:
        """Put this fault into the copy. Afterwards the file is as it was, to the time of its last change."""
        known = sources(self._folder)
        ((file, place),) = mutant.places(known)
        text, before = known[file], file.stat()
        file.write_text(text[:place] + mutant.by + text[place + len(mutant.replaced) :], "utf-8")
        try:
            yield
        finally:
            file.write_text(text, "utf-8")
            # So that the bytecode of the unchanged file is valid again.
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    def run(self, tests: Sequence[str], *, seconds: float, keep_bytecode: bool = False) -> Run:
        """Run these tests until one of them fails."""
        # In front of the folders that run.py has named, such as that of another Flask.
        paths = filter(None, [str(self._folder), os.environ.get("PYTHONPATH")])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if not keep_bytecode:
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        self._report.unlink(missing_ok=True)
        self._process = process = subprocess.Popen(
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
        return Run(self._verdict(process.returncode), output)

    def stop(self) -> None:
        """End the tests that run now, from another thread: its `run` then returns."""
        if self._process is not None:
            self._process.terminate()

    def _verdict(self, code: int) -> Verdict:
        # pytest also ends with 1 if a fixture failed, and with 0 if a test was skipped.
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
    """End a run, and return its output. SIGTERM comes first, so that fixtures stop the servers that they started."""
    process.terminate()
    try:
        output, _ = process.communicate(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return output
