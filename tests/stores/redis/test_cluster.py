"""Clusters, Sentinels and replicas: an outcome is right or the call fails, and the client finds new primaries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import valkey
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, InFlight, Mismatched, Record
from flask_idempotency.stores.redis import cluster, connection, layout
from flask_idempotency.stores.redis.client import connection_for, make_client
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import TcpProxy
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted
from tests.forgiving import FORGIVING, redis_store
from tests.lab.cluster import ClusterRig, Clusters, SlotMove, slot_of
from tests.lab.nodes import Node
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import StartRedis
from tests.lab.sentinel import SentinelRig
from tests.stores.owners import WRITES
from tests.tooling.processes import eventually


def by_url(rig: ClusterRig) -> Any:
    return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in rig.awake)}/?socket_timeout=0.5"


def by_client(rig: ClusterRig) -> Any:
    nodes = [ClusterNode("127.0.0.1", node.port) for node in rig.awake]  # type: ignore[no-untyped-call]
    return redis.RedisCluster(startup_nodes=nodes, socket_timeout=0.5, retry=Retry(NoBackoff(), 1))


@pytest.fixture(params=(by_url, by_client), ids=("url", "client"))
def cluster_store(request: pytest.FixtureRequest, cluster_rig: ClusterRig) -> Iterator[RedisStore]:
    with ExitStack() as ends:
        reached = request.param(cluster_rig)
        if not isinstance(reached, str):
            ends.callback(reached.close)
        cluster_store = redis_store(reached)
        ends.callback(cluster_store.close)
        yield cluster_store


def answered(cluster_store: RedisStore, key: StorageKey) -> None:
    token = a_token()
    granted(cluster_store.claim(a_request(key), token=token, lease=LEASE))
    cluster_store.complete(key, token, PAYLOAD, keep=KEEP)


def kept_by(rig: ClusterRig, node: Node) -> StorageKey:
    ranges = [key for key in (a_key() for _ in range(64)) if rig.primary_of(layout.keys(key)[0]) is node]
    return ranges[0]


def found_again(cluster_store: RedisStore, key: StorageKey) -> bool:
    """Whether it replays by now what is known. Until then it may only say that it does not know."""
    try:
        return isinstance(cluster_store.claim(a_request(key), token=a_token(), lease=LEASE), Record)
    except StoreUnavailable:
        return False


def test_every_node_is_reached_from_any(cluster_store: RedisStore, cluster_rig: ClusterRig) -> None:
    for node in cluster_rig.primaries:
        key = kept_by(cluster_rig, node)
        answered(cluster_store, key)
        assert found_again(cluster_store, key)
        granted(cluster_store.claim(a_request(kept_by(cluster_rig, node)), token=a_token(), lease=LEASE))

    assert 3 == cluster_store.recovery.counts().in_flight
    cluster_store.check()
    assert {"eviction", "persistence"} < {finding.check for finding in cluster_store.health.findings()}


def test_commands_of_one_call_take_one_round_trip_per_node(
    cluster_rig: ClusterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one for each slot: a task asks for hundreds."""
    client = make_client(by_url(cluster_rig))
    line = connection_for(client, owned=True)
    line("GET", "a")
    trips = list[int]()

    def counted(pool: Any, commands: Any, **options: Any) -> Any:
        trips.append(len(commands))
        return connection.exchange(pool, commands, **options)

    monkeypatch.setattr(cluster, "exchange", counted)
    told = line.pipeline([("GET", f"key {number}") for number in range(99)])
    client.close()

    assert ([None] * 99, 3, 99) == (told, len(trips), sum(trips))


def test_concurrent_threads_share_one_topology_lookup(clusters: Clusters, redis_kind: str) -> None:
    server = clusters.get(redis_kind)
    client = make_client(f"redis+cluster://127.0.0.1:{server.port}")
    line = connection_for(client, owned=True)
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


def test_a_planned_failover_is_followed(cluster_store: RedisStore, cluster_rig: ClusterRig) -> None:
    primary = cluster_rig.primaries[0]
    known, running, new = (kept_by(cluster_rig, primary) for _ in range(3))
    answered(cluster_store, known)
    token = a_token()
    granted(cluster_store.claim(a_request(running), token=token, lease=LEASE))
    heir = cluster_rig.replica_of(primary)
    heir.has_all_of(primary)

    cluster_rig.fail_over(heir)

    assert eventually(lambda: found_again(cluster_store, known))
    assert isinstance(cluster_store.claim(a_request(running), token=a_token(), lease=LEASE), InFlight)
    cluster_store.complete(running, token, PAYLOAD, keep=KEEP)
    answered(cluster_store, new)


