"""Records in Redis: their bytes, indexes and time to live, and records that no client can read."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from example_app.demo.servers import RedisServer
from flask_idempotency.codec.compression import Zlib
from flask_idempotency.codec.envelope import EnvelopeCodec, byte_size_of
from flask_idempotency.engine.errors import CorruptRecord, LeaseLost
from flask_idempotency.engine.keys import Identity, Scope, StorageKey
from flask_idempotency.engine.model import (
    CORRUPT,
    Grant,
    OnExpiry,
    RequestInfo,
    State,
    StoredPayload,
    StoredResponse,
    Unknown,
)
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.encoding import ABOUT_TEXT_BYTES, about_bytes, decode
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    OTHER_PAYLOAD,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    for_each,
    found,
    granted,
    stand,
)
from tests.forgiving import redis_store
from tests.stores.contenders import contended

KEY_OF_OURS = re.compile(rb"idm1:\{p[0-9a-f]{4}\}:(r:[A-Za-z0-9_-]{43}|i|z|m|[fqk]:[A-Za-z0-9_-]{22})")


def all_keys(client: redis.Redis) -> list[bytes]:
    return sorted(client.scan_iter())


@for_each("text", ("a}{b", "{x}", "*", "a:b", "\0", "\r\nFLUSHALL\r\n", "Ü🦊", "p" * 10_000, ""))
def test_no_redis_key_contains_client_data(store: RedisStore, redis_client: redis.Redis, text: str) -> None:
    """Whatever tenants, principals and keys contain, Redis keys are made of sixteen and thirty-two letters of ours."""
    redis_client.flushdb()
    key = Identity(b"s" * 32).storage_key(Scope("app", tenant=text, principal=text), client_key=text)
    token = a_token()
    store.claim(a_request(key, about=RequestInfo(tenant=text, principal=text)), token=token, lease=LEASE)
    store.quarantine(key, token, "lost")

    keys = all_keys(redis_client)

    assert len(keys) == 3
    assert all(map(KEY_OF_OURS.fullmatch, keys))


@given(rid=st.binary(min_size=32, max_size=32), tid=st.binary(min_size=16, max_size=16))
def test_every_redis_key_follows_the_layout(rid: bytes, tid: bytes) -> None:
    """All seven of one record's keys, and with the same hash tag: they are in one slot of a Cluster."""
    keys = layout.keys(StorageKey(rid=rid, tid=tid))

    assert all(map(KEY_OF_OURS.fullmatch, keys))
    assert len({key[key.index(b"{") : key.index(b"}")] for key in keys}) == 1


def test_the_partition_is_part_of_the_format() -> None:
    """Records of older releases must be found where they are."""
    keys = layout.keys(StorageKey(rid=bytes(32), tid=b"\xff\xff" + bytes(14)))
    tenants = tuple(b"idm1:{p03ff}:%b:__8" % kind + b"A" * 19 for kind in (b"f", b"q", b"k"))

    assert keys == (b"idm1:{p03ff}:r:" + b"A" * 43, b"idm1:{p03ff}:i", b"idm1:{p03ff}:z", b"idm1:{p03ff}:m", *tenants)


@pytest.mark.parametrize("standing", ("in flight", "quarantined", "lapsed, quarantine"))
def test_unfinished_records_have_no_time_to_live(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, standing: Standing
) -> None:
    """A claim that vanished by itself would let the payment run again."""
    key = a_key()
    stand(store, clock, key, "completed")
    clock.advance(KEEP)  # The record of an earlier life is still there, and about to be dropped by Redis.
    stand(store, clock, key, standing)
    store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert redis_client.pttl(layout.keys(key)[0]) == -1


