"""Data keys and stored responses in Redis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.capabilities import Answer, DataKey
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import NO_INFO, RequestInfo, SealedBy, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.admin.data_keys import BATCH_BYTES
from flask_idempotency.stores.redis.scan import scan_all, scan_page
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock, TcpProxy
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
    stand,
)
from tests.forgiving import redis_store

SEALED = replace(PAYLOAD, sealed_by=SealedBy("2026-11", 1))


def add(store: RedisStore, tid: bytes, number: int = 1) -> bool:
    shelf = store.data_keys.read_keys(tid)
    return store.data_keys.add(tid, DataKey(number, "2026-11", b"wrapped"), store=shelf.store, after=shelf.last)


def claimed(store: RedisStore, tid: bytes) -> tuple[StorageKey, bytes]:
    key, token = a_key(tid=tid), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    return key, token


def test_an_emptied_store_gets_a_new_id(store: RedisStore, redis_client: redis.Redis) -> None:
    """
    What was wrapped for the former one is not put beside what is sealed for the new one, whose numbers begin again.
    """
    tid = a_key().tid
    add(store, tid)
    before = store.data_keys.read_keys(tid)
    redis_client.flushall()
    after = store.data_keys.read_keys(tid)

    assert (before.store != after.store, after.keys, after.last) == (True, (), 0)
    assert not store.data_keys.add(tid, DataKey(1, "2026-11", b"wrapped"), store=before.store, after=0)
    assert add(store, tid)


def test_the_store_id_is_created_once(redis_server: RedisServer, store: RedisStore) -> None:
    """Whoever asks first, in whatever process."""
    tid, other = a_key().tid, redis_store(redis_server.url)
    first = store.data_keys.read_keys(tid).store
    try:
        assert (first, 16) == (other.data_keys.read_keys(tid).store, len(first))
    finally:
        other.close()


def test_a_replay_of_an_erased_response_takes_one_command(redis_server: RedisServer, clock: FrozenClock) -> None:
    """That it was erased is said by the same script; and so is, when it is stored, that its key is there."""
    with TcpProxy(redis_server.port) as proxy:
        store = redis_store(f"redis://127.0.0.1:{proxy.port}/0", clock=clock)
        tid = a_key().tid
        add(store, tid)
        for _ in range(2):  # The server must be told each script once.
            key, token = claimed(store, tid)
            assert not found(store, key).erased
            before = proxy.requests
            store.complete(key, token, SEALED, keep=KEEP)
            store.claim(a_request(key), token=a_token(), lease=LEASE)
        counts = proxy.requests - before
        store.data_keys.shred(tid)
        before = proxy.requests
        erased = found(store, key).erased
        store.close()

        assert (counts, proxy.requests - before, erased) == (2, 1, True)


@pytest.mark.parametrize("keys", (0, 2))
def test_a_full_server_erases(full: tuple[RedisStore, redis.Redis], keys: int) -> None:
    """Whoever has to erase cannot wait until there is room."""
    store, client = full
    tid = a_key().tid
    for number in range(1, keys + 1):
        add(store, tid, number)
    store.data_keys.disable(tid, 1)
    key, token = claimed(store, tid)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    store.data_keys.read_keys(tid)
    client.config_set("maxmemory", 1)

    assert store.data_keys.shred(tid) == keys
    assert (found(store, key).erased, store.data_keys.read_keys(tid).keys) == (True, ())


def test_a_destroyed_data_key_leaves_no_bytes(store: RedisStore, redis_client: redis.Redis) -> None:
    """Neither wrapped nor closed: the hash says how many there were and when that ended."""
    tid = a_key().tid
    add(store, tid), add(store, tid, 2)
    store.data_keys.disable(tid, 2)
    store.data_keys.shred(tid)

    assert set(redis_client.hgetall(layout.data_keys(tid))) == {b"last", b"erasure"}
    assert not any(b"wrapped" in (redis_client.dump(name) or b"") for name in redis_client.scan_iter())


@for_each("text", ("", "1", "nan nan", "1 -1", "one two", "1 1e3"))
def test_an_unreadable_erasure_still_counts_as_one(store: RedisStore, redis_client: redis.Redis, text: str) -> None:
    """To replay what was erased would be worse than to replay nothing for a while."""
    tid = a_key().tid
    add(store, tid)
    key, token = claimed(store, tid)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    late, its = claimed(store, tid)
    redis_client.hset(layout.data_keys(tid), "erasure", text)
    calls: list[Any] = [
        lambda: store.read(key),
        lambda: store.claim(a_request(key), token=a_token(), lease=LEASE),
        lambda: store.complete(late, its, SEALED, keep=KEEP),
    ]

    for call in calls:
        with pytest.raises(CorruptRecord):
            call()


def test_an_unreadable_key_number_is_never_used(store: RedisStore, redis_client: redis.Redis) -> None:
    """A key of a number that was used before would seal for records that name another."""
    tid = a_key().tid
    shelf = store.data_keys.read_keys(tid)
    redis_client.hset(layout.data_keys(tid), "last", "0x1")

    with pytest.raises(CorruptRecord):
        store.data_keys.add(tid, DataKey(1, "2026-11", b"wrapped"), store=shelf.store, after=0)
    with pytest.raises(CorruptRecord):
        store.data_keys.read_keys(tid)


def test_data_keys_of_all_tenants_are_found_among_other_keys(store: RedisStore, redis_client: redis.Redis) -> None:
    """In any partition, past records and other people's keys, and each once."""
    tids = [a_key().tid for _ in range(30)]
    redis_client.hset("idm1:{p0000}:k:not-ours", "1", "x")
    redis_client.hset("idm1:{p0000}:q:not-ours", "1", "x")
    redis_client.mset({f"other:{number}": "x" for number in range(2000)})
    for tid in tids:
        add(store, tid)
        claimed(store, tid)

    assert sorted(tid for tid, _ in store.data_keys.wrapped_by_other("2027")) == sorted(tids)
    assert (store.data_keys.count(), store.ledger.tenants()) == ({"2026-11": 30}, ())


