"""A store whose calls are timed. It decides nothing: what it is asked, the store behind it answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias, TypeVar

from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Claimed, ClaimRequest, Record, Replayed, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store, StoreOutcome

Call: TypeAlias = Literal[
    "claim", "renew", "mark_point_of_no_return", "complete", "release", "quarantine", "read", "mark_corrupt"
]
Ending: TypeAlias = Literal["done", "granted", "replayed", "refused", "lost", "unavailable", "failed"]
"""How a call ended. Claims are granted, replayed or refused; what else went well is done."""

Timing: TypeAlias = Callable[[Call, Ending, float], object]
"""Hears of every call: which it was, how it ended, and after how many seconds. It must not raise, and be quick."""

BESIDES: Final = (
    *("data_keys", "answers", "ledger", "unsettled", "expiry", "chores", "health", "schema", "transactions"),
    "bell",
)
"""What a store can do besides being one. Not timed."""

AnswerT = TypeVar("AnswerT")


class TimedStore:
    """Passes every call of the port on, and says how long it took. All else is the store's own."""

    def __init__(self, store: Store, timing: Timing, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock
        for name in BESIDES:
            # Protocols that are asked for at run time look at attributes, and not at __getattr__.
            if hasattr(store, name):
                setattr(self, name, getattr(store, name))

    def __getattr__(self, name: str) -> Any:
        if name == "_store":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._store, name)

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        return self._timed(
            "claim", lambda: self._store.claim(request, token=token, lease=lease, quota=quota), _ending_of_claim
        )

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        self._timed("renew", lambda: self._store.renew(key, token, lease=lease))

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        self._timed("mark_point_of_no_return", lambda: self._store.mark_point_of_no_return(key, token))

    def complete(self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float) -> None:
        self._timed("complete", lambda: self._store.complete(key, token, payload, keep=keep))

    def release(self, key: StorageKey, token: bytes) -> None:
        self._timed("release", lambda: self._store.release(key, token))

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        self._timed("quarantine", lambda: self._store.quarantine(key, token, reason))

    def read(self, key: StorageKey) -> Record | None:
        return self._timed("read", lambda: self._store.read(key))

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        self._timed("mark_corrupt", lambda: self._store.mark_corrupt(key, payload))

    def _timed(
        self, call: Call, ask: Callable[[], AnswerT], ending_of: Callable[[Any], Ending] = lambda answer: "done"
    ) -> AnswerT:
        began = self._clock()
        try:
            answer = ask()
        except BaseException as error:
            self._timing(call, _ending_of_error(error), self._clock() - began)
            raise
        self._timing(call, ending_of(answer), self._clock() - began)
        return answer


def _ending_of_claim(outcome: StoreOutcome) -> Ending:
    match outcome:
        case Claimed():
            return "granted"
        case Replayed():
            return "replayed"
        case _:
            return "refused"


def _ending_of_error(error: BaseException) -> Ending:
    match error:
        case LeaseLost():
            return "lost"
        case StoreUnavailable():
            return "unavailable"
        case _:
            return "failed"
