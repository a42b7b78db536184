"""Run a request with durable steps once for each point where its worker may die, and then its retry.

No process is killed. At the chosen point an exception leaves the view, which no `except Exception` catches. From then on the
store refuses each call of that attempt. Other workers see the same of a worker that died.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias
from uuid import uuid4

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from flask_idempotency.engine.audit import says_never_happened
from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import IN_DOUBT, LAPSED, Record, State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.steps import StepRun, Steps
from flask_idempotency.engine.vanished import max_remaining
from flask_idempotency.testing.doubles import FrozenClock

MOST_RETRIES: Final = 5
"""A view may fail by itself and pause. A client sends it so often before we call that its end."""
SHORTEST_LEASE: Final = 0.001
"""Seconds. The attempt that dies asks for no longer one, so its retry need not wait."""
MOST_TURNS: Final = 4
"""How often `settle` is called for one doubt, if the clock can be moved in between."""
TURN_SECONDS: Final = 3600.0
"""The longest pause between two calls of a resolver for one key."""
PATIENCE: Final = 5.0
"""Seconds to wait for the end of that lease, by the clock of this machine."""

BEGINS: Final = "before it begins"
ENTERED: Final = "in its function"
RETURNED: Final = "after its function"
RECORDED: Final = "after it is recorded"
UNKEPT: Final = "before the answer is kept"
KEPT: Final = "after the answer is kept"
WITHOUT: Final = "without a crash"

Send: TypeAlias = Callable[[FlaskClient, str], TestResponse]
Effects: TypeAlias = Callable[[], Mapping[str, int]]
End: TypeAlias = Literal["answer", "doubt", "other"]


class _Died(BaseException):
    """The worker dies here."""


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """Where a worker dies. Without a step: at the end of the request, or nowhere."""

    where: str
    step: str = ""
    """The name of the step, with its item if it has one, such as `mail 7`."""

    def __str__(self) -> str:
        return f"{self.step}: {self.where}" if self.step else self.where


@dataclass(slots=True)
class Crash:
    """What came of one request whose worker died at `point`, and of its retries."""

    point: CrashPoint
    end: str = ""
    """The status of the answer that was kept, such as `201`; or `in doubt (charge)`, `paused`, `quarantined (…)`."""
    kind: End = "other"
    ran: Counter[str] = field(default_factory=Counter)
    """How often the function of each step ran to its end, over all attempts. Without what was declared harmless."""
    committed: Counter[str] = field(default_factory=Counter)
    """How often each transactional step was committed."""
    effects: Mapping[str, int] = field(default_factory=dict)
    """By how much each of your counts rose."""
    waited: float = 0.0
    """For how many seconds of the store's clock the doubt waited, until `settle` had ended it."""
    says_never: bool = False
    """Whether that was because the resolver said that it never happened."""
    faults: list[str] = field(default_factory=list)
    """Which promises were broken, in sentences."""

    def __str__(self) -> str:
        ran = ", ".join(f"{name} {times}x" for name, times in self.ran.items())
        why = " for the resolver, who says it never happened," if self.says_never else " for the resolver"
        waited = f", waited{why} {round(self.waited / 60)} min of the store's time" if self.waited else ""
        return f"{self.point} -> {self.end} [{ran}]{waited}"


@dataclass(frozen=True, slots=True)
class CrashReport:
    """What `every_crash` has found. As text: one line for each point. The first is the request without a crash."""

    crashes: tuple[Crash, ...]

    @property
    def faults(self) -> list[str]:
        """Return each broken promise, with the point at which the worker died."""
        return [f"{crash.point}: {fault}" for crash in self.crashes for fault in crash.faults]

    @property
    def ends(self) -> Mapping[str, str]:
        """Return how each point ended, by its name."""
        return {str(crash.point): crash.end for crash in self.crashes}

    def __str__(self) -> str:
        return "\n".join(map(str, self.crashes))


class _Gate:
    """Passes calls to a part of the store while the attempt lives. Afterwards its claim is lost to it."""

    def __init__(self, part: Any, attempt: _Attempt) -> None:
        self._part = part
        self._attempt = attempt

    def __getattr__(self, name: str) -> Any:
        call, attempt = getattr(self._part, name), self._attempt

        def gated(*args: Any, **kwargs: Any) -> Any:
            if attempt.dead:
                raise LeaseLost("the worker has died, as this test has chosen")
            if name == "claim" and args[0].key not in attempt.keys:
                attempt.keys.append(args[0].key)
            if attempt.dies_at is not None and "lease" in kwargs:
                kwargs["lease"] = SHORTEST_LEASE
            if name == "complete":
                attempt.reach(CrashPoint(UNKEPT))
            result = call(*args, **kwargs)
            if name == "complete":
                attempt.reach(CrashPoint(KEPT))
            return result

        return gated if callable(call) else call


