"""A Redis that was not there to be asked at the start: it is asked before the first claim, and then no more."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import Claimed, State
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, found, granted
from tests.forgiving import redis_store
from tests.lab.redis import StartRedis


def claim_one(store: RedisStore) -> object:
    return store.claim(a_request(a_key()), token=a_token(), lease=LEASE)


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.levelno for record in caplog.records]


def test_a_server_that_came_late_and_evicts_grants_nothing(
    start_redis: StartRedis, redis_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The application started without it. That it evicts is said once, and not at every request."""
    server = start_redis(redis_kind, "--maxmemory-policy", "allkeys-lru")
    store = redis_store(server.url)
    server.kill()
    store.check()
    caplog.clear()
    server.restart()

    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="allkeys-lru"):
            claim_one(store)

    assert levels(caplog) == [logging.ERROR]
    assert "Set maxmemory-policy to noeviction" in caplog.text
    with redis.Redis.from_url(server.url) as client:
        assert client.dbsize() == 0
    store.close()


def test_a_server_that_stops_evicting_grants_again(start_redis: StartRedis, redis_kind: str) -> None:
    """Without a restart of the application."""
    server = start_redis(redis_kind, "--maxmemory-policy", "volatile-ttl")
    store = redis_store(server.url)
    with pytest.raises(StoreUnavailable):
        claim_one(store)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "noeviction")

    assert isinstance(claim_one(store), Claimed)
    store.close()


def test_a_server_that_evicts_still_takes_what_owners_write(start_redis: StartRedis, redis_kind: str) -> None:
    """A worker that was granted before must be able to settle, through whichever store."""
    server = start_redis(redis_kind)
    store, key, token = redis_store(server.url), a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    fresh = redis_store(server.url)

    fresh.renew(key, token, lease=2 * LEASE)
    fresh.complete(key, token, PAYLOAD, keep=KEEP)

    assert found(fresh, key).state is State.COMPLETED
    for each in (store, fresh):
        each.close()


@pytest.mark.parametrize("checked", (True, False))
def test_it_is_asked_once(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, checked: bool) -> None:
    """At the start or before the first claim; then every claim is one round trip."""
    asked = list[str]()
    info: Any = redis.Redis.info

    def counted(self: redis.Redis, *sections: str, **options: object) -> object:
        asked.append("INFO")
        return info(self, *sections, **options)

    monkeypatch.setattr(redis.Redis, "info", counted)
    store = redis_store(redis_server.url)
    if checked:
        store.check()
    for _ in range(3):
        claim_one(store)
    store.close()

    assert ["INFO"] == asked


def test_a_server_that_will_not_tell_is_warned_of_once(
    redis_server: RedisServer, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """It will not tell at the next claim either. Claims are granted."""
    redis_client.acl_setuser("app", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-info"])
    store = redis_store(f"redis://app:pw@127.0.0.1:{redis_server.port}/0")
    outcomes = [claim_one(store) for _ in range(2)]
    redis_client.acl_deluser("app")
    store.close()

    assert all(isinstance(outcome, Claimed) for outcome in outcomes)
    assert levels(caplog) == [logging.WARNING]


@pytest.mark.parametrize(
    "error",
    (
        redis.exceptions.ClusterDownError("The cluster is down"),
        redis.exceptions.MasterDownError("Link with MASTER is down"),
        redis.exceptions.ResponseError("BUSY Redis is busy running a script."),
        redis.exceptions.TimeoutError("Timeout reading from socket"),
    ),
    ids=lambda error: type(error).__name__,
)
def test_a_server_that_cannot_tell_now_is_asked_again(redis_server: RedisServer, error: Exception) -> None:
    """What it says because it is busy or down is no refusal to tell."""
    answers = [error]

    class Shaky(redis.Redis):
        def execute_command(self, *command: object, **options: object) -> object:
            if command[0] == "INFO" and answers:
                raise answers.pop()
            return super().execute_command(*command, **options)  # type: ignore[no-untyped-call]

    with Shaky.from_url(redis_server.url) as client:
        store = redis_store(client)
        with pytest.raises(StoreUnavailable) as raised:
            claim_one(store)

        assert raised.value.__cause__ is error
        assert isinstance(claim_one(store), Claimed)
