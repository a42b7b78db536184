"""Resolve, release or reopen records in their worker's place, for resolvers and operators.

Each change applies only to the record that the caller saw, and is published with its actor and reason. The functions at the
top say how long a vanished worker may still run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
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
from flask_idempotency.engine.values import valueclass

SILENT_LEASES: Final = 3
"""How many leases a worker must let pass without renewal before an operator may release its key."""

LAPSED: Final = "lease-expired"
"""The reason of a quarantine because the lease expired, without word from the worker."""


def clamp_clock(record: Record, horizon: float) -> Record:
    """Return this record by the earlier of two clocks: the store's, and `horizon` (seconds since the epoch).

    If the store's clock jumps ahead, every lease looks long expired. Completed records keep the store's time.
    """
    if record.state is State.COMPLETED:
        return record
    return replace(record, remaining=max(record.remaining, record.deadline - horizon))


def idle_seconds(record: Record, *, lease: float) -> float:
    """Return the seconds since the worker claimed or renewed, if it did so for `lease` seconds. Never below 0."""
    return max(lease - record.remaining, 0.0)


def max_remaining(record: Record, *, max_runtime: float) -> float:
    """Return for how many more seconds the worker or its calls may run: 0 once it has ended the record.

    A worker that renewed a moment ago may be frozen or cut off from the store, and may come back. It renews for at most
    `max_runtime`, so its work should be over by then. That time counts from the end of the lease, because the record does
    not say how long the lease was. No time limit can rule out a worker that is frozen for longer.

    A worker that quarantined its own record runs no more. But the usual reason is a call to another service that timed out
    and may still arrive, so the rest of the lease counts.
    """
    if record.state is State.COMPLETED or record.payload is not None:
        # Also if the response is unreadable: then the deadline is that of the response, and not of a lease.
        return 0.0
    silent = record.state is State.PROCESSING or record.reason == LAPSED
    return max(record.remaining + (max_runtime if silent else 0.0), 0.0)


def releasable_in(record: Record, policy: Policy) -> float:
    """Return the seconds until an operator may release this key without `--force`: 0 if they may now.

    If a second run does no harm (`deduplicated`, `transactional`), a worker counts as gone after three leases without
    renewal. It renews three times in each, and the next retry takes over when the first one expires. This holds only if the
    claim was made under the policy's present rule. Otherwise the result is that of `max_remaining`.
    """
    wait = policy.max_runtime
    if policy.effects in ("deduplicated", "transactional") and record.on_expiry is policy.on_expiry:
        # The end of the lease is in the record. Its beginning is not.
        wait = min(wait, (SILENT_LEASES - 1) * policy.lease)
    return max_remaining(record, max_runtime=wait)


@valueclass(frozen=True, slots=True)
class UnknownOutcome:
    """A quarantined record, as your resolver gets it, to look up what happened."""

    record: Record
    """The record: its tenant, principal, method, endpoint, times and reason. It holds no key and no request body."""
    _downstream: Callable[[str], str] = field(repr=False)

    def downstream_key(self, name: str) -> str:
        """Return what `current_claim.downstream_key(name)` was in the view. Look the call up by it."""
        return self._downstream(name)


@valueclass(frozen=True, slots=True)
class Happened:
    """The request took effect: retries get this response from now on."""

    answer: Any = field(repr=False)
    """The response: anything that a view may return."""


@valueclass(frozen=True, slots=True)
class NeverHappened:
    """The request had no effect and none is on its way: the key may run again.

    Return it only if the other service has *ruled out* the call. If it only does not know the call yet, return `StillUnknown`.
    """


@valueclass(frozen=True, slots=True)
class StillUnknown:
    """The outcome is not known yet: the janitor calls your resolver again later."""


Resolution: TypeAlias = Happened | NeverHappened | StillUnknown


class Settler:
    """Resolves, releases and reopens records as they were seen, and publishes who did it and why.

    Every method returns False if the record has changed: the worker was faster, or another janitor. Then nothing is
    published. Each raises `StoreUnavailable` if the store does not answer, and publishes that the change may have happened.
    You may repeat it.
    """

    def __init__(
        self,
        recovery: Recovery,
        codec: Codec,
        observers: Callable[[Event], None],
        *,
        label: Callable[[StorageKey], str],
    ) -> None:
        self._recovery = recovery
        self._codec = codec
        self._observers = observers
        self._label = label

    def complete(self, seen: SeenRecord, result: StoredResponse, *, keep: float, actor: str, reason: str) -> bool:
        """Complete the record: retries get this response for `keep` seconds.

        If the tenant was erased since the key was first used, only the fact of completion is stored. Raises
        `KeyProviderUnavailable` if the response cannot be sealed.
        """
        return self._complete(seen, result, keep, verb="completed", actor=actor, reason=reason)

    def force_release(self, seen: SeenRecord, *, actor: str, reason: str, forced: bool = False) -> bool:
        """Release the key, so that it may run again. Call it only if the request had no effect and no longer runs."""
        publish = partial(self._publish, seen, verb="released", actor=actor, reason=reason, forced=forced)
        return _change_and_publish(lambda: self._recovery.force_release(seen), publish)

    def reopen(self, seen: SeenRecord, *, keep: float, actor: str, reason: str) -> bool:
        """Complete again a record that was quarantined because its response was unreadable.

        Raises `CorruptRecord` while the response cannot be opened, if it was erased, and if the record has none.
        """
        record = seen.record
        if record.state is not State.QUARANTINED or record.payload is None:
            raise CorruptRecord("this record holds no response to reopen")
        if record.erased or record.payload.sealed_by == ERASED:
            raise CorruptRecord("the response in this record was erased")
        context = SealContext(seen.key, record.token, record.fence, record.fingerprint)
        result = self._codec.open(record.payload, context)
        return self._complete(seen, result, keep, verb="reopened", actor=actor, reason=reason)

    def _complete(
        self, seen: SeenRecord, result: StoredResponse, keep: float, *, verb: str, actor: str, reason: str
    ) -> bool:
        token = successor(seen.record.token)
        context = SealContext(seen.key, token, seen.record.fence, seen.record.fingerprint)
        publish = partial(self._publish, seen, verb=verb, actor=actor, reason=reason)
        changed = False

        def store(key: StorageKey, payload: StoredPayload) -> None:
            nonlocal changed
            changed = _change_and_publish(
                lambda: self._recovery.resolve(seen, token=token, payload=payload, keep=keep), publish
            )

        SealedResponse(self._codec, [context], result).write(context, store)
        return changed

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


def _change_and_publish(change: Callable[[], bool], publish: Callable[..., None]) -> bool:
    """Make a change, and publish it if it happened or may have happened. Return whether it happened."""
    try:
        changed = change()
    except BaseException as error:  # interrupted: the change may have happened too
        # After any other of its errors, the store has not made the change.
        unknown = isinstance(error, StoreUnavailable) and not isinstance(error, NotApplied)
        if unknown or not isinstance(error, IdempotencyError):
            publish(certain=False)
        raise
    if changed:
        publish()
    return changed
