"""Duplicates that arrive together, at processes that know nothing of each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from threading import Barrier

import pytest

from example_app.demo.servers import RedisServer
from tests.e2e.conftest import Serve
from tests.e2e.ledger import PATIENCE_SECONDS, Ledger
from tests.e2e.wire import Answer, Order, Wire
from tests.long import unless_long

PROCESSES = 4
CLIENTS = 32
ROUNDS = unless_long(30, long=150)
ROUNDS_IN_STEP = unless_long(8, long=50)


class Crowd:
    """Clients that send the same bytes at the same moment, over connections that stay open."""

    def __init__(self, ports: list[int]) -> None:
        self.wires = [Wire(ports[number % len(ports)]) for number in range(CLIENTS)]
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._together = Barrier(CLIENTS)

    def send(self, data: bytes) -> list[Future[Answer]]:
        return [self._pool.submit(self._send, wire, data) for wire in self.wires]

    def _send(self, wire: Wire, data: bytes) -> Answer:
        self._together.wait(PATIENCE_SECONDS)
        return wire.send(data).answer()

    def close(self) -> None:
        for wire in self.wires:
            wire.close()
        self._pool.shutdown()


@pytest.fixture
def crowd(serve: Serve, redis_server: RedisServer) -> Iterator[Crowd]:
    crowd = Crowd([serve(redis_server, name=f"{number}").port for number in range(PROCESSES)])
    yield crowd
    crowd.close()


def refused(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.told == (409, "in-flight")]


@pytest.mark.slow
def test_a1_duplicates_that_arrive_together_run_once(crowd: Crowd, ledger: Ledger) -> None:
    """
    Of 32 duplicates at 4 processes one runs; the others are told so or get its answer, and in the end all have it.
    """
    seen = Counter[str]()
    for _ in range(ROUNDS):
        order = Order("/plain")
        answers = [future.result(PATIENCE_SECONDS) for future in crowd.send(order.attempt())]

        assert ledger.runs(order.case) == 1
        assert_one_answer(crowd, order, answers)
        seen.update(f"{answer.status} {answer.code or answer.replayed}" for answer in answers)

    # The race is one only if duplicates met a request that was running, and one that had just ended.
    assert seen["201 False"] == ROUNDS
    assert seen["409 in-flight"] > 0
    assert seen["201 True"] > 0


@pytest.mark.slow
def test_a1_duplicates_of_a_running_request_are_all_refused(crowd: Crowd, ledger: Ledger) -> None:
    """
    While one of 32 runs, the 31 others are refused, whichever process they ask; afterwards all get the one answer.
    """
    for _ in range(ROUNDS_IN_STEP):
        order = Order("/plain")
        finished = as_completed(crowd.send(order.attempt("pause")), PATIENCE_SECONDS)
        answers = [next(finished).result() for _ in range(CLIENTS - 1)]
        ledger.let_go(order.case)
        answers.append(next(finished).result())

        assert len(refused(answers)) == CLIENTS - 1
        assert ledger.runs(order.case) == 1
        assert_one_answer(crowd, order, answers)


def assert_one_answer(crowd: Crowd, order: Order, answers: list[Answer]) -> None:
    """Every client has the one answer, or has been refused and gets it now."""
    given = [answer for answer in answers if answer.status == 201]
    assert len(given) + len(refused(answers)) == CLIENTS
    for wire, answer in zip(crowd.wires, answers, strict=True):
        if answer.status == 409:
            assert answer.header("Retry-After") is not None
            given.append(wire.send(order.attempt()).answer())
    assert {answer.body for answer in given} == {given[0].body}
    assert sum(not answer.replayed for answer in given) == 1
