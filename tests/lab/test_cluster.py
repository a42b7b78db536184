"""The Cluster that tests break does what they are told of it, or what they prove would be nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import redis

from flask_idempotency.testing import TcpProxy
from tests.lab.cluster import ClusterRig, SlotMove, move, occupied, slot_of
from tests.lab.programs import REDIS_KINDS

SAYING_THEIR_NEW_PORT = [kind for kind in REDIS_KINDS if kind.startswith("valkey")]
"""Others do that when they start again."""


@pytest.fixture
def client(cluster_rig: ClusterRig) -> Iterator[redis.RedisCluster]:
    with cluster_rig.client(decode_responses=True) as client:
        yield client


def test_a_lagging_replica_lacks_the_last_write_when_it_is_promoted(
    cluster_rig: ClusterRig, client: redis.RedisCluster
) -> None:
    """And has everything that was written before it lagged."""
    primary = cluster_rig.primary_of("key")
    replica = cluster_rig.replica_of(primary)
    client.set("key", "early")
    replica.has_all_of(primary)

    replica.lag()
    client.set("key", "late")
    primary.kill()
    cluster_rig.fail_over(replica, force=True)

    assert client.get("key") == "early"


def test_between_the_steps_of_a_migration_keys_are_where_they_were_carried(cluster_rig: ClusterRig) -> None:
    """ASK for what has gone, a refusal of both together, MOVED when it is over."""
    slot = slot_of("{tag}")
    source = cluster_rig.primary_of(slot)
    target = next(node for node in cluster_rig.primaries if node is not source)
    for key in ("{tag}gone", "{tag}here"):
        source.client.set(key, key)

    step = SlotMove(cluster_rig, slot, to=target)
    step.begin()
    step.carry("{tag}gone")

    assert source.client.get("{tag}here") == "{tag}here"
    with pytest.raises(redis.exceptions.AskError):
        source.client.get("{tag}gone")
    # Redis 6 sends whoever wants both to the target, and that one says TRYAGAIN.
    with pytest.raises((redis.exceptions.TryAgainError, redis.exceptions.AskError)):
        source.client.mget("{tag}gone", "{tag}here")

    step.finish()

    with pytest.raises(redis.exceptions.MovedError):
        source.client.get("{tag}here")
    assert target.client.mget("{tag}gone", "{tag}here") == ["{tag}gone", "{tag}here"]


def test_a_mended_cluster_is_whole_and_empty(cluster_rig: ClusterRig, client: redis.RedisCluster) -> None:
    """Whatever was done to it: one dead, one half-way through a migration, one that lags."""
    client.set("key", "value")
    source = cluster_rig.primary_of("key")
    others = [node for node in cluster_rig.primaries if node is not source]
    SlotMove(cluster_rig, slot_of("key"), to=others[0]).begin()
    cluster_rig.replica_of(others[0]).lag()
    cluster_rig.replica_of(others[1]).kill()

    cluster_rig.mend()

    assert [node.told("DBSIZE") for node in cluster_rig.nodes] == [0] * 6
    assert len(cluster_rig.primaries) == 3
    assert all(cluster_rig.replica_of(primary).in_step() for primary in cluster_rig.primaries)


@pytest.mark.parametrize("redis_kind", SAYING_THEIR_NEW_PORT, indirect=True)
def test_clients_are_sent_through_a_proxy_that_a_node_announces(cluster_rig: ClusterRig) -> None:
    """So that one line of many can be cut."""
    node = cluster_rig.primary_of("key")
    with TcpProxy(node.port, marker=b"GET") as proxy:
        cluster_rig.announce(node, proxy.port)
        with cluster_rig.client() as client:
            client.get("key")

        assert proxy.requests == 1
        cluster_rig.announce(node, 0)


def test_all_that_a_node_has_is_moved_while_others_write_into_it(
    cluster_rig: ClusterRig, client: redis.RedisCluster
) -> None:
    """Nothing is lost that was acknowledged."""
    keys = [f"key {number}\x00" for number in range(60)]
    for key in keys:
        client.set(key, 0)
    source, target, _ = cluster_rig.primaries
    acknowledged, moved = dict.fromkeys(keys, 0), Event()

    def write() -> None:
        while not moved.is_set():
            for key in keys:
                acknowledged[key] = client.incr(key)

    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(write)
        move(cluster_rig, occupied(source), to=target)
        moved.set()
        writing.result()

    assert occupied(source) == set()
    assert {key: client.get(key) for key in keys} == {key: str(count) for key, count in acknowledged.items()}
