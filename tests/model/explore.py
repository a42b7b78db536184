"""Every state that can be reached, and the way to the first that must not be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class Explored(Generic[StateT]):
    """What was found. `trace` leads from the beginning to the first violation, step by step; empty when there is none."""

    states: int
    violation: str = ""
    trace: tuple[str, ...] = ()


def explore(
    start: StateT,
    moves: Callable[[StateT], Iterable[tuple[str, StateT]]],
    wrong: Callable[[StateT], str],
    *,
    ends: Callable[[StateT], bool] | None,
) -> Explored[StateT]:
    """Look at everything that can be reached from `start`, nearest first.

    `wrong` says what is wrong with a state, or nothing. From each state one that `ends` must be reachable, if it is given.
    """
    came: dict[StateT, tuple[StateT, str] | None] = {start: None}
    before: dict[StateT, list[StateT]] = {start: []}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        if fault := wrong(state):
            return Explored(len(came), fault, _way(came, state))
        for move, after in moves(state):
            if after not in came:
                came[after] = state, move
                if ends is not None:
                    before[after] = []
                waiting.append(after)
            if ends is not None:
                before[after].append(state)
    if ends is None:
        return Explored(len(came))
    stuck = came.keys() - _from_which(before, [state for state in came if ends(state)])
    if stuck:
        first = min(stuck, key=lambda state: len(_way(came, state)))
        return Explored(len(came), "no way leads to the end", _way(came, first))
    return Explored(len(came))


def _from_which(before: dict[StateT, list[StateT]], goals: list[StateT]) -> set[StateT]:
    """All states from which one of these can be reached."""
    found, waiting = set(goals), deque(goals)
    while waiting:
        for earlier in before[waiting.popleft()]:
            if earlier not in found:
                found.add(earlier)
                waiting.append(earlier)
    return found


def _way(came: dict[StateT, tuple[StateT, str] | None], state: StateT) -> tuple[str, ...]:
    way: list[str] = []
    step = came[state]
    while step is not None:
        way.append(step[1])
        step = came[step[0]]
    return tuple(reversed(way))
