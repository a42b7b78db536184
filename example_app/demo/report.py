"""Scenarios, their findings, and the table that shows whether the service kept every promise.

When it broke one, the report also shows the responses, the checks that failed, and the ends of the logs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import isgeneratorfunction
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from example_app.demo.client import PATIENCE_SECONDS, Shop

COLUMNS = ("scenario", "responses", "executions", "rows", "expected", "ok")
PROBLEM = "application/problem+json"
REPLAY_HEADERS = ("Idempotency-Replayed", "Idempotent-Replayed", "X-Idempotency-Replay", "X-Idempotency-Replayed")
SHOWN_HEADERS = ("Content-Type", "Retry-After", "Location", "X-Executions", "X-Cache-Lookup", *REPLAY_HEADERS)
LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class Seen:
    """What a scenario got: words for the table, checks by name, and the responses for a failure's report."""

    responses: str
    executions: str
    checks: Mapping[str, bool]
    received: Sequence[httpx.Response] = ()


def seen(responses: Sequence[httpx.Response], *, words: str = "", **checks: bool) -> Seen:
    """Describe these responses. The last one says how often the business code ran. All checks must hold."""
    executions = responses[-1].headers.get("X-Executions", "?")
    return Seen(words or counted(responses), executions, checks, responses)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table, with more to show if it failed."""

    scenario: str
    responses: str
    executions: str
    rows: str
    expected: str
    ok: bool
    details: Sequence[str] = field(default=(), compare=False)

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.scenario, self.responses, self.executions, self.rows, self.expected, "ok" if self.ok else "FAILED")


Parts: TypeAlias = Generator[None, None, Seen]
Play: TypeAlias = Callable[[Shop], Seen | Parts]


@dataclass(frozen=True, slots=True)
class Begun:
    """A scenario whose first part was played early: the rest of it, and the rows that it added."""

    rest: Parts
    rows: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A function that talks to the service, the promise in words, and the number of rows that it must add.

    If the function waits for a lease, it is a generator. Its part before the `yield` is played early.
    """

    play: Play
    expected: str
    rows: int
    needs_all: bool = False
    """Whether it needs more than the service: the janitor, the relay and the consumers."""

    @property
    def title(self) -> str:
        return self.play.__name__.replace("_", " ")

    @property
    def story(self) -> str:
        return " ".join((self.play.__doc__ or "").split())

    @property
    def begins_early(self) -> bool:
        return isgeneratorfunction(self.play)

    def begin(self, shop: Shop) -> Begun:
        """Play the part before the `yield`. `run` reports an exception that it raises."""
        before, parts, error = shop.rows(), self._parts(shop), None
        try:
            next(parts)
        except Exception as raised:  # noqa: BLE001
            error = raised
        return Begun(parts, shop.rows() - before, error)

    def run(self, shop: Shop, begun: Begun | None = None) -> Finding:
        """Play it, or the rest of it. An exception is a finding too, so that the rest of the tour still runs."""
        before = shop.rows() - (begun.rows if begun else 0)
        try:
            if begun and begun.error:
                raise begun.error
            saw = _ended(begun.rest if begun else self._parts(shop))
        except Exception as error:  # noqa: BLE001
            words = f"{type(error).__name__}: {error}"
            return Finding(self.title, words, "?", "?", self.expected, ok=False, details=[words])
        rows = shop.rows() - before
        failed = [name.replace("_", " ") for name, holds in saw.checks.items() if not holds]
        if rows != self.rows:
            failed.append(f"{self.rows} more rows (there are {rows})")
        details = [f"not so: {name}" for name in failed] + [described(response) for response in saw.received]
        return Finding(
            self.title, saw.responses, saw.executions, f"+{rows}", self.expected, ok=not failed, details=details
        )

    def _parts(self, shop: Shop) -> Parts:
        played = self.play(shop)
        return (yield from played) if isinstance(played, Generator) else played


