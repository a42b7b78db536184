"""Clients that never ask again, and workers that die at any moment: the janitor finishes what was begun, and charges once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Event
from typing import Any, Final

import pytest

from flask_idempotency.assembly import identities
from flask_idempotency.engine.keys import Scope
from flask_idempotency.engine.model import State
from flask_idempotency.maintenance import finish
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.web import janitor
from tests.e2e.conftest import Figures
from tests.e2e.ledger import PATIENCE_SECONDS
from tests.e2e.processes import ROOT
from tests.e2e.purchases import Purchase
from tests.e2e.step_shop import EFFECTS, create_app
from tests.e2e.test_steps import LEASE, LONGEST_SECONDS, Shop, shop
from tests.e2e.test_transactional_kills import Doom
from tests.e2e.wire import ask

__all__ = ["shop"]

POINTS: Final = (
    *("claimed", "entered", "entered-reserve", "in-reserve", "after-reserve", "entered-charge", "in-charge"),
    *("after-charge", "entered-save", "in-save", "committing", "committed", "after-save", "in-mail", "after-mail"),
    *("written-1", "written-2", "written-3", "written-4", "keeping", "kept"),
)

WITHIN_SECONDS: Final = LEASE + 60
"""From the death of its worker to the end of a request."""

_PACE: Final = Event()


def configuration(shop: Shop) -> dict[str, Any]:
    """What the workers of the shop are configured with."""
    return {**shop.server.plan.config, "IDEMPOTENCY_LEASE": LEASE}


class Janitor:
    """The janitor of the shop, in this process. It runs `reap` and `finish` until no order is half-done."""

    def __init__(self, shop: Shop) -> None:
        self.app = create_app(shop.url, ledger=shop.ledger_url, config=configuration(shop))
        self.state: Any = self.app.extensions["idempotency"]
        self.counted: Counter[str] = Counter()

    def run(self) -> None:
        tasks = janitor.janitor_of(self.app)
        for task in ("reap", "finish"):
            report: Any = tasks.run(task, Batcher())
            self.counted.update(
                {
                    name: getattr(report, name)
                    for name in ("completed", "failed", "gave_up", "resumed")
                    if hasattr(report, name)
                }
            )

    def ended(self, purchase: Purchase) -> bool:
        settings = self.state.settings
        key = identities(settings)[0].storage_key(Scope(settings.namespace, None, None), purchase.order.key)
        record = self.state.built.engine.read(key)
        return record is not None and record.state is State.COMPLETED

    def finishes(self, begun: Sequence[Purchase]) -> None:
        deadline = time.monotonic() + WITHIN_SECONDS
        left = list(begun)
        while left := [purchase for purchase in left if not self.ended(purchase)]:
            assert time.monotonic() < deadline, f"{len(left)} of {len(begun)} orders are half-done: {self.counted}"
            self.run()
            _PACE.wait(0.05)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver is called a second time within the patience of a test."""
    monkeypatch.setattr(janitor, "FIRST_PAUSE_SECONDS", LEASE / 2)


def begun(shop: Shop, purchases: Sequence[Purchase]) -> list[Purchase]:
    """The orders of which a step has had an effect."""
    return [purchase for purchase in purchases if any(shop.did(purchase).values())]


def check(shop: Shop, purchases: Sequence[Purchase]) -> None:
    """Each order was done as a whole, or not begun, with one charge, counted outside of the store."""
    for purchase in purchases:
        did = shop.did(purchase)
        if not any(did.values()):
            assert shop.payments(purchase) in (None, [])
            continue
        assert 1 == did["charge"], did
        assert all(len(shop.keys(purchase, name)) == 1 for name in EFFECTS), did
        answer = ask(shop.port, purchase.order.attempt())
        assert (201, True) == (answer.status, answer.replayed)
        assert shop.payments(purchase) in (None, [answer.json["save"]])


@pytest.mark.usefixtures("soon")
def test_a_checkout_is_finished_wherever_its_worker_dies(shop: Shop) -> None:
    purchases = []
    for point in POINTS:
        if point.startswith("commit") and shop.books is None:
            continue
        purchases.append(shop.order("/unattended"))
        shop.dies(purchases[-1], point)
    half_done = begun(shop, purchases)

    assert len(purchases) - len(("claimed", "entered", "entered-reserve", "written-1")) == len(half_done)
    Janitor(shop).finishes(half_done)
    check(shop, purchases)


IN_A_TRY: Final = ("in-charge", "after-charge", "in-save", "committed", "in-mail", "keeping", "kept")


def killed_janitor(shop: Shop, point: str) -> None:
    """Let a janitor finish what is due, and die at this point of it."""
    told = {"E2E_STORE": shop.url, "E2E_LEDGER": shop.ledger_url, "E2E_CONFIG": json.dumps(configuration(shop))}
    command = [sys.executable, "-m", "tests.e2e.doomed_janitor", point]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while subprocess.run(command, cwd=ROOT, env={**os.environ, **told}, check=False).returncode != -signal.SIGKILL:
        assert time.monotonic() < deadline, f"no janitor has died at {point}"


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_a_janitor_that_dies_in_a_try_is_followed_by_the_next(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one charge, and one row, wherever it dies. Its try has counted."""
    purchases = []
    for point in IN_A_TRY:
        if point == "committed" and shop.books is None:
            continue
        purchases.append(shop.order("/unattended"))
        shop.dies(purchases[-1], "after-reserve")
        killed_janitor(shop, point)
    monkeypatch.setattr(finish, "PAUSES_SECONDS", (0.0, *(LEASE,) * 4))
    tidy = Janitor(shop)
    tidy.finishes(purchases)

    check(shop, purchases)
    assert 0 == tidy.counted["failed"] == tidy.counted["gave_up"]


MOMENTS: Final = 20
MANY_MOMENTS: Final = 300


def at_random_moments(shop: Shop, number: int) -> dict[str, int]:
    purchases = [shop.order("/unattended") for _ in range(number)]
    with closing(Doom(shop.ledger, POINTS[:15], longest=LONGEST_SECONDS)) as doom, ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda purchase: purchase.attempt(shop.port, doom.step()), purchases))
    half_done = begun(shop, purchases)
    tidy = Janitor(shop)
    tidy.finishes(half_done)
    check(shop, purchases)
    assert 0 == tidy.counted["gave_up"]
    charges = sum(shop.did(purchase)["charge"] for purchase in purchases)
    return {
        "checkouts": number,
        "workers_killed": doom.kills,
        "begun": len(half_done),
        "charges": charges,
    } | tidy.counted


@pytest.mark.usefixtures("soon")
def test_twenty_random_kills_leave_no_order_half_done(shop: Shop) -> None:
    at_random_moments(shop, MOMENTS)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("soon")
def test_three_hundred_random_kills_leave_no_order_half_done(shop: Shop, figures: Figures) -> None:
    told = at_random_moments(shop, MANY_MOMENTS)
    figures(**told)

    assert told["workers_killed"] >= MANY_MOMENTS // 6
    assert told["completed"] >= MANY_MOMENTS // 8
