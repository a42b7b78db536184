"""Clusters and Sentinels: whatever happens to their nodes, an answer is right or there is none, and a way is found again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry

from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import InFlight, Record
from flask_idempotency.stores.redis import cluster, connection, layout
from flask_idempotency.stores.redis.client import line_of, make_client
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted
from tests.forgiving import redis_store
from tests.lab.cluster import ClusterRig, Clusters, SlotMove, slot_of
from tests.lab.nodes import Node
from tests.lab.redis import StartRedis
from tests.lab.sentinel import SentinelRig
from tests.tooling.processes import eventually


def by_url(rig: ClusterRig) -> Any:
    return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in rig.awake)}/?socket_timeout=0.5"


def by_client(rig: ClusterRig) -> Any:
    nodes = [ClusterNode("127.0.0.1", node.port) for node in rig.awake]  # type: ignore[no-untyped-call]
    return redis.RedisCluster(startup_nodes=nodes, socket_timeout=0.5, retry=Retry(NoBackoff(), 1))


@pytest.fixture(params=(by_url, by_client), ids=("url", "client"))
def store(request: pytest.FixtureRequest, cluster_rig: ClusterRig) -> Iterator[RedisStore]:
    with ExitStack() as ends:
        reached = request.param(cluster_rig)
        if not isinstance(reached, str):
            ends.callback(reached.close)
        store = redis_store(reached)
        ends.callback(store.close)
        yield store


def answered(store: RedisStore, key: StorageKey) -> None:
    token = a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, PAYLOAD, keep=KEEP)


def kept_by(rig: ClusterRig, node: Node) -> StorageKey:
    ranges = [key for key in (a_key() for _ in range(64)) if rig.primary_of(layout.keys(key)[0]) is node]
    return ranges[0]


def found_again(store: RedisStore, key: StorageKey) -> bool:
    """Whether it replays by now what is known. Until then it may only say that it does not know."""
    try:
        return isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)
    except StoreUnavailable:
        return False


def test_every_node_is_reached_from_any(store: RedisStore, cluster_rig: ClusterRig) -> None:
    """One by one, and together: in one round trip to each of them."""
    for node in cluster_rig.primaries:
        key = kept_by(cluster_rig, node)
        answered(store, key)
        assert found_again(store, key)
        granted(store.claim(a_request(kept_by(cluster_rig, node)), token=a_token(), lease=LEASE))

    assert 3 == store.recovery.counts().in_flight
    store.check()
    assert {"eviction", "persistence"} < {finding.check for finding in store.health.findings()}


def test_what_goes_together_is_one_round_trip_to_each_node(
    cluster_rig: ClusterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one for each slot: a chore asks for hundreds."""
    client = make_client(by_url(cluster_rig))
    line = line_of(client, owned=True)
    line("GET", "a")
    trips = list[int]()

    def counted(pool: Any, commands: Any, **options: Any) -> Any:
        trips.append(len(commands))
        return connection.exchange(pool, commands, **options)

    monkeypatch.setattr(cluster, "exchange", counted)
    told = line.pipeline([("GET", f"key {number}") for number in range(99)])
    client.close()

    assert ([None] * 99, 3, 99) == (told, len(trips), sum(trips))


