"""Primaries that die or fall silent under the eyes of clients: right answers or 503, and right answers again soon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from example_app.demo.servers import RedisServer
from tests.e2e.conftest import Figures, Serve
from tests.e2e.ledger import Ledger
from tests.e2e.losses import LEASE, RULES, Operator, ask_until, ask_until_acknowledged, decided, key_made_now
from tests.e2e.wire import Answer, Order, Wire, ask
from tests.lab.cluster import ClusterRig, ClusterRigs
from tests.lab.nodes import Node
from tests.lab.programs import REDIS_KINDS
from tests.lab.sentinel import SentinelRigs
from tests.tooling.processes import eventually

KIND = REDIS_KINDS[0]


@pytest.fixture
def cluster(cluster_rigs: ClusterRigs) -> ClusterRig:
    return cluster_rigs.get(KIND)


def tenants_of(rig: ClusterRig, pay: Callable[[Order], Answer]) -> Iterator[tuple[Order, Node]]:
    """Orders that are answered, each of a tenant of its own, and the primaries that keep them."""
    number = 0
    with rig.client() as client:
        while True:
            number += 1
            before = set(client.scan_iter(match="*:r:*"))
            order = of_tenant(f"tenant{number}")
            assert pay(order).status == 201
            (record,) = set(client.scan_iter(match="*:r:*")) - before
            yield order, rig.primary_of(record)


def of_tenant(name: str, **told: Any) -> Order:
    return Order("/plain", headers=(("Authorization", f"Bearer {name}/alice"),), **told)


def another(order: Order, **told: Any) -> Order:
    """Of the same tenant, and so in the same partition."""
    return Order("/plain", headers=order.headers, **told)


class Watch:
    """A client that asks the same thing over and over, and writes down what it is told until it is right again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.refusals = set[tuple[int, str | None]]()

    def until(self, data: bytes, right: Callable[[Answer], bool]) -> tuple[Answer, float]:
        """The right answer, and for how many seconds there was none."""
        began = time.monotonic()

        def done(answer: Answer) -> bool:
            if not right(answer):
                self.refusals.add(answer.told)
            return right(answer)

        return ask_until(self._port, data, done), time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["Cluster", "Sentinel"])
def test_a_primary_that_dies_is_replaced_and_only_503_is_told_meanwhile(
    request: pytest.FixtureRequest,
    serve: Serve,
    ledger: Ledger,
    ledger_server: RedisServer,
    topology: str,
    figures: Figures,
) -> None:
    """By the servers' own doing. What was answered replays, what is in flight ends, and new keys wait for a person."""
    rigs: ClusterRigs | SentinelRigs = request.getfixturevalue(f"{topology.lower()}_rigs")
    rig = rigs.get(KIND)
    server = serve(rig.url, lease=LEASE, config=RULES)
    known = of_tenant("acme")
    answer = ask(server.port, known.attempt("effect"))
    running = another(known)
    with Wire(server.port) as wire:
        wire.send(running.attempt("pause", "effect"))
        ledger.paused(running.case)
        primary = keeper_of(rig)
        heirs_are_in_step(rig, primary)
        primary.kill()
        watch = Watch(server.port)
        replay, seconds = watch.until(known.attempt("effect"), lambda answer: answer.replayed)
        new = another(known)
        refused, _ = watch.until(new.attempt("effect"), decided)
        later, _ = watch.until(
            another(known, key=key_made_now()).attempt("effect"), lambda answer: answer.status == 201
        )
        ledger.let_go(running.case)
        own = wire.answer()
    again, _ = watch.until(running.attempt("effect"), lambda answer: answer.replayed)
    acknowledged = ask_until_acknowledged(Operator(rig.url, ledger=ledger_server.url, config=RULES))
    ran, _ = watch.until(new.attempt("effect"), lambda answer: answer.status == 201)

    figures(topology=topology, seconds_until_the_first_right_answer=round(seconds, 2))
    assert (503, "memory-lost") == refused.told
    assert watch.refusals <= {(503, "store-unavailable"), (503, "memory-lost"), (409, "in-flight")}
    assert (answer.body, own.body) == (replay.body, again.body)
    assert (None, False, False) == (acknowledged, ran.replayed, later.replayed)
    assert [1] * 3 == [len(ledger.effects(order.case)) for order in (known, running, new)]


