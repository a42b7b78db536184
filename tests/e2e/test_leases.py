"""Leases that are renewed while the view runs, whatever the server and however its workers came to be."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.e2e.ledger import Ledger
from tests.e2e.wire import Order, Wire, ask, ask_until_settled

LEASE = 1.0
"""Short enough to outlive three times, long enough for a machine that is busy with other things."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"kind": "sync", "workers": 2}, id="sync"),
        pytest.param({"kind": "gthread"}, id="gthread"),
        pytest.param({"kind": "gevent"}, id="gevent"),
        pytest.param({"kind": "waitress"}, id="waitress"),
        pytest.param({"workers": 2, "arguments": ("--preload",), "config": {"WARM_UP": True}}, id="preloaded"),
    ],
)
def test_b34_view_that_outlives_its_lease_stays_the_only_one(
    serve: Serve, ledger: Ledger, plan: dict[str, Any]
) -> None:
    """
    A view that runs three leases long is never taken over: the lease is renewed while it runs, also in forked workers.
    """
    server = serve(lease=LEASE, **plan)
    order = Order("/deduplicated")
    told = set()
    with Wire(server.port) as wire:
        wire.send(order.attempt("pause"))
        ledger.paused(order.case)
        until = time.monotonic() + 3 * LEASE
        while time.monotonic() < until:
            told.add(ask(server.port, order.attempt()).told)
            time.sleep(0.05)
        ledger.let_go(order.case)
        answer = wire.answer()

    assert told == {(409, "in-flight")}
    assert (answer.status, answer.replayed) == (201, False)
    assert ask(server.port, order.attempt()).body == answer.body
    assert ledger.runs(order.case) == 1


@pytest.mark.slow
def test_b34_renewal_ends_with_max_runtime(serve: Serve, ledger: Ledger) -> None:
    """A view that hangs does not keep its key for ever: after max_runtime its lease is renewed no more."""
    server = serve(lease=LEASE, config={"IDEMPOTENCY_MAX_RUNTIME": 2 * LEASE})
    order = Order("/deduplicated")
    with Wire(server.port) as wire:
        began = time.monotonic()
        wire.send(order.attempt("pause"))
        ledger.paused(order.case)
        successor = ask_until_settled(server.port, order.attempt())
        took = time.monotonic() - began
        ledger.let_go(order.case)
        late = wire.answer()

    assert took > 2 * LEASE
    assert (successor.status, successor.replayed) == (201, False)
    assert (late.status, late.replayed, late.body) == (201, True, successor.body)
