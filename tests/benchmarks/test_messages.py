"""The benchmark of messages times each store bare, by hand and with an inbox."""

from __future__ import annotations

from contextlib import closing

from benchmarks import messages
from example_app.demo.servers import RedisServer
from flask_idempotency.stores.redis.store import RedisStore


def test_each_case_is_timed_on_each_store(redis_server: RedisServer) -> None:
    with closing(RedisStore(redis_server.url)) as store:
        store.data_loss.initialise()
    rows = messages.section(redis_server.url, rounds=1, messages=2).rows

    cases = (messages.BARE, messages.HAND, messages.HAND_AGAIN, messages.INBOX, messages.AGAIN)
    stores = ("Redis", "SQLite, transactional")
    assert [row.case for row in rows] == [f"{store}: {case}" for store in stores for case in cases]
    assert all(float(row.cells["wall"]) > 0 for row in rows)
