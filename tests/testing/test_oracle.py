"""The oracle finds every promise that is broken, and none in what is right."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from flask_idempotency.testing import Oracle
from flask_idempotency.testing.contract.support import for_each


def test_one_run_and_its_answer_given_often_breaks_nothing() -> None:
    """With the refusals that its duplicates got in between, and a key that never ran."""
    oracle = Oracle()
    oracle.answered("a", 409, b"in flight", replayed=False)
    oracle.answered("a", 201, b"paid", replayed=True)
    oracle.answered("a", 201, b"paid", replayed=False)
    oracle.executed("a")
    oracle.answered("b", 503, b"down", replayed=False)

    oracle.check()

    assert oracle.answers == 4


def ran_twice(oracle: Oracle) -> None:
    oracle.executed("a")
    oracle.executed("a")


def two_answers(oracle: Oracle) -> None:
    oracle.executed("a")
    oracle.answered("a", 201, b"paid", replayed=False)
    oracle.answered("a", 201, b"paid again", replayed=False)


def another_status(oracle: Oracle) -> None:
    oracle.executed("a")
    oracle.answered("a", 200, b"paid", replayed=False)
    oracle.answered("a", 201, b"paid", replayed=False)


def no_run(oracle: Oracle) -> None:
    oracle.answered("a", 201, b"paid", replayed=False)


def replays_that_differ(oracle: Oracle) -> None:
    oracle.executed("a")
    oracle.answered("a", 402, b"no funds", replayed=True)
    oracle.answered("a", 402, b"no card", replayed=True)


def a_failure_replayed_after_a_success(oracle: Oracle) -> None:
    oracle.executed("a")
    oracle.answered("a", 402, b"no funds", replayed=True)
    oracle.answered("a", 201, b"paid", replayed=False)


def a_failure_replayed_as_another(oracle: Oracle) -> None:
    oracle.executed("a")
    oracle.answered("a", 402, b"no funds", replayed=False)
    oracle.answered("a", 402, b"no card", replayed=True)


def somebody_elses_answer(oracle: Oracle) -> None:
    oracle.executed("b")
    oracle.answered("b", 201, b"paid by b", replayed=False)
    oracle.executed("a")
    oracle.answered("a", 201, b"paid by b", replayed=True)


@for_each(
    ("happened", "rule"),
    (
        (a_failure_replayed_as_another, "a replay unlike the first"),
        (somebody_elses_answer, "another key's answer"),
        (ran_twice, "ran more than once"),
        (two_answers, "two answers"),
        (another_status, "two answers"),
        (no_run, "an answer and no run"),
        (replays_that_differ, "a replay unlike the first"),
        (a_failure_replayed_after_a_success, "a replay unlike the first"),
    ),
)
def test_each_broken_promise_is_found(happened: Callable[[Oracle], None], rule: str) -> None:
    oracle = Oracle()
    happened(oracle)

    assert [(rule, "a")] == [(found.rule, found.key) for found in oracle.violations() if found.key == "a"]
    with pytest.raises(AssertionError, match=rule):
        oracle.check()


def test_where_work_may_be_done_again_its_answer_must_still_be_one() -> None:
    oracle = Oracle(runs_once=False)
    ran_twice(oracle)
    assert oracle.violations() == []

    two_answers(oracle)
    assert ["two answers"] == [violation.rule for violation in oracle.violations()]


def test_a_counter_elsewhere_has_the_last_word() -> None:
    """However often it is read."""
    oracle = Oracle()
    oracle.counted({"a": 1, "b": 0})
    oracle.counted({"a": 2, "b": 1})

    assert ["ran more than once: a (2 times)"] == [str(violation) for violation in oracle.violations()]


def test_threads_may_report_at_the_same_time() -> None:
    oracle = Oracle()
    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(lambda number: oracle.executed(str(number % 10)), range(1000)):
            pass

    assert ["100 times"] * 10 == [violation.detail for violation in oracle.violations()]
