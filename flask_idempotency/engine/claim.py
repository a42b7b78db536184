"""The handle that a winner holds: keep it alive, then settle it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from flask_idempotency.engine.capabilities import DataLossDetector
from flask_idempotency.engine.errors import DataKeyMissing, LeaseLost, NotCommitted, NotStorable, StoreUnavailable
from flask_idempotency.engine.events import (
    ClaimRestored,
    CommittedEarly,
    Completed,
    CompletionFailed,
    CompletionRetrying,
    Event,
    LeaseExpired,
    MaxRuntimeExceeded,
    Observers,
    Quarantined,
    Released,
    RenewalFailed,
)
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.lease import RETRY_SECONDS, LeaseRenewer
from flask_idempotency.engine.model import ERASED, ClaimRequest, Grant, OnExpiry, StoredPayload, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.store import Codec, SealContext, Store, Transaction, Transactions, Writing
from flask_idempotency.engine.waiting import Waiters

# What a winner holds, and how it lets go.


@dataclass(frozen=True, slots=True)
class Held:
    """What is held, and on which terms. `bindings` has one entry, or one more for each secret still being rotated out;
    `granted` has for each of them what was asked, and what was granted."""

    bindings: tuple[SealContext, ...]
    granted: tuple[tuple[ClaimRequest, Grant], ...]
    token: bytes = field(repr=False)
    policy: Policy
    on_expiry: OnExpiry
    record: str
    operation: str

    @property
    def keys(self) -> tuple[StorageKey, ...]:
        return tuple(binding.key for binding in self.bindings)


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a claim ends: the write that each of its keys needs, and what to tell when the store has taken it."""

    write: Callable[[StorageKey], None]
    event: Callable[[], Event] | None = None
    holds_on: bool = True
    """Whether the keys stay this claim's until the store takes it. False: nobody is at work, and perhaps none was granted."""


# From what came of the work to what a store keeps of it, whatever becomes of the keys meanwhile.

TRIES: Final = 3
"""A store that has lost a data key twice in a row, while one answer was being stored, will not keep the third either."""


class Sealing:
    """One claim's result, sealed for each of its records when that is written, and once.

    A store that lacks the data key says so and stores nothing. Then the answer is sealed with a new key; or, if its tenant
    has been erased since the claim was made, nothing is kept but that the work was done.
    """

    def __init__(self, codec: Codec, bindings: Sequence[SealContext], result: StoredResponse) -> None:
        self._codec = codec
        self._bindings = {binding.key: binding for binding in bindings}
        self._result = result
        self._sealed: dict[StorageKey, StoredPayload] = {}

    @property
    def status(self) -> int:
        return self._result.status

    @property
    def kept(self) -> bool:
        """Whether there is anything to replay but that the work was done."""
        return self._result.kept and all(payload.sealed_by != ERASED for payload in self._sealed.values())

    @property
    def byte_size(self) -> int:
        """Of what the store was given for the newest key."""
        return len(self._sealed[next(iter(self._bindings))].data)

    def writing(self, store: Callable[[StorageKey, StoredPayload], None]) -> Callable[[StorageKey], None]:
        """A write that stores this result under a key, as often as it is asked to."""

        def write(key: StorageKey) -> None:
            self._until_kept(lambda: store(key, self._payload(key)))

        return write

    def committing(self, commit: Callable[[Writing], None]) -> None:
        """Commit with the payloads of all records, in the order of their bindings."""

        def payloads() -> list[StoredPayload]:
            return [self._payload(key) for key in self._bindings]

        # Seal before the commit begins: a codec that fails must leave it alone.
        payloads()
        commit(lambda write: self._until_kept(lambda: write(payloads())))

    def _until_kept(self, attempt: Callable[[], None]) -> None:
        for _ in range(TRIES):
            try:
                return attempt()
            except DataKeyMissing as gone:
                for key in self._bindings:
                    self._lost(key, erased=gone.erased)
        raise StoreUnavailable("the store forgets its data keys as fast as it is given new ones")

    def _lost(self, key: StorageKey, *, erased: bool) -> None:
        payload = self._sealed.pop(key, None)
        self._codec.forget(key)
        if erased and payload is not None:
            self._sealed[key] = StoredPayload(b"", payload.status, payload.success, 0, ERASED)

    def _payload(self, key: StorageKey) -> StoredPayload:
        if key not in self._sealed:
            try:
                self._sealed[key] = self._codec.seal(self._result, self._bindings[key])
            except NotStorable:
                self._result = StoredResponse(status=self._result.status, kept=False)
                self._sealed[key] = self._codec.seal(self._result, self._bindings[key])
        return self._sealed[key]


