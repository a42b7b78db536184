"""Timing in interleaved rounds, so that cases are compared under the same weather."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns, thread_time_ns

from benchmarks.calls import call
from benchmarks.cases import Case

# Long enough for pools, caches and the specialising interpreter to settle.
WARM_UP_REQUESTS = 50


@dataclass(slots=True)
class Timing:
    """What one case took, in µs, by round: each request's time, and the processor's share of the average one."""

    case: Case
    rounds: list[list[float]] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        return [median(taken) for taken in self.rounds]

    @property
    def typical(self) -> float:
        return median(self.medians)

    def quantile(self, part: float) -> float:
        """Over all requests of all rounds."""
        return quantile([time for each in self.rounds for time in each], part)

    def ratio_to(self, floor: Timing) -> float:
        """The median of the ratios within each round: what slows a whole round down cancels out."""
        return median(mine / its for mine, its in zip(self.medians, floor.medians, strict=True))

    def added_to(self, floor: Timing) -> float:
        return median(mine - its for mine, its in zip(self.medians, floor.medians, strict=True))

    def processor_ratio_to(self, floor: Timing) -> float:
        return median(mine / its for mine, its in zip(self.processor, floor.processor, strict=True))

    def processor_added_to(self, floor: Timing) -> float:
        return median(mine - its for mine, its in zip(self.processor, floor.processor, strict=True))


def quantile(taken: Sequence[float], part: float) -> float:
    ordered = sorted(taken)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)]


def measure(cases: Sequence[Case], *, rounds: int, requests: int) -> list[Timing]:
    """Every case in every round, in a new order each time. Raises if an answer was not the one to be measured."""
    timings = [Timing(case) for case in cases]
    for case in cases:
        _take(case, WARM_UP_REQUESTS)
    # What is alive now lives to the end; the collector need not look at it in the middle of a request.
    gc.collect()
    gc.freeze()
    try:
        for _ in range(rounds):
            for timing in random.sample(timings, len(timings)):
                taken, processor = _take(timing.case, requests)
                timing.rounds.append(taken)
                timing.processor.append(processor)
    finally:
        gc.unfreeze()
    return timings


def _take(case: Case, requests: int) -> tuple[list[float], float]:
    app = case.flask
    environs = [case.make() for _ in range(requests)]
    taken, answers = [], []
    processor = thread_time_ns()
    for environ in environs:
        began = perf_counter_ns()
        answers.append(call(app, environ))
        taken.append((perf_counter_ns() - began) / 1000)
    processor = thread_time_ns() - processor
    for answer in answers:
        case.check(answer)
    return taken, processor / 1000 / requests