class _Attempt:
    """One attempt at a request: which points it reaches, and where it dies."""

    def __init__(self, crash: Crash, dies_at: CrashPoint | None, effects: Effects) -> None:
        self.crash = crash
        self.dies_at = dies_at
        self.dead = False
        self.keys: list[StorageKey] = []
        self.policy: Policy | None = None
        self.reached: list[CrashPoint] = []
        self._effects = effects
        self._open: list[StepRun] = []

    def reach(self, point: CrashPoint) -> None:
        """Note this point, and die there if it is the one."""
        if self.dead:
            raise _Died
        if point not in self.reached:
            self.reached.append(point)
        if point == self.dies_at:
            self.dead = True
            raise _Died

    def watch(self, steps: Steps) -> None:
        """Reach the points of each step of this claim."""
        enter = steps.enter

        def entering(name: str, item: bytes = b"", **options: Any) -> StepRun:
            step = f"{name} {item.decode()}" if item else name
            self.reach(CrashPoint(BEGINS, step))
            run = enter(name, item, **options)
            if not run.recalled:
                try:
                    self.reach(CrashPoint(ENTERED, step))
                except _Died:
                    _drop(run)
                    raise
                self._watch_run(run, step)
            return run

        steps.enter = entering  # type: ignore[method-assign]

    def _watch_run(self, run: StepRun, step: str) -> None:
        crash, finish, fail, withdraw = self.crash, run.finish, run.fail, run.withdraw
        # Another step may run beside it; and the database takes back what a transactional one did.
        alone = not self._open and run.step.effects != "transactional"
        before = dict(self._effects()) if alone else {}
        self._open.append(run)

        def finishing(result: bytes | None) -> bool:
            self._open.remove(run)
            self._ran(run, step)
            try:
                self.reach(CrashPoint(RETURNED, step))
            except _Died:
                _drop(run)
                raise
            kept = finish(result)
            if run.step.effects == "transactional":
                crash.committed[step] += 1
            self.reach(CrashPoint(RECORDED, step))
            return kept

        def failing(error: BaseException) -> None:
            self._open.remove(run)
            if not run.step.is_harmless(error):
                self._ran(run, step)
            elif alone:
                self._nothing_happened(before, f"{step!r} raised {type(error).__name__}, which it calls harmless")
            fail(error)

        def withdrawing() -> None:
            self._open.remove(run)
            if alone:
                self._nothing_happened(before, f"{step!r} says that it did nothing")
            withdraw()

        run.finish, run.fail, run.withdraw = finishing, failing, withdrawing  # type: ignore[method-assign]

    def _ran(self, run: StepRun, step: str) -> None:
        self.crash.ran[step] += 1
        if run.step.effects == "plain" and self.crash.ran[step] == 2:
            self.crash.faults.append(f"the plain step {step!r} ran twice")

    def _nothing_happened(self, before: Mapping[str, int], text: str) -> None:
        self.crash.faults += [
            f"{text}, but {name!r} rose by {rise} while it ran"
            for name, rise in _risen(before, self._effects()).items()
        ]


def _drop(run: StepRun) -> None:
    """Do to the database what it does by itself when its client dies."""
    if run.transaction is not None:
        run.transaction.roll_back()
        run.transaction.leave()


