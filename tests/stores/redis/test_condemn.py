"""Records that nobody can read: no time ends them, and no claim takes them for absent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis

from flask_idempotency.engine.errors import CorruptRecord, LeaseLost
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, OnExpiry, State, StoredPayload, Unknown
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    OTHER_PAYLOAD,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)

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


def test_a_condemned_record_has_no_time_to_live(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock
) -> None:
    """Redis would drop it a minute after its answer's life, and the payment would run again."""
    key = a_key()
    stand(store, clock, key, "completed")
    assert redis_client.pttl(layout.keys(key)[0]) > 0
    store.mark_corrupt(key, PAYLOAD)

    assert quarantined(redis_client, key)
    clock.advance(2 * KEEP)
    assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)


def test_whoever_completes_a_condemned_record_takes_it_out(
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


@pytest.mark.parametrize("how", ("condemned", "cut short", "nothing of it left", "its state damaged"))
def test_no_owner_releases_what_was_completed(
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


def test_an_answer_without_time_and_status_is_one(
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


def test_condemning_moves_what_is_counted(store: RedisStore, redis_client: redis.Redis, clock: FrozenClock) -> None:
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


@pytest.mark.parametrize("spoilt", GARBAGE)
def test_what_cannot_be_read_stays_for_ever(
    store: RedisStore, redis_client: redis.Redis, clock: FrozenClock, spoilt: str
) -> None:
    """From the first claim that meets it, byte for byte, and every claim says the same."""
    key = a_key()
    stand(store, clock, key, "completed")
    name, data = layout.keys(key)[0], GARBAGE[spoilt](stored(redis_client, key))
    redis_client.set(name, data, px=100_000)

    for _ in range(2):
        with pytest.raises(CorruptRecord):
            store.claim(a_request(key, on_lapse=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE)
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


@pytest.mark.parametrize("place", (80, -1), ids=("whom it is about", "the answer's head"))
def test_what_only_scripts_can_read_is_quarantined(
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


def test_another_status_is_another_payload(store: RedisStore, clock: FrozenClock) -> None:
    """The facts beside the bytes count as well."""
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, PAYLOAD, keep=KEEP)
    changes: list[dict[str, Any]] = [{"status": 202}, {"success": False}, {"byte_size": 1}]
    for changed in changes:
        store.mark_corrupt(key, replace(PAYLOAD, **changed))

    assert found(store, key).state is State.COMPLETED
