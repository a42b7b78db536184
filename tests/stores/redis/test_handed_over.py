"""What a Redis says of itself from which its memory is known to be another one, on real servers that come and go."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.model import InFlight
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing.contract.support import a_key, granted
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import StartRedis, connect, follow, is_written
from tests.stores.forgetting import RULES, claim, refused
from tests.tooling.processes import eventually

pytestmark = pytest.mark.slow


def test_a_redis_that_keeps_its_process_to_itself_is_told(redis_server: RedisServer, redis_client: Any) -> None:
    """Scripts of a user who may not ask: an emptied store is noticed, and a restart is not."""
    redis_client.execute_command("ACL", "SETUSER", "shy", "on", ">pw", "~*", "&*", "+@all", "-info")
    with closing(RedisStore(f"redis://shy:pw@127.0.0.1:{redis_server.port}/0", rules=RULES)) as store:
        store.data_loss.initialise()
        granted(claim(store))
        told = store.data_loss.status().notices_restarts
        redis_client.flushall()

        assert (False, "missing") == (told, refused(store).loss)
    redis_client.execute_command("ACL", "DELUSER", "shy")


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_a_restart_is_noticed_though_nothing_is_lost(start_redis: StartRedis, kind: str) -> None:
    """Nobody can tell that nothing is: what was written last may not have reached the disk."""
    server = start_redis(kind, "--appendonly", "yes", "--appendfsync", "everysec")
    with closing(RedisStore(server.url, rules=RULES)) as store:
        store.data_loss.initialise()
        key = a_key()
        granted(claim(store, key))
        with connect(server.url) as client:
            assert eventually(lambda: is_written(client))
        server.kill()
        server.restart()

        assert "changed" == refused(store).loss
        assert isinstance(claim(store, key), InFlight)


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_a_first_replica_is_no_loss(start_redis: StartRedis, kind: str) -> None:
    """The line of replication is another one from then on, and begins anew."""
    primary, replica = start_redis(kind), start_redis(kind)
    with closing(RedisStore(primary.url, rules=RULES)) as store:
        store.data_loss.initialise()
        with redis.Redis.from_url(replica.url) as client, redis.Redis.from_url(primary.url) as followed:
            follow(client, followed, port=primary.port)

        granted(claim(store))


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_a_primary_that_was_one_before_has_lost_what_came_between(start_redis: StartRedis, kind: str) -> None:
    """The same process keeps the memory again, and has thrown its own last writes away to follow the other one."""
    first, second = start_redis(kind), start_redis(kind)
    with closing(RedisStore(first.url, rules=RULES)) as store:
        store.data_loss.initialise()
        with redis.Redis.from_url(first.url) as one, redis.Redis.from_url(second.url) as two:
            for promoted, demoted, port in ((two, one, first.port), (one, two, second.port)):
                follow(promoted, demoted, port=port)
                promoted.replicaof("NO", "ONE")

        assert "changed" == refused(store).loss
