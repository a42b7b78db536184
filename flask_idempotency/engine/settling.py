"""Settling keys in their owners' place: for resolvers, and for people."""

from __future__ import annotations

from collections.abc import Callable

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.events import Event, Settled
from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.ports import Binding, Codec
from flask_idempotency.engine.record import ERASED, Payload, State
from flask_idempotency.engine.result import Result
from flask_idempotency.engine.sealing import Sealing
from flask_idempotency.engine.token import successor
from flask_idempotency.engine.unsettled import Found, Unsettled


class Settler:
    """Settles what was seen and still stands so, and tells who did it and why.

    Every method returns False when something else is there by now: the owner was faster, or another janitor. Then nothing
    was changed, and nothing is told. Each raises `StoreUnavailable` when nobody can tell; it may be repeated.
    """

    def __init__(
        self,
        unsettled: Unsettled,
        codec: Codec,
        observers: Callable[[Event], None],
        *,
        label: Callable[[StorageKey], str],
    ) -> None:
        self._unsettled = unsettled
        self._codec = codec
        self._observers = observers
        self._label = label

    def complete(self, seen: Found, result: Result, *, keep: float, actor: str, reason: str) -> bool:
        """Retries get this result from now on, for `keep` seconds. Raises `KeysUnavailable` when it cannot be sealed.

        The answer of a tenant that was erased since the key was first used is not stored: only that the work was done.
        """
        return self._complete(seen, result, keep, verb="completed", actor=actor, reason=reason)

    def free(self, seen: Found, *, actor: str, reason: str, forced: bool = False) -> bool:
        """The key may run again. Whoever calls this has made sure that its work was not done, and is not being done."""
        freed = self._unsettled.free(seen)
        if freed:
            self._tell(seen, verb="released", actor=actor, reason=reason, forced=forced)
        return freed

    def reopen(self, seen: Found, *, keep: float, actor: str, reason: str) -> bool:
        """A record that was quarantined because nobody could open its answer is completed again, now that somebody can.

        Raises `CorruptRecord` while it cannot be opened, and for a record that holds no answer.
        """
        record = seen.record
        if record.state is not State.QUARANTINED or record.payload is None:
            raise CorruptRecord("there is no answer in this record that could be opened")
        if record.erased or record.payload.sealed_by == ERASED:
            raise CorruptRecord("the answer in this record was erased")
        binding = Binding(seen.key, record.token, record.fence, record.fingerprint)
        result = self._codec.open(record.payload, binding)
        return self._complete(seen, result, keep, verb="reopened", actor=actor, reason=reason)

    def _complete(self, seen: Found, result: Result, keep: float, *, verb: str, actor: str, reason: str) -> bool:
        token = successor(seen.record.token)
        binding = Binding(seen.key, token, seen.record.fence, seen.record.fingerprint)
        settled = False

        def store(key: StorageKey, payload: Payload) -> None:
            nonlocal settled
            settled = self._unsettled.settle(seen, token=token, payload=payload, keep=keep)

        Sealing(self._codec, [binding], result).writing(store)(seen.key)
        if settled:
            self._tell(seen, verb=verb, actor=actor, reason=reason)
        return settled

    def _tell(self, seen: Found, *, verb: str, actor: str, reason: str, forced: bool = False) -> None:
        self._observers(
            Settled(
                self._label(seen.key),
                seen.record.about.operation,
                verb=verb,
                was=seen.record.state.value,
                actor=actor,
                reason=reason,
                forced=forced,
            )
        )