@pytest.mark.slow
def test_a_silent_primary_is_unavailable_until_it_is_replaced(
    cluster_store: RedisStore, cluster_rig: ClusterRig
) -> None:
    primary, other = cluster_rig.primaries[:2]
    known, elsewhere = kept_by(cluster_rig, primary), kept_by(cluster_rig, other)
    answered(cluster_store, known)
    answered(cluster_store, elsewhere)
    heir = cluster_rig.replica_of(primary)
    heir.has_all_of(primary)

    primary.pause()
    with pytest.raises(StoreUnavailable):
        cluster_store.claim(a_request(known), token=a_token(), lease=LEASE)
    assert eventually(lambda: found_again(cluster_store, elsewhere))
    cluster_rig.promoted(heir)

    assert eventually(lambda: found_again(cluster_store, known))


@pytest.mark.parametrize("cluster_store", (by_url,), ids=("url",), indirect=True)
def test_one_at_a_time_waits_for_a_silent_node(
    cluster_store: RedisStore, cluster_rig: ClusterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, well = cluster_rig.primaries[:2]
    key, other = kept_by(cluster_rig, gone), kept_by(cluster_rig, well)
    answered(cluster_store, other)
    for node in (gone, cluster_rig.replica_of(gone)):
        node.pause()
    with pytest.raises(StoreUnavailable):
        cluster_store.read(key)
    sent = list[object]()
    exchange = connection.exchange

    def counted(*arguments: Any, **options: Any) -> Any:
        sent.append(arguments)
        return exchange(*arguments, **options)

    monkeypatch.setattr(cluster, "exchange", counted)
    with pytest.raises(StoreUnavailable):
        cluster_store.read(key)

    assert [] == sent
    assert isinstance(cluster_store.claim(a_request(other), token=a_token(), lease=LEASE), Record)


def test_a_migrating_slot_fails_calls_until_it_has_moved(cluster_store: RedisStore, cluster_rig: ClusterRig) -> None:
    """
    Half of what a script needs may be at either end: nobody runs anything. What was asked in vain can be asked again.
    """
    source, target = cluster_rig.primaries[:2]
    key, token = kept_by(cluster_rig, source), a_token()
    known = StorageKey(a_key().rid, key.tid)
    answered(cluster_store, known)
    move = SlotMove(cluster_rig, slot_of(layout.keys(key)[0]), to=target)
    move.begin()

    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            cluster_store.claim(a_request(key), token=token, lease=LEASE)
        move.carry()
    move.finish()

    assert 1 == granted(cluster_store.claim(a_request(key), token=token, lease=LEASE)).attempt
    assert isinstance(cluster_store.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)
    assert found_again(cluster_store, known)


def test_a_single_key_call_follows_a_migrating_slot(cluster_store: RedisStore, cluster_rig: ClusterRig) -> None:
    slot = slot_of(layout.task_lock("reap"))
    source = cluster_rig.primary_of(slot)
    target = next(node for node in cluster_rig.primaries if node is not source)
    move = SlotMove(cluster_rig, slot, to=target)
    move.begin()

    assert cluster_store.task_log.lock("reap", a_token(), lease=60)
    assert not cluster_store.task_log.lock("reap", a_token(), lease=60)
    move.finish()
    assert not cluster_store.task_log.lock("reap", a_token(), lease=60)


@pytest.mark.parametrize("kind", (AttributeError, KeyError, IndexError, TypeError, ValueError))
def test_a_confused_cluster_client_is_unavailable(kind: type[Exception]) -> None:
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
        cluster_store = RedisStore(Lost(), replicas=replicas)
        with pytest.raises(StoreUnavailable):
            cluster_store.claim(a_request(a_key()), token=a_token(), lease=LEASE)


@pytest.mark.parametrize("url", ("redis+cluster://127.0.0.1:1,127.0.0.1:2", "redis+sentinel://127.0.0.1:1/payments"))
def test_an_application_starts_while_its_servers_are_down(url: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster_store = RedisStore(url)
    cluster_store.check()
    for ask in (lambda: cluster_store.read(a_key()), cluster_store.recovery.counts, cluster_store.health.findings):
        with pytest.raises(StoreUnavailable) as raised:
            ask()
        assert "127.0.0.1" not in str(raised.value)
    cluster_store.close()

    assert "127.0.0.1" not in caplog.text


def test_a_cluster_url_needs_a_cluster_and_a_plain_url_a_server(
    start_redis: StartRedis, clusters: Clusters, redis_kind: str
) -> None:
    alone, node = start_redis(redis_kind), clusters.get(redis_kind)
    with pytest.raises(ConfigurationError, match="Write redis://"):
        RedisStore(f"redis+cluster://127.0.0.1:{alone.port}").check()
    with pytest.raises(ConfigurationError, match=r"Write redis\+cluster://"):
        RedisStore(node.url).check()


def test_sentinels_lead_to_the_new_primary(sentinel_rig: SentinelRig) -> None:
    cluster_store, known, new = redis_store(sentinel_rig.url), a_key(), a_key()
    answered(cluster_store, known)
    for replica in sentinel_rig.replicas:
        replica.has_all_of(sentinel_rig.primary)

    sentinel_rig.fail_over()

    assert eventually(lambda: found_again(cluster_store, known))
    answered(cluster_store, new)
    cluster_store.close()


@pytest.mark.slow
def test_a_silent_primary_is_unavailable_until_sentinels_name_another(sentinel_rig: SentinelRig) -> None:
    primary, heir = sentinel_rig.primary, sentinel_rig.replicas[0]
    cluster_store, known = redis_store(f"{sentinel_rig.url}?socket_timeout=0.5"), a_key()
    answered(cluster_store, known)
    for replica in sentinel_rig.replicas:
        replica.has_all_of(primary)

    sentinel_rig.sentinels[0].pause()
    primary.pause()
    with pytest.raises(StoreUnavailable):
        cluster_store.claim(a_request(known), token=a_token(), lease=LEASE)
    sentinel_rig.promoted(heir)

    assert eventually(lambda: found_again(cluster_store, known))
    cluster_store.close()


PROMISED = [verb for verb in WRITES if verb != "renew"]
"""A renewal that is lost ends a lease early, and nothing else."""

WAYS: dict[str, Callable[[str], Any]] = {
    "url": lambda url: f"{url}?socket_timeout=0.5",
    "redis-py": lambda url: redis.Redis.from_url(url, socket_timeout=0.5, decode_responses=True),
    "valkey-py": lambda url: valkey.Valkey.from_url(url, socket_timeout=0.5),
}


@dataclass
class Pair:
    """A store that waits for the one replica that there is."""

    store: RedisStore
    primary: RedisServer
    replica: RedisServer


BY_URL = [("url", kind) for kind in REDIS_KINDS]
PAIRS = [*BY_URL, ("redis-py", REDIS_KINDS[0]), ("valkey-py", REDIS_KINDS[-1])]


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest, start_redis: StartRedis) -> Iterator[Pair]:
    way, redis_kind = request.param
    primary = start_redis(redis_kind, "--repl-diskless-sync-delay", "0")
    replica = start_redis(redis_kind, "--replicaof", "127.0.0.1", str(primary.port))
    with ExitStack() as ends:
        node = Node(replica)
        ends.callback(node.client.close)
        assert eventually(node.in_step)
        reached = WAYS[way](primary.url)
        if not isinstance(reached, str):
            ends.callback(reached.close)
        store = RedisStore(reached, rules=FORGIVING, replicas=1)
        ends.callback(store.close)
        yield Pair(store, primary, replica)


@pytest.mark.slow
def test_a_claim_without_enough_replicas_is_not_granted(pair: Pair) -> None:
    """
    It would be gone after a fail-over, and somebody else would run. Nor is it when it is asked for again: that finds it
    there and writes nothing, and a replica that lacks the first would count. With the replica back it is granted.
    """
    key, token = a_key(), a_token()
    pair.replica.pause()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="IDEMPOTENCY_REPLICAS = 1"):
            pair.store.claim(a_request(key), token=token, lease=LEASE)
    pair.replica.resume()

    assert eventually(lambda: claimed(pair.store, key, token))
    assert 1 == granted(pair.store.claim(a_request(key), token=token, lease=LEASE)).attempt


