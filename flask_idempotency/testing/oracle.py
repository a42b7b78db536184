"""Says whether what clients were told, and what was done, can both be true."""

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
    """What happened to one key and must not."""

    rule: Rule
    key: str
    told: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.key} ({self.told})"


@dataclass(frozen=True, slots=True)
class Delivered:
    """An answer as its client has it."""

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
    """Is told of every run and of every answer, from any thread and in any order, and judges when it is asked.

    Runs must come from where they are made or from a counter of their own, never from the store under test. An answer
    that is unlike others proves nothing unless bodies differ from run to run: put something random into yours, for one that
    two keys were given is taken for somebody else's answer. Where an endpoint may run again (`on_abandoned="takeover"`),
    say `runs_once=False`. A key that may run again because its answer has expired counts as a new one.
    """

    def __init__(self, *, runs_once: bool = True) -> None:
        self._runs_once = runs_once
        self._lock = threading.Lock()
        self._runs: Counter[str] = Counter()
        self._answers: defaultdict[str, list[Delivered]] = defaultdict(list)

    def executed(self, key: str) -> None:
        """The work of this key was done, once more."""
        with self._lock:
            self._runs[key] += 1

    def counted(self, runs: Mapping[str, int]) -> None:
        """How often the work of these keys was done in all, as a counter elsewhere has it."""
        with self._lock:
            self._runs.update({key: number - self._runs[key] for key, number in runs.items()})

    def answered(self, key: str, status: int, body: bytes, *, replayed: bool) -> None:
        """A client has received this. Of a connection that ended without an answer there is nothing to tell."""
        with self._lock:
            self._answers[key].append(Delivered(status, body, replayed))

    @property
    def answers(self) -> int:
        """How many it was told of; a run that proves something has some."""
        with self._lock:
            return sum(map(len, self._answers.values()))

    def violations(self) -> list[Violation]:
        """Everything that breaks a promise, by key."""
        with self._lock:
            runs = Counter(self._runs)
            answers = {key: tuple(told) for key, told in self._answers.items()}
        shared = _shared(answers)
        return [
            found
            for key in sorted({*runs, *answers})
            for found in (*self._judge(key, runs[key], answers.get(key, ())), *_strangers(key, shared))
        ]

    def check(self) -> None:
        """Raises `AssertionError`, with all of it, unless every promise was kept."""
        if found := self.violations():
            raise AssertionError(f"{len(found)} promises broken\n" + "\n".join(map(str, found)))

    def _judge(self, key: str, runs: int, answers: tuple[Delivered, ...]) -> Iterable[Violation]:
        successes = {answer.content for answer in answers if answer.succeeded}
        if self._runs_once and runs > 1:
            yield Violation("ran more than once", key, f"{runs} times")
        if len(successes) > 1:
            yield Violation("two answers", key, f"{len(successes)} different successes")
        if successes and not runs:
            yield Violation("an answer and no run", key, f"{len(answers)} answers")
        if unlike := _unlike_the_first(answers):
            yield Violation("a replay unlike the first", key, f"{unlike} of {len(answers)} answers")


def _unlike_the_first(answers: tuple[Delivered, ...]) -> int:
    """How many replays say something else than the answer that they repeat: the run's own, if its client got it, and else
    the first replay. A refusal that was sent fresh, such as a conflict, is no run's own."""
    fresh = [answer for answer in answers if not answer.replayed]
    replays = [answer for answer in answers if answer.replayed]
    if not replays:
        return 0
    status = replays[0].status
    own = [answer for answer in fresh if answer.succeeded] or [answer for answer in fresh if answer.status == status]
    first = (own or replays)[0]
    return sum(answer.content != first.content for answer in replays)


def _shared(answers: Mapping[str, Iterable[Delivered]]) -> list[set[str]]:
    """The keys that were given one body, as a success or again, of each such body."""
    holders: defaultdict[bytes, set[str]] = defaultdict(set)
    for key, told in answers.items():
        for answer in told:
            if answer.body and (answer.succeeded or answer.replayed):
                holders[answer.body].add(key)
    return [keys for keys in holders.values() if len(keys) > 1]


def _strangers(key: str, shared: Iterable[set[str]]) -> Iterable[Violation]:
    for keys in shared:
        if key in keys:
            yield Violation("another key's answer", key, f"one body under {len(keys)} keys")