def keeper_of(rig: Any) -> Node:
    """Whoever keeps the only records there are."""
    if not isinstance(rig, ClusterRig):
        found: Node = rig.primary
        return found
    with rig.client() as client:
        return rig.primary_of(next(client.scan_iter(match="*:r:*")))


def heirs_are_in_step(rig: Any, primary: Node) -> None:
    for heir in [rig.replica_of(primary)] if isinstance(rig, ClusterRig) else rig.replicas:
        heir.has_all_of(primary)


@pytest.mark.slow
def test_while_a_node_and_its_replica_are_silent_the_others_serve_theirs(
    serve: Serve, cluster: ClusterRig, ledger: Ledger, figures: Figures
) -> None:
    """Whose keys are there gets 503, in bounded time, and runs nothing; whoever else's are not, notices nothing."""
    server = serve(cluster.url, lease=LEASE, config=RULES)
    tenants = tenants_of(cluster, lambda order: ask(server.port, order.attempt()))
    dark, silent = next(tenants)
    light = next(order for order, node in tenants if node is not silent)
    running = another(light)
    new, attempts = another(dark), [another(light) for _ in range(8)]
    with Wire(server.port) as theirs, Wire(server.port) as ours:
        theirs.send(running.attempt("pause", "effect"))
        ledger.paused(running.case)
        pair = cluster.replica_of(silent), silent
        for node in pair:
            node.pause()
        began = time.monotonic()
        ours.send(new.attempt("effect"))
        served = [ask(server.port, order.attempt("effect")).told for order in attempts]
        refused = ours.answer()
        seconds = time.monotonic() - began
        meanwhile = ask(server.port, running.attempt("effect"))
        ledger.let_go(running.case)
        own = theirs.answer()
    for node in pair:
        node.resume()

    replay = ask_until(server.port, dark.attempt(), lambda answer: answer.replayed)

    figures(seconds_to_a_503=round(seconds, 2))
    assert (503, "store-unavailable") == refused.told
    assert refused.header("Retry-After") is not None
    assert [(201, None)] * len(attempts) == served
    assert ((409, "in-flight"), 201) == (meanwhile.told, own.status)
    assert (201, 0, 0) == (replay.status, ledger.runs(new.case), len(ledger.effects(dark.case)))


@pytest.mark.slow
def test_21_what_not_all_replicas_have_is_not_run(serve: Serve, cluster: ClusterRig, ledger: Ledger) -> None:
    """
    With IDEMPOTENCY_REPLICAS and a silent replica: 503, the view is not entered, and the key is free again afterwards.
    """
    server = serve(cluster.url, lease=LEASE, config={**RULES, "IDEMPOTENCY_REPLICAS": 1})
    known, primary = next(tenants_of(cluster, lambda order: ask(server.port, order.attempt())))
    replica = cluster.replica_of(primary)
    new = another(known)
    replica.pause()
    refused = ask(server.port, new.attempt("effect"))
    entered = ledger.runs(new.case)
    replay = ask(server.port, known.attempt())
    replica.resume()
    with cluster.client() as client:
        assert eventually(lambda: len(list(client.scan_iter(match="*:r:*"))) == 1)  # long before its lease could lapse
    ran = ask_until(server.port, new.attempt("effect"), lambda answer: answer.status != 503)

    assert ((503, "store-unavailable"), 0) == (refused.told, entered)
    assert (201, True) == (replay.status, replay.replayed)
    assert (201, False, 1) == (ran.status, ran.replayed, len(ledger.effects(new.case)))
