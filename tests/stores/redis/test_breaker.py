"""When a server that fails is called again, and by how many at once."""

from __future__ import annotations

import logging

import pytest

from flask_idempotency.stores.redis.replay_cache import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, CircuitBreaker
from flask_idempotency.testing.doubles import FrozenClock

MILLISECOND = 0.001


@pytest.fixture
def breaker(clock: FrozenClock) -> CircuitBreaker:
    return CircuitBreaker("The server", monotonic=clock)


def fail(breaker: CircuitBreaker) -> None:
    turn = breaker.turn()
    assert turn is not None
    breaker.failed(turn, "TimeoutError")


def succeed(breaker: CircuitBreaker) -> None:
    turn = breaker.turn()
    assert turn is not None
    breaker.succeeded(turn)


def test_while_all_is_well_everybody_passes(breaker: CircuitBreaker) -> None:
    """Any number at once."""
    assert None not in [breaker.turn() for _ in range(100)]


def test_after_a_failure_nobody_calls_for_a_second(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    """Not one, to its last moment."""
    fail(breaker)
    clock.advance(FIRST_PAUSE_SECONDS - MILLISECOND)

    assert breaker.turn() is None


def test_then_one_tries_and_the_others_do_not_wait(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    """What was not there a second ago may still be away, and cost each of them a time-out."""
    fail(breaker)
    clock.advance(FIRST_PAUSE_SECONDS)

    assert [breaker.turn() is None for _ in range(3)] == [False, True, True]


def test_pauses_double_up_to_half_a_minute(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    """A server that is away for the night costs two time-outs a minute."""
    fail(breaker)
    pauses = []
    for _ in range(7):
        before = clock.now
        while (turn := breaker.turn()) is None:
            clock.advance(FIRST_PAUSE_SECONDS)
        pauses.append(clock.now - before)
        breaker.failed(turn, "TimeoutError")

    assert pauses == [1, 2, 4, 8, 16, LAST_PAUSE_SECONDS, LAST_PAUSE_SECONDS]


def test_one_success_lets_everybody_pass(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    """And the next failure begins with a short pause again."""
    for _ in range(4):
        fail(breaker)
        clock.advance(LAST_PAUSE_SECONDS)
    succeed(breaker)
    assert None not in [breaker.turn() for _ in range(3)]

    fail(breaker)
    clock.advance(FIRST_PAUSE_SECONDS)

    assert breaker.turn() is not None


def test_of_many_that_fail_together_one_counts(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    """A hundred threads in one time-out are one outage of a second, not of half a minute."""
    turns = [breaker.turn() for _ in range(100)]
    for turn in turns:
        assert turn is not None
        breaker.failed(turn, "TimeoutError")
    clock.advance(FIRST_PAUSE_SECONDS)

    assert breaker.turn() is not None


def test_a_success_from_before_the_failure_proves_nothing(breaker: CircuitBreaker) -> None:
    """Its answer was under way when the server went."""
    early = breaker.turn()
    assert early is not None
    fail(breaker)
    breaker.succeeded(early)

    assert breaker.turn() is None


def test_whoever_tries_and_is_never_heard_of_again_blocks_nobody(breaker: CircuitBreaker, clock: FrozenClock) -> None:
    """Its worker was killed. The next one tries after as long as if it had failed."""
    fail(breaker)
    clock.advance(FIRST_PAUSE_SECONDS)
    assert breaker.turn() is not None
    clock.advance(FIRST_PAUSE_SECONDS)

    assert breaker.turn() is not None


def test_coming_and_going_are_logged_once_each(
    breaker: CircuitBreaker, clock: FrozenClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning with the kind of error, and that it is over."""
    caplog.set_level(logging.INFO, logger="flask_idempotency")
    for _ in range(3):
        fail(breaker)
        clock.advance(LAST_PAUSE_SECONDS)
    succeed(breaker)
    succeed(breaker)

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "The server does not answer (TimeoutError): it is left alone, and tried again now and then"),
        ("INFO", "The server answers again"),
    ]
