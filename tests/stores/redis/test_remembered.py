"""A record that outlives its response, in Redis: where its time is, and what damage to it does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import cast

import fakeredis
import pytest

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.model import Expired, Grant, OnExpiry, Record, RequestInfo, State
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.encoding import ABOUT_TEXT_BYTES, decode, encode
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    ABOUT,
    FINGERPRINT,
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    granted,
)

REMEMBER = 30 * KEEP

pytestmark = pytest.mark.usefixtures("few_partitions")


@pytest.fixture
def client() -> fakeredis.FakeRedis:
    return fakeredis.FakeRedis()


@pytest.fixture
def store(client: fakeredis.FakeRedis) -> Iterator[RedisStore]:
    """A store on its server's clock, so that the rule about times to live holds."""
    with closing(RedisStore(client)) as store:
        store.data_loss.initialise()
        store.data_loss.acknowledge()
        yield store


def over(**values: object) -> Record:
    """A record whose response has expired, and which is remembered for an hour."""
    now = time.time()
    record = Record(
        state=State.COMPLETED,
        token=a_token(),
        fence=7,
        attempt=1,
        fingerprint=FINGERPRINT,
        on_expiry=OnExpiry.QUARANTINE,
        info=ABOUT,
        requested_at=now - 100,
        deadline=now - 10,
        remaining=-10,
        completed_at=now - 99,
        payload=PAYLOAD,
        remembered_until=now + 3600,
    )
    return replace(record, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, 1, 110, 111, 127, 128, 300, 16_366, 16_367, ABOUT_TEXT_BYTES - 17])
def test_the_texts_of_a_request_may_have_any_length(length: int) -> None:
    """The time behind the last text may need one more byte for its length."""
    clock = FrozenClock()
    about = RequestInfo("acme", "alice", "POST", "x" * length)
    with closing(RedisStore(fakeredis.FakeRedis(), clock=clock)) as store:
        key, token = a_key(), a_token()
        store.data_loss.initialise()
        store.data_loss.acknowledge()
        granted(store.claim(a_request(key, about=about), token=token, lease=LEASE))
        store.complete(key, token, PAYLOAD, keep=KEEP, remember=REMEMBER)
        record = found(store, key)
        assert (about, PAYLOAD) == (record.info, record.payload)
        assert clock.now + REMEMBER == pytest.approx(record.remembered_until, abs=0.002)
        assert record == replace(decode(encode(record, tid=key.tid), now=clock.now), remaining=record.remaining)
        clock.advance(KEEP + 1)
        assert isinstance(store.claim(a_request(key, about=about), token=a_token(), lease=LEASE), Expired)
        store.expiry.sweep(horizon=clock.now, limit=10)

        assert (about, b"") == ((skeleton := found(store, key)).info, skeleton.payload and skeleton.payload.data)


def test_a_record_that_is_completed_again_has_the_new_time_or_none() -> None:
    """After damage a resolver may complete it, with another policy than before."""
    clock = FrozenClock()
    with closing(RedisStore(fakeredis.FakeRedis(), clock=clock)) as store:
        key, token = a_key(), a_token()
        store.data_loss.initialise()
        store.data_loss.acknowledge()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        store.complete(key, token, PAYLOAD, keep=KEEP, remember=REMEMBER)
        for remember in (2 * REMEMBER, None):
            store.mark_corrupt(key, PAYLOAD)
            held = SeenRecord(key, found(store, key))
            assert (held.record.info, held.record.remembered_until) == (ABOUT, None)
            assert store.recovery.resolve(held, token=a_token(), payload=PAYLOAD, keep=KEEP, remember=remember)
            until = None if remember is None else pytest.approx(clock.now + remember, abs=0.002)
            assert (found(store, key).info, found(store, key).remembered_until) == (ABOUT, until)


def test_the_release_before_replays_it_and_then_refuses_it(store: RedisStore, client: fakeredis.FakeRedis) -> None:
    """It reads the last text whole, and an expired record whose time to live is longer than a minute is damage to it."""
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.complete(key, token, PAYLOAD, keep=KEEP, remember=REMEMBER)
    name = layout.keys(key)[0]
    data = cast("bytes", client.get(name))
    texts = data[80 : 80 + int.from_bytes(data[77:80], "big")]
    deadline = int.from_bytes(data[48:54], "big") / 1000

    assert texts.startswith(b"\4acme\5alice\4POST" + bytes((len(ABOUT.operation) + 17,)) + b"payments.create\0~")
    assert KEEP == pytest.approx(deadline - time.time(), abs=60)
    # The end of a life is when a minute of it is left, and five seconds between two clocks.
    assert REMEMBER + 65 == pytest.approx(client.pttl(name) / 1000, abs=60)


def test_no_flipped_bit_lets_a_remembered_key_run(store: RedisStore, client: fakeredis.FakeRedis) -> None:
    """Wherever it is: in the state, in one of the two times, or in the mark before the second."""
    key = a_key()
    data, name = encode(over(), tid=key.tid), layout.keys(key)[0]
    outcomes = set[str]()
    texts_end = data.index(b"\0~") + 17
    places = [0, 25, *range(42, 59), *range(77, 80), *range(texts_end - 19, texts_end + 2)]
    for bit in (8 * place + bit for place in places for bit in range(8)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        client.set(name, bytes(damaged), px=3_665_000)
        try:
            outcome = store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE)
        except CorruptRecord:
            outcomes.add("corrupt")
        else:
            outcomes.add(type(outcome).__name__)
            assert not isinstance(outcome, Grant), f"bit {bit}"

    assert {"corrupt", "Expired", "Mismatched"} <= outcomes


def test_the_key_is_free_when_redis_would_drop_the_record(store: RedisStore, client: fakeredis.FakeRedis) -> None:
    """In the last minute of its time to live, as any other expired record."""
    key, now = a_key(), time.time()
    client.set(layout.keys(key)[0], encode(over(remembered_until=now - 1), tid=key.tid), px=64_000)

    assert store.read(key) is None
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
