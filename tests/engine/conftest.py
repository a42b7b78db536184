"""An engine on the memory store, with a clock that moves when told and a thread that is driven by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.claim import Claim, Dependencies
from flask_idempotency.engine.engine import Engine, Outcome
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.keys import Identity, Scope, StorageKey
from flask_idempotency.engine.lease import LeaseRenewer
from flask_idempotency.engine.model import ClaimRequest, RequestInfo
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.policy import Policy, merge
from flask_idempotency.engine.store import Store
from flask_idempotency.engine.waiting import Waiters
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing.doubles import FrozenClock


class Unsteady:
    """A store whose methods can be made to fail, before or after they act."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.down: set[str] = set()
        self.mute: set[str] = set()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if name in self.down:
                raise StoreUnavailable("down")
            answer = getattr(self._store, name)(*args, **kwargs)
            if name in self.mute:
                raise StoreUnavailable("the reply was lost")
            return answer

        return call


@dataclass
class House:
    """Everything an engine test touches."""

    clock: FrozenClock
    store: Any
    renewer: LeaseRenewer
    engine: Engine
    around: Dependencies
    events: list[Event]
    identities: tuple[Identity, ...]
    policy: Policy = field(default_factory=Policy)

    def request(
        self, key: str = "k", *, body: bytes = b"body", identity: int = 0, policy: Policy | None = None
    ) -> ClaimRequest:
        """A request for this client key, as the door would make it under the identity with this number."""
        name = self.identities[identity]
        return ClaimRequest(
            key=name.storage_key(Scope("shop", "acme", "alice"), key),
            fingerprint=b"\1" + name.fingerprint(body)[:16],
            on_expiry=(policy or self.policy).on_expiry,
            info=RequestInfo("acme", "alice", "POST", "pay"),
        )

    def claim(self, request: ClaimRequest | None = None, *former: ClaimRequest, **policy: Any) -> Outcome:
        merged = merge(self.policy, policy)
        return self.engine.claim(request or self.request(policy=merged), merged, former=former)

    def won(self, request: ClaimRequest | None = None, *former: ClaimRequest, **policy: Any) -> Claim:
        outcome = self.claim(request, *former, **policy)
        assert isinstance(outcome, Claim)
        return outcome

    def told(self) -> list[str]:
        """The names of the events so far, oldest first."""
        return [type(event).__name__ for event in self.events]

    def slow_reads(self, seconds: float) -> None:
        """From now on time passes while a waiter looks: the store takes this long to answer a read."""
        read = self.store._store.read

        def slowly(key: StorageKey) -> object:
            self.clock.advance(seconds)
            return read(key)

        self.store._store.read = slowly

    def pass_time(self, seconds: float) -> None:
        """Everybody's clock moves, and the background thread does what has become due."""
        self.clock.advance(seconds)
        self.renewer.tick()

    @property
    def key(self) -> StorageKey:
        return self.request().key


@pytest.fixture
def house() -> House:
    return new_house()


def new_house() -> House:
    clock = FrozenClock()
    store = Unsteady(MemoryStore(clock=clock))
    events: list[Event] = []
    renewer = LeaseRenewer(monotonic=clock, threaded=False)
    identities = (Identity(b"new"), Identity(b"old"))
    around = Dependencies(
        store=store,
        codec=EnvelopeCodec(),
        renewer=renewer,
        repeater=renewer,
        waiters=Waiters(4),
        observers=Observers([events.append]),
        monotonic=clock,
    )
    return House(clock, store, renewer, Engine(around), around, events, identities)
