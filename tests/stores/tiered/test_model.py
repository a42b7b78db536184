"""Any sequence of calls against a tiered store: the outcomes are those of its system alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import fakeredis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import LeaseLost
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, OnExpiry, Record, State, StoredPayload
from flask_idempotency.engine.store import Store
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    FINGERPRINT,
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    OTHER_PAYLOAD,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
)
from tests.backends import OneAtATime
from tests.long import unless_long
from tests.stores.tiered.test_faults import HeldUp
from tests.stores.weather import FATES, Exposed, Fate
from tests.tiered_backends import TellingStore, tiered_on

EXAMPLES = unless_long(20, long=500)
KEYS = a_key(), a_key()
keys = st.sampled_from(KEYS)
durations = st.integers(1, 40)
payloads = st.builds(
    StoredPayload,
    data=st.binary(max_size=4),
    status=st.sampled_from((200, 422)),
    success=st.booleans(),
    byte_size=st.integers(0, 200),
)


class FakeWeather(Exposed, OneAtATime):
    pass


class TieredMachine(RuleBasedStateMachine):
    """Does the same to a tiered store and to a memory store of its own, in the same time, and compares all answers."""

    tokens = Bundle("tokens")

    @initialize(target=tokens, telling=st.booleans())
    def begin(self, telling: bool) -> bytes:
        self.clock = FrozenClock()
        self.alone = MemoryStore(self.clock)
        self.system = TellingStore(self.clock) if telling else MemoryStore(self.clock)
        server = fakeredis.FakeServer()
        self.client, self.onlooker = FakeWeather(server=server), OneAtATime(server=server)
        for script in (scripts.CACHE_GET, scripts.CACHE_PUT):
            # What it was sent while it was frozen it can run only if it knows it.
            self.onlooker.script_load(script.text)
        self.new_process()
        return a_token()

    @rule()
    def new_process(self) -> None:
        """It remembers nothing of what the former one claimed."""
        # Whenever it is asked the time, every pause is over: no failure spares the next call from failing.
        cache = RedisReplayCache(self.client, clock=self.clock, monotonic=count(step=60).__next__)
        self.store = tiered_on(self.system, cache)

    @rule(target=tokens)
    def another_token(self) -> bytes:
        return a_token()

    @rule(seconds=durations)
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(fates=st.lists(st.sampled_from(("fine", *FATES)), min_size=1, max_size=4))
    def bad_weather(self, fates: list[Fate]) -> None:
        self.client.expect(fates)

    @rule()
    def thaw(self) -> None:
        self.client.thaw(self.clock.now)

    @rule(key=keys)
    def evict(self, key: StorageKey) -> None:
        self.client.delete(layout.cached_response(key))

    @rule(key=keys, place=st.integers(0, 120), byte=st.binary(min_size=1, max_size=1))
    def spoil(self, key: StorageKey, place: int, byte: bytes) -> None:
        """Anything but the entry's own deadline, which nothing else could tell."""
        entry = self.client.get(layout.cached_response(key))
        if isinstance(entry, bytes) and len(entry) > 7 + place:
            self.client.setrange(layout.cached_response(key), 7 + place, byte)

    @rule(
        key=keys,
        token=tokens,
        fingerprint=st.sampled_from((FINGERPRINT, FINGERPRINT, OTHER_FINGERPRINT)),
        on_expiry=st.sampled_from(OnExpiry),
        lease=durations,
    )
    def claim(self, key: StorageKey, token: bytes, fingerprint: bytes, on_expiry: OnExpiry, lease: int) -> None:
        request = a_request(key, fingerprint=fingerprint, on_expiry=on_expiry)
        expected = self.alone.claim(request, token=token, lease=lease)
        told = self.store.claim(request, token=token, lease=lease)
        if isinstance(told, Record) and isinstance(expected, Record) and isinstance(self.system, TellingStore):
            # Counted from the claim and not from the completion: it goes sooner from the cache, and never later.
            assert 0 < told.remaining <= expected.remaining
            told = replace(told, remaining=expected.remaining)
        assert expected == told

    @rule(key=keys, token=tokens, payload=payloads, keep=durations)
    def complete(self, key: StorageKey, token: bytes, payload: StoredPayload, keep: int) -> None:
        self.same(lambda store: store.complete(key, token, payload, keep=keep))

    @rule(key=keys, token=tokens, payload=payloads)
    def complete_and_ask(self, key: StorageKey, token: bytes, payload: StoredPayload) -> None:
        """The usual life: without it few records live for long enough to be cached."""
        self.claim(key, token, FINGERPRINT, OnExpiry.TAKEOVER, 30)
        self.complete(key, token, payload, 30)
        self.claim(key, token, FINGERPRINT, OnExpiry.TAKEOVER, 30)

    @rule(key=keys, token=tokens, payload=payloads, peeks=st.integers(1, 2))
    def complete_and_freeze(self, key: StorageKey, token: bytes, payload: StoredPayload, peeks: int) -> None:
        """The same, with a server that stands still just as it is told the answer."""
        fates: list[Fate] = ["fine"] * peeks
        self.client.expect([*fates, "frozen"])
        self.complete_and_ask(key, token, payload)

    @rule(key=keys, token=tokens, lease=durations)
    def renew(self, key: StorageKey, token: bytes, lease: int) -> None:
        self.same(lambda store: store.renew(key, token, lease=lease))

    @rule(key=keys, token=tokens)
    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        self.same(lambda store: store.mark_point_of_no_return(key, token))

    @rule(key=keys, token=consumes(tokens))
    def release(self, key: StorageKey, token: bytes) -> None:
        self.same(lambda store: store.release(key, token))

    @rule(key=keys, token=tokens)
    def quarantine(self, key: StorageKey, token: bytes) -> None:
        self.same(lambda store: store.quarantine(key, token, "lost"))

    @invariant()
    def nothing_is_cached_that_is_not_so(self) -> None:
        """Looked at past all weather."""
        if not hasattr(self, "client"):
            return
        for key in KEYS:
            cached, record = RedisReplayCache(self.onlooker, clock=self.clock).get(key), self.alone.read(key)
            if isinstance(cached, Record):
                assert record is not None
                assert 0 < cached.remaining <= record.remaining
                assert replace(cached, remaining=record.remaining) == record

    def same(self, write: Callable[[Store], object]) -> None:
        def lost(store: Store) -> bool:
            try:
                write(store)
            except LeaseLost:
                return True
            return False

        assert lost(self.alone) == lost(self.store)

    def teardown(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
            self.onlooker.close()


TestTiered = TieredMachine.TestCase
TestTiered.settings = settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None, database=None)