def test_completed_records_outlive_their_deadline_by_a_minute(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Redis only takes out the rubbish. When the answer expires is written in the record."""
    key = a_key()
    stand(store, clock, key, "completed")

    left = redis_client.pttl(layout.keys(key)[0])

    assert (KEEP + 55) * 1000 < left <= (KEEP + 60) * 1000


def test_the_indexes_hold_unfinished_records(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """In flight by the end of the lease, renewed or not; quarantined by when; completed and released in neither."""
    key = a_key()
    in_flight, quarantined = layout.keys(key)[1:3]
    name = layout.name(layout.keys(key))

    def indexes() -> tuple[object, object]:
        return redis_client.zscore(in_flight, name), redis_client.zscore(quarantined, name)

    token = stand(store, clock, key, "in flight")
    now = clock.now * 1000
    assert indexes() == (now + LEASE * 1000, None)
    store.renew(key, token, lease=2 * LEASE)
    assert indexes() == (now + 2 * LEASE * 1000, None)
    store.quarantine(key, token, "lost")
    assert indexes() == (None, now)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    assert indexes() == (None, None)
    clock.advance(KEEP)
    store.release(key, stand(store, clock, key, "quarantined"))
    assert indexes() == (None, None)
    store.release(key, stand(store, clock, key, "in flight"))
    assert indexes() == (None, None)
    stand(store, clock, key, "completed")
    assert indexes() == (None, None)


def test_a_takeover_moves_in_the_index(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """The successor's lease is the one to watch."""
    key = a_key()
    stand(store, clock, key, "lapsed, takeover")
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))

    assert redis_client.zscore(layout.keys(key)[1], layout.name(layout.keys(key))) == (clock.now + LEASE) * 1000


def test_a_partition_that_lost_its_floor_still_gives_a_higher_fence(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """The record's own fence counts too, even where both it and the floor were far ahead of the clock."""
    key = a_key()
    floor = layout.keys(key)[3]
    redis_client.hset(floor, "fence", str(int((clock.now + 86400) * 1_000_000)))
    stand(store, clock, key, "lapsed, takeover")
    before = found(store, key).fence
    redis_client.delete(floor)

    assert granted(store.claim(a_request(key), token=a_token(), lease=LEASE)).fence > before


def test_a_clock_set_back_gives_no_negative_duration(store: RedisStore, clock: FrozenClock) -> None:
    """A clock that was set back in between leaves a record that says: at once."""
    key = a_key()
    token = stand(store, clock, key, "in flight")
    clock.advance(-3600)
    store.complete(key, token, PAYLOAD, keep=KEEP)

    assert found(store, key).completed_at == found(store, key).requested_at


def test_the_server_time_decides(redis_server: RedisServer, redis_client: redis.Redis) -> None:
    """Without a clock from a test the script asks Redis: deadline, fence and first use are all in its time."""
    store, key = redis_store(redis_server.url), a_key()
    try:
        before = redis_client.time()
        grant = granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
        after = redis_client.time()
        record = found(store, key)
    finally:
        store.close()

    earliest, latest = (seconds * 1_000_000 + us for seconds, us in (before, after))
    assert earliest <= grant.fence <= latest
    assert earliest / 1e6 - 0.001 <= record.requested_at <= latest / 1e6
    assert earliest / 1e6 <= record.deadline - LEASE <= latest / 1e6 + 0.001


def answer_of_two_kilobytes() -> StoredResponse:
    """A page of payments as JSON: names repeat, identifiers and amounts do not."""
    chance = random.Random(7)
    payments: list[dict[str, object]] = []
    while len(body := json.dumps({"payments": payments}).encode()) < 2048:
        payments.append(
            {
                "id": f"pay_{chance.getrandbits(64):016x}",
                "amount": chance.randrange(100, 1_000_000),
                "currency": "EUR",
                "status": "succeeded",
                "account": f"acc_{chance.getrandbits(32):08x}",
                "created_at": f"2026-11-{chance.randrange(1, 29):02d}T{chance.randrange(24):02d}:00:00Z",
            }
        )
    return StoredResponse(
        status=201, metadata=(("Content-Type", "application/json"), ("Location", "/payments/pay_81f0")), body=body
    )


def test_a_stored_response_takes_little_memory(store: RedisStore, redis_client: redis.Redis) -> None:
    """A 2 KB JSON answer takes at most 1.1 KB of Redis, its key and Redis' own bookkeeping included."""
    result = answer_of_two_kilobytes()
    data = EnvelopeCodec(compression=Zlib()).wrap(result)
    key, token = a_key(), a_token()
    about = RequestInfo(tenant="acme", principal="alice", method="POST", operation="payments.create")
    granted(store.claim(a_request(key, about=about), token=token, lease=LEASE))
    store.complete(key, token, StoredPayload(data, result.status, True, byte_size_of(result)), keep=KEEP)

    usage = redis_client.memory_usage(layout.keys(key)[0])

    assert len(result.body) >= 2048
    assert usage is not None
    assert usage <= 1100


def test_a_record_adds_little_to_its_payload(store: RedisStore, redis_client: redis.Redis) -> None:
    """77 bytes of header, one that says that it is not sealed, and a length for each thing that may be long."""
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key, about=RequestInfo()), token=token, lease=LEASE))
    store.complete(key, token, StoredPayload(b"x" * 100, 200, True, 100), keep=KEEP)

    assert redis_client.strlen(layout.keys(key)[0]) == 77 + 3 + 4 + 1 + 1 + 100


