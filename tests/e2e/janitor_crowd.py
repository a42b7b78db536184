"""Janitors of one application, killed at random moments while they look after it. Run as a program.

    python -m tests.e2e.janitor_crowd \
        '{"store": URL, "ledger": URL, "config": {}, "crowd": "x", "janitors": 4, "seconds": 60, "seed": 7}'

One process forks them, and for so many seconds kills one after another and forks others in their place. When its standard
input ends it ends them all and prints one JSON object: how many were killed before that.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import select
import signal
import sys
import time
from typing import Any, Final, NoReturn

from flask import Flask, request

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import ClaimGranted, Reaped, Resolved
from flask_idempotency.engine.recovery import Happened, NeverHappened, Resolution, UnknownOutcome
from flask_idempotency.maintenance import janitor as locks
from flask_idempotency.maintenance import reap as pauses
from flask_idempotency.maintenance.janitor import Batcher, Janitor, Task
from flask_idempotency.signals import claim_granted, reaped, resolved
from flask_idempotency.web import janitor as tasks
from flask_idempotency.web.janitor import janitor_of, work_of
from tests.e2e import service
from tests.e2e.ledger import Ledger

BY_RESOLVER: Final = "resolver"
"""What the answer says that nobody's view has given."""

TASKS: Final[tuple[Task, ...]] = ("heartbeat", "reap", "expire", "reconcile")
LIFE_SECONDS: Final = 1.0
"""On average, and at least until it has begun its work."""

PAUSE_SECONDS: Final = 0.05
ANSWER_SECONDS: Final = 0.6
"""As long as workers may stand still: some wake just before their key is settled in their place."""


def victim() -> Flask:
    """What the workers serve: the other victim, which also writes down whose key is whose."""
    app = service.from_environment()
    ledger: Ledger = app.config["LEDGER"]

    def granted(sender: Flask, *, event: ClaimGranted) -> None:
        ledger.note("granted", request.headers.get(service.CASE, ""), event.record)

    claim_granted.connect(granted, app, weak=False)
    return app


def looked_after(*, store: Any, ledger: str, config: dict[str, Any], crowd: str) -> Flask:
    """The same application as its janitors have it: with resolvers that ask the outside world."""

    def look(unknown: UnknownOutcome) -> Resolution:
        name = unknown.downstream_key("effect")
        happened = bool(book.noted("done", name))
        # Before it is acted on: whoever is killed in between has said it all the same.
        book.note("said", name, "happened" if happened else "never")
        # The outside world takes its time to answer, and much may happen to the key meanwhile.
        time.sleep(random.uniform(0, ANSWER_SECONDS))
        return Happened(({"run": BY_RESOLVER}, 201)) if happened else NeverHappened()

    app = service.create_app(store=store, ledger=ledger, config=config, resolvers={"plain": look, "marked": look})
    book: Ledger = app.config["LEDGER"]

    def told(sender: Flask, *, event: Resolved) -> None:
        book.note("settled", event.record, event.verb)

    def found(sender: Flask, *, event: Reaped) -> None:
        book.note("reaped", crowd, event.record)

    resolved.connect(told, app, weak=False)
    reaped.connect(found, app, weak=False)
    return app


class Crowd:
    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._rng = random.Random(told["seed"])
        self._alive: dict[int, tuple[int, mmap.mmap]] = {}
        self.killed = 0

    def run(self) -> None:
        for number in range(self._told["janitors"]):
            self._fork(number)
        until = time.monotonic() + self._told["seconds"]
        while not _ended(self._rng.uniform(0, 2 * LIFE_SECONDS / len(self._alive))):
            # Whoever is killed before it has begun tells nothing, and on a busy machine that may be everybody.
            at_work = [pid for pid, (_, begun) in self._alive.items() if begun[0]]
            if time.monotonic() > until or not at_work:
                continue
            pid = self._rng.choice(at_work)
            self._kill(pid)
            self.killed += 1
            number, begun = self._alive.pop(pid)
            begun.close()
            self._fork(number)
        for pid in self._alive:
            self._kill(pid)

    def _fork(self, number: int) -> None:
        begun = mmap.mmap(-1, mmap.PAGESIZE)
        pid = os.fork()
        if pid == 0:
            self._be_a_janitor(number, begun)
        self._alive[pid] = number, begun

    def _be_a_janitor(self, number: int, begun: mmap.mmap) -> NoReturn:
        try:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
            names = ("store", "ledger", "config", "crowd")
            work_for_ever(looked_after(**{name: self._told[name] for name in names}), begun, locked=number % 2 == 0)
        except BaseException:  # noqa: BLE001 - a child must never go on as its parent
            sys.excepthook(*sys.exc_info())
            os._exit(1)

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise SystemExit(f"a janitor failed with {os.waitstatus_to_exitcode(status)}")


def work_for_ever(app: Flask, begun: mmap.mmap, *, locked: bool) -> NoReturn:
    """Every task, again and again. Without the lock it finds others at the same work: that only saves some of it."""
    state = app.extensions["idempotency"]
    janitor = janitor_of(app)
    if not locked:
        work = work_of(app)
        janitor = Janitor(work, task_log=None, observers=state.observers)
    while True:
        for task in TASKS:
            try:
                janitor.run(task, Batcher(batch=3, budget=1.0))
            except StoreUnavailable:
                continue
            begun[0] = 1
        time.sleep(PAUSE_SECONDS)


def hurry() -> None:
    """Pauses that are made for days of waiting, and a lock for a task of minutes, are no use in a test of seconds."""
    setattr(tasks, "FIRST_PAUSE_SECONDS", 0.2)  # noqa: B010 - it is not to be set by anybody else
    setattr(pauses, "LAST_PAUSE_SECONDS", 0.5)  # noqa: B010
    setattr(locks, "LOCK_SECONDS", 0.0)  # noqa: B010


def _ended(seconds: float) -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable)


def main() -> None:
    hurry()
    crowd = Crowd(json.loads(sys.argv[1]))
    crowd.run()
    sys.stdout.write(json.dumps({"killed": crowd.killed}))


if __name__ == "__main__":
    main()
