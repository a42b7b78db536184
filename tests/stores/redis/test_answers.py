"""A walk through Redis: past everything that is no answer, on one server or many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.capabilities import Answer, DataKey
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import NOBODY, RequestInfo, SealedBy, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.admin.data_keys import BATCH_BYTES, Scan
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted, stand
from tests.forgiving import redis_store


def walk(store: RedisStore, **which: Any) -> list[Answer]:
    after: bytes | None = b""
    met = list[Answer]()
    while after is not None:
        page = store.responses.scan(after=after, limit=100, **which)
        met += page.answers
        after = page.after
    return met


def complete(store: RedisStore, key: StorageKey, payload: StoredPayload = PAYLOAD) -> None:
    token = a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=Quota()))
    store.complete(key, token, payload, keep=KEEP)


def test_every_answer_is_met_among_thousands_of_keys(store: RedisStore, redis_client: redis.Redis) -> None:
    """In many partitions and in one; other people's keys are not looked at."""
    redis_client.mset({f"other:{number}": "x" for number in range(3000)})
    tid = a_key().tid
    keys = {a_key() for _ in range(100)} | {a_key(tid=tid) for _ in range(100)}
    for key in keys:
        complete(store, key)

    assert {answer.key for answer in walk(store)} == keys
    assert {answer.key for answer in walk(store, tid=tid)} == {key for key in keys if key.tid == tid}
    assert store.responses.count() == {"": 200}


