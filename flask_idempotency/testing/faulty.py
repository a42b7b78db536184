"""A store whose line can be cut at a chosen moment, or whose process ends there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, Payload, Record
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store, StoreOutcome
from flask_idempotency.testing.points import Points

AnswerT = TypeVar("AnswerT")
Verb: TypeAlias = Literal["claim", "renew", "mark", "complete", "release", "hold", "read", "condemn"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a store was asked to make. `token` is None for `read` and `condemn`."""

    verb: Verb
    key: StorageKey
    token: bytes | None


@dataclass(slots=True)
class _Fault:
    """`countdown` calls of `verb` (any, when None) from now, lose what goes there or what comes back."""

    verb: Verb | None
    countdown: int
    lost: Literal["request", "reply"]


class FaultyStore:
    """Passes every call to a real store, notes it in `calls`, and loses those it was told to lose.

    A lost request was never applied, a lost reply was: the caller sees `StoreUnavailable` either way and cannot tell.
    While `down` is true every request is lost.

    Each call reaches the `points` "before claim" and, once it was applied, "after claim", whichever its verb.
    """

    def __init__(self, store: Store, *, points: Points | None = None) -> None:
        self.points = points if points is not None else Points()
        self.calls: list[Call] = []
        self.down = False
        self._store = store
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()

    def lose_request(self, verb: Verb | None = None, *, nth: int = 1) -> None:
        """The `nth` call from now (of this verb) does not reach the store."""
        self._faults.append(_Fault(verb, nth, "request"))

    def lose_reply(self, verb: Verb | None = None, *, nth: int = 1) -> None:
        """The `nth` call from now (of this verb) is applied, and nobody hears of it."""
        self._faults.append(_Fault(verb, nth, "reply"))

    def verbs(self) -> list[Verb]:
        """What the store was asked to do so far, in order."""
        return [call.verb for call in self.calls]

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        call = Call("claim", request.key, token)
        return self._pass(call, lambda: self._store.claim(request, token=token, lease=lease, quota=quota))

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        self._pass(Call("renew", key, token), lambda: self._store.renew(key, token, lease=lease))

    def mark(self, key: StorageKey, token: bytes) -> None:
        self._pass(Call("mark", key, token), lambda: self._store.mark(key, token))

    def complete(self, key: StorageKey, token: bytes, payload: Payload, *, keep: float) -> None:
        self._pass(Call("complete", key, token), lambda: self._store.complete(key, token, payload, keep=keep))

    def release(self, key: StorageKey, token: bytes) -> None:
        self._pass(Call("release", key, token), lambda: self._store.release(key, token))

    def hold(self, key: StorageKey, token: bytes, reason: str) -> None:
        self._pass(Call("hold", key, token), lambda: self._store.hold(key, token, reason))

    def read(self, key: StorageKey) -> Record | None:
        return self._pass(Call("read", key, None), lambda: self._store.read(key))

    def condemn(self, key: StorageKey, payload: Payload) -> None:
        self._pass(Call("condemn", key, None), lambda: self._store.condemn(key, payload))

    def _pass(self, call: Call, ask: Callable[[], AnswerT]) -> AnswerT:
        lost = self._note(call)
        self.points.reach(f"before {call.verb}")
        if lost == "request":
            raise StoreUnavailable(f"the request to {call.verb} was lost, as this test asked")
        answer = ask()
        self.points.reach(f"after {call.verb}")
        if lost == "reply":
            raise StoreUnavailable(f"the reply to {call.verb} was lost, as this test asked")
        return answer

    def _note(self, call: Call) -> Literal["request", "reply"] | None:
        with self._lock:
            self.calls.append(call)
            lost: Literal["request", "reply"] | None = "request" if self.down else None
            for fault in [fault for fault in self._faults if fault.verb in (None, call.verb)]:
                fault.countdown -= 1
                if fault.countdown == 0:
                    self._faults.remove(fault)
                    lost = lost or fault.lost
            return lost
