"""Every store keeps journals as the memory store does, whatever is asked of it, in whatever order."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, Protocol

import pytest

from flask_idempotency.engine.capabilities import Ledger, SeenRecord
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.journal import Effects, Entry, Journal, JournalWrite, StepState
from flask_idempotency.engine.model import ERASED, Grant, OnExpiry, Record, State, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, CapableStore, Kit, a_key, a_request
from tests.backends import BACKENDS
from tests.lab.programs import REDIS_KINDS
from tests.sql_backends import maria_database, sql_databases, sql_stores

__all__ = ["maria_database", "sql_databases", "sql_stores"]

KINDS: Final = (
    "fakeredis",
    *(f"{kind}-url" for kind in REDIS_KINDS),
    "sqlite",
    "postgres-insert",
    f"tiered-{REDIS_KINDS[0]}-telling",
)
LIVES: Final = int(os.environ.get("AGREEMENT_LIVES", "3"))
CALLS: Final = 60

EFFECTS: Final[tuple[Effects, ...]] = ("plain", "plain", "deduplicated", "transactional", "pure")


class Counting(CapableStore, Protocol):
    """A store that counts what its tenants use."""

    @property
    def ledger(self) -> Ledger: ...


@dataclass
class Side:
    """One store, and what it has shown to those who call it."""

    store: Counting
    grants: list[Grant] = field(default_factory=list)
    """As often as a claim was granted, and granted again."""
    seen: list[tuple[SeenRecord, Journal]] = field(default_factory=list)
    """What resolvers have looked at."""


class Life:
    """One key, and calls about it by workers, resolvers, janitors, and copies of them that come late."""

    def __init__(self, random: Random, *stores: Any, clock: FrozenClock) -> None:
        self.random, self.clock = random, clock
        self.key = a_key()
        self.tokens = [random.randbytes(16) for _ in range(4)]
        self.sides = [Side(store) for store in stores]
        self.quota = random.choice((None, Quota(records=1000)))
        self.fresh = 0
        """How many tokens resolvers have made."""
        self.told: list[str] = []

    def both(self, name: str, call: Callable[[Side], Any]) -> None:
        self.told.append(name)
        outcomes = []
        for side in self.sides:
            try:
                outcomes.append(call(side))
            except IdempotencyError as error:
                outcomes.append(type(error).__name__)
        shown = [self.shown(side) for side in self.sides]
        story = "\n".join(self.told)
        assert outcomes[0] == outcomes[1], f"{story}\n{outcomes}"
        assert shown[0] == shown[1], f"{story}\n{shown[0]}\n{shown[1]}"

    def shown(self, side: Side) -> Any:
        record, journal = side.store.read(self.key), side.store.journals.read(self.key)
        fences = {grant.fence: number for number, grant in enumerate(side.grants)}
        entries = sorted(
            (replace(each, fence=fences.get(each.fence, -1)) for each in journal.entries), key=lambda each: each.id
        )
        if record is not None:
            record = replace(record, fence=fences.get(record.fence, -1), remaining=0.0)
        usage = side.store.ledger.usage(self.key.tid)
        # A record that is in no index is met by no janitor, resolver or operator.
        met = [self.key in Kit(side.store, self.clock).walked(state, tid=self.key.tid) for state in State]
        counted = usage.records, usage.bytes, usage.in_flight
        return record, entries, journal.erased, journal.complete, counted, met

    def step(self) -> None:
        verbs = (
            [self.claim] * 5
            + [self.write] * 14
            + [self.wait] * 4
            + [self.release, self.release, self.renew, self.quarantine]
            + [self.complete, self.complete_only]
            + [self.look] * 3
            + [self.resume] * 6
            + [self.give_up] * 2
            + [self.end_lease, self.resolve, self.force_release, self.recall, self.sweep, self.replace]
        )
        self.random.choice(verbs)()

    def claim(self) -> None:
        token = self.random.choice(self.tokens)
        request = a_request(self.key, on_expiry=OnExpiry.TAKEOVER)

        def call(side: Side) -> Any:
            outcome = side.store.claim(request, token=token, lease=LEASE, quota=self.quota)
            if isinstance(outcome, Grant):
                if all(outcome.fence != grant.fence for grant in side.grants):
                    side.grants.append(outcome)
                return "granted", outcome.token, outcome.attempt, outcome.lease
            if isinstance(outcome, Record):
                return "record"
            return repr(outcome)

        self.both(f"claim {self.tokens.index(token)}", call)

    def grant(self) -> int | None:
        """Choose one of the grants so far, the last ones more often."""
        grants = len(self.sides[0].grants)
        return None if not grants else max(grants - 1 - min(self.random.choice((0, 0, 0, 0, 1, 2)), grants - 1), 0)

    def entry(self) -> Entry:
        name = self.random.choice("abc")
        state = self.random.choice(tuple(StepState))
        data = self.random.randbytes(3)
        payload = self.random.choice(
            (None, StoredPayload(data, 0, True, self.random.randrange(9)), StoredPayload(b"", 0, True, 3, ERASED))
        )
        return Entry(
            name.encode() * 12,
            name,
            self.random.choice(EFFECTS),
            state,
            self.random.random() < 0.5,
            self.random.choice((b"", b"d" * 16)),
            payload,
            kept=self.random.random() < 0.7,
            took=float(self.random.randrange(3)),
        )

    def writing(self) -> JournalWrite:
        enter = {entry.id: entry for entry in (self.entry() for _ in range(self.random.randrange(4)))}
        withdraw = [id for id in (b"a" * 12, b"b" * 12, b"c" * 12) if id not in enter and self.random.random() < 0.2]
        return JournalWrite(
            self.random.randrange(1, 7),
            tuple(enter.values()),
            withdraw,
            self.random.randrange(3),
            self.random.random() < 0.5,
        )

    def write(self) -> None:
        at, writing = self.grant(), self.writing()
        if at is None:
            return

        def call(side: Side) -> None:
            grant = side.grants[at]
            side.store.journals.write(self.key, grant.token, fence=grant.fence, writing=writing, lease=LEASE)

        self.both(f"write {at} {writing}", call)

    def owner(self, name: str, call: Callable[[Side, Grant], Any]) -> None:
        at = self.grant()
        if at is not None:
            self.both(f"{name} {at}", lambda side: call(side, side.grants[at]))

    def wait(self) -> None:
        seconds = self.random.choice((1, 1, LEASE, LEASE + 1, 61))
        self.clock.advance(seconds)
        self.told.append(f"wait {seconds}")

    def release(self) -> None:
        at = self.grant()
        if at is None:
            return
        self.both(f"release {at}", lambda side: side.store.release(self.key, side.grants[at].token))
        # For how long a store refuses this token from here on, it may choose once others have had the key.
        token = self.sides[0].grants[at].token
        self.tokens = [self.random.randbytes(16) if each == token else each for each in self.tokens]

    def renew(self) -> None:
        self.owner("renew", lambda side, grant: side.store.renew(self.key, grant.token, lease=LEASE))

    def quarantine(self) -> None:
        self.owner("quarantine", lambda side, grant: side.store.quarantine(self.key, grant.token, "steps-changed"))

    def complete(self) -> None:
        self.owner(
            "complete", lambda side, grant: side.store.journals.complete(self.key, grant.token, PAYLOAD, keep=KEEP)
        )

    def complete_only(self) -> None:
        """As an earlier release, which leaves the journal to a sweep, and its bytes to the recount of a quota."""
        if self.quota is not None:
            return
        self.owner("complete-only", lambda side, grant: side.store.complete(self.key, grant.token, PAYLOAD, keep=60))

    def recall(self) -> None:
        self.owner(
            "recall",
            lambda side, grant: len(side.store.journals.recall(self.key, grant.token, fence=grant.fence).entries),
        )

    def look(self) -> None:
        if self.sides[0].store.read(self.key) is None:
            return
        for side in self.sides:
            record = side.store.read(self.key)
            assert record is not None
            side.seen.append((SeenRecord(self.key, record), side.store.journals.read(self.key)))
        self.told.append(f"look {len(self.sides[0].seen) - 1}")

    def resolver(self, name: str, call: Callable[[Side, SeenRecord, Journal], Any]) -> None:
        if not self.sides[0].seen or self.random.random() < 0.6:
            self.look()
        looks = len(self.sides[0].seen)
        if not looks:
            return
        at = looks - 1 if self.random.random() < 0.7 else self.random.randrange(looks)
        self.both(f"{name} {at}", lambda side: call(side, *side.seen[at]))

    def resume(self) -> None:
        self.fresh += 1
        if not self.sides[0].seen or self.random.random() < 0.6:
            self.look()
        if not self.sides[0].seen:
            return
        looks = len(self.sides[0].seen)
        at = looks - 1 if self.random.random() < 0.7 else self.random.randrange(looks)
        known = self.sides[0].seen[at][1].entries
        enter, withdraw = [], []
        for entry in known:
            match self.random.randrange(3):
                case 0:
                    enter.append(replace(self.entry(), id=entry.id, state=StepState.FINISHED, took=0.0))
                case 1:
                    withdraw.append(entry.id)
        writing = JournalWrite(0, tuple(enter), withdraw, self.random.randrange(3), self.random.random() < 0.3)
        token = self.fresh.to_bytes(16, "big")

        def call(side: Side) -> bool:
            seen, journal = side.seen[at]
            return side.store.journals.resume(seen, journal, token=token, writing=writing)

        self.both(f"resume {at} {writing}", call)
        if self.random.random() < 0.3:
            self.both(f"resume again {at}", call)

    def give_up(self) -> None:
        horizon = self.clock() + self.random.choice((-10, 0, 10))
        self.resolver("give up", lambda side, seen, journal: side.store.journals.give_up(seen, horizon=horizon))

    def end_lease(self) -> None:
        horizon = self.clock()
        self.resolver(
            "end lease", lambda side, seen, journal: side.store.recovery.quarantine_expired(seen, horizon=horizon)
        )

    def resolve(self) -> None:
        self.fresh += 1
        token = self.fresh.to_bytes(16, "big")
        self.resolver(
            "resolve",
            lambda side, seen, journal: side.store.recovery.resolve(seen, token=token, payload=PAYLOAD, keep=60),
        )

    def force_release(self) -> None:
        self.resolver("force release", lambda side, seen, journal: side.store.recovery.force_release(seen))

    def sweep(self) -> None:
        def call(side: Side) -> None:
            after: bytes | None = b""
            while after is not None:
                after = side.store.journals.sweep(after=after, limit=100).after

        self.both("sweep", call)

    def replace(self) -> None:
        new = StoredPayload(self.random.randbytes(4), 0, True, 4)
        stale = self.random.random() < 0.2

        def call(side: Side) -> list[bool]:
            return [
                side.store.journals.replace(self.key, each.id, new if stale else each.payload, new)
                for each in sorted(side.store.journals.read(self.key).entries, key=lambda each: each.id)
                if each.payload is not None
            ]

        self.both("replace", call)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_keeps_journals_as_the_memory_store_does(
    request: pytest.FixtureRequest, clock: FrozenClock, kind: str
) -> None:
    """AGREEMENT_LIVES and AGREEMENT_SEED ask for more of it, or for the life that failed."""
    first = int(os.environ.get("AGREEMENT_SEED", "0"))
    with ExitStack() as ends:
        store, memory = BACKENDS[kind](request, ends)(clock), MemoryStore(clock)
        for seed in range(first, first + LIVES):
            life = Life(Random(seed), memory, store, clock=clock)
            for _ in range(CALLS):
                life.step()