def every_crash(
    app: Flask,
    request: Send,
    *,
    effects: Effects | None = None,
    settle: Callable[[], object] | None = None,
    clock: FrozenClock | None = None,
) -> CrashReport:
    """Let the worker of this request die at each point of each of its steps, retry, and check what came of it.

    `request` sends the request with the client and the key that it gets. Each point has a key of its own. The points are:
    before a step begins, in its function, after its function, after it is recorded; and before and after the answer is kept.

    `effects` returns how often each effect has happened so far, counted where it happens: by the fake of a payment provider,
    say. Without it, nothing can see what happens outside of steps, twice in a deduplicated one, or in a harmless failure.

    `settle` is called when a step is in doubt, to let resolvers settle it; the retry after it must end in the answer.
    `clock` is that of the store, if it only moves when a test moves it. It needs to be behind this machine's. A resolver who
    says that a step never happened is believed when its worker cannot run any more: then the clock is moved, and `settle` is
    called again. The report says how long that was. Nothing here sleeps.

    Raises `AssertionError` with the report if a promise is broken: a plain or transactional step that happened twice, an
    effect that happened more often than without a crash, or not at all, or an end that is neither the answer nor a doubt.
    """
    state = app.extensions["idempotency"]
    engine: Engine | None = state.engine
    assert engine is not None, "the guard of this application is switched off"
    runner = _Runner(app, engine, request, effects or dict, settle, clock)
    first = Crash(CrashPoint(WITHOUT))
    points = runner.run(first, None)
    crashes = [first]
    assert points, (
        f"the request took no step and ended in {first.end}: is the key sent, and does its endpoint list steps=?"
    )
    _check(first, first)
    for point in points if first.kind == "answer" else ():
        crash = Crash(point)
        runner.run(crash, point)
        _check(crash, first)
        crashes.append(crash)
    report = CrashReport(tuple(crashes))
    if report.faults:
        raise AssertionError("\n".join(["promises were broken:", *report.faults, "", "all points:", str(report)]))
    return report


