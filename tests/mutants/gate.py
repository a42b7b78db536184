"""The gate passes if every fault makes one of the tests fail that are named for it. No other failure counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from tests.mutants.catalogue import Mutant, sources
from tests.mutants.copies import Copy, Run, Verdict

MUTANT_SECONDS: Final = 90.0
"""For tests that take a few: a machine may be busy."""
BASELINE_SECONDS: Final = 600.0
TRIES: Final = 3
"""A test of many processes may meet a fault in most of its runs and not in all. Such a fault is reported as UNSTEADY."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """`complaint` is empty if a named test noticed the fault, in one of `TRIES` runs."""

    mutant: Mutant
    seconds: float
    complaint: str = ""
    output: str = ""
    runs: int = 1
    """How often the named tests were run. No run but the last noticed it."""


class Gate:
    """Runs the tests in copies below `folder`, and changes no file of the repository."""

    def __init__(self, root: Path, folder: Path, *, tell: Callable[[str], object]) -> None:
        self._root = root
        self._folder = folder
        self._tell = tell

    def judge(self, mutants: Sequence[Mutant], *, workers: int) -> int:
        """Return the exit code: 0 if the named tests noticed every fault."""
        began = time.monotonic()
        known = sources(self._root)
        places = {mutant: len(mutant.places(known)) for mutant in mutants}
        judged = [Judgement(mutant, 0.0, _stale(found)) for mutant, found in places.items() if found != 1]
        fresh = [mutant for mutant, found in places.items() if found == 1]
        copies: list[Copy] = []
        with ThreadPoolExecutor(workers) as pool:
            try:
                copies += pool.map(lambda n: Copy(self._root, self._folder / f"copy-{n}"), range(workers))
                if not self._passes_unchanged(pool, copies, fresh):
                    return 1
                judged += self._tried(pool, copies, fresh)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in copies:
                    copy.stop()
                raise
        return self._summed_up(judged, time.monotonic() - began)

    def _passes_unchanged(self, pool: ThreadPoolExecutor, copies: Sequence[Copy], mutants: Sequence[Mutant]) -> bool:
        tests = sorted({test for mutant in mutants for test in mutant.killed_by})
        shares = [(copy, share) for n, copy in enumerate(copies) if (share := tests[n :: len(copies)])]
        runs = pool.map(lambda each: each[0].run(each[1], seconds=BASELINE_SECONDS, keep_bytecode=True), shares)
        failed = [run for run in runs if run.verdict is not Verdict.PASSED]
        for run in failed:
            self._tell(f"{run.output}\nThe named tests do not pass on the code as it is ({run.verdict.value}).")
        return not failed

    def _tried(self, pool: ThreadPoolExecutor, copies: Sequence[Copy], mutants: Sequence[Mutant]) -> list[Judgement]:
        free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def judge(mutant: Mutant) -> Judgement:
            copy = free.get()
            try:
                began = time.monotonic()
                with copy.faulty(mutant):
                    runs = [copy.run(mutant.killed_by, seconds=MUTANT_SECONDS)]
                    while _complaint(mutant, runs[-1]) and len(runs) < TRIES:
                        runs.append(copy.run(mutant.killed_by, seconds=MUTANT_SECONDS))
                complaint = _complaint(mutant, runs[-1])
                judgement = Judgement(mutant, time.monotonic() - began, complaint, runs[-1].output, len(runs))
            finally:
                free.put(copy)
            self._tell(f"{'FAILED' if judgement.complaint else 'killed'} {judgement.seconds:5.1f} s  {mutant.name}")
            return judgement

        return list(pool.map(judge, mutants))

    def _summed_up(self, judged: Sequence[Judgement], seconds: float) -> int:
        failed = [judgement for judgement in judged if judgement.complaint]
        for judgement in failed:
            mutant = judgement.mutant
            self._tell(f"\n--- {mutant.name} {judgement.complaint}\n{mutant.harm}\n{judgement.output}")
        for judgement in judged:
            if judgement.runs > 1 and not judgement.complaint:
                self._tell(
                    f"=== UNSTEADY: {judgement.mutant.name} was noticed by run {judgement.runs} of its tests only"
                )
        killed = len(judged) - len(failed)
        self._tell(f"--- {len(judged)} faults, {killed} noticed by the tests named for them, in {seconds:.0f} s")
        return 1 if failed else 0


def workers() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stale(places: int) -> str:
    return f"is stale: the package has {places} places that fit, not one. Say in the catalogue how the code reads now"


def _complaint(mutant: Mutant, run: Run) -> str:
    match run.verdict:
        case Verdict.FAILED:
            return ""
        case Verdict.HUNG:
            return "" if mutant.may_hang else f"did not end within {MUTANT_SECONDS:g} s, and the entry has no may_hang"
        case Verdict.PASSED:
            return "SURVIVES: no test that is named for it failed"
        case Verdict.SKIPPED:
            return "was not tried: its test was skipped"
        case Verdict.BROKEN:
            return "was noticed by no test: none could be run"