@for_each(
    ("field", "kept"),
    (("1", b""), ("1", b"\x05kid"), ("1", b"\x01\xffw"), ("x1", b"now"), ("last", b"-1")),
)
def test_a_data_key_that_cannot_be_read_is_corrupt(
    store: RedisStore, redis_client: redis.Redis, field: str, kept: bytes
) -> None:
    """And not absent: with another of its number nothing would open that it has sealed."""
    tid = a_key().tid
    add(store, tid)
    redis_client.hset(layout.data_keys(tid), field, kept)

    with pytest.raises(CorruptRecord):
        store.data_keys.read_keys(tid)


def test_one_damaged_tenant_does_not_stop_tasks_of_others(
    store: RedisStore, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    good, lost, spoilt, listed = (a_key().tid for _ in range(4))
    for tid in (good, lost, spoilt):
        add(store, tid), add(store, tid, 2)
    redis_client.hset(layout.data_keys(lost), mapping={"1": b"\x05kid", "x2": b"now"})
    redis_client.hset(layout.data_keys(spoilt), mapping={"last": b"-1", "9" * 5000: b"\x01kw", "2": b""})
    redis_client.lpush(layout.data_keys(listed), "not ours")
    told = sorted((tid, key.number) for tid, key in store.data_keys.wrapped_by_other("2027"))

    assert told == sorted([(good, 1), (good, 2), (spoilt, 1)])
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert caplog.records[0].getMessage().startswith("skipped 5 corrupt data keys")
    assert not any(layout.data_keys(tid).decode()[-22:] in caplog.text for tid in (good, lost, spoilt, listed))
    assert (store.data_keys.count(), len(caplog.records)) == ({"2026-11": 3}, 2)
    for tid in (lost, spoilt, listed):
        with pytest.raises(CorruptRecord):
            store.data_keys.read_keys(tid)


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


def test_every_response_is_found_among_thousands_of_keys(store: RedisStore, redis_client: redis.Redis) -> None:
    redis_client.mset({f"other:{number}": "x" for number in range(3000)})
    tid = a_key().tid
    keys = {a_key() for _ in range(100)} | {a_key(tid=tid) for _ in range(100)}
    for key in keys:
        complete(store, key)

    assert {answer.key for answer in walk(store)} == keys
    assert {answer.key for answer in walk(store, tid=tid)} == {key for key in keys if key.tid == tid}
    assert store.responses.count() == {"": 200}


def test_unreadable_records_are_skipped(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """Of another type, garbage, or under a name that is none: one of them must not stop the task for all others."""
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


def test_an_erased_response_is_reported_as_erased(store: RedisStore, clock: FrozenClock) -> None:
    """So that a task may drop what plain ones still hold."""
    key, other = a_key(), a_key()
    for each in (key, other):
        stand(store, clock, each, "completed")
    store.data_keys.shred(key.tid)

    assert {answer.key: answer.record.erased for answer in walk(store)} == {key: True, other: False}


def test_replacing_a_response_keeps_its_lifetime_and_quota(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    key = a_key()
    complete(store, key)
    shelf = store.data_keys.read_keys(key.tid)
    assert store.data_keys.add(key.tid, DataKey(1, "2026-11", b"wrapped"), store=shelf.store, after=0)
    name, ledger = layout.keys(key)[0], redis_client.hgetall(layout.tenant_quota(key.tid))
    redis_client.pexpire(name, 1_000_000)
    new = replace(PAYLOAD, data=b"sealed", sealed_by=SealedBy("2026-11", 1))

    assert store.responses.replace(key, PAYLOAD, new)
    assert 900_000 < redis_client.pttl(name) <= 1_000_000
    assert redis_client.hgetall(layout.tenant_quota(key.tid)) == ledger


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


def test_every_node_of_a_cluster_is_scanned_to_its_end() -> None:
    server: Any = Nodes(a=2, b=3, c=1)

    assert [key for keys in scan_all(server, b"*") for key in keys] == [b"a0", b"a1", b"b0", b"b1", b"b2", b"c0"]


def test_a_scan_restarts_if_its_node_is_gone() -> None:
    """Where it stood means nothing on another server: to meet some twice is allowed, to pass some over is not."""
    server: Any = Nodes(a=2, b=3)
    _, after = scan_page(server, b"*", after=b"b 0", count=1)
    assert after == b"b 1"
    other: Any = Nodes(a=2, c=3)
    keys, _ = scan_page(other, b"*", after=after, count=1)

    assert keys == [b"a0"]


def test_every_script_names_all_its_keys_in_one_slot(redis_server: RedisServer, clock: FrozenClock) -> None:
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


def test_long_responses_are_read_in_batches(
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


def test_a_response_is_found_after_any_header(store: RedisStore) -> None:
    about = RequestInfo(principal="p" * 70_000, tenant="t" * 70_000)
    payloads = [replace(PAYLOAD, sealed_by=SealedBy(kid, 0)) for kid in ("", "k" * 255)]
    payloads += [PAYLOAD, replace(PAYLOAD, byte_size=2**53 + 1), replace(PAYLOAD, data=b"")]
    expected = {}
    for payload in payloads:
        for each in (NO_INFO, about):
            key, token = a_key(), a_token()
            granted(store.claim(a_request(key, about=each), token=token, lease=LEASE, quota=Quota()))
            store.complete(key, token, payload, keep=KEEP)
            expected[key] = payload
    kids = {"": 6, "k" * 255: 2}

    assert {answer.key: answer.record.payload for answer in walk(store)} == expected
    assert {kid: count for kid, count in store.responses.count().items() if count} == kids
    assert all(store.ledger.reconcile(key.tid).none for key in expected)