NOT_COMMITTED = "not-committed"


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What a claim works with: one of these per engine."""

    store: Store
    codec: Codec
    renewer: LeaseRenewer
    waiters: Waiters
    observers: Observers
    transactions: Transactions | None = None
    """Present when the store keeps its records in the database of the application's own session."""
    data_loss: DataLossDetector | None = None
    """Present when the store may forget."""
    monotonic: Callable[[], float] = time.monotonic
    repeater: LeaseRenewer | None = None
    """Repeats what a store would not take, so that leases need not wait for that."""

    @property
    def repeats(self) -> LeaseRenewer:
        return self.repeater or self.renewer


class Claim:
    """The right to work on a key, until settled by exactly one of `complete`, `release` and `hold`.

    All three raise `LeaseLost` when the record is no longer this claim's; then the work's answer must not be delivered.
    When the store does not answer they return, and the write is repeated in the background: the work has been done,
    whether or not a store knows. The key is never released for that reason.

    Under `effects="transactional"` the work's rows belong to the claim: `complete` commits them together with the record
    and may therefore also raise `NotCommitted` and `StoreUnavailable`; `release` and `hold` roll them back.
    """

    def __init__(self, held: Held, grant: Grant, around: Dependencies, *, asked_at: float) -> None:
        self._held = held
        self._deps = around
        self._asked_at = asked_at
        self._past_point = False
        self._settling = False
        self._lost = False
        self._pending: Settlement | None = None
        self._pending_since = asked_at
        self._transaction: Transaction | None = None
        self.fence = grant.fence
        self.attempt = grant.attempt

    def prepare(self) -> None:
        """Have at hand what storing the result needs. Raises `StoreUnavailable` before the work, and not after it."""
        for key in self._held.keys:
            self._deps.codec.prepare(key)

    def keep_alive(self) -> None:
        """Have the lease renewed until the claim is settled, or has run for `max_runtime`."""
        self._deps.renewer.add(self, after=self._held.policy.lease / 3)

    def join(self, transactions: Transactions) -> None:
        """From here on the work's rows are committed with the record, or not at all."""
        held = self._held
        self._transaction = transactions.join(
            held.keys, held.token, operation=held.operation, told=lambda: self._publish(CommittedEarly(*self._who))
        )

    @property
    def transactional(self) -> bool:
        """Whether the work's rows are this claim's to commit."""
        return self._transaction is not None

    @property
    def key(self) -> StorageKey:
        """The record's key under the newest secret."""
        return self._held.bindings[0].key

    @property
    def oldest_key(self) -> StorageKey:
        """The record's key under the oldest secret in use: what must stay the same while secrets rotate."""
        return self._held.bindings[-1].key

    @property
    def fingerprint(self) -> bytes:
        """Of the request that holds the claim, under the newest secret."""
        return self._held.bindings[0].fingerprint

    @property
    def past_point(self) -> bool:
        """Whether the view has said that what follows must not be repeated, or has committed something by itself."""
        return self._past_point or (self._transaction is not None and self._transaction.committed_early)

    def point_of_no_return(self) -> None:
        """Say that what follows must not be repeated: from now on a vanished worker quarantines its key.

        Durable when it returns. Raises `LeaseLost` when another attempt has taken over, and `StoreUnavailable` when the
        store could not be told: in both cases let the exception end the view *before* the effect.
        """
        if self._held.on_expiry is OnExpiry.TAKEOVER and not self._past_point:
            if self._transaction is not None:
                self._transaction.before_mark()
            for key in self._held.keys:
                self._deps.store.mark_point_of_no_return(key, self._held.token)
        self._past_point = True

    def is_retryable(self, error: BaseException | None) -> bool:
        """Whether the work failed only because the database had to choose between it and other transactions."""
        return self._transaction is not None and error is not None and self._transaction.is_retryable(error)

    def has_written(self) -> bool:
        """Return whether transactional work may have rows to commit. Ask before the claim is settled."""
        return self._transaction is not None and self._transaction.has_written()

    def complete(self, result: StoredResponse, *, with_rows: bool = True) -> None:
        """The result is durable and will be replayed. What cannot be stored leaves a tombstone: done, body not kept.

        The rows of transactional work are committed with it, or rolled back before it if it is to be kept without them.
        """
        store, token, keep = self._deps.store, self._held.token, self._held.policy.keep
        sealing = Sealing(self._deps.codec, self._held.bindings, result)
        if self._transaction is not None and with_rows:
            self._commit(self._transaction, sealing)
        else:
            write = sealing.writing(lambda key, payload: store.complete(key, token, payload, keep=keep))
            self._settle(Settlement(self._restoring(write), lambda: self._completed(sealing)))

    def release(self, reason: str) -> None:
        """Nothing happened that must not happen twice: the key may run again."""
        self._settle(Settlement(self._give_back, lambda: Released(*self._who, reason=reason)))

    def quarantine(self, reason: str) -> None:
        """Nobody can tell what happened: quarantine the key until somebody settles it."""
        store, token = self._deps.store, self._held.token
        write = self._restoring(lambda key: store.quarantine(key, token, reason))
        self._settle(Settlement(write, lambda: Quarantined(*self._who, reason=reason)))

    def release_unstarted(self) -> None:
        """The work was not begun, and will not be: whatever of the claim was granted is free again."""
        try:
            self._write(Settlement(self._free, holds_on=False))
        except Exception:  # noqa: BLE001 - the caller is owed the refusal that it was given
            self.release_later(droppable=False)

    def release_later(self, *, droppable: bool = True) -> None:
        """The same, but as soon as the store answers. `spare`: it never said whether anything was granted."""
        self._pending, self._pending_since = Settlement(self._free, holds_on=False), self._deps.monotonic()
        self._deps.repeats.add(self, after=RETRY_SECONDS, droppable=droppable)

    def run(self) -> float | None:
        """Renew the lease, or repeat a settlement that the store has not taken yet. Called by the renewer's thread."""
        now, limit = self._deps.monotonic(), self._held.policy.max_runtime
        if self._pending is not None:
            self._repeat(self._pending, last=now - self._pending_since > limit)
            return None
        if self._settling:
            return None
        if now - self._asked_at > limit:
            self._publish(MaxRuntimeExceeded(*self._who))
            return None
        return self._renew()

    def _renew(self) -> float | None:
        try:
            self._prolong()
        except LeaseLost:
            if not self._settling:
                self._lost = True
                self._publish(LeaseExpired(*self._who))
            return None
        except StoreUnavailable as error:
            self._publish(RenewalFailed(*self._who, error=type(error).__name__))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the next renewal must come before the lease ends
            self._publish(RenewalFailed(*self._who, error=type(error).__name__))
        return self._held.policy.lease / 3

    def _stay_alive(self) -> None:
        """The work is done, and its answer waits to be stored: nobody shall take the key over for that meanwhile."""
        with suppress(LeaseLost, StoreUnavailable):
            self._prolong()

    def _prolong(self) -> None:
        store, token, lease = self._deps.store, self._held.token, self._held.policy.lease
        renew = self._restoring(lambda key: store.renew(key, token, lease=lease))
        for key in self._held.keys:
            renew(key)

    def _restoring(self, write: Callable[[StorageKey], None]) -> Callable[[StorageKey], None]:
        """The same write, once more where the store had forgotten the claim and has it back."""

        def again(key: StorageKey) -> None:
            try:
                write(key)
            except LeaseLost:
                if not self._restored(key):
                    raise
                write(key)

        return again

    def _restored(self, key: StorageKey) -> bool:
        memory, held = self._deps.data_loss, self._held
        if memory is None or (held.on_expiry is OnExpiry.TAKEOVER and not self._past_point):
            return False
        request, grant = next(pair for pair in held.granted if pair[0].key == key)
        age = self._deps.monotonic() - self._asked_at
        if not memory.restore_claim(request, grant, lease=held.policy.lease, age=age):
            return False
        self._publish(ClaimRestored(*self._who))
        return True

    def _commit(self, transaction: Transaction, sealing: Sealing) -> None:
        try:
            self._begin_to_settle()
            sealing.committing(
                lambda writing: transaction.settle(writing, keep=self._held.policy.keep, otherwise=self._undo)
            )
        except LeaseLost:
            transaction.roll_back()
            self._publish(LeaseExpired(*self._who))
            raise
        except NotCommitted:
            kind = Quarantined if self.past_point else Released
            self._publish(kind(*self._who, reason=NOT_COMMITTED))
            raise
        except StoreUnavailable as error:
            # Unless the commit itself was refused or lost, nobody has rolled anything back.
            transaction.roll_back()
            # Safe either way: what was committed after all is completed, and cannot be undone.
            self._pending, self._pending_since = Settlement(self._undo), self._deps.monotonic()
            self._deps.repeats.add(self, after=RETRY_SECONDS)
            self._publish(CompletionRetrying(*self._who, error=type(error).__name__))
            raise
        except Exception:
            transaction.roll_back()
            raise
        finally:
            transaction.leave()
            self._deps.waiters.notify(self.key)
        self._publish(self._completed(sealing))

    def _undo(self, key: StorageKey) -> None:
        """Settle the record of work that was not committed. Raises `LeaseLost` where it was committed after all."""
        if self.past_point:
            self._deps.store.quarantine(key, self._held.token, NOT_COMMITTED)
        else:
            self._give_back(key)

    def _begin_to_settle(self) -> None:
        self._settling = True
        self._deps.renewer.remove(self)
        if self._lost:
            # Known before the store was asked, and true even if it does not answer now.
            raise LeaseLost("the lease was found lost when it was to be renewed")

    def _settle(self, settlement: Settlement) -> None:
        if self._transaction is not None:
            # Before the key is free for others, who must not find these rows.
            self._transaction.roll_back()
            self._transaction.leave()
        self._begin_to_settle()
        try:
            self._write(settlement)
        except StoreUnavailable as error:
            self._pending, self._pending_since = settlement, self._deps.monotonic()
            self._deps.repeats.add(self, after=RETRY_SECONDS)
            self._publish(CompletionRetrying(*self._who, error=type(error).__name__))

    def _repeat(self, settlement: Settlement, *, last: bool) -> None:
        try:
            self._write(settlement)
        except LeaseLost:
            pass
        except StoreUnavailable as error:
            if not last:
                if settlement.holds_on:
                    self._stay_alive()
                raise
            self._publish(CompletionFailed(*self._who, error=type(error).__name__))
        except Exception as error:  # noqa: BLE001 - a record that cannot be read will not be readable next time either
            self._publish(CompletionFailed(*self._who, error=type(error).__name__))
        self._pending = None

    def _write(self, settlement: Settlement) -> None:
        try:
            # Oldest secret first: a crash in between leaves the key that every release asks first settled.
            for key in reversed(self._held.keys):
                settlement.write(key)
        except LeaseLost:
            self._publish(LeaseExpired(*self._who))
            raise
        finally:
            self._deps.waiters.notify(self.key)
        if settlement.event is not None:
            self._publish(settlement.event())

    def _give_back(self, key: StorageKey) -> None:
        self._deps.store.release(key, self._held.token)

    def _free(self, key: StorageKey) -> None:
        # Not ours, so never granted: there is nothing to give back, and nothing was lost.
        with suppress(LeaseLost):
            self._give_back(key)

    def _completed(self, sealing: Sealing) -> Event:
        return Completed(*self._who, status=sealing.status, kept=sealing.kept, byte_size=sealing.byte_size)

    @property
    def _who(self) -> tuple[str, str]:
        return self._held.record, self._held.operation

    def _publish(self, event: Event) -> None:
        self._deps.observers(event)