def claimed(store: RedisStore, key: Any, token: bytes) -> bool:
    try:
        return isinstance(store.claim(a_request(key), token=token, lease=LEASE), Grant)
    except StoreUnavailable:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("pair", BY_URL, ids="-".join, indirect=True)
@pytest.mark.parametrize("verb", PROMISED)
def test_a_repeated_call_without_enough_replicas_fails_too(pair: Pair, verb: str) -> None:
    """
    The second time a script finds its work done and writes nothing: there would be nothing to wait for, and the replica
    that lacks the first would count.
    """
    key, token = a_key(), a_token()
    granted(pair.store.claim(a_request(key), token=token, lease=LEASE))
    pair.replica.pause()
    for _ in range(1 if verb == "release" else 2):  # a key that is free already is nobody's promise
        with pytest.raises(StoreUnavailable, match="IDEMPOTENCY_REPLICAS = 1"):
            WRITES[verb](pair.store, key, token)
    pair.replica.resume()

    def done() -> bool:
        try:
            WRITES[verb](pair.store, key, token)
        except StoreUnavailable:
            return False
        return True

    assert eventually(done)


@pytest.mark.slow
def test_a_refusal_or_a_replay_needs_no_replica(pair: Pair) -> None:
    known, running, token = a_key(), a_key(), a_token()
    granted(pair.store.claim(a_request(known), token=token, lease=LEASE))
    pair.store.complete(known, token, PAYLOAD, keep=KEEP)
    granted(pair.store.claim(a_request(running), token=token, lease=LEASE))
    pair.replica.pause()

    assert isinstance(pair.store.claim(a_request(known), token=a_token(), lease=LEASE), Record)
    assert isinstance(pair.store.claim(a_request(running), token=a_token(), lease=LEASE), InFlight)
    other = a_request(running, fingerprint=b"o" * 17)
    assert isinstance(pair.store.claim(other, token=a_token(), lease=LEASE), Mismatched)
    pair.replica.resume()