def test_threads_that_begin_at_once_share_one_look(clusters: Clusters, redis_kind: str) -> None:
    """A worker's first requests come together: one of them asks who keeps what, and the others wait for its answer."""
    server = clusters.get(redis_kind)
    client = make_client(f"redis+cluster://127.0.0.1:{server.port}")
    line = line_of(client, owned=True)
    begin, told = threading.Barrier(8), list[Any]()

    def ask() -> None:
        begin.wait(60)
        told.append(line("EXISTS", "nothing"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    client.close()

    assert ([0] * 8, 1) == (told, client.looks)


def test_a_planned_failover_is_followed(store: RedisStore, cluster_rig: ClusterRig) -> None:
    """What was known is replayed, what is in flight is taken, and what is new runs; by whoever has the slot now."""
    primary = cluster_rig.primaries[0]
    known, running, new = (kept_by(cluster_rig, primary) for _ in range(3))
    answered(store, known)
    token = a_token()
    granted(store.claim(a_request(running), token=token, lease=LEASE))
    heir = cluster_rig.replica_of(primary)
    heir.has_all_of(primary)

    cluster_rig.fail_over(heir)

    assert eventually(lambda: found_again(store, known))
    assert isinstance(store.claim(a_request(running), token=a_token(), lease=LEASE), InFlight)
    store.complete(running, token, PAYLOAD, keep=KEEP)
    answered(store, new)


@pytest.mark.slow
def test_a_silent_primary_is_unavailable_until_it_is_replaced(store: RedisStore, cluster_rig: ClusterRig) -> None:
    """Its keys get no answer and those of others do; then the same store finds the new one by itself."""
    primary, other = cluster_rig.primaries[:2]
    known, elsewhere = kept_by(cluster_rig, primary), kept_by(cluster_rig, other)
    answered(store, known)
    answered(store, elsewhere)
    heir = cluster_rig.replica_of(primary)
    heir.has_all_of(primary)

    primary.pause()
    with pytest.raises(StoreUnavailable):
        store.claim(a_request(known), token=a_token(), lease=LEASE)
    assert eventually(lambda: found_again(store, elsewhere))
    cluster_rig.promoted(heir)

    assert eventually(lambda: found_again(store, known))


@pytest.mark.parametrize("store", (by_url,), ids=("url",), indirect=True)
def test_one_at_a_time_waits_for_a_silent_node(
    store: RedisStore, cluster_rig: ClusterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the others keep their threads, and leases elsewhere are renewed in time; other nodes' keys are answered."""
    gone, well = cluster_rig.primaries[:2]
    key, other = kept_by(cluster_rig, gone), kept_by(cluster_rig, well)
    answered(store, other)
    for node in (gone, cluster_rig.replica_of(gone)):
        node.pause()
    with pytest.raises(StoreUnavailable):
        store.read(key)
    sent = list[object]()
    exchange = connection.exchange

    def counted(*arguments: Any, **options: Any) -> Any:
        sent.append(arguments)
        return exchange(*arguments, **options)

    monkeypatch.setattr(cluster, "exchange", counted)
    with pytest.raises(StoreUnavailable):
        store.read(key)

    assert [] == sent
    assert isinstance(store.claim(a_request(other), token=a_token(), lease=LEASE), Record)


def test_a_slot_on_its_way_gives_no_answer_and_then_the_right_one(store: RedisStore, cluster_rig: ClusterRig) -> None:
    """
    Half of what a script needs may be at either end: nobody runs anything. What was asked in vain can be asked again.
    """
    source, target = cluster_rig.primaries[:2]
    key, token = kept_by(cluster_rig, source), a_token()
    known = StorageKey(a_key().rid, key.tid)
    answered(store, known)
    move = SlotMove(cluster_rig, slot_of(layout.keys(key)[0]), to=target)
    move.begin()

    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            store.claim(a_request(key), token=token, lease=LEASE)
        move.carry()
    move.finish()

    assert 1 == granted(store.claim(a_request(key), token=token, lease=LEASE)).attempt
    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)
    assert found_again(store, known)


def test_a_single_key_is_asked_for_where_it_is_going(store: RedisStore, cluster_rig: ClusterRig) -> None:
    """A lock of the chores, taken while its slot moves: it is nobody else's at either end."""
    slot = slot_of(layout.task_lock("reap"))
    source = cluster_rig.primary_of(slot)
    target = next(node for node in cluster_rig.primaries if node is not source)
    move = SlotMove(cluster_rig, slot, to=target)
    move.begin()

    assert store.task_log.lock("reap", a_token(), lease=60)
    assert not store.task_log.lock("reap", a_token(), lease=60)
    move.finish()
    assert not store.task_log.lock("reap", a_token(), lease=60)


@pytest.mark.parametrize("kind", (AttributeError, KeyError, IndexError, TypeError, ValueError))
def test_a_cluster_client_that_has_lost_its_way_is_unavailable(kind: type[Exception]) -> None:
    """Sent on to a node that it does not know, redis-py's raises what Python raises for a None."""

    class Lost(redis.RedisCluster):
        def __init__(self) -> None: ...

        def execute_command(self, *command: Any, **options: Any) -> Any:
            raise kind

        def get_node_from_key(self, key: Any, replica: bool = False) -> Any:
            raise kind

        def get_connection_kwargs(self) -> Any:
            return {}

        def get_primaries(self) -> list[Any]:
            return []

    for replicas in (0, 1):
        store = RedisStore(Lost(), replicas=replicas)
        with pytest.raises(StoreUnavailable):
            store.claim(a_request(a_key()), token=a_token(), lease=LEASE)


@pytest.mark.parametrize("url", ("redis+cluster://127.0.0.1:1,127.0.0.1:2", "redis+sentinel://127.0.0.1:1/payments"))
def test_what_is_down_does_not_keep_the_application_from_starting(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """
    It is looked for with each request, and until it is found they are refused; without a word of where it should be.
    """
    store = RedisStore(url)
    store.check()
    for ask in (lambda: store.read(a_key()), store.recovery.counts, store.health.findings):
        with pytest.raises(StoreUnavailable) as raised:
            ask()
        assert "127.0.0.1" not in str(raised.value)
    store.close()

    assert "127.0.0.1" not in caplog.text


def test_a_server_is_no_cluster_and_a_cluster_no_server(
    start_redis: StartRedis, clusters: Clusters, redis_kind: str
) -> None:
    """Both would refuse most requests, or all: this is said at the start, with what to write instead."""
    alone, node = start_redis(redis_kind), clusters.get(redis_kind)
    with pytest.raises(ConfigurationError, match="Write redis://"):
        RedisStore(f"redis+cluster://127.0.0.1:{alone.port}").check()
    with pytest.raises(ConfigurationError, match=r"Write redis\+cluster://"):
        RedisStore(node.url).check()


def test_sentinels_lead_to_the_new_primary(sentinel_rig: SentinelRig) -> None:
    """
    After a planned fail-over the first calls may be refused; then what was known is replayed and what is new runs.
    """
    store, known, new = redis_store(sentinel_rig.url), a_key(), a_key()
    answered(store, known)
    for replica in sentinel_rig.replicas:
        replica.has_all_of(sentinel_rig.primary)

    sentinel_rig.fail_over()

    assert eventually(lambda: found_again(store, known))
    answered(store, new)
    store.close()


@pytest.mark.slow
def test_a_silent_primary_is_unavailable_until_sentinels_name_another(sentinel_rig: SentinelRig) -> None:
    """With one of the Sentinels silent as well."""
    primary, heir = sentinel_rig.primary, sentinel_rig.replicas[0]
    store, known = redis_store(f"{sentinel_rig.url}?socket_timeout=0.5"), a_key()
    answered(store, known)
    for replica in sentinel_rig.replicas:
        replica.has_all_of(primary)

    sentinel_rig.sentinels[0].pause()
    primary.pause()
    with pytest.raises(StoreUnavailable):
        store.claim(a_request(known), token=a_token(), lease=LEASE)
    sentinel_rig.promoted(heir)

    assert eventually(lambda: found_again(store, known))
    store.close()
