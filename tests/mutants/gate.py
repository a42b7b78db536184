"""Passes when every fault is noticed by the tests that are named for it, and by nothing else than a failure of theirs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from tests.mutants.copies import Copy, Run, Verdict
from tests.mutants.mutant import Mutant

MUTANT_SECONDS: Final = 90.0
"""For tests that take a few: a machine may be busy."""
BASELINE_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """`complaint` is empty for a fault that was noticed."""

    mutant: Mutant
    seconds: float
    complaint: str = ""
    output: str = ""


class Gate:
    """Works in copies below `folder`, and leaves the repository alone."""

    def __init__(self, root: Path, folder: Path, *, tell: Callable[[str], object]) -> None:
        self._root = root
        self._folder = folder
        self._tell = tell

    def judge(self, mutants: Sequence[Mutant], *, workers: int) -> int:
        """The exit code: 0 when every fault was noticed."""
        began = time.monotonic()
        judged = [Judgement(mutant, 0.0, complaint) for mutant in mutants if (complaint := self._stale(mutant))]
        stale = {judgement.mutant.name for judgement in judged}
        fresh = [mutant for mutant in mutants if mutant.name not in stale]
        with ThreadPoolExecutor(workers) as pool:
            try:
                copies = list(pool.map(lambda n: Copy(self._root, self._folder / f"copy-{n}"), range(workers)))
                if not self._sound(pool, copies, fresh):
                    return 1
                judged += self._noticed(pool, copies, fresh)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return self._summed_up(judged, time.monotonic() - began)

    def _stale(self, mutant: Mutant) -> str:
        file = self._root / mutant.file
        places = mutant.places(file.read_text("utf-8")) if file.exists() else 0
        if places == 1:
            return ""
        return (
            f"is stale: its place is found {places} times in {mutant.file}, not once. "
            "Say in the catalogue where the code that it breaks is now"
        )

    def _sound(self, pool: ThreadPoolExecutor, copies: Sequence[Copy], mutants: Sequence[Mutant]) -> bool:
        """Whether all named tests pass while nothing is broken."""
        tests = sorted({test for mutant in mutants for test in mutant.killed_by})
        shares = [tests[n :: len(copies)] for n in range(len(copies))]

        def run(copy: Copy, share: Sequence[str]) -> Run:
            if not share:
                return Run(Verdict.PASSED, "")
            return copy.run(share, seconds=BASELINE_SECONDS, keep_bytecode=True)

        runs = list(pool.map(run, copies, shares))
        for each in runs:
            if each.verdict is not Verdict.PASSED:
                self._tell(f"{each.output}\nThe named tests do not pass on the code as it is ({each.verdict.value}).")
        return all(each.verdict is Verdict.PASSED for each in runs)

    def _noticed(self, pool: ThreadPoolExecutor, copies: Sequence[Copy], mutants: Iterable[Mutant]) -> list[Judgement]:
        free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def judge(mutant: Mutant) -> Judgement:
            copy = free.get()
            try:
                began = time.monotonic()
                with copy.faulty(mutant):
                    run = copy.run(mutant.killed_by, seconds=MUTANT_SECONDS)
                judgement = Judgement(mutant, time.monotonic() - began, _complaint(mutant, run), run.output)
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
        killed = len(judged) - len(failed)
        self._tell(f"--- {len(judged)} faults, {killed} noticed by the tests named for them, in {seconds:.0f} s")
        return 1 if failed else 0


def workers() -> int:
    """As many as there are processors for this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _complaint(mutant: Mutant, run: Run) -> str:
    match run.verdict:
        case Verdict.FAILED:
            return ""
        case Verdict.HUNG:
            return "" if mutant.may_hang else f"did not end within {MUTANT_SECONDS:g} s, which is not said to be a sign"
        case Verdict.PASSED:
            return f"SURVIVES in {mutant.file}: no test that is named for it has failed"
        case Verdict.SKIPPED:
            return "was not tried: its test was skipped"
        case Verdict.BROKEN:
            return "was noticed by no test: none could be run"
