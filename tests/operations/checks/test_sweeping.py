"""Janitors that do not come, come too late, or do not keep up."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.capabilities import TaskReport, Verdict
from flask_idempotency.operations.doctor import backlog, chores, janitor
from tests.operations.checks.judging import worst

DONE, CUT = '{"removed":1,"finished":true}', '{"removed":1,"finished":false}'


@pytest.mark.parametrize(
    ("last", "verdict"),
    (
        pytest.param({}, Verdict.FAULT, id="never"),
        pytest.param({"heartbeat": TaskReport(59.0, "{}")}, Verdict.FINE, id="lately"),
        pytest.param({"heartbeat": TaskReport(61.0, "{}")}, Verdict.FAULT, id="long ago"),
        pytest.param({"heartbeat": TaskReport(9e9, "{}"), "expire": TaskReport(5.0, "{}")}, Verdict.FINE, id="by cron"),
    ),
)
def test_a_janitor_is_missed_after_two_intervals(last: dict[str, TaskReport], verdict: Verdict) -> None:
    """Any chore is a sign of life: cron has no heartbeat."""
    assert verdict is worst(janitor(last, heartbeat_interval=30.0))


def test_where_none_is_expected_none_is_missed() -> None:
    assert Verdict.FINE is worst(janitor({}, heartbeat_interval=None))


@pytest.mark.parametrize(
    ("last", "verdict"),
    (
        pytest.param({"expire": TaskReport(179.0, DONE), "rotate": TaskReport(9.0, DONE)}, Verdict.FINE, id="in time"),
        pytest.param({"expire": TaskReport(181.0, DONE), "rotate": TaskReport(9.0, DONE)}, Verdict.FAULT, id="late"),
        pytest.param({"rotate": TaskReport(9.0, DONE)}, Verdict.ADVICE, id="never, though due every minute"),
        pytest.param({"expire": TaskReport(9.0, DONE)}, Verdict.FINE, id="never, and due every day"),
        pytest.param({}, Verdict.FINE, id="no janitor at all is another check's"),
    ),
)
def test_each_chore_has_to_have_its_turns(last: dict[str, TaskReport], verdict: Verdict) -> None:
    """One may be late; three intervals without it are told."""
    assert verdict is worst(chores(last, every={"expire": 60.0, "rotate": 86400.0}, patience=60.0))


@pytest.mark.parametrize(("ago", "verdict"), ((119.0, Verdict.FINE), (121.0, Verdict.FAULT)))
def test_a_chore_is_not_late_before_the_janitor_is(ago: float, verdict: Verdict) -> None:
    """Who reaps by cron, once a minute, need not be told that ten seconds were the default."""
    assert verdict is worst(chores({"reap": TaskReport(ago, DONE)}, every={"reap": 10.0}, patience=120.0))


def test_a_chore_that_nobody_does_by_itself_is_not_missed() -> None:
    assert Verdict.FINE is worst(chores({"expire": TaskReport(9e9, DONE)}, every={}, patience=60.0))


@pytest.mark.parametrize(
    ("last", "verdict"),
    (
        pytest.param({}, Verdict.FINE, id="nothing"),
        pytest.param({"expire": TaskReport(1.0, DONE)}, Verdict.FINE, id="to its end"),
        pytest.param({"expire": TaskReport(1.0, CUT)}, Verdict.ADVICE, id="cut short"),
        pytest.param({"reap": TaskReport(1.0, CUT), "expire": TaskReport(1.0, DONE)}, Verdict.ADVICE, id="one of two"),
        pytest.param({"expire": TaskReport(1.0, "?")}, Verdict.FINE, id="of another release"),
    ),
)
def test_a_run_that_its_budget_has_ended_is_a_backlog(last: dict[str, TaskReport], verdict: Verdict) -> None:
    assert verdict is worst(backlog(last))


def test_the_backlog_of_expire_names_its_rate() -> None:
    said = [backlog({chore: TaskReport(1.0, CUT)})[0].remedy for chore in ("expire", "reap")]

    assert [True, False] == ["IDEMPOTENCY_EXPIRE_RATE" in remedy for remedy in said]
