"""Whatever passes between a worker and its store may be lost once, before or after it has counted: nobody notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from example_app.demo.servers import RedisServer
from flask_idempotency.testing import TcpProxy
from tests.e2e.conftest import Serve
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Server
from tests.e2e.wire import Answer, Order, Wire, ask, ask_until_settled
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers
from tests.tooling.processes import eventually

LEASE = 1.2
"""Renewed after a third: not within any of the orders here but the one that waits for it."""

Lose = Callable[[TcpProxy], None]


@dataclass(frozen=True)
class Transition:
    """One write, and what clients are told of a request in which it was lost and repeated."""

    path: str
    before: tuple[str, ...]
    """What the view does until its next write is the one."""
    after: tuple[str, ...]
    told: int = 201
    retried: tuple[int, str | None, bool] = (201, None, True)
    """Status, problem, and whether it is a replay."""
    runs: int = 1

    @property
    def steps(self) -> tuple[str, ...]:
        return (*self.before, "pause", *self.after)


TRANSITIONS = {
    "mark": Transition("/marked", (), ("point", "effect")),
    "complete": Transition("/plain", ("effect",), ()),
    "release": Transition("/plain", (), ("status:503",), told=503, retried=(201, None, False), runs=2),
    "hold": Transition(
        "/plain", ("point", "effect"), ("status:500",), told=500, retried=(409, "outcome-unknown", False)
    ),
}


@pytest.fixture(scope="module")
def line(redis_servers: RedisServers) -> Iterator[TcpProxy]:
    """The only way to the store that the server has."""
    with RedisServer(redis_servers.program(REDIS_KINDS[0])) as server, TcpProxy(server.port) as line:
        yield line


@pytest.fixture
def server(serve: Serve, line: TcpProxy) -> Server:
    return serve(line.url, lease=LEASE)


@pytest.fixture(params=[TcpProxy.lose_request, TcpProxy.lose_reply], ids=["request", "reply"])
def lose(request: pytest.FixtureRequest) -> Lose:
    chosen: Lose = request.param
    return chosen


@pytest.mark.parametrize("name", TRANSITIONS)
def test_11_lost_once_a_settlement_or_a_mark_counts_once(
    server: Server, line: TcpProxy, ledger: Ledger, lose: Lose, name: str
) -> None:
    """Its client is answered as ever, retries get what it has come to, and the effect happens once."""
    transition = TRANSITIONS[name]
    # What the store has not run before it is told in full, at the second try: then that would be what is lost.
    paid(server, ledger, transition, lambda: None)
    order = Order(transition.path)
    before = list[int]()

    def loss() -> None:
        before.append(line.requests)
        lose(line)

    told = paid(server, ledger, transition, loss, order)
    sent = line.requests - before[0]
    again = ask(server.port, order.attempt("effect"))

    assert sent >= 2
    assert (transition.told, False) == (told.status, told.replayed)
    assert transition.retried == (*again.told, again.replayed)
    assert (transition.runs, 1) == (ledger.runs(order.case), len(ledger.effects(order.case)))


def paid(
    server: Server, ledger: Ledger, transition: Transition, meanwhile: Callable[[], None], order: Order | None = None
) -> Answer:
    """What an order is told. `meanwhile` is while its view waits."""
    order = order or Order(transition.path)
    with Wire(server.port) as wire:
        wire.send(order.attempt(*transition.steps))
        ledger.paused(order.case)
        meanwhile()
        ledger.let_go(order.case)
        return wire.answer()


def test_10_lost_once_a_claim_counts_once(server: Server, line: TcpProxy, ledger: Ledger, lose: Lose) -> None:
    """It is granted to whoever asks again, who is not told that the key is in flight."""
    ask(server.port, Order("/plain").attempt())
    order = Order("/plain")
    before = line.requests
    lose(line)
    answer = ask(server.port, order.attempt("effect"))
    again = ask(server.port, order.attempt("effect"))

    assert line.requests - before >= 4
    assert (201, False) == (answer.status, answer.replayed)
    assert (201, True, answer.body) == (again.status, again.replayed, again.body)
    assert (1, 1) == (ledger.runs(order.case), len(ledger.effects(order.case)))


def test_11_lost_once_a_renewal_is_made_up_for_before_its_lease_ends(
    server: Server, line: TcpProxy, ledger: Ledger, lose: Lose
) -> None:
    """Its view stays the only one, though others may take over whoever falls silent."""
    order = Order("/deduplicated")
    with Wire(server.port) as wire:
        wire.send(order.attempt("pause", "effect"))
        ledger.paused(order.case)
        before = line.requests
        assert eventually(lambda: line.requests > before)  # this one loads the script
        before = line.requests
        lose(line)
        # The lost one, the one in its place, and the next ones: a lease later, and more.
        assert eventually(lambda: line.requests >= before + 5)
        meanwhile = ask(server.port, order.attempt("effect"))
        ledger.let_go(order.case)
        answer = wire.answer()
    again = ask_until_settled(server.port, order.attempt("effect"))

    assert (409, "in-flight") == meanwhile.told
    assert (201, False) == (answer.status, answer.replayed)
    assert (201, True, answer.body) == (again.status, again.replayed, again.body)
    assert (1, 1) == (ledger.runs(order.case), len(ledger.effects(order.case)))
