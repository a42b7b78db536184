"""Workers and janitors are killed and frozen at random while clients want their answers: each gets one, and it is true."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import IncompleteRead, RemoteDisconnected
from typing import Any, Final, cast
from uuid import uuid4

import pytest
from sqlalchemy import create_engine

from example_app.demo.servers import RedisServer
from flask_idempotency.assembly import build_store
from flask_idempotency.engine.capabilities import UnfinishedCounts
from flask_idempotency.maintenance.janitor import Batcher, Janitor, Report, Task
from flask_idempotency.maintenance.reap import ReapReport
from flask_idempotency.stores.sql.migrations.runner import upgrade
from flask_idempotency.web.janitor import janitor_of
from tests.e2e.conftest import Figures, Serve
from tests.e2e.janitor_crowd import BY_RESOLVER, looked_after
from tests.e2e.ledger import Ledger
from tests.e2e.processes import ROOT, Server, kill, pause, resume
from tests.e2e.wire import Answer, Order, ask
from tests.lab.postgres import StartPostgres
from tests.lab.redis import StartRedis
from tests.long import unless_long
from tests.tooling.processes import eventually

SECONDS: Final = int(os.environ.get("JANITOR_CHAOS_SECONDS", unless_long(10, long=60)))
"""A minute is better: more workers wake just as somebody settles their keys."""

LEASE: Final = 0.6
MAX_RUNTIME: Final = 5.0
"""Far longer than any worker is frozen, and than a busy machine may take to go on with it afterwards."""

FROZEN_SECONDS: Final = (LEASE, 4 * LEASE)
CUSTOMERS: Final = 8
JANITORS: Final = 4
BUSY_MS: Final = 300
SETTLED_SECONDS: Final = 60.0
"""Within this every key has its answer once nobody is killed any more."""

VIEWS: Final = {"/plain": "take:{} effect take:{}", "/marked": "take:{} point effect take:{}"}
VIEWS["/deduplicated"] = VIEWS["/plain"]

CONFIG: Final = {
    "IDEMPOTENCY_MAX_RUNTIME": MAX_RUNTIME,
    "IDEMPOTENCY_QUOTA_RECORDS": 10**9,  # never reached: for the ledger that it has kept
}


@dataclass
class Purchase:
    """What a customer wants once, and what they were told. Two of their devices ask for it at the same time."""

    order: Order
    steps: str
    answers: list[Answer] = field(default_factory=list)
    refusals: Counter[str | None] = field(default_factory=Counter)

    def insist(self, port: int) -> None:
        """Ask until there is an answer, as clients do whose money it is."""
        deadline = time.monotonic() + SECONDS + SETTLED_SECONDS
        while time.monotonic() < deadline:
            with suppress(RemoteDisconnected, ConnectionResetError, IncompleteRead, BrokenPipeError):
                answer = ask(port, self.order.attempt(self.steps))
                if answer.status == 201:
                    self.answers.append(answer)
                    return
                self.refusals[answer.code] += 1
            time.sleep(random.uniform(0.05, 1.0))  # as retries are spread: between two of them a janitor may come
        raise AssertionError(f"no answer for {self.order.path} in time: {dict(self.refusals)}")


def a_purchase() -> Purchase:
    path = random.choice(list(VIEWS))
    steps = VIEWS[path].format(random.randrange(BUSY_MS), random.randrange(BUSY_MS))
    return Purchase(Order(path), steps)


def shopping(port: int, until: float) -> list[Purchase]:
    """Everything that the customers have bought by then, each of them one thing after the other."""
    with ThreadPoolExecutor(2 * CUSTOMERS) as devices:

        def buy() -> list[Purchase]:
            bought = []
            while time.monotonic() < until:
                bought.append(purchase := a_purchase())
                other = devices.submit(purchase.insist, port)
                purchase.insist(port)
                other.result()
            return bought

        return [purchase for each in [devices.submit(buy) for _ in range(CUSTOMERS)] for purchase in each.result()]


class Fate(threading.Thread):
    """What befalls workers: some are killed, some stand still for longer than their leases."""

    def __init__(self, server: Server, until: float, seed: int) -> None:
        super().__init__()
        self._server, self._until, self._rng = server, until, random.Random(seed)
        self.killed = self.frozen = 0

    def run(self) -> None:
        thaws: list[threading.Timer] = []
        while time.monotonic() < self._until:
            time.sleep(self._rng.uniform(0.1, 0.5))
            with suppress(ProcessLookupError, IndexError):
                self._strike(self._rng.choice(self._server.workers), thaws)
        for thaw in thaws:
            thaw.join()

    def _strike(self, pid: int, thaws: list[threading.Timer]) -> None:
        if self._rng.random() < 0.4:
            kill(pid)
            self.killed += 1
            return
        pause(pid)
        self.frozen += 1
        thaws.append(threading.Timer(self._rng.uniform(*FROZEN_SECONDS), _thaw, [pid]))
        thaws[-1].start()


def _thaw(pid: int) -> None:
    with suppress(ProcessLookupError):
        resume(pid)


@contextmanager
def janitors(told: dict[str, Any], counts: Counter[str]) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.e2e.janitor_crowd", json.dumps(told)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
        try:
            yield
            said, _ = crowd.communicate("that is all\n", timeout=SETTLED_SECONDS)
        except BaseException:
            crowd.kill()
            raise
    assert crowd.returncode == 0
    counts.update(json.loads(said))


def on_redis(request: pytest.FixtureRequest) -> str:
    start: StartRedis = request.getfixturevalue("start_redis")
    return start().url


def on_postgresql(request: pytest.FixtureRequest) -> str:
    start: StartPostgres = request.getfixturevalue("start_postgres")
    server = start()
    server.create_database("shop")
    engine = create_engine(server.url("shop"))
    upgrade(engine)
    engine.dispose()
    return server.url("shop")


@pytest.mark.soak
@pytest.mark.timeout(120 + 5 * SECONDS)
@pytest.mark.parametrize("on", (on_redis, on_postgresql), ids=("redis", "postgresql"))
def test_36_37_every_key_is_settled_once_and_truthfully(
    on: Callable[[pytest.FixtureRequest], str],
    request: pytest.FixtureRequest,
    serve_once: Serve,
    ledger: Ledger,
    ledger_server: RedisServer,
    figures: Figures,
) -> None:
    """
    Whoever dies or stands still, and whenever: one effect and one answer for each key, and nothing left to be done.
    """
    url, seed, crowd = on(request), random.randrange(10**9), uuid4().hex
    server = serve_once(
        url,
        app="tests.e2e.janitor_crowd:victim()",
        workers=3,
        threads=4,
        lease=LEASE,
        config=CONFIG,
        arguments=("--preload",),
    )
    config = {"IDEMPOTENCY_LEASE": LEASE, **CONFIG}
    told: dict[str, Any] = {"store": url, "ledger": ledger_server.url, "config": config, "crowd": crowd}
    counts: Counter[str] = Counter()
    until = time.monotonic() + SECONDS
    fate = Fate(server, until, seed)
    with janitors({**told, "janitors": JANITORS, "seconds": SECONDS, "seed": seed}, counts):
        fate.start()
        purchases = shopping(server.port, until)
        fate.join()

    for purchase in purchases:
        purchase.insist(server.port)
    stories = [Story.of(purchase, ledger) for purchase in purchases]
    figures(
        seed=seed,
        keys=dict(Counter(purchase.order.path for purchase in purchases)),
        workers_killed=fate.killed,
        workers_frozen=fate.frozen,
        janitors_killed=counts["killed"],
        quarantined_by_janitors=len(ledger.noted("reaped", crowd)),
        refusals=dict(sum((purchase.refusals for purchase in purchases), Counter())),
        completed_by_resolver=sum(story.by_resolver for story in stories),
        released_by_resolver=sum(story.settled["released"] for story in stories),
        ran_again=dict(Counter(story.path for story in stories if story.grants > 1)),
        events_lost_with_their_janitors=sum(story.lost_events for story in stories),
    )
    assert [] == [fault for story in stories for fault in story.faults()]
    assert sum(story.lost_events for story in stories) <= counts["killed"]
    assert min(fate.killed, fate.frozen, counts["killed"]) >= SECONDS / 5
    assert sum(story.settled.total() for story in stories) > 0

    with closing(cast("Any", build_store(url))) as store:
        janitor = janitor_of(looked_after(**{**told, "store": store}))
        assert UnfinishedCounts() == store.recovery.counts()
        assert ReapReport() == run(janitor, "reap")
        recount = run(janitor, "reconcile")
        assert (0, 0) == (recount.drifted, recount.busy)


def run(janitor: Janitor, task: Task) -> Any:
    """Its report, as soon as the lock has run out that a killed janitor may have left behind."""
    reports: list[Report] = []

    def ran() -> bool:
        report = janitor.run(task, Batcher())
        reports.extend([] if report is None else [report])
        return report is not None

    assert eventually(ran)
    return reports[0]


@dataclass(frozen=True)
class Story:
    """What has happened to one key, by everybody's word."""

    path: str
    answers: frozenset[bytes]
    effects: tuple[str, ...]
    grants: int
    said: Counter[str]
    """By resolvers, before it was acted on."""
    settled: Counter[str]
    """As events have told it. Whoever is killed between the deed and the word has done it all the same."""

    @classmethod
    def of(cls, purchase: Purchase, ledger: Ledger) -> Story:
        case = purchase.order.case
        effects, labels = ledger.effects(case), ledger.noted("granted", case)
        return cls(
            path=purchase.order.path,
            answers=frozenset(answer.body for answer in purchase.answers),
            effects=tuple(effects),
            grants=len(labels),
            said=Counter(ledger.noted("said", effects[0]) if effects else ()),
            settled=Counter(verb for label in set(labels) for verb in ledger.noted("settled", label)),
        )

    @property
    def by_resolver(self) -> bool:
        return any(json.loads(answer)["run"] == BY_RESOLVER for answer in self.answers)

    @property
    def lost_events(self) -> int:
        """Keys that a janitor has completed, and died before it could say so."""
        return int(self.by_resolver) - self.settled["completed"]

    def faults(self) -> list[str]:
        faults = {
            "other than one answer": len(self.answers) != 1,
            "no effect, or under several names": len(set(self.effects)) != 1,
            "more than one effect": self.path != "/deduplicated" and len(self.effects) != 1,
            "ran again though nobody had released it": self.path == "/plain" and self.grants - 1 > self.said["never"],
            "released more often than a resolver has said so": self.settled["released"] > self.said["never"],
            "completed by a resolver more than once": self.settled["completed"] > 1,
            "completed by a resolver that has not seen the effect": self.by_resolver and not self.said["happened"],
            "an answer that is not the one it was settled with": self.settled["completed"] > int(self.by_resolver),
        }
        return [f"{fault}: {self}" for fault, found in faults.items() if found]
