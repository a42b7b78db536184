"""Check a run: compare the responses that clients got with the work that was done."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Rule: TypeAlias = Literal[
    "ran more than once", "two answers", "an answer and no run", "a replay unlike the first", "another key's answer"
]


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise about one key."""

    rule: Rule
    key: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.key} ({self.detail})"


@dataclass(frozen=True, slots=True)
class Delivered:
    """A response as its client got it."""

    status: int
    body: bytes
    replayed: bool

    @property
    def succeeded(self) -> bool:
        return 200 <= self.status < 300

    @property
    def content(self) -> tuple[int, bytes]:
        return self.status, self.body


class Oracle:
    """Collects runs and responses, from any thread and in any order, and finds broken promises.

    Report a run from the view or from a separate counter, never from the store under test. Put a random value into each
    response body: if two keys get the same body, the oracle assumes that one got the other's response. If an endpoint may
    run again (`on_abandoned="takeover"`), pass `runs_once=False`. A key whose response has expired counts as a new key.
    """

    def __init__(self, *, runs_once: bool = True) -> None:
        self._runs_once = runs_once
        self._lock = threading.Lock()
        self._runs: Counter[str] = Counter()
        self._answers: defaultdict[str, list[Delivered]] = defaultdict(list)

    def executed(self, key: str) -> None:
        """Report that the view has run for this key."""
        with self._lock:
            self._runs[key] += 1

    def counted(self, runs: Mapping[str, int]) -> None:
        """Report how often the view has run in all for these keys, from another counter."""
        with self._lock:
            self._runs.update({key: number - self._runs[key] for key, number in runs.items()})

    def answered(self, key: str, status: int, body: bytes, *, replayed: bool) -> None:
        """Report a response that a client has received. Report no call for a connection that ended without one."""
        with self._lock:
            self._answers[key].append(Delivered(status, body, replayed))

    @property
    def answers(self) -> int:
        """The number of reported responses. A useful run has some."""
        with self._lock:
            return sum(map(len, self._answers.values()))

    def violations(self) -> list[Violation]:
        """Return all broken promises, sorted by key."""
        with self._lock:
            runs = Counter(self._runs)
            answers = {key: tuple(told) for key, told in self._answers.items()}
        shared = _shared(answers)
        return [
            found
            for key in sorted({*runs, *answers})
            for found in self._judge(key, runs[key], answers.get(key, ()), shared)
        ]

    def check(self) -> None:
        """Raise `AssertionError` with all broken promises, if there are any."""
        if found := self.violations():
            raise AssertionError(f"{len(found)} promises broken\n" + "\n".join(map(str, found)))

    def _judge(
        self, key: str, runs: int, answers: tuple[Delivered, ...], shared: Iterable[set[str]]
    ) -> Iterable[Violation]:
        successes = {answer.content for answer in answers if answer.succeeded}
        if self._runs_once and runs > 1:
            yield Violation("ran more than once", key, f"{runs} times")
        if len(successes) > 1:
            yield Violation("two answers", key, f"{len(successes)} different successes")
        if successes and not runs:
            yield Violation("an answer and no run", key, f"{len(answers)} answers")
        if unlike := _unlike_the_first(answers):
            yield Violation("a replay unlike the first", key, f"{unlike} of {len(answers)} answers")
        for keys in shared:
            if key in keys:
                yield Violation("another key's answer", key, f"one body under {len(keys)} keys")


def _unlike_the_first(answers: tuple[Delivered, ...]) -> int:
    """Return how many replays differ from the response of the run, or from the first replay if its client got none.

    A refusal, such as a conflict, is not the response of a run.
    """
    fresh = [answer for answer in answers if not answer.replayed]
    replays = [answer for answer in answers if answer.replayed]
    if not replays:
        return 0
    status = replays[0].status
    own = [answer for answer in fresh if answer.succeeded] or [answer for answer in fresh if answer.status == status]
    first = (own or replays)[0]
    return sum(answer.content != first.content for answer in replays)


def _shared(answers: Mapping[str, Iterable[Delivered]]) -> list[set[str]]:
    """Return, for each body that several keys got as a success or a replay, the set of these keys."""
    holders: defaultdict[bytes, set[str]] = defaultdict(set)
    for key, told in answers.items():
        for answer in told:
            if answer.body and (answer.succeeded or answer.replayed):
                holders[answer.body].add(key)
    return [keys for keys in holders.values() if len(keys) > 1]
