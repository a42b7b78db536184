"""The clock of a web host is wrong by a day, or is set while it serves: no decision depends on it."""

from __future__ import annotations

import pytest

from tests.e2e.books import Books
from tests.e2e.conftest import Serve
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Server, kill
from tests.e2e.shop import APPLICATION
from tests.e2e.till import Till
from tests.e2e.wire import Order, Wire, ask, ask_until_settled
from tests.lab.clock import DAY, HOUR, Place, WallClock
from tests.lab.programs import REDIS_KINDS

LEASE = 1.0

on_servers = pytest.mark.parametrize("place", (*REDIS_KINDS, "postgresql"), indirect=True)


def decisions(one: Server, other: Server, ledger: Ledger) -> dict[str, object]:
    """What one host is told of keys that another has used, in every state; and how often each was used."""
    first = Order("/plain")
    told: dict[str, object] = {"new": ask(one.port, first.attempt("effect")).told}
    replay = ask(other.port, first.attempt("effect"))
    told["known"] = replay.told, replay.replayed
    for path in ("/plain", "/deduplicated"):
        order = Order(path)
        with Wire(one.port) as wire:
            wire.send(order.attempt("effect", "pause"))
            worker = ledger.paused(order.case)
            told[f"{path} in flight"] = ask(other.port, order.attempt()).told
            kill(worker)
            assert wire.ended()
        told[f"{path} abandoned"] = ask_until_settled(other.port, order.attempt("effect")).told
        told[f"{path} effects"] = len(ledger.effects(order.case))
    return told


@pytest.mark.slow
@on_servers
def test_39_no_decision_depends_on_the_clock_of_a_web_host(
    place: Place, serve_once: Serve, ledger: Ledger, wall_clock: WallClock
) -> None:
    """
    Two days ahead or behind of the other, and set while it serves: both are told what they are told when it is right.
    """
    preloaded = {"lease": LEASE, "arguments": ("--preload",)}
    one = serve_once(place.url, environment=wall_clock.environment, **preloaded)
    other = serve_once(place.url, **preloaded)
    right = decisions(one, other, ledger)
    assert {"new": (201, None), "/plain abandoned": (409, "outcome-unknown")}.items() <= right.items()

    for wall_clock.ahead in (2 * DAY, -2 * DAY):
        assert [right, right] == [decisions(one, other, ledger), decisions(other, one, ledger)]


@pytest.mark.slow
@pytest.mark.parametrize("place", ("postgresql",), indirect=True)
@pytest.mark.parametrize("step", (HOUR, -HOUR, 2 * DAY), ids=("hour-on", "hour-back", "two-days-on"))
def test_38_a_transactional_view_is_committed_once(
    place: Place, serve_once: Serve, ledger: Ledger, step: float
) -> None:
    """
    Its database's clock ends its lease before it commits: the commit of one of two goes through, and both tell of that.
    """
    books, janitor, order = Books(place.url), Till(place.store), Order("/pay")
    server = serve_once(place.url, app=APPLICATION, lease=30.0)
    with Wire(server.port) as wire:
        wire.send(order.attempt("pause:claimed"))
        ledger.paused(order.case)
        place.set_ahead(step)
        janitor.sweep()
        second = ask(server.port, order.attempt())
        place.set_ahead(0)
        janitor.sweep()
        ledger.let_go(order.case)
        late = wire.answer()
    payments = books.payments()
    books.close()

    assert ((201, None) if step > 0 else (409, "in-flight")) == second.told
    assert (201, step > 0) == (late.status, late.replayed)
    assert [late.json["id"]] == payments[order.case]
    assert step < 0 or second.body == late.body
