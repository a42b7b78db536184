"""A store, and all it takes to reap it: what was told, who is asked, and time that moves when told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Grant, OnExpiry, Record, SealContext, StoredResponse
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Resolution, Settler, UnknownOutcome
from flask_idempotency.engine.store import Codec
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.maintenance.reap import ReapReport, ResolverContext, reap
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import ABOUT, LEASE, a_key, a_request, a_token, found

POLICY = Policy(lease=LEASE, max_runtime=900.0)
PAID = StoredResponse(201, body=b"paid")


def still(batch: int = 1000) -> Batcher:
    """No pace and no end."""
    return Batcher(batch, sleep=lambda seconds: None, monotonic=lambda: 0.0)


def label(key: StorageKey) -> str:
    return key.rid.hex()[:8]


class Yard:
    """One store, and what becomes of its unsettled records."""

    def __init__(self, store: Any, clock: FrozenClock | None = None) -> None:
        self.store = store
        self.clock = clock or FrozenClock()
        self.codec: Codec = EnvelopeCodec(compression=None)
        self.events: list[Event] = []
        self.asked: list[UnknownOutcome] = []
        self.says: Sequence[Callable[[UnknownOutcome], Any]] = ()
        self.policy = POLICY

    def claim(
        self, *, on_expiry: OnExpiry = OnExpiry.QUARANTINE, key: StorageKey | None = None
    ) -> tuple[StorageKey, bytes]:
        key, token = key or a_key(), a_token()
        outcome = self.store.claim(a_request(key, on_expiry=on_expiry), token=token, lease=LEASE)
        assert isinstance(outcome, Grant)
        return key, token

    def held(self) -> tuple[StorageKey, bytes]:
        """Quarantined by its owner's word."""
        key, token = self.claim()
        self.store.quarantine(key, token, "view-crashed")
        return key, token

    def vanished(self, *, ago: float = 1.0, on_expiry: OnExpiry = OnExpiry.QUARANTINE) -> tuple[StorageKey, bytes]:
        """Its lease has ended so long ago, with no word from its owner."""
        key, token = self.claim(on_expiry=on_expiry)
        self.clock.advance(LEASE + ago)
        return key, token

    def resolver(self, unknown: UnknownOutcome) -> Resolution:
        self.asked.append(unknown)
        said: Resolution = self.says[min(len(self.asked), len(self.says)) - 1](unknown)
        return said

    def settler(self) -> Settler:
        return Settler(self.store.recovery, self.codec, Observers([self.events.append]), label=label)

    def asking(self) -> ResolverContext:
        return ResolverContext(
            resolvers={ABOUT.operation: self.resolver},
            policy_of=lambda about: self.policy,
            settler=self.settler(),
            downstream=lambda found, name: f"{name} of {label(found.key)}",
        )

    def reap(self, *, horizon: float | None = None, drain: Batcher | None = None) -> ReapReport:
        return reap(
            self.store.recovery,
            horizon=self.clock.now if horizon is None else horizon,
            drain=drain or still(),
            observers=Observers([self.events.append]),
            label=label,
            resolving=self.asking() if self.says else None,
        )

    def read(self, key: StorageKey) -> Record:
        return found(self.store, key)

    def seen(self, key: StorageKey) -> SeenRecord:
        return SeenRecord(key, self.read(key))

    def opened(self, key: StorageKey) -> StoredResponse:
        record = self.read(key)
        assert record.payload is not None
        return self.codec.open(record.payload, SealContext(key, record.token, record.fence, record.fingerprint))

    def told(self) -> list[str]:
        return [type(event).__name__ for event in self.events]
