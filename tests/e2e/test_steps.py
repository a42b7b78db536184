"""Durable steps in real workers: they are killed, stopped and cut off, and each effect is counted outside of the store."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import pytest

from example_app.demo.servers import RedisServer
from tests.e2e.books import Books
from tests.e2e.conftest import Figures
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Plan, Server, is_paused, pause, resume
from tests.e2e.purchases import Purchase
from tests.e2e.step_shop import APPLICATION, EFFECTS, create_app
from tests.e2e.test_transactional_kills import Doom
from tests.e2e.wire import Order, Wire, ask, ask_until_settled
from tests.forgiving import make_ready
from tests.lab.postgres import PostgresServer
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import RedisServers
from tests.tooling.processes import eventually

LEASE: Final = 0.4
"""Only retries of a dead worker wait for its end. A worker that is late keeps its claim, as no other asks for it."""


@dataclass(frozen=True)
class Shop:
    """A server of the victim, and what was done outside of its store."""

    server: Server
    url: str
    ledger: Ledger
    ledger_url: str
    books: Books | None

    @property
    def port(self) -> int:
        return self.server.port

    def order(self, path: str = "/checkout") -> Purchase:
        return Purchase(Order(path))

    def dies(self, purchase: Purchase, point: str) -> None:
        """Send it to a worker that is killed at this point."""
        assert purchase.attempt(self.port, f"die:{point}") is None

    @contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """Stop a worker, but not in the middle of a write: a lock that it holds would stop every other worker too."""
        try:
            while True:
                pause(pid)
                assert eventually(lambda: is_paused(pid))
                if self.books is None or not self.books.locked():
                    break
                resume(pid)
            yield
        finally:
            resume(pid)

    def did(self, purchase: Purchase) -> dict[str, int]:
        """How often the function of each step ran."""
        return {name: len(self.ledger.noted(name, purchase.order.case)) for name in EFFECTS}

    def keys(self, purchase: Purchase, name: str) -> set[str]:
        """The downstream keys under which it ran."""
        return set(self.ledger.noted(name, purchase.order.case))

    def payments(self, purchase: Purchase) -> list[str] | None:
        """The ids of its rows. None if it has no database."""
        return None if self.books is None else self.books.payments().get(purchase.order.case, [])


KINDS: Final = (*REDIS_KINDS, "postgresql", "sqlite", "tiered")
"""Each in one process of a run, so that its servers start once: see `tests/stages.py`."""


@pytest.fixture(scope="module", params=KINDS)
def shop(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ledger_server: RedisServer
) -> Iterator[Shop]:
    """Two workers. Each kind of store has them once for all tests of this module."""
    kind: str = request.param
    servers: RedisServers = request.getfixturevalue("redis_servers")
    with ExitStack() as ends:
        books = None
        config: dict[str, object] = {"IDEMPOTENCY_MAX_WAITERS": 64}
        if kind in REDIS_KINDS:
            url = ends.enter_context(RedisServer(servers.program(kind))).url
            make_ready(url)
        else:
            if kind == "sqlite":
                url = f"sqlite:///{tmp_path_factory.mktemp('steps') / 'shop.sqlite'}"
            else:
                postgres: PostgresServer = request.getfixturevalue("postgres_server")
                url = postgres.url(ends.enter_context(postgres.database()))
            if kind == "tiered":
                config["IDEMPOTENCY_REDIS_URL"] = ends.enter_context(RedisServer(servers.program(REDIS_KINDS[0]))).url
            books = Books(url)
            ends.callback(books.close)
        plan = Plan(url, workers=2, threads=8, lease=LEASE, app=APPLICATION, arguments=("--preload",), config=config)
        server = ends.enter_context(Server(plan, ledger=ledger_server.url))
        ledger = Ledger(ledger_server.url)
        ends.callback(ledger.close)
        yield Shop(server, url, ledger, ledger_server.url, books)


def test_3_a_worker_that_dies_in_its_charge_keeps_all_others_out(shop: Shop) -> None:
    purchase = shop.order()
    shop.dies(purchase, "in-charge")

    told = [ask_until_settled(shop.port, purchase.order.attempt()).told for _ in range(2)]

    assert [(409, "outcome-unknown")] * 2 == told
    assert 1 == shop.ledger.runs(purchase.order.case), "no retry enters the view"
    assert {"reserve": 1, "charge": 1, "save": 0, "mail": 0} == shop.did(purchase)
    app = create_app(shop.url, ledger=shop.ledger_url, config={})
    shown = app.test_cli_runner().invoke(args=["idempotency", "show", "--key", purchase.order.key, "--json"])
    assert 0 == shown.exit_code, shown.output
    assert [("reserve", "finished"), ("charge", "in doubt")] == [
        (each["name"], each["state"]) for each in json.loads(shown.stdout)["steps"]
    ]


def test_5_a_retry_passes_the_steps_that_are_recorded(shop: Shop) -> None:
    purchase = shop.order()
    shop.dies(purchase, "written-4")

    answer = ask_until_settled(shop.port, purchase.order.attempt())

    assert (201, 2) == (answer.status, answer.json["attempt"])
    assert {"reserve": 1, "charge": 1, "save": 1, "mail": 1} == shop.did(purchase)
    assert shop.payments(purchase) in (None, [answer.json["save"]])


@pytest.mark.parametrize("step", ("reserve", "charge"))
def test_11_a_worker_that_was_overtaken_between_two_steps_begins_none(shop: Shop, step: str) -> None:
    """It delivers the response of the retry. A transactional step needs no store to begin, and is rolled back."""
    purchase = shop.order()
    with Wire(shop.port) as wire:
        wire.send(purchase.order.attempt(f"pause:after-{step}"))
        with shop.stopped(shop.ledger.paused(purchase.order.case)):
            answer = ask_until_settled(shop.port, purchase.order.attempt())
            shop.ledger.let_go(purchase.order.case)
        late = wire.answer()

    assert (201, 2) == (answer.status, answer.json["attempt"])
    assert (201, answer.body) == (late.status, late.body)
    did = shop.did(purchase)
    assert did.pop("save") in ((1, 2) if step == "charge" and shop.books is not None else (1,))
    assert {"reserve": 1, "charge": 1, "mail": 1} == did
    assert shop.payments(purchase) in (None, [answer.json["save"]])


def test_a_worker_that_was_stopped_in_its_charge_ends_the_quarantine(shop: Shop) -> None:
    """No retry goes on beside it. Its finish is accepted, however late, and the request ends as if it had not slept."""
    purchase = shop.order()
    with Wire(shop.port) as wire:
        wire.send(purchase.order.attempt("pause:in-charge"))
        with shop.stopped(shop.ledger.paused(purchase.order.case)):
            refused = ask_until_settled(shop.port, purchase.order.attempt())
            shop.ledger.let_go(purchase.order.case)
        late = wire.answer()
    again = ask(shop.port, purchase.order.attempt())

    assert (409, "outcome-unknown") == refused.told
    assert (201, 1) == (late.status, late.json["attempt"])
    assert (True, late.body) == (again.replayed, again.body)
    assert 1 == shop.ledger.runs(purchase.order.case)
    assert {"reserve": 1, "charge": 1, "save": 1, "mail": 1} == shop.did(purchase)


def test_a_paused_key_is_not_another_requests(shop: Shop) -> None:
    purchase = shop.order("/mail")
    paused = ask(shop.port, purchase.order.attempt("status:503"))
    other = replace(purchase.order, body=b'{"amount": 200}')
    refused = ask(shop.port, other.attempt())
    answer = ask(shop.port, purchase.order.attempt())

    assert (503, "paused") == (paused.status, paused.header("Idempotency-Status"))
    assert (422, 201) == (refused.status, answer.status)
    assert 2 == shop.ledger.runs(purchase.order.case)
    assert {"reserve": 1, "charge": 1, "save": 0, "mail": 1} == shop.did(purchase)


POINTS: Final = (
    "claimed",
    "entered",
    "entered-save",
    "in-save",
    "committing",
    "committed",
    "after-save",
    "in-mail",
    "after-mail",
    "keeping",
    "kept",
)


def test_7_a_step_happens_once_whenever_its_worker_dies(shop: Shop) -> None:
    """In a SQL database it is transactional: there is one row. Redis has a deduplicated one, under the same key again."""
    for point in POINTS:
        if point.startswith("commit") and shop.books is None:
            continue
        purchase = shop.order("/order")
        shop.dies(purchase, point)

        answer = ask_until_settled(shop.port, purchase.order.attempt())

        assert (201, point == "kept") == (answer.status, answer.replayed), point
        assert shop.payments(purchase) in (None, [answer.json["save"]]), point
        assert [1, 1] == [len(shop.keys(purchase, name)) for name in ("save", "mail")], point


ROUNDS: Final = 500
LONGEST_SECONDS: Final = 0.05


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shop", ["postgresql", "sqlite", "tiered"], indirect=True)
def test_7_five_hundred_random_kills_cost_no_row(shop: Shop, figures: Figures) -> None:
    """A worker is killed up to 50 ms after it has reached some point, whatever it does then."""
    purchases = [shop.order("/order") for _ in range(ROUNDS)]
    with closing(Doom(shop.ledger, POINTS, longest=LONGEST_SECONDS)) as doom, ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda purchase: purchase.pay(shop.port, doom.step()), purchases))
    assert shop.books is not None
    rows = shop.books.payments()
    figures(
        rounds=ROUNDS,
        rows=sum(map(len, rows.values())),
        workers_killed=doom.kills,
        attempts_without_a_response=sum(purchase.lost for purchase in purchases),
        views_entered=sum(shop.ledger.runs(purchase.order.case) for purchase in purchases),
        refused=dict(Counter(answer.told for purchase in purchases for answer in purchase.answers)),
    )
    for purchase in purchases:
        assert {(201, None), (409, "in-flight"), (503, "request-paused")} >= {each.told for each in purchase.answers}
        assert [purchase.answers[-1].json["save"]] == rows[purchase.order.case]
        assert 1 == len({each.json["save"] for each in purchase.paid})
        assert 1 == len(shop.keys(purchase, "mail"))
    assert doom.kills >= ROUNDS // 4


KILLS: Final = 200
CHECKOUT: Final = ("claimed", "entered-reserve", "in-reserve", "entered-charge", "in-charge", "after-charge", "in-save")


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_two_hundred_random_kills_charge_at_most_once(shop: Shop, figures: Figures) -> None:
    """Each checkout ends with its response, or with one charge in doubt that keeps all others out."""

    def buy(purchase: Purchase) -> None:
        step = doom.step()
        while not purchase.answers or purchase.answers[-1].told not in ((201, None), (409, "outcome-unknown")):
            purchase.attempt(shop.port, step)
            step = ""

    purchases = [shop.order() for _ in range(KILLS)]
    with closing(Doom(shop.ledger, CHECKOUT, longest=LONGEST_SECONDS)) as doom, ThreadPoolExecutor(8) as clients:
        list(clients.map(buy, purchases))
    again = [ask(shop.port, purchase.order.attempt()) for purchase in purchases]
    unknown = [purchase for purchase in purchases if purchase.answers[-1].status == 409]
    figures(
        checkouts=KILLS,
        charges=sum(shop.did(purchase)["charge"] for purchase in purchases),
        workers_killed=doom.kills,
        attempts_without_a_response=sum(purchase.lost for purchase in purchases),
        views_entered=sum(shop.ledger.runs(purchase.order.case) for purchase in purchases),
        in_doubt=len(unknown),
        in_doubt_and_charged=sum(shop.did(purchase)["charge"] for purchase in unknown),
    )
    for purchase, answer in zip(purchases, again, strict=True):
        last = purchase.answers[-1]
        assert (last.told, last.body if last.status == 201 else b"") == (
            answer.told,
            answer.body if answer.status == 201 else b"",
        )
        did = shop.did(purchase)
        assert did["charge"] == 1 or (last.status == 409 and did["charge"] == 0), did
        assert (did["save"], did["mail"]) == (0, 0) or last.status == 201
        assert shop.payments(purchase) in (None, [last.json["save"]] if last.status == 201 else [])
        assert all(len(shop.keys(purchase, name)) <= 1 for name in ("reserve", "mail"))
    assert doom.kills >= KILLS // 4
