"""Clocks that disagree, and clocks that somebody has set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from flask_idempotency.engine.capabilities import TaskLog, Verdict
from flask_idempotency.operations.doctor import clock_skew, clock_step
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from tests.operations.checks.judging import worst


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock()


@pytest.fixture
def book(clock: FrozenClock) -> TaskLog:
    return MemoryStore(clock=clock).task_log


def looks(*times: float) -> Callable[[], float]:
    """A host's clock that says this at its first look, and at its next."""
    given: Iterator[float] = iter(times)
    return lambda: next(given)


@pytest.mark.parametrize("ahead", (1, -1))
@pytest.mark.parametrize(
    ("apart", "verdict"),
    ((0.9, Verdict.FINE), (1.1, Verdict.ADVICE), (29.9, Verdict.ADVICE), (30.1, Verdict.FAULT), (86400, Verdict.FAULT)),
)
def test_clocks_that_are_apart_are_told_by_how_far(
    apart: float, verdict: Verdict, ahead: int, book: TaskLog, clock: FrozenClock
) -> None:
    """In either direction."""
    host = clock.now - ahead * apart

    assert verdict is worst(clock_skew(book, host_clock=looks(host, host)))


def test_it_says_which_of_the_two_is_ahead(book: TaskLog, clock: FrozenClock) -> None:
    said = [clock_skew(book, host_clock=looks(host, host))[0].text for host in (clock.now - 5, clock.now + 5)]

    assert [True, True] == ["5.0 s ahead of" in said[0], "5.0 s behind" in said[1]]


def test_a_store_that_takes_long_to_answer_is_not_ahead(book: TaskLog, clock: FrozenClock) -> None:
    """Its clock was read at some moment of this call, and which one nobody knows."""
    assert Verdict.FINE is worst(clock_skew(book, host_clock=looks(clock.now - 50, clock.now + 50)))


@pytest.mark.parametrize(
    ("report", "verdict"),
    (
        pytest.param(None, Verdict.FINE, id="no heartbeat"),
        pytest.param('{"skew_ms":9000,"stepped_ms":0}', Verdict.FINE, id="apart, and steady"),
        pytest.param('{"skew_ms":0,"stepped_ms":-900}', Verdict.FINE, id="a little"),
        pytest.param('{"skew_ms":0,"stepped_ms":1100}', Verdict.ADVICE, id="a second"),
        pytest.param('{"skew_ms":0,"stepped_ms":-40000}', Verdict.FAULT, id="more than a lease"),
        pytest.param('{"skew_ms":0}', Verdict.FINE, id="of another release"),
        pytest.param("[]", Verdict.FINE, id="something else"),
        pytest.param("{", Verdict.FINE, id="nothing that can be read"),
    ),
)
def test_a_clock_that_was_set_is_told(report: str | None, verdict: Verdict, book: TaskLog) -> None:
    if report is not None:
        book.report("heartbeat", report)

    assert verdict is worst(clock_step(book))
