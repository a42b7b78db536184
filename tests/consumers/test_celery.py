"""Tasks on a real worker, with Redis as their broker: each message takes effect once, whatever befalls it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import chain, chord, states

from example_app.demo.servers import RedisServer
from tests.consumers.celery_shop import add_tasks, make_celery
from tests.consumers.celery_worker import Shop, ShopLedger, Worker, at, freeze, setup_of
from tests.tooling.processes import DEADLINE_SECONDS, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOWS = ("die:before", "die:after")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """The broker, the results, the ledger and the store, each in a database of this server."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def sender(server: RedisServer) -> Iterator[Shop]:
    """The sender's side, without a worker."""
    ledger = ShopLedger(at(server, 2))
    celery_app = make_celery(at(server, 0), at(server, 1))
    add_tasks(celery_app, ledger, transactional=True)
    with redis.Redis.from_url(at(server, 0)) as broker:
        shop = Shop(celery_app, ledger, broker)
        yield shop
        shop.close()


@pytest.fixture(scope="module")
def worker(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Two pool processes that keep their records in Redis. The tests of this module share them."""
    folder = tmp_path_factory.mktemp("worker")
    store = f"{at(server, 3)}?socket_timeout=5&socket_connect_timeout=5"
    worker = Worker(setup_of(server, folder, store=store), folder / "log", "-P", "prefork", "-c", "2")
    yield worker
    worker.kill()


# A worker that is killed.


@pytest.fixture(scope="module")
def killed(sender: Shop, worker: Worker) -> dict[tuple[str, str], tuple[str, Any]]:
    """Messages whose workers are killed, before and after the effect. They take a while, beside the other tests."""
    sent = {}
    for name in ("plain", "marked", "deduplicated"):
        for blow in BLOWS:
            case = sender.case(blow)
            sent[name, blow] = case, sender.task(name).delay(case)
    for blow in ("die:charging", "die:charged"):
        case = sender.case(blow)
        sent["stepped", blow] = case, sender.task("stepped").delay(case)
    case = sender.case(*["die:after"] * 9)
    sent["deduplicated", "always"] = case, sender.task("deduplicated").delay(case)
    return sent


@pytest.fixture
def shop(sender: Shop, worker: Worker, killed: object) -> Shop:
    return sender


@pytest.mark.parametrize("name", ("plain", "marked", "deduplicated"))
def test_a_killed_worker_costs_what_the_effects_say(
    shop: Shop, killed: dict[tuple[str, str], tuple[str, Any]], name: str
) -> None:
    ends = {}
    for blow in BLOWS:
        case, message = killed[name, blow]
        message.get(timeout=DEADLINE_SECONDS, propagate=False)
        ends[blow] = message.state, len(shop.ledger.effects(case)), len(set(shop.ledger.effects(case)))

    match name:
        case "plain":
            assert ends == {"die:before": (states.FAILURE, 0, 0), "die:after": (states.FAILURE, 1, 1)}
            assert {shop.failure(killed[name, blow][1]) for blow in BLOWS} == {"OutcomeUnknown"}
        case "marked":
            assert ends == {"die:before": (states.SUCCESS, 1, 1), "die:after": (states.FAILURE, 1, 1)}
            assert shop.failure(killed[name, "die:after"][1]) == "OutcomeUnknown"
        case "deduplicated":
            # Again, under the same downstream key.
            assert [(state, keys) for state, _, keys in ends.values()] == [(states.SUCCESS, 1)] * 2


def test_a_message_goes_on_behind_the_finished_steps_of_a_killed_worker(
    shop: Shop, killed: dict[tuple[str, str], tuple[str, Any]]
) -> None:
    doubtful, in_doubt = killed["stepped", "die:charging"]
    finished, goes_on = killed["stepped", "die:charged"]

    assert shop.failure(in_doubt) == "OutcomeUnknown"
    assert shop.result(goes_on) > 1
    assert [1, 1] == [len(shop.ledger.effects(case)) for case in (doubtful, finished)]
    assert [0, 1] == [len(shop.ledger.noted("shipped", case)) for case in (doubtful, finished)]


def test_a_task_that_kills_its_worker_each_time_ends(
    shop: Shop, killed: dict[tuple[str, str], tuple[str, Any]]
) -> None:
    """After `max_attempts`, which are 3 here. A bare task goes on without end."""
    case, message = killed["deduplicated", "always"]

    assert shop.failure(message) == "TooManyAttempts"
    assert shop.ledger.runs(case) == 3


def test_a_frozen_worker_finds_its_successors_result(shop: Shop) -> None:
    """Its lease ends, another process takes over, and the late result is dropped: the value is the successor's."""
    case = shop.case("stay:before")
    message = shop.task("deduplicated").delay(case)
    pid = shop.ledger.paused(case)
    freeze(pid)
    try:
        assert shop.result(message) > 1
    finally:
        os.kill(pid, signal.SIGCONT)
    shop.ledger.let_go(case)
    shop.await_idle()

    assert shop.result(message) > 1
    assert len(set(shop.ledger.effects(case))) == 1


# Messages that arrive more than once.


def test_a_message_that_is_delivered_while_it_runs_takes_effect_once(shop: Shop, worker: Worker) -> None:
    """Its broker takes it for lost after two seconds. The copies wait, and are not acknowledged away."""
    case = shop.case("stay:after")
    message = shop.task("patient").delay(case)
    shop.ledger.paused(case)
    shop.sent_again(worker, message.id)
    shop.ledger.let_go(case)

    assert shop.result(message) == 1
    shop.await_idle()
    assert shop.ledger.runs(case) == len(shop.ledger.effects(case)) == 1
    assert shop.result(message) == 1


def test_the_only_copy_left_is_kept_while_its_owner_works(shop: Shop, worker: Worker) -> None:
    """The owner is killed, so its own message is gone with it: the copy that met it in flight runs."""
    case = shop.case("stay:before")
    message, messages = shop.hold_back(shop.task("deduplicated").s(case))
    shop.deliver(messages, times=2)
    pid = shop.ledger.paused(case)
    shop.sent_again(worker, message.id)
    os.kill(pid, signal.SIGKILL)

    assert shop.result(message) == 2
    assert len(set(shop.ledger.effects(case))) == 1


def test_a_chain_whose_head_is_delivered_three_times_runs_each_link_once(shop: Shop) -> None:
    """Replays return the stored value, so that the chain goes on, to messages with the same ids."""
    cases = [shop.case() for _ in range(3)]
    add = shop.task("add")
    links = chain(add.s(1, cases[0]), add.s(cases[1]), add.s(cases[2]))
    last, messages = shop.hold_back(links)

    shop.deliver(messages, times=3)

    assert shop.result(last) == 1111
    shop.await_idle()
    assert [shop.ledger.runs(case) for case in cases] == [1, 1, 1]
    assert shop.result(last) == 1111


def test_a_worker_that_dies_before_the_chain_goes_on_loses_nothing(shop: Shop) -> None:
    """Between our record and Celery's dispatch: the replay dispatches it."""
    first, second = shop.case("die:dispatch"), shop.case()
    add = shop.task("add")

    last = chain(add.s(1, first), add.s(second)).apply_async()

    assert shop.result(last) == 111
    assert [shop.ledger.runs(case) for case in (first, second)] == [1, 1]


def test_links_of_a_message_that_is_delivered_three_times_run_once(shop: Shop) -> None:
    """Celery gives them a new id each time they are sent, and we the same."""
    case, one, two = shop.case(), shop.case(), shop.case()
    add = shop.task("add")
    signature = add.s(1, case)
    signature.link(add.s(one))
    signature.link(add.s(two))

    shop.deliver(shop.hold_back(signature)[1], times=3)

    assert eventually(lambda: bool(shop.ledger.runs(one) and shop.ledger.runs(two)))
    shop.await_idle()
    assert [shop.ledger.runs(each) for each in (case, one, two)] == [1, 1, 1]


def test_a_chord_counts_a_part_that_is_delivered_three_times_once(shop: Shop, worker: Worker) -> None:
    """Its body runs once, and gets every part: that of the first run, and the one that was still at work."""
    doubled, slow, body = shop.case(), shop.case("stay:after"), shop.case()
    patient, add = shop.task("patient"), shop.task("add")
    whole = chord([patient.s(doubled), add.s(4, slow)], add.s(body))
    last, messages = shop.hold_back(whole)

    shop.deliver(messages, times=3)
    shop.ledger.paused(slow)
    shop.sent_again(worker, id_of(messages, slow))
    shop.ledger.let_go(slow)

    assert shop.result(last) == (1 + 41) * 10 + 1
    shop.await_idle()
    assert [shop.ledger.runs(case) for case in (doubled, slow, body)] == [1, 1, 1]


def id_of(messages: list[str], case: str) -> str:
    found = [json.loads(text)["headers"] for text in messages]
    return str(next(headers["id"] for headers in found if case in headers["argsrepr"]))


def test_a_result_that_is_stored_is_not_sent_again(shop: Shop, worker: Worker) -> None:
    """Celery stores it after it has sent links and the chain, so the copy has nothing left to do."""
    case, link = shop.case(), shop.case()
    signature = shop.task("add").s(1, case)
    signature.link(shop.task("add").s(link))
    message, messages = shop.hold_back(signature)
    shop.deliver(messages)
    assert shop.result(message) == 11

    shop.deliver(messages)

    shop.sent_again(worker, message.id)
    shop.await_idle()
    assert shop.ledger.runs(case) == shop.ledger.runs(link) == 1


# Identity.


@pytest.mark.parametrize("name", ("retries", "autoretries"))
def test_a_task_is_retried_as_often_as_without_us(shop: Shop, worker: Worker, name: str) -> None:
    """A retry has the same id, and the record is released. Copies that were sent again have all their retries left."""
    case = shop.case("stay:before")
    message, messages = shop.hold_back(shop.task(name).s(case))
    shop.deliver(messages, times=2)
    shop.ledger.paused(case)
    shop.sent_again(worker, message.id, times=2)
    shop.ledger.let_go(case)

    # A copy that comes between two runs is one more run.
    assert shop.result(message) >= 3
    shop.await_idle()
    assert set(shop.ledger.noted("retries", case)) == {"0", "1", "2"}


def test_a_task_that_replaces_itself_runs_each_step_once(shop: Shop) -> None:
    """All steps have one task id. The host is delivered three times, and ignored when it is replayed."""
    case = shop.case()
    signature = shop.task("descend").s(case, 3)
    message, messages = shop.hold_back(signature)

    shop.deliver(messages, times=3)

    assert shop.result(message) == 4
    shop.await_idle()
    assert shop.ledger.runs(case) == 4


# How a body may end.


def test_a_soft_time_limit_ends_the_body_and_releases_the_record(shop: Shop) -> None:
    case = shop.case("stay:before")
    message = shop.task("hurried").delay(case)
    assert shop.ledger.awaited("ended", case) == "soft"

    shop.task("hurried").apply_async((case,), task_id=message.id)

    assert eventually(lambda: shop.ledger.runs(case) >= 2)
    shop.await_idle()
