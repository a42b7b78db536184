"""Settling keys in their owners' place: for resolvers, and for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeAlias

from flask_idempotency.engine.capabilities import Recovery, SeenRecord
from flask_idempotency.engine.claim import SealedResponse
from flask_idempotency.engine.errors import CorruptRecord, IdempotencyError, NotApplied, StoreUnavailable
from flask_idempotency.engine.events import Event, Resolved
from flask_idempotency.engine.keys import StorageKey, successor
from flask_idempotency.engine.model import ERASED, Record, State, StoredPayload, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.store import Codec, SealContext

# When a record's owner was last heard of, and whether it may still be at work.

SILENT_LEASES: Final = 3
"""For how many leases an owner must not have renewed, to count as gone for a person who releases its key."""

LAPSED: Final = "lease-expired"
"""The reason of a quarantine that nobody's word has led to: the lease ended, and the owner was silent."""


def clamp_clock(record: Record, horizon: float) -> Record:
    """This record by the earlier of two clocks: the store's, and `horizon` (seconds since the epoch).

    A clock that was set forward makes every owner look long gone. Answers have the store's time, and no other.
    """
    if record.state is State.COMPLETED:
        return record
    return replace(record, remaining=max(record.remaining, record.deadline - horizon))


def idle_seconds(record: Record, *, lease: float) -> float:
    """Seconds since the owner claimed or renewed, if it did so for `lease` seconds. Never below 0."""
    return max(lease - record.remaining, 0.0)


def max_remaining(record: Record, *, max_runtime: float) -> float:
    """For how many more seconds the owner, or what it has sent, may be at work: 0 when it has settled the record.

    An owner that was renewed until a moment ago may be frozen, or cut off from the store, and may come back. After
    `max_runtime` nothing renews it, so its work was to be over by then. It is counted from the end of the lease and not
    from its beginning, for nobody knows how long a lease the owner was given. One that is frozen for longer still is not
    ruled out, by this or by anything else.

    One that has said itself that it does not know is not at work any more. But the commonest reason for that is a request
    to somebody else that has timed out, and may still be on its way: so the rest of its lease is waited for.
    """
    if record.state is State.COMPLETED or record.payload is not None:
        # Of an answer that nobody can open, too, the deadline is its own and no lease's.
        return 0.0
    silent = record.state is State.PROCESSING or record.reason == LAPSED
    return max(record.remaining + (max_runtime if silent else 0.0), 0.0)


def releasable_in(record: Record, policy: Policy) -> float:
    """Seconds until a person may release this key without `--force`: 0 if they may now.

    If a second run does no harm (`deduplicated`, `transactional`), an owner counts as gone once it has not renewed its
    lease for three leases: it renews three times in each, and the next retry takes the key over when the first one ends.
    Only if the claim was made under the rule that the policy has now. Otherwise as `may_live_for`.
    """
    wait = policy.max_runtime
    if policy.effects in ("deduplicated", "transactional") and record.on_expiry is policy.on_expiry:
        # The end of the lease is in the record. Its beginning is not.
        wait = min(wait, (SILENT_LEASES - 1) * policy.lease)
    return max_remaining(record, max_runtime=wait)


# What an application can say about an outcome that nobody knows.


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """A quarantined record, as a resolver is shown it: what to ask the outside world about."""

    record: Record
    _downstream: Callable[[str], str] = field(repr=False)

    def downstream_key(self, name: str) -> str:
        """What `current_claim.downstream_key(name)` was in the view: ask the other side by it what it has done."""
        return self._downstream(name)


@dataclass(frozen=True, slots=True)
class Happened:
    """The work was done: retries get this answer from now on. It may be anything that a view may return."""

    answer: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class NeverHappened:
    """Nothing was done, and nothing of it is on its way any more: the key may run again.

    Only to be said of an outcome that the other side has *ruled out*. That it has not heard of it yet is `StillUnknown`.
    """


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """Ask again later."""


Resolution: TypeAlias = Happened | NeverHappened | StillUnknown


class Settler:
    """Settles what was seen and still stands so, and tells who did it and why.

    Every method returns False when something else is there by now: the owner was faster, or another janitor. Then nothing
    was changed, and nothing is told. Each raises `StoreUnavailable` when nobody can tell, and tells that it may have been
    done; it may be repeated.
    """

    def __init__(
        self,
        unsettled: Recovery,
        codec: Codec,
        observers: Callable[[Event], None],
        *,
        label: Callable[[StorageKey], str],
    ) -> None:
        self._unsettled = unsettled
        self._codec = codec
        self._observers = observers
        self._label = label

    def complete(self, seen: SeenRecord, result: StoredResponse, *, keep: float, actor: str, reason: str) -> bool:
        """Retries get this result from now on, for `keep` seconds. Raises `KeyProviderUnavailable` when it cannot be sealed.

        The answer of a tenant that was erased since the key was first used is not stored: only that the work was done.
        """
        return self._complete(seen, result, keep, verb="completed", actor=actor, reason=reason)

    def force_release(self, seen: SeenRecord, *, actor: str, reason: str, forced: bool = False) -> bool:
        """The key may run again. Whoever calls this has made sure that its work was not done, and is not being done."""
        told = partial(self._publish, seen, verb="released", actor=actor, reason=reason, forced=forced)
        return _heard(lambda: self._unsettled.force_release(seen), told)

    def reopen(self, seen: SeenRecord, *, keep: float, actor: str, reason: str) -> bool:
        """A record that was quarantined because nobody could open its answer is completed again, now that somebody can.

        Raises `CorruptRecord` while it cannot be opened, and for a record that holds no answer.
        """
        record = seen.record
        if record.state is not State.QUARANTINED or record.payload is None:
            raise CorruptRecord("there is no answer in this record that could be opened")
        if record.erased or record.payload.sealed_by == ERASED:
            raise CorruptRecord("the answer in this record was erased")
        binding = SealContext(seen.key, record.token, record.fence, record.fingerprint)
        result = self._codec.open(record.payload, binding)
        return self._complete(seen, result, keep, verb="reopened", actor=actor, reason=reason)

    def _complete(
        self, seen: SeenRecord, result: StoredResponse, keep: float, *, verb: str, actor: str, reason: str
    ) -> bool:
        token = successor(seen.record.token)
        binding = SealContext(seen.key, token, seen.record.fence, seen.record.fingerprint)
        told = partial(self._publish, seen, verb=verb, actor=actor, reason=reason)
        settled = False

        def store(key: StorageKey, payload: StoredPayload) -> None:
            nonlocal settled
            settled = _heard(lambda: self._unsettled.resolve(seen, token=token, payload=payload, keep=keep), told)

        SealedResponse(self._codec, [binding], result).write(binding, store)
        return settled

    def _publish(
        self, seen: SeenRecord, *, verb: str, actor: str, reason: str, forced: bool = False, certain: bool = True
    ) -> None:
        self._observers(
            Resolved(
                self._label(seen.key),
                seen.record.info.operation,
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
    return isinstance(error, StoreUnavailable) and not isinstance(error, NotApplied)
