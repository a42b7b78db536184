"""Settling keys in their owners' place: for resolvers, and for people."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flask_idempotency.engine.errors import CorruptRecord, IdempotencyError, NothingChanged, StoreUnavailable
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
    was changed, and nothing is told. Each raises `StoreUnavailable` when nobody can tell, and tells that it may have been
    done; it may be repeated.
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
        told = partial(self._tell, seen, verb="released", actor=actor, reason=reason, forced=forced)
        return _heard(lambda: self._unsettled.free(seen), told)

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
        told = partial(self._tell, seen, verb=verb, actor=actor, reason=reason)
        settled = False

        def store(key: StorageKey, payload: Payload) -> None:
            nonlocal settled
            settled = _heard(lambda: self._unsettled.settle(seen, token=token, payload=payload, keep=keep), told)

        Sealing(self._codec, [binding], result).writing(store)(seen.key)
        return settled

    def _tell(
        self, seen: Found, *, verb: str, actor: str, reason: str, forced: bool = False, certain: bool = True
    ) -> None:
        self._observers(
            Settled(
                self._label(seen.key),
                seen.record.about.operation,
                verb=verb,
                was=seen.record.state.value,
                actor=actor,
                reason=reason,
                forced=forced,
                certain=certain,
            )
        )


def _heard(settle: Callable[[], bool], told: Callable[..., None]) -> bool:
    """Whether this has settled the key. It is told of, and also where nobody knows: what may have been done is on record."""
    try:
        settled = settle()
    except BaseException as error:  # whoever is interrupted does not know either
        if not isinstance(error, IdempotencyError) or _may_be_done(error):
            told(certain=False)
        raise
    if settled:
        told()
    return settled


def _may_be_done(error: IdempotencyError) -> bool:
    """Any other than these the store raises instead of doing it."""
    return isinstance(error, StoreUnavailable) and not isinstance(error, NothingChanged)