@dataclass(frozen=True, slots=True)
class _Runner:
    """Sends the request of one point, and then its retries."""

    app: Flask
    engine: Engine
    request: Send
    effects: Effects
    settle: Callable[[], object] | None
    clock: FrozenClock | None

    def run(self, crash: Crash, point: CrashPoint | None) -> list[CrashPoint]:
        """Fill in what comes of this crash. Return the points that the first attempt reached, if it took steps."""
        key, before = str(uuid4()), dict(self.effects())
        first = _Attempt(crash, point, self.effects)
        response = self._send(first, key)
        if point is not None:
            if not first.dead:
                crash.faults.append("the request never came here again: it takes other steps each time")
            self._wait(first)
            response = None
        settled, keys = False, first.keys
        for _ in range(MOST_RETRIES):
            if response is None or not self._ended(crash, response, keys):
                response = self._send(_Attempt(crash, None, self.effects), key)
                self._ended(crash, response, keys)
            if crash.kind == "doubt" and self.settle is not None and not settled:
                settled, response = True, None
                self._settle(crash, first, self.settle)
            elif crash.kind != "other" or crash.end.startswith("quarantined"):
                break
            else:
                response = None
        if settled and crash.kind == "doubt":
            crash.faults.append(f"nothing has settled the doubt{self._reason(crash, first)}")
        crash.effects = _risen(before, self.effects())
        return first.reached if any(reached.step for reached in first.reached) else []

    def _settle(self, crash: Crash, attempt: _Attempt, settle: Callable[[], object]) -> None:
        """Let the resolver settle the doubt. If it is not believed yet, let that time pass, and call it again."""
        for turn in range(MOST_TURNS):
            settle()
            left = self._believed_in(attempt)
            if left is None or self.clock is None or turn == MOST_TURNS - 1:
                return
            crash.says_never = self._says_never(attempt)
            # A little more, because leases are rounded. Without it, the next call of the resolver is due by then.
            seconds = left + 1.0 if left > 0 else TURN_SECONDS
            self.clock.advance(seconds)
            crash.waited += seconds

    def _quarantined(self, attempt: _Attempt) -> Iterator[tuple[StorageKey, Record]]:
        for key in attempt.keys:
            record = self.engine._deps.store.read(key)
            if record is not None and record.state is State.QUARANTINED:
                yield key, record

    def _believed_in(self, attempt: _Attempt) -> float | None:
        """Return the seconds until no worker can run any more. None: no record is quarantined."""
        runs = 0.0 if attempt.policy is None else attempt.policy.max_runtime
        return max((max_remaining(record, max_runtime=runs) for _, record in self._quarantined(attempt)), default=None)

    def _says_never(self, attempt: _Attempt) -> bool:
        audit = self.app.extensions["idempotency"].built.audit
        return any(
            says_never_happened(audit, key, since=record.requested_at) for key, record in self._quarantined(attempt)
        )

    def _reason(self, crash: Crash, attempt: _Attempt) -> str:
        """Say what the resolver is waited for, as the end of a sentence. Empty: it has not said that it never happened."""
        left = self._believed_in(attempt)
        if left is None or not self._says_never(attempt):
            return ""
        if self.clock is None:
            remedy = "Give the store a FrozenClock and pass it as clock=, so that this time can pass"
        elif self.clock.now > time.time():
            remedy = (
                "The janitor goes by the earlier of the clock and this machine's: begin with FrozenClock(), in the past"
            )
        else:
            remedy = "Let settle= run the janitor"
        return f": the resolver says it never happened, which is believed in {max(round(left / 60), 1)} min. {remedy}"

    def _send(self, attempt: _Attempt, key: str) -> TestResponse | Exception | None:
        with self._watched(attempt):
            try:
                return self.request(self.app.test_client(), key)
            except _Died:
                return None
            except Exception as error:  # noqa: BLE001 - a view may raise anything, and a test client passes it on
                return error

    @contextmanager
    def _watched(self, attempt: _Attempt) -> Iterator[None]:
        """Give the engine the gates of this attempt. They stay with its claims, also when the worker has died."""
        engine, deps, claim = self.engine, self.engine._deps, self.engine.claim

        def claiming(request: Any, policy: Policy, **kwargs: Any) -> Any:
            outcome = claim(request, policy, **kwargs)
            if isinstance(outcome, Claim) and outcome.steps is not None:
                attempt.policy = policy
                attempt.watch(outcome.steps)
            return outcome

        gated: dict[str, Any] = {
            name: _Gate(part, attempt)
            for name in ("store", "journals", "step_transactions")
            if (part := getattr(deps, name)) is not None
        }
        engine._deps = replace(deps, **gated)
        engine.claim = claiming  # type: ignore[method-assign]
        try:
            yield
        finally:
            engine._deps = deps
            del engine.claim

    def _wait(self, attempt: _Attempt) -> None:
        """Let the lease of the dead worker end."""
        if self.clock is not None:
            self.clock.advance(1.0)
        patience = time.monotonic() + PATIENCE
        store = self.engine._deps.store
        for key in attempt.keys:
            while (record := store.read(key)) is not None and record.state is State.PROCESSING and record.remaining > 0:
                assert time.monotonic() < patience, "the lease does not end: pass the store's clock as clock="

    def _ended(self, crash: Crash, response: TestResponse | Exception | None, keys: list[StorageKey]) -> bool:
        """Note how the request stands now. Return whether a retry could not change it."""
        deps = self.engine._deps
        records = [record for key in keys if (record := deps.store.read(key)) is not None]
        quarantined = [record for record in records if record.state is State.QUARANTINED]
        status = (
            str(response.status_code) if isinstance(response, TestResponse) else f"raised {type(response).__name__}"
        )
        if quarantined:
            reason, doubtful = quarantined[0].reason, list[str]()
            if deps.journals is not None:
                entries = [entry for key in keys for entry in deps.journals.read(key).entries if entry.in_doubt]
                doubtful = list(dict.fromkeys(entry.name for entry in entries))
            doubt = bool(doubtful) and reason in (IN_DOUBT, LAPSED)
            crash.kind = "doubt" if doubt else "other"
            crash.end = f"in doubt ({', '.join(doubtful)})" if doubt else f"quarantined ({reason})"
            return True
        if records and all(record.state is State.COMPLETED for record in records):
            crash.kind, crash.end = "answer", status
            return True
        crash.kind, crash.end = "other", f"paused ({status})" if records else f"released ({status})"
        return False


def _risen(before: Mapping[str, int], after: Mapping[str, int]) -> Mapping[str, int]:
    rises = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: rise for name, rise in rises.items() if rise}


def _check(crash: Crash, first: Crash) -> None:
    """Add the promises that this run has broken. `first` is the one without a crash."""
    if crash.kind == "other":
        crash.faults.append(f"the end is neither the answer nor a doubt: {crash.end}")
    elif crash.kind == "answer" and crash.end != first.end:
        crash.faults.append(f"the answer is {crash.end}, and without a crash it is {first.end}")
    elif crash is first and crash.kind == "doubt":
        crash.faults.append(f"it ends {crash.end}, although nothing crashed: no point could be tried")
    crash.faults += [
        f"the transactional step {name!r} was committed twice" for name, n in crash.committed.items() if n > 1
    ]
    for name in sorted(crash.effects.keys() | first.effects.keys()):
        rise, usual = crash.effects.get(name, 0), first.effects.get(name, 0)
        if rise > usual or (rise < usual and crash.kind == "answer"):
            crash.faults.append(f"{name!r} rose by {rise}, and without a crash it rises by {usual}")
