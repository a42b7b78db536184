"""Durable steps over a line that loses, delays and freezes what passes: each effect happens once, outside of the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import pytest
from flask import Flask
from sqlalchemy import create_engine, make_url, text

from example_app.demo.servers import RedisServer
from flask_idempotency.testing import TcpProxy
from tests.e2e.books import Books
from tests.e2e.conftest import Serve
from tests.e2e.ledger import Ledger
from tests.e2e.losses import LEASE as RULED_LEASE
from tests.e2e.losses import RULES, Scene, ask_until, decided, emptied, failed_over, set_back
from tests.e2e.processes import Plan, Server
from tests.e2e.purchases import Purchase
from tests.e2e.step_shop import APPLICATION, create_app
from tests.e2e.wire import Answer, Order, Wire, ask, ask_until_settled
from tests.forgiving import make_ready
from tests.lab.postgres import PostgresServer
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers, StartRedis, connect
from tests.lab.sentinel import SentinelRigs
from tests.tooling.processes import eventually

LEASE: Final = 60.0
"""No renewal is between two calls of a step: its loss would be another one."""

Lose = Callable[[TcpProxy], None]


@dataclass(frozen=True)
class Shop:
    """A server of the victim that reaches its store through a line."""

    server: Server
    line: TcpProxy
    ledger: Ledger
    redis: RedisServer | None
    books: Books | None

    def did(self, purchase: Purchase) -> list[int]:
        """How often the functions of its steps ran."""
        return [len(self.ledger.noted(name, purchase.order.case)) for name in ("reserve", "charge", "mail")]

    def content(self) -> Any:
        """Every byte that the store has."""
        if self.redis is not None:
            with connect(self.redis.url) as client:
                return {key: client.dump(key) for key in client.scan_iter()}
        assert self.books is not None
        engine = create_engine(self.books.url)
        with engine.connect() as connection:
            rows = [
                connection.execute(text(f"SELECT * FROM {table} ORDER BY 1, 2")).all()  # noqa: S608
                for table in ("idempotency_records", "idempotency_steps")
            ]
        engine.dispose()
        return rows

    def arrived(self) -> Callable[[], bool]:
        """Whether a delayed request has arrived since now, and the server has acted on it."""
        if self.redis is not None:
            before = _scripts(self.redis)
            return lambda: _scripts(self.redis) > before
        # The connection that brings it has lost its client, and ends behind it.
        connections = self._connections()
        return lambda: self._connections() < connections

    def _connections(self) -> int:
        assert self.books is not None
        return self.books.ask("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")


def _scripts(server: RedisServer | None) -> int:
    assert server is not None
    with connect(server.url) as client:
        return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])


KINDS: Final = (REDIS_KINDS[0], "postgresql")
"""Each in one process of a run, so that its servers start once: see `tests/stages.py`."""


@pytest.fixture(scope="module", params=KINDS)
def shop(request: pytest.FixtureRequest, ledger_server: RedisServer) -> Iterator[Shop]:
    redis, books, servers = None, None, request.getfixturevalue("redis_servers")
    assert isinstance(servers, RedisServers)
    with ExitStack() as ends:
        if request.param == "postgresql":
            postgres: PostgresServer = request.getfixturevalue("postgres_server")
            books = Books(postgres.url(ends.enter_context(postgres.database())))
            ends.callback(books.close)
            # Every chunk counts: the test chooses the one behind a pause of the view.
            line = ends.enter_context(TcpProxy(postgres.port, marker=b""))
            url = make_url(books.url).set(port=line.port).render_as_string(hide_password=False)
        else:
            redis = ends.enter_context(RedisServer(servers.program(request.param)))
            make_ready(redis.url)
            line = ends.enter_context(TcpProxy(redis.port))
            url = line.url
        plan = Plan(url, lease=LEASE, app=APPLICATION)
        server = ends.enter_context(Server(plan, ledger=ledger_server.url))
        ledger = Ledger(ledger_server.url)
        ends.callback(ledger.close)
        shop = Shop(server, line, ledger, redis, books)
        for path in ("/mail", "/order"):
            # The store gets the whole text of a script that it has not run, at a second try: the proxy would lose that one.
            for attempt in ("status:503", ""):
                ask(server.port, Order(path).attempt(attempt))
        yield shop


def bought(shop: Shop, purchase: Purchase, *steps: str, at: str, during: Callable[[], Any]) -> list[Answer]:
    """Buy, and return each response that the client gets. `during` is while the first attempt pauses at this point."""
    with Wire(shop.server.port) as wire:
        wire.send(purchase.order.attempt(f"pause:{at}", *steps))
        shop.ledger.paused(purchase.order.case)
        during()
        shop.ledger.let_go(purchase.order.case)
        answers = [wire.answer()]
    while answers[-1].status != 201:
        assert len(answers) < 4, answers
        answers.append(ask_until_settled(shop.server.port, purchase.order.attempt()))
    return answers


CALLS: Final = {
    "begin": ("after-reserve", ()),
    "finish": ("in-charge", ()),
    "release": ("after-mail", ("status:503",)),
    "complete": ("after-mail", ()),
}


@pytest.mark.parametrize("lose", (TcpProxy.lose_request, TcpProxy.lose_reply), ids=("request", "reply"))
@pytest.mark.parametrize("call", CALLS)
def test_23_a_call_that_is_lost_once_runs_nothing_twice(shop: Shop, lose: Lose, call: str) -> None:
    purchase, (at, steps) = Purchase(Order("/mail")), CALLS[call]
    before = list[int]()

    def loses() -> None:
        before.append(shop.line.requests)
        lose(shop.line)

    bought(shop, purchase, *steps, at=at, during=loses)

    assert shop.line.requests > before[0] + 1
    assert [1, 1, 1] == shop.did(purchase)


def test_27_a_begin_that_arrives_behind_its_finish_changes_no_byte(shop: Shop) -> None:
    purchase = Purchase(Order("/mail"))
    with Wire(shop.server.port) as wire:
        wire.send(purchase.order.attempt("pause:after-reserve", "pause:after-charge"))
        shop.ledger.paused(purchase.order.case)
        shop.line.delay_request()
        shop.ledger.let_go(purchase.order.case)
        shop.ledger.paused(purchase.order.case)
        before, has_arrived = shop.content(), shop.arrived()
        shop.line.deliver()
        assert eventually(has_arrived)
        assert before == shop.content()
        shop.ledger.let_go(purchase.order.case)
        answer = wire.answer()

    assert 201 == answer.status
    assert [1, 1, 1] == shop.did(purchase)


@pytest.mark.parametrize(
    ("lose", "told", "runs"),
    ((TcpProxy.lose_reply, [201], 1), (TcpProxy.lose_request, [503, 201], 2)),
    ids=("reply", "request"),
)
def test_29_the_journal_decides_a_commit_that_was_cut(shop: Shop, lose: Lose, told: list[int], runs: int) -> None:
    if shop.books is None:
        pytest.skip("Redis has no COMMIT")
    purchase = Purchase(Order("/order"))
    answers = bought(shop, purchase, at="committing", during=lambda: lose(shop.line))

    assert told == [answer.status for answer in answers]
    assert {None, "request-paused"} >= {answer.code for answer in answers}
    assert runs == shop.ledger.runs(purchase.order.case)
    assert [answers[-1].json["save"]] == shop.books.payments()[purchase.order.case]


def test_31_a_redis_that_freezes_at_a_begin_leaves_nothing_in_doubt(
    start_redis: StartRedis, serve_once: Serve, ledger: Ledger
) -> None:
    """It stays frozen until the client has its answer. What was sent by then arrives afterwards."""
    redis, purchase = start_redis(), Purchase(Order("/mail"))
    url = f"{redis.url}?socket_timeout=1&socket_connect_timeout=1"
    make_ready(redis.url)
    server = serve_once(url, app=APPLICATION)
    with Wire(server.port) as wire:
        wire.send(purchase.order.attempt("pause:after-reserve"))
        ledger.paused(purchase.order.case)
        redis.pause()
        try:
            ledger.let_go(purchase.order.case)
            first = wire.answer()
            assert [] == ledger.noted("charge", purchase.order.case)
        finally:
            redis.resume()
    answer = ask_until_settled(server.port, purchase.order.attempt())

    assert (503, "request-paused") == first.told
    assert (201, 2) == (answer.status, answer.json["attempt"])
    assert [1, 1, 1] == [len(ledger.noted(name, purchase.order.case)) for name in ("reserve", "charge", "mail")]


def forgetful(request: pytest.FixtureRequest, loss: str) -> Scene:
    if loss == "lagging replica":
        rigs: SentinelRigs = request.getfixturevalue("sentinel_rigs")
        return failed_over(rigs.get(REDIS_KINDS[0]))
    start: StartRedis = request.getfixturevalue("start_redis")
    return emptied(start()) if loss == "emptied" else set_back(start())


def acknowledge(app: Flask) -> None:
    """Do as an operator who tries until the grace period is over."""
    told = ["--yes", "--actor", "e2e", "--reason", "it was us"]
    assert eventually(lambda: app.test_cli_runner().invoke(args=["idempotency", "redis", "ack", *told]).exit_code == 0)


def test_57_a_worker_whose_redis_was_emptied_begins_no_step(
    request: pytest.FixtureRequest, serve_once: Serve, ledger: Ledger, ledger_server: RedisServer
) -> None:
    """No key runs until an operator has looked."""
    scene = forgetful(request, "emptied")
    server = serve_once(scene.url, lease=RULED_LEASE, config=RULES, app=APPLICATION)
    purchase, other = Purchase(Order("/mail")), Purchase(Order("/mail"))
    with Wire(server.port) as wire:
        wire.send(purchase.order.attempt("pause:after-reserve"))
        ledger.paused(purchase.order.case)
        scene.lose()
        ledger.let_go(purchase.order.case)
        answer = wire.answer()
    refused = [ask(server.port, each.order.attempt()) for each in (purchase, other, purchase)]

    assert answer.status in (409, 503)
    assert [(503, "memory-lost")] * 3 == [each.told for each in refused]
    assert [(1, 0), (0, 0)] == [
        (len(ledger.noted("reserve", case)), len(ledger.noted("charge", case)))
        for case in (purchase.order.case, other.order.case)
    ]
    acknowledge(create_app(scene.url, ledger=ledger_server.url, config={**RULES, "IDEMPOTENCY_LEASE": RULED_LEASE}))
    answers = [ask_until_settled(server.port, each.order.attempt()) for each in (purchase, other)]

    assert [201, 201] == [each.status for each in answers]
    assert [1, 1] == [len(ledger.noted("charge", each.order.case)) for each in (purchase, other)]
    assert 1 == len(set(ledger.noted("reserve", purchase.order.case)))


@pytest.mark.parametrize("loss", ("older snapshot", pytest.param("lagging replica", marks=pytest.mark.matrix)))
def test_57_a_step_that_redis_has_forgotten_is_never_run_again(
    request: pytest.FixtureRequest, serve_once: Serve, ledger: Ledger, ledger_server: RedisServer, loss: str
) -> None:
    """Of one request the charge was recorded in what was lost, of the other it had begun before. Their worker is dead.

    Only each request as a whole can be settled.
    """
    scene = forgetful(request, loss)
    server = serve_once(scene.url, lease=RULED_LEASE, config=RULES, app=APPLICATION)
    lost, in_doubt = Purchase(Order("/mail")), Purchase(Order("/mail"))
    with Wire(server.port) as first, Wire(server.port) as second:
        first.send(lost.order.attempt("pause:after-reserve", "die:keeping"))
        second.send(in_doubt.order.attempt("pause:in-charge"))
        for purchase in (lost, in_doubt):
            ledger.paused(purchase.order.case)
        scene.secure()
        ledger.let_go(lost.order.case)
        assert first.ended()
        assert second.ended()
    scene.lose()

    def lease_is_over(answer: Answer) -> bool:
        # A worker takes the place of a dead one before the lease is over.
        return decided(answer) and answer.code != "in-flight"

    asked = (lost, in_doubt, lost, in_doubt)
    told = [ask_until(server.port, each.order.attempt(), lease_is_over).told for each in asked]

    assert [(409, "outcome-unknown")] * 4 == told
    assert [(1, 1, 1), (1, 1, 0)] == [
        tuple(len(ledger.noted(name, each.order.case)) for name in ("reserve", "charge", "mail"))
        for each in (lost, in_doubt)
    ]
    app = create_app(scene.url, ledger=ledger_server.url, config={**RULES, "IDEMPOTENCY_LEASE": RULED_LEASE})
    cli = app.test_cli_runner()
    reserved = ("reserve", "finished")
    for purchase, reason, steps in (
        (lost, "memory-lost", [reserved]),
        (in_doubt, "lease-expired", [reserved, ("charge", "in doubt")]),
    ):
        named = ("--key", purchase.order.key)
        shown = json.loads(cli.invoke(args=["idempotency", "show", *named, "--json"]).stdout)
        assert (reason, steps) == (shown["reason"], [(step["name"], step["state"]) for step in shown["steps"]])
        because = ("--reason", "seen", "--actor", "e2e", "--yes")
        happened = ("--step", "charge", "--happened", "--result", '"ch_1"')
        for settled in (happened, ("--step", "charge", "--never-happened", "--force"), ("--resume",)):
            refused = cli.invoke(args=["idempotency", "resolve", *named, *because, *settled])
            assert 1 == refused.exit_code, refused.output
        assert (409, "outcome-unknown") == ask(server.port, purchase.order.attempt()).told
