"""Scenarios, what each of them showed, and the table that says whether every promise was kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import httpx

from example_app.shop import Shop

COLUMNS = ("scenario", "answers", "executions", "rows", "expected", "ok")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a scenario got, in the words of the table."""

    answers: str
    executions: str
    ok: bool


def seen(responses: Sequence[httpx.Response], *, ok: bool, answers: str = "") -> Seen:
    """What these responses say; the last one knows how often the business code has run."""
    return Seen(answers or counted(responses), responses[-1].headers.get("X-Executions", "?"), ok)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    scenario: str
    answers: str
    executions: str
    rows: str
    expected: str
    ok: bool

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.scenario, self.answers, self.executions, self.rows, self.expected, "ok" if self.ok else "FAILED")


Play: TypeAlias = Callable[[Shop], Seen]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A play, the promise it must keep in words, and the rows it must leave behind."""

    play: Play
    expected: str
    rows: int

    @property
    def title(self) -> str:
        return self.play.__name__.replace("_", " ")

    @property
    def story(self) -> str:
        return " ".join((self.play.__doc__ or "").split())

    def run(self, shop: Shop) -> Finding:
        """Any surprise is a finding too, so that the rest of the tour is still seen."""
        before = shop.rows()
        try:
            saw = self.play(shop)
        except Exception as error:  # noqa: BLE001
            return Finding(self.title, f"{type(error).__name__}: {error}", "?", "?", self.expected, ok=False)
        rows = shop.rows() - before
        ok = saw.ok and rows == self.rows
        return Finding(self.title, saw.answers, saw.executions, f"+{rows}", self.expected, ok=ok)


class Scenarios:
    """In the order in which they were written down."""

    def __init__(self) -> None:
        self._scenarios: list[Scenario] = []

    def __iter__(self) -> Iterator[Scenario]:
        return iter(self._scenarios)

    def scenario(self, expected: str, *, rows: int) -> Callable[[Play], Play]:
        def add(play: Play) -> Play:
            self._scenarios.append(Scenario(play, expected, rows))
            return play

        return add


def run(scenarios: Iterable[Scenario], shop: Shop) -> list[Finding]:
    """Plays them all, telling their stories, and at the end counts every row there is."""
    findings, promised = [], 0
    for scenario in scenarios:
        print(f"\n{scenario.title}: {scenario.story}", flush=True)
        findings.append(scenario.run(shop))
        print(f"    -> {findings[-1].answers}", flush=True)
        promised += scenario.rows
    rows = shop.rows()
    return [
        *findings,
        Finding("rows at the end", "", "", str(rows), f"{promised} in the database", ok=rows == promised),
    ]


def table(findings: Sequence[Finding]) -> str:
    lines = [COLUMNS, *(finding.cells for finding in findings)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def counted(responses: Sequence[httpx.Response]) -> str:
    """The statuses in order, each run of equal ones as one: "503, 15 × 409"."""
    numbers = Counter(word(response) for response in responses)
    return ", ".join(f"{number} × {name}" if number > 1 else name for name, number in numbers.items())


def word(response: httpx.Response) -> str:
    """The status, and what kind of answer it is where that matters."""
    if any(response.headers.get(name) for name in REPLAY_HEADERS):
        return f"{response.status_code} replayed"
    kind = response.json().get("code") if response.headers.get("Content-Type") == PROBLEM else None
    return f"{response.status_code} {kind}" if kind else str(response.status_code)


PROBLEM = "application/problem+json"
REPLAY_HEADERS = ("Idempotency-Replayed", "Idempotent-Replayed", "X-Idempotency-Replay", "X-Idempotency-Replayed")
