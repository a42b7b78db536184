"""Replicas that must have a promise before it counts: with fewer it is not made, in the same round trip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import valkey

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Claimed, InFlight, Mismatched, Replayed
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import TcpProxy
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted
from tests.forgiving import FORGIVING
from tests.lab.cluster import ClusterRig, SlotMove, slot_of
from tests.lab.nodes import Node
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import StartRedis
from tests.stores.owners import WRITES
from tests.tooling.processes import eventually

pytestmark = pytest.mark.slow

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


def test_a_claim_that_a_replica_lacks_is_not_granted(pair: Pair) -> None:
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
        return isinstance(store.claim(a_request(key), token=token, lease=LEASE), Claimed)
    except StoreUnavailable:
        return False


@pytest.mark.parametrize("pair", BY_URL, ids="-".join, indirect=True)
@pytest.mark.parametrize("verb", PROMISED)
def test_what_is_repeated_is_not_believed_either(pair: Pair, verb: str) -> None:
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


def test_who_is_refused_or_told_what_is_known_needs_no_replica(pair: Pair) -> None:
    """Nothing is promised to them."""
    known, running, token = a_key(), a_key(), a_token()
    granted(pair.store.claim(a_request(known), token=token, lease=LEASE))
    pair.store.complete(known, token, PAYLOAD, keep=KEEP)
    granted(pair.store.claim(a_request(running), token=token, lease=LEASE))
    pair.replica.pause()

    assert isinstance(pair.store.claim(a_request(known), token=a_token(), lease=LEASE), Replayed)
    assert isinstance(pair.store.claim(a_request(running), token=a_token(), lease=LEASE), InFlight)
    other = a_request(running, fingerprint=b"o" * 17)
    assert isinstance(pair.store.claim(other, token=a_token(), lease=LEASE), Mismatched)
    pair.replica.resume()


def test_a_full_server_still_takes_what_its_owner_brings(pair: Pair) -> None:
    """
    Also what is written for the replicas' sake. And a server that forgot the scripts is told them again, both of them.
    """
    key, token = a_key(), a_token()
    granted(pair.store.claim(a_request(key), token=token, lease=LEASE))
    with redis.Redis.from_url(pair.primary.url) as client:
        client.config_set("maxmemory", 1)
        client.script_flush()

        pair.store.complete(key, token, PAYLOAD, keep=KEEP)

        assert -1 != client.ttl(layout.followed(layout.keys(key)[0])[0])


def test_waiting_takes_no_round_trip_of_its_own(start_redis: StartRedis, redis_kind: str) -> None:
    """A first request still makes two, and a replay one."""
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


@pytest.mark.parametrize("way", ("url", "client"))
def test_in_a_cluster_the_replicas_of_the_keys_own_primary_count(cluster_rig: ClusterRig, way: str) -> None:
    """Those of the others say nothing about it."""
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


def test_a_slot_on_its_way_is_not_written_to_at_both_ends(cluster_rig: ClusterRig) -> None:
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
