"""The right to work on a key: renew its lease, then complete, release or quarantine it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Final, Literal, final

from flask_idempotency.engine import events
from flask_idempotency.engine.errors import DataKeyMissing, LeaseLost, NotCommitted, NotStorable, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.lease import RETRY_SECONDS, LeaseRenewer
from flask_idempotency.engine.model import (
    ERASED,
    IN_DOUBT,
    KEYS_FORGOTTEN,
    TRIES,
    ClaimRequest,
    Grant,
    OnExpiry,
    SealContext,
    State,
    StoredPayload,
    StoredResponse,
    WrittenT,
    write_sealed,
)
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.values import valueclass
from flask_idempotency.engine.waiting import Waiters

if TYPE_CHECKING:
    from flask_idempotency.engine.capabilities import DataLossDetector, Recovery, Void
    from flask_idempotency.engine.journal import Journals, StepTransactions
    from flask_idempotency.engine.steps import Steps
    from flask_idempotency.engine.store import Codec, Store, Transaction, Transactions

NOT_COMMITTED: Final = "not-committed"


@dataclass(slots=True, eq=False, repr=False)
class SealedResponse:
    """One response, sealed once for each record of a claim, when that record is written.

    If the store lacks the data key, it stores nothing and raises `DataKeyMissing`. The response is then sealed with a new
    key. If the tenant was erased after the claim, only the fact of completion is stored.
    """

    codec: Codec
    contexts: Sequence[SealContext]
    """One for each record, the one under the newest secret first."""
    response: StoredResponse
    _payloads: dict[bytes, StoredPayload] = field(default_factory=dict)
    """By `StorageKey.rid`, whose hash costs less than that of the whole key."""

    def payload(self, context: SealContext) -> StoredPayload:
        """Seal for this record, unless that was done. What cannot be stored becomes a tombstone."""
        payload = self._payloads.get(context.key.rid)
        if payload is None:
            try:
                payload = self.codec.seal(self.response, context)
            except NotStorable:
                self.response = StoredResponse(status=self.response.status, kept=False)
                payload = self.codec.seal(self.response, context)
            self._payloads[context.key.rid] = payload
        return payload

    def payloads(self) -> list[StoredPayload]:
        """Seal for each record, in the order of the contexts."""
        return [self.payload(context) for context in self.contexts]

    def write(self, store: Callable[[Sequence[StoredPayload]], WrittenT]) -> WrittenT:
        """Store the payloads of all records in one step: a `store.Writing`.

        Raises `StoreUnavailable` for a store that loses each new data key.
        """
        return write_sealed(lambda: store(self.payloads()), self.discard)

    def discard(self, missing: DataKeyMissing) -> None:
        """Drop payloads sealed with a key that the store lacks. The next ones have a new key, or are empty if erased."""
        for context in self.contexts:
            payload = self._payloads.pop(context.key.rid, None)
            self.codec.forget(context.key)
            if missing.erased and payload is not None:
                self._payloads[context.key.rid] = StoredPayload(b"", payload.status, payload.success, 0, ERASED)

    def completed(self, label: str, operation: str) -> events.Completed:
        """Return the event of a stored response. `kept` is False if retries only learn that the request completed."""
        kept = self.response.kept
        for payload in self._payloads.values():
            kept = kept and payload.sealed_by != ERASED
        byte_size = len(self._payloads[self.contexts[0].key.rid].data)
        return events.Completed(label, operation, status=self.response.status, kept=kept, byte_size=byte_size)


@valueclass(frozen=True, slots=True)
class Dependencies:
    """What an engine and its claims work with: one of these per engine."""

    store: Store
    codec: Codec
    renewer: LeaseRenewer
    repeater: LeaseRenewer
    """Repeats the writes that a store did not take, so that leases need not wait for them."""
    waiters: Waiters
    observers: Observers
    transactions: Transactions | None = None
    """Present when the store keeps its records in the database of the application's own session."""
    data_loss: DataLossDetector | None = None
    """Present when the store can lose data and detects it."""
    monotonic: Callable[[], float] = time.monotonic
    journals: Journals | None = None
    """Present when the store remembers the steps of a request."""
    step_transactions: StepTransactions | None = None
    """Present when the store can commit a step together with the rows of the application's own session."""
    void: Void | None = None
    """Present when the store can void keys."""
    recovery: Recovery | None = None
    """Present when the store can free a key whose worker vanished."""


