"""A store whose line can be cut at a chosen moment, or whose process ends there."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias, TypeVar

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, Record, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store, StoreOutcome

# A clock that stands still until it is told otherwise.


class FrozenClock:
    """A `Clock` for tests: time passes by `advance`, forwards or backwards, and in no other way."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let this much time pass; negative sets the clock back, as an operator may."""
        self.now += seconds


# Named moments at which a test has something happen: a barrier, or the end of the process.

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


AnswerT = TypeVar("AnswerT")
Verb: TypeAlias = Literal[
    "claim", "renew", "mark_point_of_no_return", "complete", "release", "quarantine", "read", "mark_corrupt"
]


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a store was asked to make. `token` is None for `read` and `condemn`."""

    verb: Verb
    key: StorageKey
    token: bytes | None


@dataclass(slots=True)
class _Fault:
    """`countdown` calls of `verb` (any, when None) from now, lose what goes there or what comes back."""

    verb: Verb | None
    countdown: int
    lost: Literal["request", "reply"]


class FaultyStore:
    """Passes every call to a real store, notes it in `calls`, and loses those it was told to lose.

    A lost request was never applied, a lost reply was: the caller sees `StoreUnavailable` either way and cannot tell.
    While `down` is true every request is lost.

    Each call reaches the `points` "before claim" and, once it was applied, "after claim", whichever its verb.
    """

    def __init__(self, store: Store, *, points: Points | None = None) -> None:
        self.points = points if points is not None else Points()
        self.calls: list[Call] = []
        self.down = False
        self._store = store
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()

    def lose_request(self, verb: Verb | None = None, *, nth: int = 1) -> None:
        """The `nth` call from now (of this verb) does not reach the store."""
        self._faults.append(_Fault(verb, nth, "request"))

    def lose_reply(self, verb: Verb | None = None, *, nth: int = 1) -> None:
        """The `nth` call from now (of this verb) is applied, and nobody hears of it."""
        self._faults.append(_Fault(verb, nth, "reply"))

    def verbs(self) -> list[Verb]:
        """What the store was asked to do so far, in order."""
        return [call.verb for call in self.calls]

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        call = Call("claim", request.key, token)
        return self._pass(call, lambda: self._store.claim(request, token=token, lease=lease, quota=quota))

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        self._pass(Call("renew", key, token), lambda: self._store.renew(key, token, lease=lease))

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        self._pass(Call("mark_point_of_no_return", key, token), lambda: self._store.mark_point_of_no_return(key, token))

    def complete(self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float) -> None:
        self._pass(Call("complete", key, token), lambda: self._store.complete(key, token, payload, keep=keep))

    def release(self, key: StorageKey, token: bytes) -> None:
        self._pass(Call("release", key, token), lambda: self._store.release(key, token))

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        self._pass(Call("quarantine", key, token), lambda: self._store.quarantine(key, token, reason))

    def read(self, key: StorageKey) -> Record | None:
        return self._pass(Call("read", key, None), lambda: self._store.read(key))

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        self._pass(Call("mark_corrupt", key, None), lambda: self._store.mark_corrupt(key, payload))

    def _pass(self, call: Call, ask: Callable[[], AnswerT]) -> AnswerT:
        lost = self._note(call)
        self.points.reach(f"before {call.verb}")
        if lost == "request":
            raise StoreUnavailable(f"the request to {call.verb} was lost, as this test asked")
        answer = ask()
        self.points.reach(f"after {call.verb}")
        if lost == "reply":
            raise StoreUnavailable(f"the reply to {call.verb} was lost, as this test asked")
        return answer

    def _note(self, call: Call) -> Literal["request", "reply"] | None:
        with self._lock:
            self.calls.append(call)
            lost: Literal["request", "reply"] | None = "request" if self.down else None
            for fault in [fault for fault in self._faults if fault.verb in (None, call.verb)]:
                fault.countdown -= 1
                if fault.countdown == 0:
                    self._faults.remove(fault)
                    lost = lost or fault.lost
            return lost


# One direction of a line, which a test opens, holds and shuts.

Stance: TypeAlias = Literal["open", "held", "dropping"]


class Gate:
    """What comes here passes at once, when it is let through, or never."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stance: Stance = "open"
        self._waiting = 0
        self._ended = threading.Event()
        self.delay_seconds = 0.0
        """What each piece waits before it passes."""

    @property
    def holds(self) -> bool:
        return self._stance == "held"

    def set(self, stance: Stance) -> None:
        """From now on, for what is being held as well."""
        with self._changed:
            self._stance = stance
            self._changed.notify_all()

    def end_holding(self) -> None:
        """Let through what is held; where everything is dropped it stays so."""
        with self._changed:
            if self._stance == "held":
                self.set("open")

    def passes(self) -> bool:
        """Whether this piece may go on, as soon as that is decided."""
        self._ended.wait(self.delay_seconds)
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stance != "held")
            self._waiting -= 1
            return self._stance == "open"

    def caught(self, *, seconds: float) -> bool:
        """Whether something comes to be held in so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stance == "held" and self._waiting > 0, seconds)

    def end(self) -> None:
        """Nothing waits here any longer, and nothing passes."""
        self._ended.set()
        self.set("dropping")