def _ended(parts: Parts) -> Seen:
    """Play these parts to their end."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            saw: Seen = end.value
            return saw


class Scenarios:
    """A list that functions join by a decorator, in the order of the file."""

    def __init__(self, *, needs_all: bool = False) -> None:
        self._scenarios: list[Scenario] = []
        self._needs_all = needs_all

    def __iter__(self) -> Iterator[Scenario]:
        return iter(self._scenarios)

    def scenario(self, expected: str, *, rows: int) -> Callable[[Play], Play]:
        def add(play: Play) -> Play:
            self._scenarios.append(Scenario(play, expected, rows, self._needs_all))
            return play

        return add


def run(scenarios: Sequence[Scenario], shop: Shop) -> list[Finding]:
    """Play all scenarios and print their stories. Count all rows at the end.

    After the first scenario, begin those that wait for a lease: all these leases then expire while the others are played.
    """
    findings: list[Finding] = []
    begun: dict[str, Begun] = {}
    for number, scenario in enumerate(scenarios, 1):
        if number == 2:
            begun = begin_early(scenarios[1:], shop)
        print(f"\n[{number:2}/{len(scenarios)}] {scenario.title}: {scenario.story}", flush=True)
        if scenario.needs_all:
            shop.wait_for_all()
        findings.append(scenario.run(shop, begun.get(scenario.title)))
        print(f"    -> {findings[-1].responses}", flush=True)
    rows, promised = shop.rows(), sum(scenario.rows for scenario in scenarios)
    return [
        *findings,
        Finding("rows at the end", "", "", str(rows), f"{promised} in the database", ok=rows == promised),
    ]


def begin_early(scenarios: Sequence[Scenario], shop: Shop) -> dict[str, Begun]:
    """Play the first parts of the scenarios that have two. Return them by title."""
    early = [scenario for scenario in scenarios if scenario.begins_early]
    if early:
        names = ", ".join(scenario.title for scenario in early)
        print(f"\nThe first requests of these are sent now, because time must pass after them: {names}.", flush=True)
    return {scenario.title: scenario.begin(shop) for scenario in early}


def table(findings: Sequence[Finding]) -> str:
    lines = [COLUMNS, *(finding.cells for finding in findings)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def failures(findings: Iterable[Finding], logs: Iterable[Path]) -> str:
    """Describe each broken promise: the scenario, what was expected, what came, and the last lines of these logs."""
    lines = []
    for finding in findings:
        if not finding.ok:
            lines += ["", f"FAILED: {finding.scenario}", f"  expected: {finding.expected}"]
            lines += [f"  came: {finding.responses or finding.rows}"]
            lines += [f"  {line}" for detail in finding.details for line in detail.splitlines()]
    for log in logs if lines else ():
        ending = (
            log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else ["(there is no such file)"]
        )
        lines += ["", f"The last lines of {log.name}:", *(f"  {line}" for line in ending)]
    return "\n".join(lines)


def counted(responses: Sequence[httpx.Response]) -> str:
    """Name the kinds of responses in order, with their numbers: "503, 15 × 409"."""
    numbers = Counter(word(response) for response in responses)
    return ", ".join(f"{number} × {name}" if number > 1 else name for name, number in numbers.items())


def word(response: httpx.Response) -> str:
    """Return the status, with "replayed" or the problem's code."""
    if any(response.headers.get(name) for name in REPLAY_HEADERS):
        return f"{response.status_code} replayed"
    kind = response.json().get("code") if response.headers.get("Content-Type") == PROBLEM else None
    return f"{response.status_code} {kind}" if kind else str(response.status_code)


def described(response: httpx.Response) -> str:
    """Return a response in one line: request, status, the headers that matter, and the beginning of the body."""
    headers = [f"{name}: {response.headers[name]}" for name in SHOWN_HEADERS if name in response.headers]
    request = f"{response.request.method} {response.request.url.path}"
    return f"{request} -> {response.status_code} [{'; '.join(headers)}] {response.text[:300]!r}"


# What a scenario waits for, and asks of a response.


def until(
    ask: Callable[[], httpx.Response],
    final: Callable[[httpx.Response], bool],
    *,
    earlier: Sequence[httpx.Response] = (),
) -> list[httpx.Response]:
    """Send a request until its response is final. Return all responses, `earlier` ones first.

    A real client waits for `Retry-After`.
    """
    responses = list(earlier) or [ask()]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not final(responses[-1]) and time.monotonic() < deadline:
        time.sleep(0.1)
        responses.append(ask())
    return responses


def is_final(response: httpx.Response) -> bool:
    """Return False for a 409: another attempt holds the key."""
    return response.status_code != 409


def comes_true(holds: Callable[[], bool]) -> bool:
    """Wait until this holds. Return False if it takes longer than any janitor needs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextmanager
def lost_connection() -> Iterator[None]:
    """Require that the connection drops before the response to the request in the body."""
    try:
        yield
    except httpx.TimeoutException:
        raise
    except httpx.TransportError:
        return
    raise AssertionError("the worker answered. It should have been killed before")


def is_problem(response: httpx.Response, status: int, code: str) -> bool:
    return response.status_code == status and member(response, "code") == code


def executions(response: httpx.Response) -> int:
    """Return how often the business code ran, or -1 if the response does not say it."""
    return int(response.headers.get("X-Executions", -1))


def replayed(response: httpx.Response) -> bool:
    return bool(response.headers.get("Idempotency-Replayed") == "true")


def member(response: httpx.Response, name: str) -> Any:
    """Return this member of a JSON object, or None if the body is something else."""
    try:
        body = response.json()
    except ValueError:
        return None
    return body.get(name) if isinstance(body, dict) else None