@given(data=st.binary(max_size=60), text=st.text(max_size=300))
def test_request_info_is_stored_apart_from_the_rest(data: bytes, text: str) -> None:
    """Lengths stand before texts: no text can end one early."""
    about = RequestInfo(tenant=text, principal="p", method="", operation=text)
    first = bytes([1 << 5 | 1 << 3])

    assert decode(first + bytes(76) + about_bytes(about) + data, now=0.0).info == about


@pytest.mark.parametrize("letter", ("p", "ü", "…", "🦊", "\ud800"), ids=ascii)
def test_a_text_that_is_too_long_for_an_auditor_is_cut(store: RedisStore, letter: str) -> None:
    """A principal of twenty megabytes fails no payment. What is there of it ends between two letters, and says so."""
    key = a_key()
    about = RequestInfo(tenant="acme", principal=letter * (20_000_000 // len(letter.encode("utf-8", "surrogatepass"))))
    granted(store.claim(a_request(key, about=about), token=a_token(), lease=LEASE))

    told = found(store, key).info

    assert told.principal == letter * (len(told.principal) - 1) + "…"
    assert ABOUT_TEXT_BYTES - 4 < len(told.principal.encode("utf-8", "surrogatepass")) <= ABOUT_TEXT_BYTES
    assert told.tenant == "acme"


@for_each(("size", "cut"), ((ABOUT_TEXT_BYTES, False), (ABOUT_TEXT_BYTES + 1, True)))
def test_a_text_that_just_fits_is_kept_whole(size: int, cut: bool) -> None:
    """To the byte."""
    data = bytes([1 << 5 | 1 << 3]) + bytes(76) + about_bytes(RequestInfo(operation="o" * size))

    assert (decode(data, now=0.0).info.operation != "o" * size) == cut


def test_attempts_are_counted_to_255(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """One byte. A key that was taken over more often than that has other worries."""
    key = a_key()
    stand(store, clock, key, "lapsed, takeover")
    redis_client.setrange(layout.keys(key)[0], 24, b"\xfe")
    attempts = []
    for _ in range(3):
        outcome = store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE)
        assert isinstance(outcome, Grant)
        attempts.append(outcome.attempt)
        clock.advance(LEASE)

    assert attempts == [255, 255, 255]


@for_each(
    ("token", "fingerprint", "tid"),
    ((b"short", b"\1" * 17, bytes(16)), (b"t" * 16, b"\1" * 32, bytes(16)), (b"t" * 16, b"\1" * 17, bytes(32))),
)
def test_values_that_do_not_fit_the_header_are_refused(
    store: RedisStore, redis_client: redis.Redis, token: bytes, fingerprint: bytes, tid: bytes
) -> None:
    """Written nevertheless it would shift every field behind it."""
    with pytest.raises(ValueError, match="16 bytes"):
        store.claim(a_request(a_key(tid=tid), fingerprint=fingerprint), token=token, lease=LEASE)

    assert all_keys(redis_client) == []


GARBAGE: dict[str, Any] = {
    "nothing": lambda data: b"",
    "cut in the header": lambda data: data[:40],
    "a newer format": lambda data: bytes([data[0] | 0xE0]) + data[1:],
    "an unknown state": lambda data: bytes([data[0] & 0xE7]) + data[1:],
    "not ours": lambda data: b"not a record at all " * 10,
}


def stored(client: redis.Redis, key: StorageKey) -> bytes:
    data = client.get(layout.keys(key)[0])
    assert isinstance(data, bytes)
    return data


def quarantined(client: redis.Redis, key: StorageKey) -> bool:
    keys = layout.keys(key)
    return client.pttl(keys[0]) == -1 and client.zscore(keys[2], layout.name(keys)) is not None


def test_a_corrupt_record_has_no_time_to_live(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
    """Redis would drop it a minute after its answer's life, and the payment would run again."""
    key = a_key()
    stand(store, clock, key, "completed")
    assert redis_client.pttl(layout.keys(key)[0]) > 0
    store.mark_corrupt(key, PAYLOAD)

    assert quarantined(redis_client, key)
    clock.advance(2 * KEEP)
    assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)


def test_completing_a_corrupt_record_ends_its_quarantine(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """By its token, as any other that is quarantined; nobody else's."""
    key = a_key()
    token = stand(store, clock, key, "completed")
    store.mark_corrupt(key, PAYLOAD)
    with pytest.raises(LeaseLost):
        store.complete(key, a_token(), OTHER_PAYLOAD, keep=KEEP)
    store.complete(key, token, OTHER_PAYLOAD, keep=KEEP)

    assert (State.COMPLETED, OTHER_PAYLOAD) == (found(store, key).state, found(store, key).payload)
    assert redis_client.pttl(layout.keys(key)[0]) > 0
    assert redis_client.zcard(layout.keys(key)[2]) == 0


def owners_word(store: RedisStore, key: StorageKey, token: bytes) -> set[type[Exception] | None]:
    """What an owner hears who would have its record otherwise than completed."""
    calls: list[Any] = [
        lambda: store.release(key, token),
        lambda: store.quarantine(key, token, "why"),
        lambda: store.mark_point_of_no_return(key, token),
    ]
    heard = set[type[Exception] | None]()
    for call in calls:
        try:
            call()
            heard.add(None)
        except (LeaseLost, CorruptRecord) as error:
            heard.add(type(error))
    return heard


@for_each("how", ("condemned", "cut short", "nothing of it left", "its state damaged"))
def test_no_owner_releases_a_completed_record(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, how: str
) -> None:
    """
    However little of the answer is left, the payment was made: not a byte changes, and the key does not run again.
    """
    key = a_key()
    token = stand(store, clock, key, "completed")
    name, data = layout.keys(key)[0], stored(redis_client, key)
    match how:
        case "condemned":
            store.mark_corrupt(key, PAYLOAD)
        case "its state damaged":
            redis_client.set(name, bytes((data[0] | 0x18,)) + data[1:])
        case _:
            end = data.index(PAYLOAD.data) - 2
            redis_client.set(name, data[: end + (how == "cut short")])
            with pytest.raises(CorruptRecord):
                store.claim(a_request(key), token=a_token(), lease=LEASE)
    before = stored(redis_client, key)

    assert {LeaseLost} == owners_word(store, key, token)
    assert before == stored(redis_client, key)


def test_a_response_without_time_and_status_is_still_a_response(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """A consumer's result may have no status, and take less than a millisecond."""
    key, token, bare = a_key(), a_token(), StoredPayload(b"", 0, True, 0)
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, bare, keep=KEEP)
    store.mark_corrupt(key, bare)

    assert {LeaseLost} == owners_word(store, key, token)


def test_a_quarantine_whose_reason_is_cut_short_is_not_released(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Nobody can say whether an answer stood behind it."""
    key = a_key()
    token = stand(store, clock, key, "quarantined")
    redis_client.set(layout.keys(key)[0], stored(redis_client, key)[:-3])

    assert {CorruptRecord} == owners_word(store, key, token)


def test_marking_a_record_corrupt_moves_its_quota(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """From its bucket to the unsettled, once, and back when it is settled."""
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=Quota()))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    store.mark_corrupt(key, PAYLOAD)
    store.mark_corrupt(key, PAYLOAD)

    assert (Usage(1, 0, 0), Drift()) == (store.ledger.usage(key.tid), store.ledger.reconcile(key.tid))
    clock.advance(3 * KEEP)
    assert Usage(1, 0, 0) == store.ledger.usage(key.tid)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    assert (Usage(1, PAYLOAD.byte_size, 0), Drift()) == (
        store.ledger.usage(key.tid),
        store.ledger.reconcile(key.tid),
    )


@for_each("spoilt", GARBAGE)
def test_an_unreadable_record_stays_for_ever(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, spoilt: str
) -> None:
    """From the first claim that meets it, byte for byte, and every claim says the same."""
    key = a_key()
    stand(store, clock, key, "completed")
    name, data = layout.keys(key)[0], GARBAGE[spoilt](stored(redis_client, key))
    redis_client.set(name, data, px=100_000)

    for _ in range(2):
        with pytest.raises(CorruptRecord):
            store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE)
        assert quarantined(redis_client, key)
        clock.advance(100 * 86_400)
    assert stored(redis_client, key) == data


def test_a_key_of_another_type_stays_for_ever(store: RedisStore, redis_client: redis.Redis) -> None:
    """Somebody else's list in our place is no absent record, and would be one when its time is over."""
    key = a_key()
    name = layout.keys(key)[0]
    redis_client.lpush(name, "not ours")
    redis_client.pexpire(name, 100_000)
    with pytest.raises(CorruptRecord):
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert (redis_client.type(name), quarantined(redis_client, key)) == (b"list", True)


@for_each("place", (80, -1), ids=("whom it is about", "the answer's head"))
def test_a_record_that_only_scripts_can_read_is_quarantined(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, place: int
) -> None:
    """To them it was completed, and time would have ended it."""
    key = a_key()
    stand(store, clock, key, "completed")
    name, data = layout.keys(key)[0], stored(redis_client, key)
    spoilt = data[:80] + b"\x7f" + data[81:] if place == 80 else data[: data.index(PAYLOAD.data) - 2]
    redis_client.set(name, spoilt, keepttl=True)

    with pytest.raises(CorruptRecord):
        store.claim(a_request(key), token=a_token(), lease=LEASE)
    assert quarantined(redis_client, key)
    clock.advance(100 * 86_400)
    assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)


def test_a_reason_that_is_cut_short_is_corrupt(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """For whoever claims the key and for whoever reads it."""
    key = a_key()
    stand(store, clock, key, "quarantined")
    redis_client.set(layout.keys(key)[0], stored(redis_client, key)[:-3])

    with pytest.raises(CorruptRecord):
        store.claim(a_request(key), token=a_token(), lease=LEASE)
    with pytest.raises(CorruptRecord):
        store.read(key)


def test_a_different_status_is_a_different_payload(store: RedisStore, clock: FrozenClock) -> None:
    """The facts beside the bytes count as well."""
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    changes: list[dict[str, Any]] = [{"status": 202}, {"success": False}, {"byte_size": 1}]
    for changed in changes:
        store.mark_corrupt(key, replace(PAYLOAD, **changed))

    assert found(store, key).state is State.COMPLETED


@pytest.mark.slow
def test_exactly_one_thread_of_all_processes_is_granted(redis_server: RedisServer) -> None:
    """In every round one claim is granted, and everybody else hears of it or of its answer."""
    wins, outcomes = contended(redis_server.url, rounds=40)

    assert [number for number, _ in wins] == list(range(40))
    assert set(outcomes) == {"Grant", "InFlight", "Record"}
    assert sorted(fence for _, fence in wins) == [fence for _, fence in wins]
