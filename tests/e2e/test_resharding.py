"""Slots that change their node while their keys are paid with: right answers or 503, and nothing runs twice."""

from __future__ import annotations

from itertools import cycle, islice

import pytest

from example_app.demo.servers import RedisServer
from tests.e2e.conftest import Figures, Serve
from tests.e2e.customers import ALLOWED, Customers, judge, refusals
from tests.e2e.ledger import PATIENCE_SECONDS, Ledger
from tests.e2e.losses import LEASE, RULES, Operator, ask_until_acknowledged
from tests.e2e.purchases import Crowd
from tests.lab.cluster import ClusterRigs, SlotMove, slot_of
from tests.lab.programs import REDIS_KINDS

TENANTS = 4
CLIENTS = 4
MOVES = 24
"""Each of the few slots goes round all nodes, and comes back to where it was."""


@pytest.mark.slow
def test_54_while_slots_move_under_load_nothing_runs_twice(
    cluster_rigs: ClusterRigs, serve: Serve, ledger: Ledger, ledger_server: RedisServer, figures: Figures
) -> None:
    """
    To move a slot loses nothing, but looks like a loss: known keys replay, and new ones wait until it is acknowledged.
    """
    rig = cluster_rigs.get(REDIS_KINDS[0])
    server = serve(rig.url, lease=LEASE, config=RULES)
    operator = Operator(rig.url, ledger=ledger_server.url, config=RULES)
    customers = Customers([server.port], TENANTS, patience=1)
    crowd = Crowd(CLIENTS, customers.buy)
    crowd.buys(2 * TENANTS)
    with rig.client() as client:
        slots = sorted({slot_of(key) for key in client.scan_iter(match="*:r:*")})

    for number, slot in enumerate(islice(cycle(slots), MOVES)):
        source = rig.primary_of(slot)
        others = [node for node in rig.primaries if node is not source]
        SlotMove(rig, slot, to=others[number // len(slots) % 2]).run()
        crowd.wait(0.05)
        if number == MOVES // 2:
            assert ask_until_acknowledged(operator) is None
    acknowledged = ask_until_acknowledged(operator)
    crowd.buys(2 * TENANTS)
    purchases = crowd.stop()
    paid = [customers.insist(purchase, patience=PATIENCE_SECONDS) for purchase in purchases]

    oracle, told = judge(purchases, ledger), refusals(purchases)
    figures(purchases=len(purchases), answers=oracle.answers, slots=len(slots), told=dict(told))
    oracle.check()
    assert acknowledged is None
    assert all(paid)
    assert set(told) <= ALLOWED
    assert [1] * len(purchases) == [len(ledger.effects(purchase.order.case)) for purchase in purchases]
