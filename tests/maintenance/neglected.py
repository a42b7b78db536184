"""A store that nobody has looked after for a while: what is in it, and how that stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnExpiry, Record, State
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.quota import Drift
from flask_idempotency.engine.recovery import Happened, Resolution, Settler, StillUnknown, UnknownOutcome
from flask_idempotency.engine.store import Clock
from flask_idempotency.maintenance.janitor import Batcher, Janitor, expire
from flask_idempotency.maintenance.reap import ResolverContext, reap
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.quota import EXTRA, Tenant
from flask_idempotency.testing.contract.support import ABOUT, KEEP, LEASE, PAYLOAD, Kit
from tests.forgiving import redis_store
from tests.maintenance.yard import PAID, label

BATCH = 7


def store_at(url: str, clock: Clock) -> Any:
    return redis_store(url, clock=clock) if url.startswith("redis") else SqlStore(Database(url), clock=clock)


def said(unknown: UnknownOutcome) -> Resolution:
    """Of what its owner has held it is known what happened; of what has lapsed it is not."""
    return Happened(PAID) if unknown.record.reason == "view-crashed" else StillUnknown()


def janitor_of(
    store: Any, clock: FrozenClock, events: list[Event], *, locked: bool = True, telling: Any = None
) -> Janitor:
    """One host's janitor, which hears of `events`. `telling` stands before the store, if anything does."""
    observers, looked = Observers([events.append]), telling or store
    asking = ResolverContext(
        resolvers={ABOUT.operation: said},
        policy_of=lambda about: Policy(lease=LEASE, keep=KEEP),
        settler=Settler(looked.recovery, EnvelopeCodec(compression=None), observers, label=label),
        downstream=lambda found, name: name,
    )
    return Janitor(
        {
            "reap": lambda horizon, drain: reap(
                looked.recovery, horizon=horizon, drain=drain, observers=observers, label=label, resolving=asking
            ),
            "expire": lambda horizon, drain: expire(looked.expiry, horizon=horizon, drain=drain),
        },
        task_log=store.task_log if locked else None,
        observers=observers,
        host_clock=clock,
    )


@dataclass
class Neglected:
    """Keys in every state, of one tenant that is counted."""

    store: Any
    tenant: Tenant
    over: list[StorageKey]
    living: list[StorageKey]
    lapsed: list[StorageKey]
    waiting: list[StorageKey]
    held: list[StorageKey]
    before: dict[StorageKey, Record]

    @staticmethod
    def store_of(store: Any, clock: FrozenClock, *, size: int = 12) -> Neglected:
        tenant = Tenant(Kit(store, clock))
        over = [tenant.complete() for _ in range(size)]
        clock.advance(KEEP + EXTRA + 1)
        lapsed = [tenant.begin()[0] for _ in range(size)]
        waiting = [tenant.begin(on_expiry=OnExpiry.TAKEOVER)[0] for _ in range(size)]
        clock.advance(LEASE + 1)
        living = [tenant.complete() for _ in range(size)]
        held = list[StorageKey]()
        for _ in range(size):
            key, token = tenant.begin()
            store.quarantine(key, token, "view-crashed")
            held.append(key)
        before = {key: store.read(key) for key in (*living, *lapsed, *waiting, *held)}
        return Neglected(store, tenant, over, living, lapsed, waiting, held, before)

    def partly(self) -> list[str]:
        """What is neither as it was nor as it is to be: there is nothing between the two."""
        faults = list[str]()
        for key, before in self.before.items():
            now = self.store.read(key)
            if now is None or _still(now) not in (_still(before), self._after(key, now)):
                faults.append(f"{before.state} became {now}")
        drift = self.store.ledger.reconcile(self.tenant.tid)
        return faults if drift == Drift() else [*faults, f"{drift}"]

    def undone(self) -> list[str]:
        """What a janitor has left."""
        ended = [f"{key} is there" for key in self.over if self.store.read(key) is not None]
        states = {key: self.store.read(key).state for key in (*self.lapsed, *self.held, *self.living, *self.waiting)}
        expected = {
            **dict.fromkeys(self.lapsed, State.QUARANTINED),
            **dict.fromkeys((*self.held, *self.living), State.COMPLETED),
            **dict.fromkeys(self.waiting, State.PROCESSING),
        }
        return ended + [f"{key} is {state}" for key, state in states.items() if state is not expected[key]]

    @property
    def bytes(self) -> int:
        """What its tenant has once everything is done."""
        size: int = self.store.read(self.held[0]).payload.byte_size
        return len(self.living) * PAYLOAD.byte_size + len(self.held) * size

    def _after(self, key: StorageKey, now: Record) -> Record:
        before = self.before[key]
        if key in self.lapsed:
            return _still(replace(before, state=State.QUARANTINED, reason="lease-expired"))
        if key in self.held and now.state is State.COMPLETED and now.payload is not None:
            settled = replace(
                before,
                state=State.COMPLETED,
                token=now.token,
                reason="",
                deadline=now.deadline,
                completed_at=now.completed_at,
                payload=now.payload,
            )
            return _still(settled) if now.payload.status == PAID.status and now.token != before.token else before
        return before


def _still(record: Record) -> Record:
    """As it is at every time."""
    return replace(record, remaining=0.0)


DRAIN = Batcher(BATCH, sleep=lambda seconds: None)
