"""A janitor says that it is alive, and what it has found when it looked at the clocks."""

from __future__ import annotations

import pytest

from flask_idempotency.engine.capabilities import TaskReport
from flask_idempotency.maintenance.janitor import HeartbeatReport, heartbeat


def before(report: str) -> dict[str, TaskReport]:
    return {"heartbeat": TaskReport(60.0, report), "reap": TaskReport(60.0, '{"skew_ms":999999}')}


def test_the_first_heartbeat_tells_the_skew_and_no_step() -> None:
    """There is nothing to compare with. Ahead is above 0, behind below."""
    assert HeartbeatReport(skew_ms=1500) == heartbeat({}, store_now=1001.5, host_now=1000.0)
    assert HeartbeatReport(skew_ms=-250) == heartbeat({}, store_now=999.75, host_now=1000.0)


def test_a_clock_that_was_set_is_a_step() -> None:
    """By how much, and in which direction, since the last one."""
    last = before('{"skew_ms":-250,"stepped_ms":0,"finished":true}')

    assert HeartbeatReport(skew_ms=-250, stepped_ms=0) == heartbeat(last, store_now=1999.75, host_now=2000.0)
    assert HeartbeatReport(172_800_000, stepped_ms=172_800_250) == heartbeat(last, store_now=174800.0, host_now=2000.0)
    assert HeartbeatReport(-3_600_000, stepped_ms=-3_599_750) == heartbeat(last, store_now=0.0, host_now=3600.0)


@pytest.mark.parametrize(
    "report", ("", "{}", "[]", "null", "not json", '{"skew_ms":"1"}', '{"skew_ms":null}', '{"skew_ms":1.5}')
)
def test_what_another_release_has_written_is_no_step(report: str) -> None:
    """Nobody is to be woken because of it."""
    assert HeartbeatReport(skew_ms=1000) == heartbeat(before(report), store_now=1001.0, host_now=1000.0)


def test_a_heartbeat_is_always_finished() -> None:
    """Nothing can be left of it."""
    assert heartbeat({}, store_now=0.0, host_now=0.0).finished
