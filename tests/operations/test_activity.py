"""A summary of a time span adds up what every process has counted, and has no gaps."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest

from flask_idempotency.engine.activity import EDGES, HOUR, MINUTE, OUTCOMES, ActivityLog, Counts
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.operations.activity import (
    GROUPS,
    LONGEST_SPAN,
    MINUTES_UP_TO,
    Figures,
    Times,
    as_object,
    summary,
)
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing.doubles import FrozenClock

OWNER = owner_mark("shop")
DAY = 24 * HOUR


@pytest.fixture
def clock() -> FrozenClock:
    return FrozenClock(1_800_000_000.0 + 20 * MINUTE + 30)


@pytest.fixture
def log(clock: FrozenClock) -> ActivityLog:
    return MemoryStore(clock).activity


def add(log: ActivityLog, counts: Counts, *, token: list[int] = [0]) -> None:  # noqa: B006 - a new token each time
    token[0] += 1
    log.add(OWNER, counts, token=token[0].to_bytes(16, "big"))


def test_a_span_adds_up_endpoints_and_buckets(log: ActivityLog, clock: FrozenClock) -> None:
    add(log, {"pay": {"new": 2, "completed": 2}, "refund": {"replayed": 1}})
    clock.advance(2 * MINUTE)
    add(log, {"pay": {"taken-over": 1, "replayed": 4, "quarantined": 1}})
    add(log, {"pay": {"conflict": 3}})
    log.add(owner_mark("other"), {"pay": {"new": 99}}, token=bytes(16))

    found = summary(log, OWNER, seconds=10 * MINUTE)

    assert found.total.requests == 2 + 1 + 1 + 4 + 3
    assert list(found.endpoints) == ["pay", "refund"]
    assert found.endpoints["pay"].groups == {
        "new": 3,
        "replayed": 4,
        "conflicts": 3,
        "mismatches": 0,
        "outcome-unknown": 0,
        "missing-key": 0,
        "refused": 0,
        "unprotected": 0,
    }
    assert found.endpoints["refund"].counts == {"replayed": 1}
    assert found.total.endings == {"completed": 2, "released": 0, "quarantined": 1, "paused": 0, "not-kept": 0}
    assert found.total.outcomes == dict.fromkeys(OUTCOMES, 0) | {
        "new": 2,
        "replayed": 5,
        "taken-over": 1,
        "conflict": 3,
    }


def test_the_series_has_every_bucket_of_the_span_once(log: ActivityLog, clock: FrozenClock) -> None:
    add(log, {"pay": {"new": 1}})
    clock.advance(3 * MINUTE)
    add(log, {"pay": {"new": 2}})

    found = summary(log, OWNER, seconds=5 * MINUTE)

    now = clock.now - 30
    assert [(point.start, point.figures.requests) for point in found.series] == [
        (now - 5 * MINUTE, 0),
        (now - 4 * MINUTE, 0),
        (now - 3 * MINUTE, 1),
        (now - 2 * MINUTE, 0),
        (now - MINUTE, 0),
        (now, 2),
    ]
    assert found.total.requests == 3
    assert (found.now, found.length, found.seconds) == (clock.now, MINUTE, 5 * MINUTE)


def test_the_total_is_the_sum_of_the_series_at_every_moment(log: ActivityLog, clock: FrozenClock) -> None:
    for _ in range(50):
        add(log, {"pay": {"new": 1}})
        clock.advance(17)
        found = summary(log, OWNER, seconds=2 * MINUTE)
        assert found.total.requests == sum(point.figures.requests for point in found.series)
        assert len(found.series) == len({point.start for point in found.series}) == 3
        assert found.series[-1].start <= clock.now < found.series[-1].start + MINUTE


@pytest.mark.parametrize(
    ("seconds", "length", "points"),
    (
        (MINUTE, MINUTE, 2),
        (MINUTES_UP_TO, MINUTE, 181),
        (MINUTES_UP_TO + 1, HOUR, 4),
        (DAY, HOUR, 25),
        (LONGEST_SPAN, HOUR, 721),
    ),
)
def test_a_long_span_is_shown_by_hour(log: ActivityLog, seconds: float, length: int, points: int) -> None:
    found = summary(log, OWNER, seconds=seconds)

    assert (found.length, len(found.series)) == (length, points)


def test_percentiles_merge_over_endpoints_and_buckets(log: ActivityLog, clock: FrozenClock) -> None:
    add(log, {"pay": {"t:new:3": 49}, "refund": {"t:new:3": 20, "t:replayed:0": 1}})
    clock.advance(MINUTE)
    add(log, {"pay": {"t:new:3": 29, "t:new:10": 2}})

    found = summary(log, OWNER, seconds=HOUR)

    assert found.total.new_times == Times(100, EDGES[3], EDGES[3], EDGES[10])
    assert found.endpoints["refund"].new_times == Times(20, EDGES[3], EDGES[3], EDGES[3])
    assert found.total.replayed_times == Times(1, EDGES[0], EDGES[0], EDGES[0])
    assert found.series[-1].figures.new_times == Times(31, EDGES[3], EDGES[10], EDGES[10])
    assert found.series[0].figures.new_times == Times(0, None, None, None)


def test_a_time_past_the_last_edge_has_no_upper_edge() -> None:
    figures = Figures({f"t:new:{len(EDGES)}": 1})

    assert figures.new_times == Times(1, inf, inf, inf)
    assert _times(figures)["new"] == {"count": 1, "p50": 60.0, "p95": 60.0, "p99": 60.0}


def test_json_has_numbers_only() -> None:
    figures = Figures({"new": 1, "t:new:1": 1, "completed": 1, "would:new@cookie": 7})

    assert json.loads(json.dumps(as_object(figures), allow_nan=False)) == {
        "requests": 1,
        "observed": 7,
        "outcomes": dict.fromkeys(OUTCOMES, 0) | {"new": 1},
        "endings": {"completed": 1, "released": 0, "quarantined": 0, "paused": 0, "not-kept": 0},
        "times": {
            "new": {"count": 1, "p50": 0.002, "p95": 0.002, "p99": 0.002},
            "replayed": {"count": 0, "p50": None, "p95": None, "p99": None},
        },
    }


def _times(figures: Figures) -> Any:
    return as_object(figures)["times"]


def test_every_line_of_a_chart_adds_up_known_counters() -> None:
    known = {*OUTCOMES, "quarantined"}

    assert {counter for counters in GROUPS.values() for counter in counters} <= known


def test_an_application_without_activity_has_an_empty_summary(log: ActivityLog) -> None:
    found = summary(log, OWNER, seconds=HOUR)

    assert found.total.requests == 0
    assert not found.endpoints
    assert len(found.series) == 61
