"""What observing costs: a request without a key, a first one and a retry in each mode, and without the extension, on Redis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final
from uuid import uuid4

from flask import Flask

from benchmarks import apps
from benchmarks.apps import ANSWER, PAYMENT
from benchmarks.harness import Case, Received, Timing, call, environ, measure
from benchmarks.report import Row, Section

BARE: Final = "without the extension"
MODES: Final = ("observe", "warn", "enforce")
UNKEYED, FIRST, RETRY = "no key", "first", "retry"

NOTE: Final = (
    "µs through the WSGI callable, medians of interleaved rounds. `+` is what a mode adds to the application without the "
    "extension, and `of enforce` compares with the same path in mode enforce. In mode observe and warn a retry runs the view."
)


@dataclass(frozen=True, slots=True)
class ModeCase(Case):
    """A case whose retry is replayed by `enforce` only."""

    def check(self, received: Received) -> None:
        replayed = (self.app, self.path) == ("enforce", RETRY)
        if (received.status, received.replayed, received.size) != (201, replayed, len(ANSWER)):
            raise RuntimeError(f"{self.app}, {self.path}: got {received}")


def section(url: str, *, rounds: int, requests: int) -> Section:
    """Time every mode on this Redis."""
    guises = {BARE: apps.bare()}
    for mode in MODES:
        guises[mode] = apps.ours(url, config={"IDEMPOTENCY_MODE": mode, "IDEMPOTENCY_NAMESPACE": f"modes-{mode}"})
    timings = measure(
        [case for name, app in guises.items() for case in _cases(name, app)], rounds=rounds, requests=requests
    )
    by_name = {(timing.case.app, timing.case.path): timing for timing in timings}
    return Section("Modes: what observing costs, on Redis", NOTE, [_row(each, by_name) for each in timings])


def _cases(name: str, app: Flask) -> list[ModeCase]:
    key = str(uuid4())
    call(app, environ("POST", "/payments", body=PAYMENT, key=key))
    return [
        ModeCase(name, UNKEYED, app, partial(environ, "POST", "/payments", body=PAYMENT)),
        ModeCase(name, FIRST, app, lambda: environ("POST", "/payments", body=PAYMENT, key=str(uuid4()))),
        ModeCase(name, RETRY, app, partial(environ, "POST", "/payments", body=PAYMENT, key=key)),
    ]


def _row(timing: Timing, by_name: dict[tuple[str, str], Timing]) -> Row:
    cells: dict[str, float | str] = {"median": timing.typical, "cpu": median(timing.processor)}
    bare, enforced = by_name[BARE, timing.case.path], by_name["enforce", timing.case.path]
    if timing is not bare:
        cells |= {"+": timing.added_to(bare), "+ cpu": timing.processor_added_to(bare)}
        if timing is not enforced:
            cells["of enforce"] = timing.ratio_to(enforced)
    return Row(f"{timing.case.path}: {timing.case.app}", cells)
