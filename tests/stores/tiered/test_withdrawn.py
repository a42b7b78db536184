"""Any order in which others free, settle and condemn, while answers are on their way to the cache: none comes back."""

from __future__ import annotations

import fakeredis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, Record, State
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.tiered import TieredStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, OTHER_PAYLOAD, PAYLOAD, a_key, a_request, a_token
from tests.backends import OneAtATime
from tests.stores.tiered.test_faults import HeldUp

KEYS = a_key(), a_key()
keys = st.sampled_from(KEYS)
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
        self.hosts = [TieredStore(self.system, slow) for slow in self.slow]

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
TestWithdrawn.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, database=None)
