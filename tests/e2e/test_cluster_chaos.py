"""Servers on a Cluster that is killed, silenced, failed over and resharded under load: every key runs once at most."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import pytest

from example_app.demo.servers import RedisServer
from tests.e2e.cluster_weather import Weather
from tests.e2e.conftest import Figures, Serve
from tests.e2e.customers import ALLOWED, Customers, judge, refusals
from tests.e2e.ledger import PATIENCE_SECONDS, Ledger
from tests.e2e.losses import LEASE, RULES, Operator, ask_until_acknowledged, key_made_now
from tests.e2e.purchases import Crowd, Purchase
from tests.lab.cluster import ClusterRig, ClusterRigs
from tests.lab.programs import REDIS_KINDS
from tests.long import unless_long

CHAOS_SECONDS: Final = float(os.environ.get("CHAOS_SECONDS") or unless_long(15, long=60))
CLIENTS: Final = 6
TENANTS: Final = 12
"""As many partitions, or fewer: so each is hit often."""

HOLD: Final = 2.0
"""Twice what an owner takes at most to put its claim back."""

CONFIG: Final = {**RULES, "IDEMPOTENCY_DATA_LOSS_GRACE": HOLD, "IDEMPOTENCY_MAX_RUNTIME": 30}


@pytest.fixture
def cluster(cluster_rigs: ClusterRigs) -> ClusterRig:
    return cluster_rigs.get(REDIS_KINDS[0])


def storm(
    weather: Weather, customers: Customers, first: str, *, seconds: float, after: Callable[[], None]
) -> list[Purchase]:
    """All that was bought while the weather blew; this befalls the Cluster first, and `after` follows each thing."""
    crowd = Crowd(CLIENTS, customers.buy)
    ends, what = time.monotonic() + seconds, first
    while time.monotonic() < ends:
        weather.blow(what)
        after()
        crowd.wait(0.5)
        what = ""
    return crowd.stop()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_54_waited_for_by_replicas_nothing_is_lost_and_everything_is_paid_once(
    cluster: ClusterRig, serve_once: Serve, ledger: Ledger, ledger_server: RedisServer, figures: Figures
) -> None:
    """While one thing fails at a time, and a person acknowledges after each: one run and one answer of every key."""
    odds = {
        "dies": 3,
        "hands over": 2,
        "is silent until replaced": 2,
        "is silent for a moment": 2,
        "its replica is silent": 2,
        "its replica restarts": 1,
        "slots move": 3,
    }
    config = {**CONFIG, "IDEMPOTENCY_REPLICAS": 1}
    operator = Operator(cluster.url, ledger=ledger_server.url, config=CONFIG)
    acknowledged = list[str | None]()

    def look() -> None:
        if operator.status():
            acknowledged.append(ask_until_acknowledged(operator))

    with Weather(cluster, odds) as weather:
        servers = [serve_once(weather.url, lease=LEASE, config=config, name=name) for name in ("one", "two")]
        customers = Customers([server.port for server in servers], TENANTS, patience=10)
        purchases = storm(weather, customers, "dies", seconds=CHAOS_SECONDS, after=look)
    paid = [customers.insist(purchase, patience=PATIENCE_SECONDS) for purchase in purchases]

    oracle, told = judge(purchases, ledger), refusals(purchases)
    figures(acknowledged=len(acknowledged), answers=oracle.answers, purchases=len(purchases), told=told, **weather.seen)
    oracle.check()
    assert {None} == set(acknowledged)
    assert all(paid)
    assert set(told) <= ALLOWED
    assert [1] * len(purchases) == [len(ledger.effects(purchase.order.case)) for purchase in purchases]
    assert len(purchases) >= CHAOS_SECONDS


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_54_what_may_be_lost_never_runs_again_while_nobody_acknowledges(
    cluster: ClusterRig, serve_once: Serve, ledger: Ledger, figures: Figures
) -> None:
    """
    Replicas that lack the last second are promoted: one run of a key at most, and one answer. Keys made later run.
    """
    # A primary that is silent and wakes up again may grant for some milliseconds, and nobody notices without replicas that
    # are waited for: docs/how-it-works/data-loss.md says so.
    odds = {
        "dies": 1,
        "dies while its replica lags": 4,
        "hands over": 2,
        "is silent for a moment": 1,
        "its replica restarts": 1,
        "slots move": 3,
    }
    with Weather(cluster, odds) as weather:
        servers = [serve_once(weather.url, lease=LEASE, config=CONFIG, name=name) for name in ("one", "two")]
        customers = Customers([server.port for server in servers], TENANTS, patience=1, new_key=key_made_now)
        worst = "dies while its replica lags"
        purchases = storm(weather, customers, worst, seconds=CHAOS_SECONDS / 2, after=lambda: None)
    again = [customers.attempt(purchase) for purchase in purchases]
    later = [Purchase(customers.order()) for _ in range(TENANTS)]
    paid = [customers.insist(purchase, patience=PATIENCE_SECONDS) for purchase in later]

    oracle, told = judge([*purchases, *later], ledger), refusals(purchases)
    figures(answers=oracle.answers, purchases=len(purchases), unpaid=again.count(False), told=told, **weather.seen)
    oracle.check()
    assert all(paid)
    assert set(told) <= ALLOWED
    assert (503, "memory-lost") in told
