"""Processes use keys in every way there is and are killed while they do: nothing is counted wrongly."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import create_engine

from flask_idempotency.engine.model import State
from flask_idempotency.engine.quota import Drift, Usage
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.migrations.runner import upgrade
from flask_idempotency.stores.sql.store import SqlStore
from tests.e2e.conftest import Figures
from tests.e2e.processes import ROOT
from tests.e2e.quota_crowd import KEYS, key_of
from tests.forgiving import redis_store
from tests.lab.postgres import StartPostgres
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import StartRedis
from tests.long import unless_long

SECONDS = int(os.environ.get("QUOTA_CHAOS_SECONDS", unless_long(10, long=60)))
"""A minute is better, and is what the figures in the README were taken with."""

PROCESSES = int(os.environ.get("QUOTA_CHAOS_PROCESSES", "8"))
"""Sixty-four leave no processor to the tests beside this one: by themselves they may have them."""

LIMIT = 20
TENANTS = 2

Open = Callable[[Callable[[], float | None]], Any]


def on_redis(request: pytest.FixtureRequest) -> tuple[str, Open]:
    start: StartRedis = request.getfixturevalue("start_redis")
    # Each is killed with what it has in its pipe; the server is not.
    url = start(REDIS_KINDS[0]).url
    return url, lambda clock: closing(redis_store(url, clock=clock))


def on_postgresql(request: pytest.FixtureRequest) -> tuple[str, Open]:
    start: StartPostgres = request.getfixturevalue("start_postgres")
    server = start("-c", "max_connections=200")
    server.create_database("shop")
    url = server.url("shop")
    engine = create_engine(url)
    upgrade(engine)
    engine.dispose()
    return url, lambda clock: closing(SqlStore(Database(url), clock=clock))


@pytest.mark.soak
@pytest.mark.timeout(60 + 5 * SECONDS)
@pytest.mark.parametrize("on", (on_redis, on_postgresql), ids=("redis", "postgresql"))
def test_49_50_the_ledger_is_a_recount_after_a_crowd_that_was_killed_at_random(
    on: Callable[[pytest.FixtureRequest], tuple[str, Open]], request: pytest.FixtureRequest, figures: Figures
) -> None:
    """Never negative at any sample, never above the limit, and the limit is reached."""
    url, opened = on(request)
    tids = [secrets.token_bytes(16) for _ in range(TENANTS)]
    seed = random.randrange(10**9)
    told = {"store": url, "tids": [tid.hex() for tid in tids], "limit": LIMIT, "seed": seed}
    told |= {"processes": PROCESSES, "seconds": SECONDS}
    command = [sys.executable, "-m", "tests.e2e.quota_crowd", json.dumps(told)]
    samples: list[Usage] = []
    with (
        opened(lambda: None) as store,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as crowd,
    ):
        while _runs(crowd):
            samples += [store.ledger.usage(tid) for tid in tids]
        assert crowd.stdout is not None
        counts = json.loads(crowd.stdout.read())
        assert crowd.returncode == 0

    most = max(sample.records for sample in samples)
    figures(seed=seed, samples=len(samples), most_records=most, **counts)
    assert [] == [each for each in samples if min(each.records, each.bytes, each.in_flight, each.new_keys) < 0]
    assert most == LIMIT
    assert counts["killed"] >= SECONDS / 2
    assert min(counts["grants"], counts["refusals"], counts["completions"]) >= SECONDS
    # At one instant, or answers would end between one look and the next.
    instant = time.time()
    with opened(lambda: instant) as store:
        for tid in tids:
            assert _recounted(store, tid) == store.ledger.usage(tid)
            drift = store.ledger.reconcile(tid)
            assert (Drift(), 0) == (drift, drift.busy)


def _runs(crowd: subprocess.Popen[str]) -> bool:
    """Asked often enough to see much, and seldom enough to leave the crowd a processor."""
    try:
        crowd.wait(0.01)
    except subprocess.TimeoutExpired:
        return True
    return False


def _recounted(store: Any, tid: bytes) -> Usage:
    """From the records alone, each read by its name."""
    found = [store.read(key_of(tid, name)) for name in range(KEYS)]
    records = [record for record in found if record is not None and record.in_quota]
    return Usage(
        records=len(records),
        bytes=sum(record.payload.byte_size for record in records if record.state is State.COMPLETED),
        in_flight=sum(record.state is State.PROCESSING and record.remaining > 0 for record in records),
    )