def test_what_cannot_be_read_is_passed_over(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """Of another type, garbage, or under a name that is none: one of them must not stop the chore for all others."""
    good, spoilt, listed = a_key(), a_key(), a_key()
    for key in (good, spoilt):
        stand(store, clock, key, "completed")
    data = redis_client.get(layout.keys(spoilt)[0])
    assert isinstance(data, bytes)
    redis_client.set(layout.keys(spoilt)[0], data[:50])
    redis_client.lpush(layout.keys(listed)[0], "not ours")
    redis_client.set("idm1:{p0000}:r:!", data)
    redis_client.set("idm1:{p0000}:r:A", data)

    assert [answer.key for answer in walk(store)] == [good]
    assert store.responses.count() == {"": 1}


def test_an_erased_answer_is_met_as_such(store: RedisStore, clock: FrozenClock) -> None:
    """So that a chore may drop what plain ones still hold."""
    key, other = a_key(), a_key()
    for each in (key, other):
        stand(store, clock, each, "completed")
    store.data_keys.shred(key.tid)

    assert {answer.key: answer.record.erased for answer in walk(store)} == {key: True, other: False}


def test_replacing_leaves_the_time_to_live_and_the_ledger(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Redis drops it when it would have."""
    key = a_key()
    complete(store, key)
    shelf = store.data_keys.read_keys(key.tid)
    assert store.data_keys.add(key.tid, DataKey(1, "2026-11", b"wrapped"), store=shelf.store, after=0)
    name, ledger = layout.keys(key)[0], redis_client.hgetall(layout.ledger(key.tid))
    redis_client.pexpire(name, 1_000_000)
    new = replace(PAYLOAD, data=b"sealed", sealed_by=SealedBy("2026-11", 1))

    assert store.responses.replace(key, PAYLOAD, new)
    assert 900_000 < redis_client.pttl(name) <= 1_000_000
    assert redis_client.hgetall(layout.ledger(key.tid)) == ledger


class Node:
    def __init__(self, name: str) -> None:
        self.name = name


class Nodes:
    """A server that looks like a Cluster of several, each with keys of its own, one to a page."""

    def __init__(self, **keys: int) -> None:
        self.keys = keys

    def primaries(self) -> list[tuple[bytes, Node]]:
        return [(name.encode(), Node(name)) for name in sorted(self.keys)]

    def scan(self, cursor: int, pattern: bytes, count: int, *, node: Node) -> tuple[int, list[bytes]]:
        following = cursor + 1
        return (0 if following >= self.keys[node.name] else following), [f"{node.name}{cursor}".encode()]


def test_every_node_of_a_cluster_is_asked_to_its_end() -> None:
    """One after the other; a page ends where its node's does."""
    server: Any = Nodes(a=2, b=3, c=1)

    assert [key for keys in Scan(server).all(b"*") for key in keys] == [b"a0", b"a1", b"b0", b"b1", b"b2", b"c0"]


def test_a_walk_whose_node_is_gone_begins_again() -> None:
    """Where it stood means nothing on another server: to meet some twice is allowed, to pass some over is not."""
    server: Any = Nodes(a=2, b=3)
    _, after = Scan(server).page(b"*", after=b"b 0", count=1)
    assert after == b"b 1"
    other: Any = Nodes(a=2, c=3)
    keys, _ = Scan(other).page(b"*", after=after, count=1)

    assert keys == [b"a0"]


def test_every_command_of_a_call_names_all_its_keys_in_one_slot(redis_server: RedisServer, clock: FrozenClock) -> None:
    """
    Whatever is called: a Cluster refuses what is in two slots, and a script that reaches for what it was not given may
    be sent to the wrong server.
    """
    asked = list[tuple[bytes, ...]]()

    class Listening(redis.Redis):
        def execute_command(self, *args: Any, **options: Any) -> Any:
            if str(args[0]).startswith("EVAL"):
                asked.append(args[3 : 3 + int(args[2])])
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    with Listening.from_url(redis_server.url) as client:
        store = redis_store(client, clock=clock)
        keys = [a_key() for _ in range(3)]
        for key in keys:
            complete(store, key)
            store.data_keys.add(key.tid, DataKey(1, "k", b"w"), store=store.data_keys.read_keys(key.tid).store, after=0)
            store.ledger.usage(key.tid), store.ledger.reconcile(key.tid)
            store.responses.replace(key, PAYLOAD, PAYLOAD)
            store.mark_corrupt(key, PAYLOAD)
        walk(store), store.responses.count(), store.data_keys.count()

    assert len(asked) > 30
    assert all(len({name[: name.index(b"}")] for name in names}) == 1 for names in asked)


class Weighing(redis.Redis):
    """Notes how many bytes each answer of the server has."""

    heaviest = 0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        told = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if isinstance(told, list):
            self.heaviest = max(self.heaviest, sum(len(part) for part in told if isinstance(part, bytes)))
        return told


def test_long_answers_are_read_a_few_at_a_time(
    redis_server: RedisServer, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """And only where they are wanted: a server that copies a hundred megabytes in one go lets everybody else wait."""
    tid, payload = a_key().tid, replace(PAYLOAD, data=bytes(300_000))
    with Weighing.from_url(redis_server.url) as client:
        store = redis_store(client, clock=clock)
        keys, condemned = {a_key(tid=tid) for _ in range(21)}, a_key(tid=tid)
        for key in (*keys, condemned):
            complete(store, key, payload)
        store.mark_corrupt(condemned, payload)
        client.heaviest = 0
        redis_client.config_resetstat()
        assert (store.responses.count(), walk(store, other_than="")) == ({"": 21}, [])
        assert store.ledger.reconcile(tid).none
        commands: Any = redis_client.info("commandstats")
        assert (client.heaviest < 10_000, commands.keys() & {"cmdstat_get", "cmdstat_mget"}) == (True, set())
        met = walk(store)

        assert ({answer.key for answer in met}, {answer.record.payload for answer in met}) == (keys, {payload})
        assert 500_000 < client.heaviest <= BATCH_BYTES


def test_an_answer_is_met_whatever_stands_before_it(store: RedisStore) -> None:
    """Long texts about the request, a key's long name, a size that scripts cannot count to."""
    about = RequestInfo(principal="p" * 70_000, tenant="t" * 70_000)
    payloads = [replace(PAYLOAD, sealed_by=SealedBy(kid, 0)) for kid in ("", "k" * 255)]
    payloads += [PAYLOAD, replace(PAYLOAD, byte_size=2**53 + 1), replace(PAYLOAD, data=b"")]
    expected = {}
    for payload in payloads:
        for each in (NOBODY, about):
            key, token = a_key(), a_token()
            granted(store.claim(a_request(key, about=each), token=token, lease=LEASE, quota=Quota()))
            store.complete(key, token, payload, keep=KEEP)
            expected[key] = payload
    kids = {"": 6, "k" * 255: 2}

    assert {answer.key: answer.record.payload for answer in walk(store)} == expected
    assert {kid: count for kid, count in store.responses.count().items() if count} == kids
    assert all(store.ledger.reconcile(key.tid).none for key in expected)
