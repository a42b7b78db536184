"""A wrapper that reports how long each call of a store takes and how it ends.

It passes every call on and changes no outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

from flask_idempotency.engine.capabilities import CAPABILITIES
from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, Grant, Record, State, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store, StoreOutcome

Call: TypeAlias = Literal[
    "claim", "renew", "mark_point_of_no_return", "complete", "release", "quarantine", "read", "mark_corrupt"
]
Ending: TypeAlias = Literal["done", "granted", "replayed", "refused", "lost", "unavailable", "failed"]
"""How a call ended: a claim is granted, replayed or refused. Any other call that succeeds is done."""

Timing: TypeAlias = Callable[[Call, Ending, float], object]
"""The store calls it after each call with the call's name, its ending and its seconds. It must be quick and not raise."""

OutcomeT = TypeVar("OutcomeT")
ArgumentsP = ParamSpec("ArgumentsP")


class TimedStore:
    """Pass each call of the `Store` protocol on, and report its time. All other attributes come from the store."""

    def __init__(self, store: Store, timing: Timing, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock
        for name in CAPABILITIES:
            if hasattr(store, name):
                setattr(self, name, getattr(store, name))

    def __getattr__(self, name: str) -> Any:
        if name == "_store":  # `copy` looks attributes up before it sets any
            raise AttributeError(name)
        return getattr(self._store, name)

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        return self._timed("claim", self._store.claim, request, token=token, lease=lease, quota=quota)

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        self._timed("renew", self._store.renew, key, token, lease=lease)

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        self._timed("mark_point_of_no_return", self._store.mark_point_of_no_return, key, token)

    def complete(self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float) -> None:
        self._timed("complete", self._store.complete, key, token, payload, keep=keep)

    def release(self, key: StorageKey, token: bytes) -> State | None:
        return self._timed("release", self._store.release, key, token)

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        self._timed("quarantine", self._store.quarantine, key, token, reason)

    def read(self, key: StorageKey) -> Record | None:
        return self._timed("read", self._store.read, key)

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        self._timed("mark_corrupt", self._store.mark_corrupt, key, payload)

    def _timed(
        self,
        call: Call,
        method: Callable[ArgumentsP, OutcomeT],
        *arguments: ArgumentsP.args,
        **options: ArgumentsP.kwargs,
    ) -> OutcomeT:
        ending: Ending = "failed"
        began = self._clock()
        try:
            outcome = method(*arguments, **options)
            ending = "done"
            if call == "claim":
                match outcome:
                    case Grant():
                        ending = "granted"
                    case Record():
                        ending = "replayed"
                    case _:
                        ending = "refused"
            return outcome
        except LeaseLost:
            ending = "lost"
            raise
        except StoreUnavailable:
            ending = "unavailable"
            raise
        finally:
            self._timing(call, ending, self._clock() - began)
