"""Named moments at which a test has something happen: a barrier, or the end of the process."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias

VARIABLE: Final = "IDEMPOTENCY_TEST_POINTS"

Act: TypeAlias = Callable[[], object]

_WISH: Final = re.compile(r"(stop|kill) +(.+?)(?: +(\d+))?")


def stop_process() -> None:
    """This process stands still, all threads of it, until somebody sends it SIGCONT."""
    # Sent to the process, another thread could take it, and this one would run on for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def kill_process() -> None:
    """Ends this process as the kernel would: no cleanup, no goodbye."""
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(pid: int) -> bool:
    """Whether this process stands still. On Linux."""
    stat = Path("/proc", str(pid), "stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


@dataclass(slots=True)
class _Plan:
    """`countdown` passages of `point` from now, do this."""

    point: str
    act: Act
    countdown: int


class Points:
    """What is to happen where. Code that is to be tried calls `reach`; the test says `at`, or names it in the environment."""

    def __init__(self) -> None:
        self._plans: list[_Plan] = []
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """As `IDEMPOTENCY_TEST_POINTS` says: `kill before complete; stop after claim 2`. A number counts passages.

        Raises `ValueError` for what cannot be read.
        """
        points = cls()
        for wish in filter(None, (part.strip() for part in environment.get(VARIABLE, "").split(";"))):
            read = _WISH.fullmatch(wish)
            if read is None:
                raise ValueError(f"{VARIABLE} must be like 'kill before complete; stop after claim 2'")
            act = stop_process if read[1] == "stop" else kill_process
            points.at(read[2], act, nth=int(read[3] or 1))
        return points

    def at(self, point: str, act: Act, *, nth: int = 1) -> None:
        """Do this, once, when the point is reached for the `nth` time from now, in the thread that reaches it."""
        with self._lock:
            self._plans.append(_Plan(point, act, nth))

    def reach(self, point: str) -> None:
        """Whatever was planned for this point happens now, and what it raises is raised here."""
        for act in self._due(point):
            act()

    def _due(self, point: str) -> list[Act]:
        with self._lock:
            due = []
            for plan in [plan for plan in self._plans if plan.point == point]:
                plan.countdown -= 1
                if plan.countdown == 0:
                    self._plans.remove(plan)
                    due.append(plan.act)
            return due