hosts = st.integers(0, 1)


class WithdrawnMachine(RuleBasedStateMachine):
    """Two hosts whose answers come to the cache late, and others that settle by halves: the cache first, then the system."""

    halves = Bundle("halves")

    @initialize()
    def begin(self) -> None:
        clock = FrozenClock()
        self.client = OneAtATime(server=fakeredis.FakeServer())
        self.cache = RedisReplayCache(self.client, clock=clock)
        self.system = MemoryStore(clock)
        self.slow = [HeldUp(self.cache) for _ in range(2)]
        self.hosts = [tiered_on(self.system, slow) for slow in self.slow]

    @rule(host=hosts, key=keys)
    def ask(self, host: int, key: StorageKey) -> None:
        token, store = a_token(), self.hosts[host]
        if isinstance(store.claim(a_request(key), token=token, lease=LEASE), Grant):
            store.complete(key, token, PAYLOAD, keep=KEEP)
            store.claim(a_request(key), token=a_token(), lease=LEASE)

    @rule(host=hosts)
    def arrive(self, host: int) -> None:
        self.slow[host].arrive()

    @rule(host=hosts, key=keys)
    def mark_corrupt(self, host: int, key: StorageKey) -> None:
        self.hosts[host].mark_corrupt(key, PAYLOAD)

    @rule(host=hosts, key=keys)
    def seal_anew(self, host: int, key: StorageKey) -> None:
        self.hosts[host].responses.replace(key, PAYLOAD, OTHER_PAYLOAD)

    @rule(target=halves, key=keys)
    def withdraw(self, key: StorageKey) -> object:
        record = self.system.read(key)
        if record is None:
            return multiple()
        assert self.cache.invalidate(key, fence=record.fence)
        return SeenRecord(key, record)

    @rule(seen=consumes(halves), freed=st.booleans())
    def settle(self, seen: SeenRecord, freed: bool) -> None:
        if freed:
            self.system.recovery.force_release(seen)
        elif seen.record.state is State.QUARANTINED:
            self.system.recovery.resolve(seen, token=a_token(), payload=PAYLOAD, keep=KEEP)

    @invariant()
    def nothing_is_cached_but_what_the_system_has(self) -> None:
        """Or what it has condemned since: that opens for nobody."""
        if not hasattr(self, "client"):
            return
        for key in KEYS:
            cached = self.cache.get(key)
            if isinstance(cached, Record):
                record = self.system.read(key)
                assert record is not None
                assert cached.token == record.token

    def teardown(self) -> None:
        if hasattr(self, "client"):
            self.client.close()


TestWithdrawn = WithdrawnMachine.TestCase
TestWithdrawn.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None, database=None)
