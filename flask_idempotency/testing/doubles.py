"""Stand-ins for tests: a clock, a store that loses calls, points to stop a process at, and a gate for bytes."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Literal, Self, TypeAlias, TypeVar, cast

from flask_idempotency.engine.capabilities import Void
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.journal import Journals
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, Record, State, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store, StoreOutcome
from flask_idempotency.stores import timed


class FrozenClock:
    """A `Clock` for tests. Time passes only when you call `advance`. `now` is in seconds since the epoch.

    It begins at a full hour of 2023, because the janitor goes by the earlier of the store's time and this machine's.
    """

    def __init__(self, now: float = 1_700_002_800.0) -> None:
        self.now: float = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let this much time pass. A negative number sets the clock back, as an operator may."""
        self.now += seconds


VARIABLE: Final = "IDEMPOTENCY_TEST_POINTS"

Act: TypeAlias = Callable[[], object]

WhatT = TypeVar("WhatT")

_ACTION: Final = re.compile(r"(stop|kill) +(.+?)(?: +(\d+))?")


def stop_process() -> None:
    """Stop all threads of this process until another process sends SIGCONT."""
    # If we sent it to the process, another thread could receive it, and this one would run on for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def kill_process() -> None:
    """End this process with SIGKILL, without any cleanup."""
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(pid: int) -> bool:
    """Return whether this process is stopped. Needs Linux."""
    stat = Path("/proc", str(pid), "stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


@dataclass(slots=True)
class _Planned(Generic[WhatT]):
    """Something that is to happen at the `countdown`th pass of a name from now. None: of any name."""

    name: str | None
    what: WhatT
    countdown: int


def _due(plans: list[_Planned[WhatT]], passed: str) -> list[WhatT]:
    """Note that this name is passed. Take out of the plans what is to happen now, and return it."""
    due = []
    for plan in [plan for plan in plans if plan.name in (None, passed)]:
        plan.countdown -= 1
        if plan.countdown == 0:
            plans.remove(plan)
            due.append(plan.what)
    return due


class Points:
    """Actions at named points of the code. The tested code calls `reach`; the test calls `at`, or sets a variable."""

    def __init__(self) -> None:
        self._plans: list[_Planned[Act]] = []
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read `IDEMPOTENCY_TEST_POINTS`, such as `kill before complete; stop after claim 2` (the second time).

        Raises `ValueError` for text of another form.
        """
        points = cls()
        for text in filter(None, (part.strip() for part in environment.get(VARIABLE, "").split(";"))):
            read = _ACTION.fullmatch(text)
            if read is None:
                raise ValueError(f"{VARIABLE} must be like 'kill before complete; stop after claim 2'")
            act = stop_process if read[1] == "stop" else kill_process
            points.at(read[2], act, nth=int(read[3] or 1))
        return points

    def at(self, point: str, act: Act, *, nth: int = 1) -> None:
        """Call `act` once, when a thread reaches the point for the `nth` time from now, in that thread."""
        with self._lock:
            self._plans.append(_Planned(point, act, nth))

    def reach(self, point: str) -> None:
        """Run the actions of this point. Their exceptions are raised here."""
        with self._lock:
            due = _due(self._plans, point)
        for act in due:
            act()


ResultT = TypeVar("ResultT")
Lost: TypeAlias = Literal["request", "reply"]
Verb: TypeAlias = timed.Call | Literal["write", "recall", "void"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call to the store. `token` is None for `read` and `mark_corrupt`."""

    verb: Verb
    key: StorageKey
    token: bytes | None


class FaultyStore:
    """A store that passes calls to a real one, records them in `calls`, and loses the ones that you choose.

    The real store never gets a lost request, and applies a call whose reply is lost. The caller gets `StoreUnavailable` in
    both cases. While `down` is true, every request is lost.

    Each call reaches a point such as "before claim" and, after the store has applied it, "after claim" (see `points`).

    If the real store has `void` or `journals`, this one has too. Of the journals, it passes a worker's calls in the same way:
    `write`, `recall`, and a `complete` that removes the journal. The others go to the real store directly.
    """

    def __init__(self, store: Store, *, points: Points | None = None) -> None:
        self.points: Points = points if points is not None else Points()
        self.calls: list[Call] = []
        self.down = False
        self._store = store
        self.remembers: bool | None = getattr(store, "remembers", None)
        self._faults: list[_Planned[Lost]] = []
        self._lock = threading.Lock()

    def lose_request(self, verb: Verb | None = None, *, nth: int = 1) -> None:
        """Lose the request of the `nth` call from now (of this verb)."""
        self._faults.append(_Planned(verb, "request", nth))

    def lose_reply(self, verb: Verb | None = None, *, nth: int = 1) -> None:
        """Apply the `nth` call from now (of this verb), and lose its reply."""
        self._faults.append(_Planned(verb, "reply", nth))

    def verbs(self) -> list[Verb]:
        """Return the verbs of all calls so far, in order."""
        return [call.verb for call in self.calls]

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        call = Call("claim", request.key, token)
        return self._pass(call, lambda: self._store.claim(request, token=token, lease=lease, quota=quota))

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        self._pass(Call("renew", key, token), lambda: self._store.renew(key, token, lease=lease))

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        self._pass(Call("mark_point_of_no_return", key, token), lambda: self._store.mark_point_of_no_return(key, token))

    def complete(self, key: StorageKey, token: bytes, payload: StoredPayload, **lives: Any) -> None:
        self._pass(Call("complete", key, token), lambda: self._store.complete(key, token, payload, **lives))

    def release(self, key: StorageKey, token: bytes) -> State | None:
        return self._pass(Call("release", key, token), lambda: self._store.release(key, token))

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        self._pass(Call("quarantine", key, token), lambda: self._store.quarantine(key, token, reason))

    def read(self, key: StorageKey) -> Record | None:
        return self._pass(Call("read", key, None), lambda: self._store.read(key))

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        self._pass(Call("mark_corrupt", key, None), lambda: self._store.mark_corrupt(key, payload))

    @property
    def void(self) -> Void:
        """Passes calls to `void` of the real store. Raises `AttributeError` if it has none."""
        store: Any = self._store
        real: Void = store.void
        return lambda request, *, token, keep, quota=None: self._pass(
            Call("void", request.key, token), lambda: real(request, token=token, keep=keep, quota=quota)
        )

    @property
    def process_local(self) -> bool:
        """Whether other processes do not see the records of the real store."""
        return bool(getattr(self._store, "process_local", False))

    @property
    def journals(self) -> Journals:
        """The journals of the real store. Raises `AttributeError` if it has none."""
        store: Any = self._store
        return cast("Journals", _FaultyJournals(store.journals, self._pass))

    def _pass(self, call: Call, send: Callable[[], ResultT]) -> ResultT:
        with self._lock:
            self.calls.append(call)
            faults = _due(self._faults, call.verb)
        lost = "request" if self.down else next(iter(faults), None)
        self.points.reach(f"before {call.verb}")
        if lost == "request":
            raise StoreUnavailable(f"the request to {call.verb} was lost, as this test has chosen")
        result = send()
        self.points.reach(f"after {call.verb}")
        if lost == "reply":
            raise StoreUnavailable(f"the reply to {call.verb} was lost, as this test has chosen")
        return result


class _FaultyJournals:
    """The journals of a `FaultyStore`: a worker's calls pass as those of the store do, the others directly."""

    def __init__(self, journals: Journals, passing: Callable[[Call, Callable[[], Any]], Any]) -> None:
        self._journals = journals
        self._pass = passing

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._journals, name)
        if name not in ("write", "recall", "complete"):
            return real
        verb = cast("Verb", name)
        return lambda key, token, *more, **named: self._pass(
            Call(verb, key, token), lambda: real(key, token, *more, **named)
        )


GateState: TypeAlias = Literal["open", "held", "dropping"]


class Gate:
    """One direction of a connection: open, held, or dropping. `TcpProxy` has two of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state: GateState = "open"
        self._waiting = 0
        self._ended = threading.Event()
        self.delay_seconds: float = 0.0
        """Each chunk waits so long before it passes."""

    @property
    def holds(self) -> bool:
        return self._state == "held"

    def set(self, state: GateState) -> None:
        """Set the state for new chunks and for those that are held."""
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def end_holding(self) -> None:
        """Open a held gate. A gate that drops chunks stays as it is."""
        with self._changed:
            if self._state == "held":
                self.set("open")

    def passes(self) -> bool:
        """Wait while the gate is held, then return whether this chunk may pass."""
        self._ended.wait(self.delay_seconds)
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._state != "held")
            self._waiting -= 1
            return self._state == "open"

    def caught(self, *, seconds: float) -> bool:
        """Return whether the gate holds a chunk within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state == "held" and self._waiting > 0, seconds)

    def end(self) -> None:
        """Release all waiting chunks and drop them, and all later ones."""
        self._ended.set()
        self.set("dropping")
