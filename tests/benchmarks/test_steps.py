"""The benchmark of durable steps times each store, and refuses a request that did not go on."""

from __future__ import annotations

from contextlib import closing

import redis

from benchmarks import steps
from benchmarks.harness import Cores
from example_app.demo.servers import RedisServer
from flask_idempotency.stores.redis.store import RedisStore


def test_each_case_is_timed_on_redis_and_sqlite(redis_server: RedisServer) -> None:
    with closing(RedisStore(redis_server.url)) as store:
        store.data_loss.initialise()
    with closing(redis.Redis.from_url(redis_server.url)) as client:
        section, without = steps.sections(client, redis_server.url, None, Cores(), rounds=1, requests=2)

    cases = (steps.HAND, steps.STEP, steps.PASSED)
    names = [row.case for row in section.rows]
    assert [f"{store}: {case}" for store in ("Redis", "SQLite") for case in cases] == [
        name for name in names if not name.startswith("PostgreSQL")
    ]
    assert all(float(row.cells["wall"]) > 0 for row in section.rows)
    goals = [verdict.budget for row in section.rows for verdict in row.verdicts if row.case.startswith("Redis")]
    assert ["wall ≤ 1.25 × by hand", "< 60 µs"] == goals
    assert [f"{path}: {name}" for path in ("first", "replay") for name in (steps.WITHOUT, steps.BESIDE)] == [
        row.case for row in without.rows
    ]
    assert [0, 1, 0, 1] == [len(row.verdicts) for row in without.rows]