@valueclass(frozen=True, slots=True)
class ClaimEnding:
    """How a claim ends: the write that each of its records needs."""

    write: Literal["complete", "release", "quarantine", "release-unstarted", "undo-commit"]
    reason: str = ""
    sealed: SealedResponse | None = None
    """What `complete` stores."""


@final
class Claim:
    """The right to work on a key, until exactly one of `complete`, `release` and `quarantine` ends it.

    All three raise `LeaseLost` if the record belongs to another attempt. Then do not send this view's response. If the store
    does not answer, they return, and the renewer repeats the write in the background, because the view has run. An outage
    never releases the key.

    Under `effects="transactional"` the view's rows belong to the claim: `complete` commits them together with the
    record and may therefore also raise `NotCommitted` and `StoreUnavailable`. `release` and `quarantine` roll them back.
    """

    # What most claims never set is an attribute of the class, so that they do not pay for it.
    _point_passed = False
    ended: bool = False
    """Whether `complete`, `release` or `quarantine` was called. The store may not have taken that yet."""
    _lost = False
    _pending: ClaimEnding | None = None
    _pending_since = 0.0
    stored: bool = False
    """Whether the store has taken the end of this claim. False while the write is repeated, and if it was given up."""
    _repeated: Event | None = None
    """Set when no write is left to repeat."""
    _transaction: Transaction | None = None
    transactional: bool = False
    """Whether this claim commits the view's rows."""
    steps: Steps | None = None
    """The steps of its view. None: its policy has none."""
    _dropped: Steps | None = None
    """What earlier attempts recorded of steps that its endpoint has dropped, all of them."""
    paused: bool = False
    """Whether a release has paused it, because the store has recorded an effect: the next retry resumes."""
    _journals: Journals | None = None
    """Set when a journal is to be removed with the completion."""
    taken_from: str = ""
    """The trace of the claim that this one took over, if its record had one."""
    kept: bool = False
    """Whether the store has the response itself, and not only the fact of completion."""
    refused_point: LeaseLost | StoreUnavailable | None = None
    """The error that `point_of_no_return` raised last. The effect behind it has not happened."""

    def __init__(
        self,
        deps: Dependencies,
        policy: Policy,
        granted: Sequence[tuple[ClaimRequest, Grant]],
        *,
        token: bytes,
        requested_at: float,
    ) -> None:
        """`granted` has one entry for each secret in use, newest first."""
        newest = granted[0][0]
        self._deps = deps
        self._policy = policy
        self._granted = granted
        self._token = token
        # A store that cannot remember a key after its response has expired does not know `remember`.
        self._lives = {"keep": policy.keep} | ({} if policy.remember is None else {"remember": policy.remember})
        self._requested_at = requested_at
        self.label: str = newest.key.label
        self.operation: str = newest.info.operation
        self.fence: int = 0
        self.attempt: int = 0
        self.contexts: list[SealContext] = []
        """One for each record, in the order of `granted`."""
        for request, grant in granted:
            self.contexts.append(SealContext(request.key, token, grant.fence, request.fingerprint))
            if grant.fence >= self.fence:
                self.fence, self.attempt = grant.fence, grant.attempt
            if grant.taken_from:
                self.taken_from = grant.taken_from

    @property
    def key(self) -> StorageKey:
        """The record's key under the newest secret."""
        return self.contexts[0].key

    @property
    def oldest_key(self) -> StorageKey:
        """The record's key under the oldest secret in use: what must stay the same while secrets rotate.

        A former name that another caller had during an earlier attempt is at its first attempt now, and does not count.
        """
        most = max(grant.attempt for _, grant in self._granted)
        return next(request.key for request, grant in reversed(self._granted) if grant.attempt == most)

    @property
    def did_nothing(self) -> bool:
        """Whether its work surely had no effect so far: the store would have a trace of one."""
        had_steps = self.steps is not None and self.steps.has_effects
        return self._policy.shows_effects and not self.past_point and not had_steps

    @property
    def past_point(self) -> bool:
        """Whether the view passed its point of no return, or committed by itself."""
        return self._point_passed or (self._transaction is not None and self._transaction.committed_early)

    @property
    def repeating(self) -> bool:
        """Whether the last write is repeated, because the store did not take it."""
        return self._pending is not None

    def stored_within(self, seconds: float) -> bool:
        """Wait until the store has taken the last write of this claim. Return whether it has.

        Raises `LeaseLost` if a repeated write found that the record belongs to another attempt.
        """
        if self.stored:
            return True
        self._repeated = repeated = Event()
        if self._pending is not None:
            repeated.wait(seconds)
        if self._lost:
            raise LeaseLost("another attempt took over before the store took the result")
        return self.stored

    def join(self, transactions: Transactions) -> None:
        """Commit the view's rows together with the record from here on, or not at all."""
        keys = tuple(context.key for context in self.contexts)
        self._transaction = transactions.join(
            keys,
            self._token,
            operation=self.operation,
            on_early_commit=lambda: self._deps.observers(events.CommittedEarly(self.label, self.operation)),
        )
        self.transactional = True

    def begin_steps(self) -> str:
        """Read what earlier attempts recorded, and compare it with the steps that the endpoint declares.

        Return why the view must not begin: the quarantine reason, or empty. Raises `StoreUnavailable` if the journal cannot
        be read now, and `CorruptRecord` if it is unreadable.
        """
        journals, attempts = self._deps.journals, [grant.attempt for _, grant in self._granted]
        declared = self._policy.steps or self._policy.dropped_steps
        if journals is None or (not declared and max(attempts) == 1):
            return ""
        # For the endpoints that have steps, or had some.
        from flask_idempotency.engine.steps import Steps

        steps = Steps(
            list(zip(self.contexts, attempts, strict=True)),
            self._policy,
            journals,
            self._deps.codec,
            self._deps.observers,
            operation=self.operation,
            monotonic=self._deps.monotonic,
            refuse=self._refuse_steps,
            transactions=self._deps.step_transactions,
        )
        try:
            steps.recall()
        except LeaseLost as error:
            raise StoreUnavailable("another attempt took over before the steps were read") from error
        if self._policy.effects == "steps" or steps.recorded:
            self._journals = journals
        if self._policy.effects == "steps":
            self.steps = steps
        elif not steps.poisoned and steps.has_effects:
            self._dropped = steps
        return steps.poisoned

    def _refuse_steps(self) -> None:
        if self._lost:
            raise LeaseLost("another attempt took over, so no further step of this one begins")
        if self.ended:
            raise RuntimeError("the claim has ended: take all steps before the response is complete")
        if self._deps.monotonic() - self._requested_at > self._policy.max_runtime:
            raise LeaseLost("the request runs longer than max_runtime, so no further step of it begins")

    def point_of_no_return(self) -> None:
        """Mark the point of no return: if the lease expires from now on, the key is quarantined, not taken over.

        The mark is stored on return. Raises `LeaseLost` if another attempt took over, and `StoreUnavailable` if the store
        did not answer: in both cases let the exception end the view *before* the effect. Raises `RuntimeError` beside steps.
        """
        if self.steps is not None:
            # Each write of a step says afresh whether a retry may go on: it would take the mark back.
            raise RuntimeError(
                "point_of_no_return(): this work takes steps, and they record how far it has come. Make what follows a "
                'plain step: current_claim.step("name", function).'
            )
        if self._granted[0][0].on_expiry is OnExpiry.TAKEOVER and not self._point_passed:
            if self._transaction is not None:
                self._transaction.before_mark()
            try:
                for context in self.contexts:
                    self._deps.store.mark_point_of_no_return(context.key, self._token)
            except (LeaseLost, StoreUnavailable) as error:
                self.refused_point = error
                raise
        self._point_passed = True

    def is_retryable(self, error: BaseException | None) -> bool:
        """Return whether the view failed only because the database preferred other transactions."""
        return self._transaction is not None and error is not None and self._transaction.is_retryable(error)

    def has_written(self) -> bool:
        """Return whether a transactional view may have rows to commit. Call it before the claim ends."""
        return self._transaction is not None and self._transaction.has_written()

    def complete(self, response: StoredResponse, *, with_rows: bool = True) -> None:
        """Store the response: retries get it from now on. A response that cannot be stored leaves a tombstone.

        Commits the rows of a transactional view with it; without `with_rows` it rolls them back first.
        """
        sealed = SealedResponse(self._deps.codec, self.contexts, response)
        if self._transaction is not None and with_rows:
            self._commit(self._transaction, sealed)
        else:
            self._end(ClaimEnding("complete", sealed=sealed))

    def release(self, reason: str) -> None:
        """Release the key, so that it may run again. Call it only if a second run does no harm."""
        self._end(ClaimEnding("release", reason))

    def quarantine(self, reason: str) -> None:
        """Quarantine the key until a resolver or an operator resolves it: the outcome is unknown."""
        self._end(ClaimEnding("quarantine", reason))

    @property
    def has_new_record(self) -> bool:
        """Whether a record of it is at its first attempt: none of that name was there, or it had expired."""
        return any(grant.attempt == 1 for _, grant in self._granted)

    def release_unstarted(self) -> None:
        """Release all keys of this claim. Call it only if the view has not started."""
        self.ended = True
        self._deps.renewer.remove(self)
        try:
            self._write(ClaimEnding("release-unstarted"))
        except Exception:  # noqa: BLE001 - the caller must get its own refusal
            self.release_later(droppable=False)

    def release_first_attempt(self) -> None:
        """Release all keys if this is the first attempt of each. Call it only if the view has not started.

        After a take-over the first attempt may have completed, so its lease is left to expire.
        """
        if all(grant.attempt == 1 for _, grant in self._granted):
            self.release_unstarted()

    def release_later(self, *, droppable: bool = True) -> None:
        """Do as `release_unstarted`, as soon as the store answers. `droppable`: the store may have granted nothing."""
        self._pending, self._pending_since = ClaimEnding("release-unstarted"), self._deps.monotonic()
        self._deps.repeater.add(self, after=RETRY_SECONDS, droppable=droppable)

    def run(self) -> float | None:
        """Renew the lease, or repeat a write that the store has not taken yet. The renewer's thread calls this."""
        now, limit = self._deps.monotonic(), self._policy.max_runtime
        if self._pending is not None:
            self._repeat(self._pending, last=now - self._pending_since > limit)
            return None
        if self.ended:
            return None
        if now - self._requested_at > limit:
            self._deps.observers(events.MaxRuntimeExceeded(self.label, self.operation))
            return None
        try:
            self._renew()
        except LeaseLost:
            if not self.ended:
                self._lost = True
                self._deps.observers(events.LeaseExpired(self.label, self.operation))
            return None
        except Exception as error:
            self._deps.observers(events.RenewalFailed(self.label, self.operation, error=cause_of(error)))
            # After any other error, the next renewal must come before the lease expires too.
            if isinstance(error, StoreUnavailable):
                raise
        return self._policy.lease / 3

    def _renew(self) -> None:
        for request, grant in self._granted:
            try:
                self._deps.store.renew(request.key, self._token, lease=self._policy.lease)
            except LeaseLost:
                if not self._restored(request, grant):
                    raise
                self._deps.store.renew(request.key, self._token, lease=self._policy.lease)

    def _restored(self, request: ClaimRequest, grant: Grant) -> bool:
        """Restore the claim in a store that lost it. False: the store did not, or another attempt may have taken over."""
        detector = self._deps.data_loss
        if detector is None or (request.on_expiry is OnExpiry.TAKEOVER and not self._point_passed):
            return False
        age = self._deps.monotonic() - self._requested_at
        if not detector.restore_claim(request, grant, lease=self._policy.lease, age=age):
            return False
        self._deps.observers(events.ClaimRestored(self.label, self.operation))
        return True

    def _end(self, ending: ClaimEnding) -> None:
        if self._transaction is not None:
            # Before another attempt can claim the key: it must not find these rows.
            self._transaction.roll_back()
            self._transaction.leave()
        self._stop_renewal()
        try:
            self._write(ending)
        except StoreUnavailable as error:
            self._retry_later(ending, error)

    def _stop_renewal(self) -> None:
        self.ended = True
        self._deps.renewer.remove(self)
        if self._lost:
            # A renewal found this. It holds even if the store does not answer now.
            raise LeaseLost("the lease was found lost when it was to be renewed")

    def _retry_later(self, ending: ClaimEnding, error: StoreUnavailable) -> None:
        self._pending, self._pending_since = ending, self._deps.monotonic()
        self._deps.repeater.add(self, after=RETRY_SECONDS)
        self._deps.observers(events.CompletionRetrying(self.label, self.operation, error=cause_of(error)))

    def _repeat(self, ending: ClaimEnding, *, last: bool) -> None:
        try:
            self._write(ending)
        except LeaseLost:
            self._lost = True
        except Exception as error:
            # Any other error stays, as that of an unreadable record.
            if isinstance(error, StoreUnavailable) and not last:
                if ending.write != "release-unstarted":
                    # The view has run and its response waits to be stored: no other attempt may take over.
                    with suppress(LeaseLost, StoreUnavailable):
                        self._renew()
                raise
            self._deps.observers(events.CompletionFailed(self.label, self.operation, error=cause_of(error)))
        self._pending = None
        if self._repeated is not None:
            self._repeated.set()

    def _write(self, ending: ClaimEnding) -> None:
        """Write to each record, and publish the end of the claim once the store has it."""
        states: list[State | None] = []
        try:
            if self.steps is not None and ending.write in ("release", "quarantine"):
                self.steps.flush()
            if self._dropped is not None and ending.write in ("release", "release-unstarted"):
                self._dropped.let_others_go_on()
            # Oldest secret first: after a crash in between, the key that every release looks at first has ended.
            for number in reversed(range(len(self.contexts))):
                try:
                    states.append(self._write_record(self.contexts[number], ending))
                except LeaseLost:
                    if ending.write not in ("complete", "quarantine") or not self._restored(*self._granted[number]):
                        raise
                    self._write_record(self.contexts[number], ending)
        except LeaseLost:
            self._deps.observers(events.LeaseExpired(self.label, self.operation))
            raise
        finally:
            if (waiters := self._deps.waiters).waiting:
                waiters.notify(self.key)
        self.stored = True
        if ending.sealed is not None:
            event = ending.sealed.completed(self.label, self.operation)
            self.kept = event.kept
            self._deps.observers(event)
        elif ending.write == "release" and State.QUARANTINED in states:
            self._deps.observers(events.Quarantined(self.label, self.operation, reason=IN_DOUBT))
        elif ending.write == "release" and State.PROCESSING in states:
            self.paused = True
            self._deps.observers(events.Paused(self.label, self.operation, reason=ending.reason))
        elif ending.write == "release":
            self._deps.observers(events.Released(self.label, self.operation, reason=ending.reason))
        elif ending.write == "quarantine":
            self._deps.observers(events.Quarantined(self.label, self.operation, reason=ending.reason))

    def _write_record(self, context: SealContext, ending: ClaimEnding) -> State | None:
        """Write the end of the claim to one record. Return what a release has made of it: None if the key is free."""
        if ending.sealed is not None:
            for _ in range(TRIES):
                try:
                    payload = ending.sealed.payload(context)
                    store = self._deps.store if self._journals is None else self._journals
                    store.complete(context.key, self._token, payload, **self._lives)
                    return None
                except DataKeyMissing as missing:
                    ending.sealed.discard(missing)
            raise StoreUnavailable(KEYS_FORGOTTEN)
        if ending.write == "quarantine":
            self._deps.store.quarantine(context.key, self._token, ending.reason)
        elif ending.write == "undo-commit":
            self._undo(context.key)
        elif ending.write == "release":
            return self._deps.store.release(context.key, self._token)
        else:
            # A key that was not granted has nothing to release, and nothing was lost.
            with suppress(LeaseLost):
                self._deps.store.release(context.key, self._token)
        return None

    def _undo(self, key: StorageKey) -> None:
        """End the claim of a view that did not commit. Raises `LeaseLost` if it did commit."""
        if self.past_point:
            self._deps.store.quarantine(key, self._token, NOT_COMMITTED)
        else:
            self._deps.store.release(key, self._token)

    def _commit(self, transaction: Transaction, sealed: SealedResponse) -> None:
        try:
            self._stop_renewal()
            sealed.payloads()  # before the commit begins: a codec that fails must leave the transaction alone
            transaction.settle(sealed.write, otherwise=self._undo, **self._lives)
        except LeaseLost:
            transaction.roll_back()
            self._deps.observers(events.LeaseExpired(self.label, self.operation))
            raise
        except NotCommitted:
            ended = events.Quarantined if self.past_point else events.Released
            self._deps.observers(ended(self.label, self.operation, reason=NOT_COMMITTED))
            raise
        except StoreUnavailable as error:
            # Unless the commit itself was refused or lost, the rows are still there.
            transaction.roll_back()
            # Safe either way: if the commit did happen, the record is completed, and the undo changes nothing.
            self._retry_later(ClaimEnding("undo-commit"), error)
            raise
        except Exception:
            transaction.roll_back()
            raise
        finally:
            transaction.leave()
            if (waiters := self._deps.waiters).waiting:
                waiters.notify(self.key)
        self.stored = True
        event = sealed.completed(self.label, self.operation)
        self.kept = event.kept
        self._deps.observers(event)
