"""A fast path in a script may only repeat the rules below it: with and without it, the same calls have the same effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, OnExpiry, SealedBy, StoredPayload
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import FINGERPRINT, KEEP, LEASE, OTHER_FINGERPRINT, PAYLOAD
from tests.lab.redis import connect
from tests.long import unless_long

FAST = [name for name in ("claim", "complete") if "-- fast path: " in scripts.read(name)]
TID = b"t" * 16
KEYS = [StorageKey(rid=letter * 32, tid=TID) for letter in (b"a", b"b")]
TOKENS = [letter * 16 for letter in (b"x", b"y", b"z")]
SEALED = StoredPayload(data=b"sealed", status=200, success=True, byte_size=400, sealed_by=SealedBy("kek", 1))
QUOTAS = [Quota(records=1), Quota(bytes=50), Quota(in_flight=1), Quota(new_keys=NewKeys(1, 60.0))]
FACTS, DATA_KEYS = layout.facts_in(layout.number(TID)), layout.data_keys(TID)
NOW_MS = 1_800_000_000_000


class Side:
    """A store and its server, with the scripts as they are or without their fast paths."""

    def __init__(self, url: str, clock: FrozenClock, *, fast: bool) -> None:
        self.client, self.store = connect(url), RedisStore(url, clock=clock)
        if not fast:
            plain = {name: scripts.load(name, fast=False) for name in FAST}
            run = self.store._server.run

            def run_plain(script: scripts.Script, *arguments: Any, **options: Any) -> Any:
                return run(plain.get(script.name, script), *arguments, **options)

            self.store._server.run = run_plain  # type: ignore[method-assign]

    def begin(self) -> None:
        self.client.flushdb()
        about: dict[str, Any] = self.client.info()
        facts: dict[Any, Any] = {"store_id": "s", "layout": "1024/1", "process": about["run_id"]}
        self.client.hset(FACTS, mapping={**facts, "replication_id": about["master_replid"]})

    def content(self) -> dict[bytes, Any]:
        """Return every key with its value and its time to live."""
        read: dict[bytes, Any] = {b"string": self.client.get, b"hash": self.client.hgetall, b"list": self.client.llen}
        found = dict[bytes, Any]()
        for key in self.client.scan_iter():
            kind = self.client.type(key)
            value = read[kind](key) if kind in read else self.client.zrange(key, 0, -1, withscores=True)
            left = self.client.pttl(key)
            # The time that a slow test run takes.
            found[key] = value, pytest.approx(left, abs=20_000 if left > 0 else 0)
        return found

    def close(self) -> None:
        self.store.close()
        self.client.close()


@dataclass
class Claim:
    key: int
    token: int
    fingerprint: bytes
    on_expiry: OnExpiry
    waits: bool
    quota: Quota | None

    def __call__(self, side: Side) -> Any:
        request = ClaimRequest(KEYS[self.key], self.fingerprint, self.on_expiry, notify_on_completion=self.waits)
        return side.store.claim(request, token=TOKENS[self.token], lease=LEASE, quota=self.quota)


@dataclass
class End:
    how: str
    key: int
    token: int

    def __call__(self, side: Side) -> Any:
        store, key, token = side.store, KEYS[self.key], TOKENS[self.token]
        match self.how:
            case "complete":
                return store.complete(key, token, PAYLOAD, keep=KEEP)
            case "complete sealed":
                return store.complete(key, token, SEALED, keep=KEEP)
            case "release":
                return store.release(key, token)
            case "quarantine":
                return store.quarantine(key, token, "crashed")
            case "mark":
                return store.mark_point_of_no_return(key, token)
            case _:
                return store.renew(key, token, lease=2 * LEASE)


@dataclass
class Field:
    """Write a field of a hash, or delete it."""

    name: bytes
    field: str
    value: str | None

    def __call__(self, side: Side) -> Any:
        if self.value is None:
            return side.client.hdel(self.name, self.field)
        return side.client.hset(self.name, self.field, self.value)


@dataclass
class Flip:
    """Flip a bit of a record, if there is one."""

    key: int
    bit: int

    def __call__(self, side: Side) -> None:
        record = layout.keys(KEYS[self.key])[0]
        if side.client.exists(record):
            side.client.setbit(record, self.bit, 1 - side.client.getbit(record, self.bit))


@dataclass
class Misplace:
    """Put a value of another type in the place of a key."""

    at: int

    def __call__(self, side: Side) -> None:
        name = layout.keys(KEYS[0])[self.at]
        side.client.delete(name)
        side.client.lpush(name, "x")


@pytest.fixture
def sides(redis_server: RedisServer, clock: FrozenClock) -> Iterator[list[Side]]:
    with (
        closing(Side(redis_server.url, clock, fast=True)) as fast,
        closing(Side(redis_server.url.removesuffix("/0") + "/1", clock, fast=False)) as plain,
    ):
        yield [fast, plain]


# The usual cases come often, or the fast path would rarely run.
keys, tokens = st.sampled_from([0, 0, 0, 1]), st.sampled_from([0, 0, 0, 1, 2])
fingerprints = st.sampled_from([FINGERPRINT, FINGERPRINT, FINGERPRINT, OTHER_FINGERPRINT])
rules = st.sampled_from([OnExpiry.QUARANTINE, OnExpiry.QUARANTINE, OnExpiry.TAKEOVER])
quotas = st.sampled_from([*(None for _ in range(8)), *QUOTAS])
claims = st.builds(Claim, keys, tokens, fingerprints, rules, st.booleans(), quotas)
endings = ["complete", "complete", "complete", "complete sealed", "release", "quarantine", "mark", "renew"]
ends = st.builds(End, st.sampled_from(endings), keys, tokens)
times = st.sampled_from([0.0015, LEASE + 1, KEEP + 1, -5.0])
damage = st.one_of(
    st.builds(
        Field,
        st.just(FACTS),
        st.sampled_from(["fence", "store_id", "layout", "lost_at"]),
        st.sampled_from([None, "9", "x"]),
    ),
    st.builds(
        Field,
        st.just(FACTS),
        st.sampled_from(["lost_at", "acked_loss", "fence_at_loss", "fence"]),
        st.sampled_from([str(NOW_MS), str(NOW_MS + 10), str(NOW_MS * 1000), str(2**53 - 2)]),
    ),
    st.builds(
        Field,
        st.just(FACTS),
        st.sampled_from(["process", "replication_id", "lossless", "store_id"]),
        st.sampled_from([None, "", "f" * 40, "unnamed"]),
    ),
    st.builds(Field, st.just(DATA_KEYS), st.sampled_from(["1", "x1"]), st.sampled_from([None, "9"])),
    st.builds(Field, st.just(DATA_KEYS), st.just("erasure"), st.sampled_from([None, "1 9", f"1 {NOW_MS}999", "x"])),
    st.builds(Flip, keys, st.integers(0, 95 * 8)),
    st.builds(Misplace, st.integers(0, 6)),
)

CLAIM = Claim(0, 0, FINGERPRINT, OnExpiry.QUARANTINE, waits=False, quota=None)
# Damage is rare: after it, most keys stay as they are.
steps = st.sampled_from([*[claims] * 8, *[ends] * 8, *[times] * 2, damage]).flatmap(lambda kind: kind)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=unless_long(60, long=2_000)
)
@given(steps=st.lists(steps, min_size=8, max_size=24))
@example(steps=[CLAIM, End("complete", 0, 1), End("complete", 0, 0), End("complete", 0, 0), CLAIM])
@example(steps=[CLAIM, End("complete", 0, 0), KEEP + 1, CLAIM])
@example(steps=[CLAIM, End("complete sealed", 0, 0), Field(DATA_KEYS, "1", "k"), End("complete sealed", 0, 0), CLAIM])
@example(steps=[CLAIM, Field(DATA_KEYS, "1", "k"), Field(DATA_KEYS, "x1", "9"), End("complete sealed", 0, 0)])
@example(steps=[Field(FACTS, "lost_at", "9"), CLAIM, Field(FACTS, "acked_loss", "9"), CLAIM])
def test_the_fast_path_repeats_the_rules(sides: list[Side], clock: FrozenClock, steps: list[Any]) -> None:
    clock.now = NOW_MS / 1000
    for side in sides:
        side.begin()

    for step in steps:
        if isinstance(step, float):
            clock.advance(step)
            continue
        fast, plain = (done(step, side) for side in sides)
        assert fast == plain, step

    fast, plain = (side.content() for side in sides)
    assert fast == plain


def done(step: Any, side: Side) -> Any:
    """Return what the step returns, or the error that it raises."""
    try:
        return step(side)
    except (IdempotencyError, redis.ResponseError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", FAST)
def test_a_fast_path_can_be_removed(name: str) -> None:
    with_it, without = scripts.load(name), scripts.load(name, fast=False)

    assert "fast path" not in without.text
    assert (without.sha != with_it.sha, without.durable) == (True, with_it.durable)
