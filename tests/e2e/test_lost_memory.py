"""A Redis that has forgotten what it promised: nothing runs twice, and clients are told why nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from example_app.demo.servers import RedisServer
from tests.e2e.conftest import Serve
from tests.e2e.ledger import Ledger
from tests.e2e.losses import (
    LEASE,
    RULES,
    Operator,
    Scene,
    ask_until,
    ask_until_acknowledged,
    decided,
    emptied,
    failed_over,
    failed_over_in_part,
    key_made_now,
    restarted_empty,
    set_back,
)
from tests.e2e.processes import Server
from tests.e2e.wire import Answer, Order, Wire, ask, ask_until_settled
from tests.lab.cluster import ClusterRigs
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers, connect
from tests.lab.sentinel import SentinelRigs

KIND = REDIS_KINDS[0]
"""What the scripts of others are told is tested where the store is; here it is about all of it together."""

SERVED = (("Authorization", "Bearer acme/alice"),)
"""All keys of a tenant are in one partition, so that what concerns one of them concerns all."""

REFUSED = (503, "memory-lost", False)
ANSWERED, REPLAYED = (201, None, False), (201, None, True)
UNKNOWN = (409, "outcome-unknown", False)


@pytest.fixture(scope="session")
def forgetful(redis_servers: RedisServers) -> Iterator[RedisServer]:
    """One server for all that can be done to one."""
    with RedisServer(redis_servers.program(KIND)) as server:
        yield server


@pytest.fixture
def alone(forgetful: RedisServer) -> RedisServer:
    """Empty again."""
    with connect(forgetful.url) as client:
        client.flushall()
    return forgetful


@dataclass(frozen=True)
class Told:
    """What became of each kind of key, as its client sees it: status, problem, and whether it was a replay."""

    known: Any
    """Answered before what was lost."""
    forgotten: Any
    """Used and answered in what was lost."""
    half: Any
    """Used before, and answered in what was lost."""
    later: Any
    """A UUID of version 7 that was made after the loss."""


EMPTIED = Told(known=REFUSED, forgotten=REFUSED, half=REFUSED, later=REFUSED)
SET_BACK = Told(known=REPLAYED, forgotten=REFUSED, half=UNKNOWN, later=ANSWERED)

LOSSES: dict[str, tuple[Callable[[pytest.FixtureRequest], Scene], Told]] = {
    "restarted empty": (lambda request: restarted_empty(request.getfixturevalue("alone")), EMPTIED),
    "emptied": (lambda request: emptied(request.getfixturevalue("alone")), EMPTIED),
    "older snapshot": (lambda request: set_back(request.getfixturevalue("alone")), SET_BACK),
    "lagging replica, Sentinel": (lambda request: failed_over(_sentinels(request).get(KIND)), SET_BACK),
    "lagging replica, Cluster": (lambda request: failed_over_in_part(_clusters(request).get(KIND)), SET_BACK),
}


def _sentinels(request: pytest.FixtureRequest) -> SentinelRigs:
    rigs: SentinelRigs = request.getfixturevalue("sentinel_rigs")
    return rigs


def _clusters(request: pytest.FixtureRequest) -> ClusterRigs:
    rigs: ClusterRigs = request.getfixturevalue("cluster_rigs")
    return rigs


def outcome(answer: Answer) -> tuple[int, str | None, bool]:
    return *answer.told, answer.replayed


@dataclass(frozen=True)
class Till:
    """Where a tenant pays, and what it is told."""

    server: Server
    ledger: Ledger

    def order(self, **told: Any) -> Order:
        return Order("/plain", headers=SERVED, **told)

    def begun(self, order: Order) -> Wire:
        """Send it; its view waits."""
        wire = Wire(self.server.port).send(order.attempt("pause", "effect"))
        self.ledger.paused(order.case)
        return wire

    def ended(self, order: Order, wire: Wire) -> Answer:
        """What the client of a waiting view gets."""
        self.ledger.let_go(order.case)
        with wire:
            return wire.answer()

    def paid(self, order: Order) -> Answer:
        return ask(self.server.port, order.attempt("effect"))

    def found(self, order: Order) -> Answer:
        """As soon as there is a Redis that can be asked."""
        return ask_until(self.server.port, order.attempt("effect"), decided)


@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=pytest.mark.slow) if "replica" in name else name for name in LOSSES]
)
def test_19_what_was_forgotten_is_refused_until_somebody_has_looked(
    request: pytest.FixtureRequest, serve: Serve, ledger: Ledger, ledger_server: RedisServer, loss: str
) -> None:
    """
    Known keys replay, owners at work put their claims back, keys made later run, and all others wait for a person.
    """
    build, expected = LOSSES[loss]
    scene = build(request)
    till = Till(serve(scene.url, lease=LEASE, config=RULES), ledger)
    operator = Operator(scene.url, ledger=ledger_server.url, config=RULES)
    known, forgotten, half, running, refused = (till.order() for _ in range(5))

    first = till.paid(known)
    waiting = till.begun(half)
    scene.secure()
    answered = till.ended(half, waiting), till.paid(forgotten)
    waiting = till.begun(running)
    scene.lose()

    refusal = till.found(refused)
    told = Told(
        known=outcome(till.found(known)),
        forgotten=outcome(till.found(forgotten)),
        later=outcome(till.paid(till.order(key=key_made_now()))),
        half=outcome(ask_until_settled(till.server.port, half.attempt("effect"))),
    )
    meanwhile = ask_until(till.server.port, running.attempt("effect"), lambda answer: answer.code != "memory-lost")
    own = till.ended(running, waiting)
    again = till.paid(running)
    status = operator.status()
    acknowledged = ask_until_acknowledged(operator)
    after = [till.paid(order) for order in (till.order(), refused)]

    assert [(201, None)] * 3 == [answer.told for answer in (first, *answered)]
    assert (REFUSED, "30") == (outcome(refusal), refusal.header("Retry-After"))
    assert expected == told
    assert ((409, "in-flight"), ANSWERED, REPLAYED) == (meanwhile.told, outcome(own), outcome(again))
    assert own.body == again.body
    assert (1, None, 0) == (status, acknowledged, operator.status())
    assert [ANSWERED] * 2 == [outcome(answer) for answer in after]
    assert [1] * 5 == [len(ledger.effects(order.case)) for order in (known, forgotten, half, running, refused)]
