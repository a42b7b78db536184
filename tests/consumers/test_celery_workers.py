"""Workers that other tests cannot share: with rows of their own, that are shut down, without a store, and on RabbitMQ."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import states
from sqlalchemy import create_engine, text

from example_app.demo.servers import RedisServer
from tests.consumers.celery_shop import add_tasks, make_celery
from tests.consumers.celery_worker import STOP_SECONDS, Shop, ShopLedger, Worker, at, setup_of
from tests.lab.rabbitmq import RabbitServer
from tests.tooling.processes import DEADLINE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ORDERS = 8

Hire = Callable[..., Worker]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def shop(server: RedisServer) -> Iterator[Shop]:
    ledger = ShopLedger(at(server, 2))
    celery_app = make_celery(at(server, 0), at(server, 1))
    add_tasks(celery_app, ledger, transactional=True)
    with redis.Redis.from_url(at(server, 0)) as broker:
        broker.flushall()
        shop = Shop(celery_app, ledger, broker)
        yield shop
        shop.close()


@pytest.fixture
def hire(server: RedisServer, tmp_path: Path) -> Iterator[Hire]:
    """Starts a worker: `hire("-c", "2", store=…)`."""
    with ExitStack() as ends:

        def hire(*arguments: str, **setup: Any) -> Worker:
            worker = Worker(setup_of(server, tmp_path, **setup), tmp_path / "log", "-P", "prefork", *arguments)
            ends.callback(worker.kill)
            return worker

        yield hire


def rows(url: str) -> dict[str, int]:
    """How many rows each case has."""
    engine = create_engine(url)
    with engine.connect() as connection:
        found = connection.execute(text('SELECT "case", count(*) FROM charges GROUP BY "case"')).all()
    engine.dispose()
    return {str(row[0]): int(row[1]) for row in found}


@pytest.mark.parametrize("kind", ("postgresql", pytest.param("sqlite", marks=pytest.mark.soak)))
def test_rows_and_record_are_one_commit(
    kind: str, shop: Shop, hire: Hire, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Killed before and after the flush, delivered twice, and shut down cold: each message has one row.

    The process that forks the pool has used the same database. After the shutdown the next worker runs the message at once.
    """
    url = f"sqlite:///{tmp_path / 'shop.sqlite'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    setup = {"store": "flask-sqlalchemy://", "database": url}
    worker = hire("-c", "2", **setup)
    charge = shop.task("transactional")
    sent = {}
    for steps in (("die:before",), ("die:after",), ("stay:before",)):
        case = shop.case(*steps)
        sent[case] = charge.delay(case)
    stopped = case
    for _ in range(ORDERS):
        case = shop.case()
        sent[case], messages = shop.hold_back(charge.s(case))
        shop.deliver(messages, times=2)
    shop.ledger.paused(stopped)
    for message in (message for case, message in sent.items() if case != stopped):
        shop.result(message)

    # What the shell does with Ctrl-\: the pool ends at once.
    worker.process.send_signal(signal.SIGQUIT)
    worker.process.wait(STOP_SECONDS)
    hire("-c", "1", **setup)

    assert shop.result(sent[stopped]) >= 2
    shop.await_idle()
    found = rows(url)
    assert {case: found.get(case) for case in sent} == dict.fromkeys(sent, 1)


def test_a_message_is_acknowledged_only_when_its_record_is_durable(shop: Shop, hire: Hire, server: RedisServer) -> None:
    """The store is silent when the body returns, and the process ends after each task: it writes what is left first."""
    with RedisServer() as store:
        worker = hire(
            "-c", "1", "--max-tasks-per-child", "1", store=f"{store.url}?socket_timeout=1&socket_connect_timeout=1"
        )
        case = shop.case("stay:after")
        message = shop.task("impatient").delay(case)
        shop.ledger.paused(case)
        store.pause()
        shop.ledger.let_go(case)
        shop.sent_again(worker, message.id)
        assert not message.ready()
        store.resume()

        assert shop.result(message) == 1
        shop.await_idle()
        assert shop.ledger.runs(case) == len(shop.ledger.effects(case)) == 1


# RabbitMQ.


@pytest.fixture
def rabbit_shop(server: RedisServer, rabbitmq: RabbitServer) -> Iterator[Shop]:
    ledger = ShopLedger(at(server, 2))
    celery_app = make_celery(rabbitmq.url, at(server, 1))
    add_tasks(celery_app, ledger)
    shop = Shop(celery_app, ledger, None)
    yield shop
    shop.close()


def test_rabbitmq(rabbit_shop: Shop, hire: Hire, server: RedisServer, rabbitmq: RabbitServer) -> None:
    """Quorum queues, whose waits RabbitMQ itself delays: a message that waits arrives, and kills cost what effects say."""
    shop = rabbit_shop
    worker = hire("-c", "2", store=at(server, 3), broker=rabbitmq.url)
    sent = {}
    for name in ("plain", "deduplicated"):
        for blow in ("die:before", "die:after"):
            case = shop.case(blow)
            sent[name, blow] = case, shop.task(name).delay(case)
    ends = {}
    for each, (case, message) in sent.items():
        message.get(timeout=DEADLINE_SECONDS, propagate=False)
        ends[each] = message.state, len(set(shop.ledger.effects(case)))
    assert ends == {
        ("plain", "die:before"): (states.FAILURE, 0),
        ("plain", "die:after"): (states.FAILURE, 1),
        ("deduplicated", "die:before"): (states.SUCCESS, 1),
        ("deduplicated", "die:after"): (states.SUCCESS, 1),
    }

    case = shop.case("stay:after")
    message = shop.task("patient").delay(case)
    shop.ledger.paused(case)
    shop.task("patient").apply_async((case,), task_id=message.id)
    shop.sent_again(worker, message.id, times=2)
    shop.ledger.let_go(case)

    assert shop.result(message) == 1
    # RabbitMQ drops what it takes for a circle: the copy that has waited twice arrives all the same.
    shop.sent_again(worker, message.id, times=3)
    assert shop.ledger.runs(case) == len(shop.ledger.effects(case)) == 1
