"""Restarts of real servers: which ones the store detects as data loss."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.model import InFlight, OnExpiry, Record, State
from flask_idempotency.stores.redis import data_loss as watching
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.admin import data_loss
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import StartRedis, connect, follow, is_written
from tests.stores.forgetting import RULES, claim, refused
from tests.stores.owners import WRITES
from tests.tooling.processes import eventually

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_partitions")]
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")
TENANT = b"\0\3" + a_key().tid[2:]
"""Its first two bytes choose the partition: never that of the tenants beside it."""


def key() -> Any:
    """All in one partition: what is forgotten of one concerns the others."""
    return a_key(tid=TENANT)


@pytest.fixture(name="server", params=REDIS_KINDS)
def flushing_server(request: pytest.FixtureRequest, start_redis: StartRedis) -> RedisServer:
    return start_redis(request.param, *ALWAYS)


@pytest.fixture(name="store")
def ready_store(server: RedisServer) -> Iterator[RedisStore]:
    with closing(RedisStore(server.url, rules=RULES)) as store:
        store.data_loss.initialise()
        yield store


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a store knows nothing of what others were granted."""
    monkeypatch.setattr(watching, "_granted", {})


def killed(server: RedisServer) -> None:
    server.kill()
    server.restart()


def put_aside(server: RedisServer) -> Callable[[], None]:
    """Copy what is on the disk now. Returns how to put it back in place of what is there then."""
    aside = server.folder.parent / f"{server.folder.name}-aside"
    shutil.copytree(server.folder, aside, ignore=lambda _, names: [name for name in names if "sock" in name])

    def put_back() -> None:
        server.kill()
        for path in server.folder.glob("appendonly*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in aside.glob("appendonly*"):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, server.folder / path.name)
        shutil.rmtree(aside)
        server.restart()

    return put_back


@pytest.mark.parametrize("restart", (killed, RedisServer.restart), ids=("killed", "shut down"))
@pytest.mark.parametrize("after_loss", ("refuse", "hold"))
def test_a_restart_without_loss_needs_no_operator(
    server: RedisServer, store: RedisStore, restart: Callable[[RedisServer], None], after_loss: Any
) -> None:
    done, running = key(), key()
    before = store.data_loss.status()
    token = stand(store, FrozenClock(), done, "in flight")
    store.complete(done, token, PAYLOAD, keep=KEEP)
    granted(claim(store, running))
    for _ in range(2):
        restart(server)
        granted(claim(store, key()))
    restart(server)

    with closing(RedisStore(server.url, rules=replace(RULES, after_loss=after_loss))) as other:
        granted(claim(other, key()))
        assert isinstance(claim(other, done), Record)
        assert isinstance(claim(other, running), InFlight)
        assert before.losses_so_far == other.data_loss.status().losses_so_far


def test_a_status_check_after_a_restart_finds_no_loss(server: RedisServer, store: RedisStore) -> None:
    before = store.data_loss.status()
    killed(server)

    assert before.losses_so_far == store.data_loss.status().losses_so_far


@pytest.mark.parametrize("verb", sorted(WRITES))
def test_an_owner_goes_on_after_a_restart_that_loses_nothing(server: RedisServer, store: RedisStore, verb: str) -> None:
    """Also where others could have taken over: nobody can have done so in what was forgotten, for nothing was."""
    mine, token = key(), a_token()
    granted(claim(store, mine, token=token, on_expiry=OnExpiry.TAKEOVER))
    killed(server)

    WRITES[verb](store, mine, token)


def test_a_restart_without_loss_allows_a_take_over(server: RedisServer, store: RedisStore) -> None:
    theirs = key()
    with closing(RedisStore(server.url, rules=RULES)) as hasty:
        granted(hasty.claim(replace(a_request(theirs), on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=0.001))
    killed(server)

    assert 2 == granted(claim(store, theirs, on_expiry=OnExpiry.TAKEOVER)).attempt
    assert State.PROCESSING is found(store, theirs).state


@pytest.mark.parametrize(
    "settings",
    (
        {"appendfsync": "everysec"},
        {"appendfsync": "no"},
        {"no-appendfsync-on-rewrite": "yes"},
        {"appendonly": "no"},
    ),
    ids=lambda settings: " ".join(f"{name} {value}" for name, value in settings.items()),
)
def test_a_server_with_weak_durability_needs_an_operator(
    server: RedisServer, store: RedisStore, settings: dict[str, str]
) -> None:
    with connect(server.url) as client:
        for name, value in settings.items():
            client.config_set(name, value)
    store._watch.next_look = 0.0
    granted(claim(store, key()))
    killed(server)

    assert "changed" == refused(store, key()).loss
    assert {"changed": layout.PARTITIONS} == store.data_loss.status().losses


def test_a_rewrite_of_the_append_only_file_keeps_the_proof(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis begins one by itself. A look that falls into it fails, and one after it counts."""
    monkeypatch.setattr(data_loss, "LOOK_SECONDS", 0.0)
    store.data_loss.status()

    def rewrites() -> bool:
        told = client.info("persistence")
        return bool(told["aof_rewrite_in_progress"] or told["aof_rewrite_scheduled"])

    with connect(server.url) as client:
        client.config_set("rdb-key-save-delay", 2_000)
        client.bgrewriteaof()
        granted(claim(store, key()))
        assert rewrites()
        assert not client.hexists(layout.facts_in(0), layout.FIELDS["LAST_LOOK"])
        assert eventually(lambda: not rewrites())
    granted(claim(store, key()))
    killed(server)

    granted(claim(store, key()))


def test_a_process_that_started_before_redis_checks_too(server: RedisServer, store: RedisStore) -> None:
    server.kill()
    with closing(RedisStore(server.url, rules=RULES)) as early:
        early.check()
        server.restart()
        granted(claim(store, key()))
        with connect(server.url) as client:
            client.hdel(layout.facts_in(0), layout.FIELDS["LAST_LOOK"])

        granted(claim(early, key()))
        killed(server)
        granted(claim(early, key()))


def test_a_start_from_a_snapshot_needs_an_operator(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(server.url) as client:
        client.save()
    granted(claim(store, key()))
    server.arguments = []
    killed(server)
    with connect(server.url) as client:
        client.config_set("appendfsync", "always")
        client.config_set("appendonly", "yes")
        while client.info("persistence")["aof_rewrite_in_progress"]:
            pass
    another_process(monkeypatch)

    with closing(RedisStore(server.url, rules=RULES)) as other:
        assert "changed" == refused(other, key()).loss


def test_a_copy_without_a_granted_claim_needs_an_operator(server: RedisServer, store: RedisStore) -> None:
    put_back = put_aside(server)
    granted(claim(store, forgotten := key()))
    put_back()
    with closing(RedisStore(server.url, rules=RULES)) as other:
        assert "changed" == refused(other, forgotten).loss
    assert "changed" == refused(store, forgotten).loss


def test_a_loss_in_one_partition_counts_for_all(server: RedisServer, store: RedisStore) -> None:
    put_back = put_aside(server)
    granted(claim(store, a_key(tid=b"\0\1" + TENANT[2:])))
    put_back()

    assert "changed" == refused(store, a_key(tid=b"\0\2" + TENANT[2:])).loss


def test_a_claim_that_its_owner_must_restore_is_data_loss(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back = put_aside(server)
    grant = granted(claim(store, mine := key(), token=(token := a_token())))
    assert token == grant.token
    put_back()
    assert store.data_loss.restore_claim(a_request(mine), grant, lease=LEASE, age=0.0)
    another_process(monkeypatch)
    with closing(RedisStore(server.url, rules=RULES)) as other:
        assert "changed" == refused(other, a_key(tid=b"\0\2" + TENANT[2:])).loss


@pytest.mark.parametrize(
    ("seconds", "accepted"),
    ((data_loss.DOWN_SECONDS - 5, True), (data_loss.DOWN_SECONDS + 5, False), (-60, False)),
    ids=("soon", "late", "the clock was set back"),
)
def test_files_older_than_a_restart_need_an_operator(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, seconds: float, accepted: bool
) -> None:
    clock = FrozenClock()
    with closing(RedisStore(server.url, clock=clock, rules=RULES)) as store:
        store.data_loss.initialise()
        another_process(monkeypatch)
        killed(server)
        clock.advance(seconds)

        if accepted:
            granted(claim(store))
        else:
            assert "changed" == refused(store).loss


def test_a_server_that_had_a_replica_needs_an_operator(
    start_redis: StartRedis, server: RedisServer, store: RedisStore
) -> None:
    """The replica may be started in its place, with what it had received."""
    replica = start_redis()
    with redis.Redis.from_url(replica.url) as client, connect(server.url) as followed:
        follow(client, followed, port=server.port)
        store._watch.next_look = 0.0
        granted(claim(store, key()))
    killed(server)

    assert "changed" == refused(store, key()).loss


def test_a_user_without_the_right_to_read_info_cannot_judge(server: RedisServer, store: RedisStore) -> None:
    killed(server)
    with connect(server.url) as client:
        client.execute_command("ACL", "SETUSER", "shy", "on", ">pw", "~*", "&*", "+@all", "-config")
    with closing(RedisStore(f"redis://shy:pw@127.0.0.1:{server.port}/0", rules=RULES)) as shy:
        assert "changed" == refused(shy, key()).loss


def test_a_process_that_cannot_judge_keeps_the_others_finding(server: RedisServer, store: RedisStore) -> None:
    with connect(server.url) as client:
        client.execute_command("ACL", "SETUSER", "shy", "on", ">pw", "~*", "&*", "+@all", "-config")
    with closing(RedisStore(f"redis://shy:pw@127.0.0.1:{server.port}/0", rules=RULES)) as shy:
        shy.data_loss.status()
    killed(server)

    granted(claim(store, key()))


def test_a_restart_that_no_process_can_judge_is_no_outage(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(server)
    monkeypatch.setattr(store.data_loss, "judge", lambda: None)

    assert ("changed", False) == ((lost := refused(store, key())).loss, lost.noticed)


def test_a_server_without_durability_is_not_checked_again(
    start_redis: StartRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_redis()
    with closing(RedisStore(server.url, rules=RULES)) as store:
        store.data_loss.initialise()
        asked = list[str]()
        monkeypatch.setattr(data_loss, "restart_proof", lambda _: asked.append("asked"))
        granted(claim(store, key()))

        assert [] == asked


def test_a_server_that_hides_its_process_is_reported(redis_server: RedisServer, redis_client: Any) -> None:
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
    primary, replica = start_redis(kind), start_redis(kind)
    with closing(RedisStore(primary.url, rules=RULES)) as store:
        store.data_loss.initialise()
        with redis.Redis.from_url(replica.url) as client, redis.Redis.from_url(primary.url) as followed:
            follow(client, followed, port=primary.port)

        granted(claim(store))


@pytest.mark.parametrize("kind", REDIS_KINDS)
def test_a_returning_primary_lost_the_writes_in_between(start_redis: StartRedis, kind: str) -> None:
    """The same process keeps the memory again, and has thrown its own last writes away to follow the other one."""
    first, second = start_redis(kind), start_redis(kind)
    with closing(RedisStore(first.url, rules=RULES)) as store:
        store.data_loss.initialise()
        with redis.Redis.from_url(first.url) as one, redis.Redis.from_url(second.url) as two:
            for promoted, demoted, port in ((two, one, first.port), (one, two, second.port)):
                follow(promoted, demoted, port=port)
                promoted.replicaof("NO", "ONE")

        assert "changed" == refused(store).loss