@pytest.mark.slow
def test_a_full_server_accepts_a_restored_claim(pair: Pair) -> None:
    key, token = a_key(), a_token()
    granted(pair.store.claim(a_request(key), token=token, lease=LEASE))
    with redis.Redis.from_url(pair.primary.url) as client:
        client.config_set("maxmemory", 1)
        client.script_flush()

        pair.store.complete(key, token, PAYLOAD, keep=KEEP)

        assert -1 != client.ttl(layout.followed(layout.keys(key)[0])[0])


@pytest.mark.slow
def test_waiting_for_replicas_takes_no_extra_round_trip(start_redis: StartRedis, redis_kind: str) -> None:
    primary = start_redis(redis_kind, "--repl-diskless-sync-delay", "0")
    node = Node(start_redis(redis_kind, "--replicaof", "127.0.0.1", str(primary.port)))
    assert eventually(node.in_step)
    node.client.close()
    with TcpProxy(primary.port) as proxy:
        store = RedisStore(f"redis://127.0.0.1:{proxy.port}/0", rules=FORGIVING, replicas=1)
        for first in (True, False):
            key, token, before = a_key(), a_token(), proxy.chunks
            granted(store.claim(a_request(key), token=token, lease=LEASE))
            store.complete(key, token, PAYLOAD, keep=KEEP)
            store.claim(a_request(key), token=a_token(), lease=LEASE)
            trips = proxy.chunks - before
            assert first or 3 == trips  # at first the scripts are told
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ("url", "client"))
def test_in_a_cluster_only_replicas_of_the_keys_primary_count(cluster_rig: ClusterRig, way: str) -> None:
    primary = cluster_rig.primaries[0]
    replica = cluster_rig.replica_of(primary)
    with ExitStack() as ends:
        reached: Any = f"redis+cluster://127.0.0.1:{primary.port}/?socket_timeout=0.5"
        if way == "client":
            reached = redis.RedisCluster("127.0.0.1", primary.port, socket_timeout=0.5)
            ends.callback(reached.close)
        store = RedisStore(reached, rules=FORGIVING, replicas=1)
        ends.callback(store.close)
        keys = [a_key() for _ in range(64)]
        here = next(key for key in keys if cluster_rig.primary_of(layout.keys(key)[0]) is primary)
        there = next(key for key in keys if cluster_rig.primary_of(layout.keys(key)[0]) is not primary)
        granted(store.claim(a_request(here), token=a_token(), lease=LEASE))
        another = type(here)(a_key().rid, here.tid)

        replica.pause()
        granted(store.claim(a_request(there), token=a_token(), lease=LEASE))
        with pytest.raises(StoreUnavailable, match="IDEMPOTENCY_REPLICAS = 1"):
            store.claim(a_request(another), token=a_token(), lease=LEASE)


@pytest.mark.slow
def test_a_migrating_slot_is_written_on_one_node_only(cluster_rig: ClusterRig) -> None:
    """
    What replicas are waited for by stands where the slot comes from, and all else has gone: whoever moves it would be told
    that it is there already.
    """
    source, target = cluster_rig.primaries[:2]
    key, elsewhere = (
        next(key for key in some_keys() if cluster_rig.primary_of(record_of(key)) is node) for node in (source, target)
    )
    written, _ = layout.followed(record_of(key))
    with closing(RedisStore(f"{cluster_rig.url}/?socket_timeout=0.5", rules=FORGIVING, replicas=1)) as store:
        for known in (key, elsewhere):  # a script that a node does not know is not run there at first
            granted(store.claim(a_request(known), token=a_token(), lease=LEASE))
        move = SlotMove(cluster_rig, slot_of(record_of(key)), to=target)
        move.begin()
        move.carry(*({*source.told("CLUSTER GETKEYSINSLOT", move.slot, 100)} - {written.decode()}))
        with pytest.raises(StoreUnavailable):
            store.claim(a_request(StorageKey(a_key().rid, key.tid)), token=a_token(), lease=LEASE)
        move.finish()

        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)


def some_keys() -> Iterator[StorageKey]:
    return (a_key() for _ in range(64))


def record_of(key: StorageKey) -> bytes:
    return layout.keys(key)[0]
