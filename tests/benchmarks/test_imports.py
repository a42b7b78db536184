"""The time that a worker takes to start is measured in new processes: this one has imported everything."""

from __future__ import annotations

import pytest

from benchmarks import imports
from benchmarks.imports import BARE, MEMORY, REDIS, SQL
from example_app.demo.servers import RedisServer


def test_each_case_is_timed_in_a_new_process(redis_server: RedisServer) -> None:
    bare, in_memory, on_redis, on_sql = imports.import_section(redis_server.url, rounds=1).rows

    assert [BARE, MEMORY, REDIS, SQL] == [row.case for row in (bare, in_memory, on_redis, on_sql)]
    assert list(bare.cells) == ["ours"]
    for row in (in_memory, on_redis, on_sql):
        cells = {name: float(cell) for name, cell in row.cells.items()}
        assert cells["whole"] == pytest.approx(cells["ours"] + cells["client"] + cells["set-up of an app"])
        assert 0 < float(bare.cells["ours"]) < cells["ours"]
        assert cells["set-up of an app"] > 0


def test_the_goal_is_for_ours_and_for_both() -> None:
    row = imports.row(REDIS, [(0.12, 0.03, 0.01), (0.13, 0.07, 0.02), (0.1, 0.02, 0.03)])

    assert row.cells == {"ours": 30.0, "client": 120.0, "set-up of an app": 20.0, "whole": 160.0}
    assert ["ours and set-up ≤ 60 ms ✓", "with redis-py ≤ 60 ms ✗ OVER"] == [str(verdict) for verdict in row.verdicts]
