"""Define the protocols that the engine needs: clock, store, transactions, codec and schema.

Stores and codecs implement them. The engine never imports an implementation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    ClaimRequest,
    Expired,
    Grant,
    InFlight,
    Mismatched,
    OtherCaller,
    OverQuota,
    Record,
    SealContext,
    State,
    StoredPayload,
    StoredResponse,
    Unknown,
    Voided,
)
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.values import valueclass

__all__ = ["Clock", "Store", "StoreOutcome"]


class Clock(Protocol):
    """Returns the time in seconds since the epoch, or None to leave it to the store.

    Stores compare deadlines with their own server's time, because two web hosts never agree to the millisecond. None keeps
    it so. Tests return a number instead, and let time pass by assignment.
    """

    def __call__(self) -> float | None: ...


def store_time() -> None:
    """Return None, so that the store's own time decides. This is the production clock."""
    return


class SteadyClock:
    """Seconds since the epoch that never step: read once, then advanced by the monotonic clock.

    The memory store uses it. A wall clock that an operator sets back must not extend leases; one set forward must not
    end them all.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()


StoreOutcome: TypeAlias = Grant | Record | Expired | InFlight | Mismatched | OtherCaller | Unknown | OverQuota | Voided


class Store(Protocol):
    """Keeps one record per key and decides, atomically, who may work on it.

    A store never interprets `payload` and never waits. The engine blocks, retries and encodes, so that no two stores do it
    differently. You pass durations in seconds, never deadlines: the store's clock sets those. A duration that is not finite
    and above 0 raises `ValueError`. The shipped `StoreContract` (`flask_idempotency.testing.contract`) is the specification.

    Every method raises `StoreUnavailable` if the store does not answer; it may have acted or not. So each is idempotent per
    token: you may repeat it after a lost reply. A write by a token that lost the record raises `LeaseLost` and changes
    nothing.

    An unreadable record raises `CorruptRecord` and never counts as absent. A claim that finds one keeps it from expiring.
    """

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        """Classify the key, and grant it if it is free: one atomic step.

        In this order: an expired record is absent; the fingerprint `model.VOIDED` is `Voided`; another fingerprint is
        `Mismatched`; COMPLETED is its `Record`, or `Expired` if only the record is remembered, and its response no longer
        kept;
        QUARANTINED is `Unknown`; PROCESSING with this very token is its `Grant` again; PROCESSING with lease left is
        `InFlight`; PROCESSING with an expired lease is taken over or quarantined, as the record says; absent is a `Grant`.
        Only a `Grant`, and the quarantine of an expired lease, write. A repeated `Grant` is as before: the same fence, and
        no more lease than is left. A take-over writes the new request into the record, but keeps when the key was first
        used.

        With `callers`, a record that another caller has is `OtherCaller`, before its fingerprint is compared. One that does
        not show its caller is as above, but is neither taken over nor quarantined: its expired lease is `Unknown`
        (`CALLER_UNKNOWN`). Neither writes.

        With a quota, an absent key is granted only if its tenant stays within it, and else is `OverQuota`. The store decides
        that in the same step, limit by limit in the order of `quota.LIMITS`. The tenant's own limits (`Ledger.limit`)
        override those passed here. The record counts from then on; a take-over does not change whether it counts. A store
        that cannot count raises `ConfigurationError`.
        """
        ...

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        """Extend the lease to at least `lease` seconds from now. Never shorten it.

        A record that was quarantined because its lease expired stays so, and gets the lease: a resolver then sees that its
        worker lives. Any other quarantined record, and one that this token completed, stays as it is, without an error.
        """
        ...

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        """Quarantine this record from now on if its lease expires; no request takes it over. Durable on return.

        A quarantined record stays as it is. Raises `LeaseLost` for one that is completed or was marked corrupt.
        """
        ...

    def complete(
        self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float, remember: float | None = None
    ) -> None:
        """Store the response durably, to replay for `keep` seconds. Accepts the token late, and from quarantine.

        A repeat by the same token changes nothing: the first response stays. A counted record expires at the next bucket
        edge (`stores.bucket_edge_ms`), so up to a thirty-second of `keep` later.

        With a `remember` that is longer than `keep`, the record stays until then, without its response: claims are
        `Expired`. A quota counts the record until the end of `remember`, and its bytes until the end of `keep`. Only a
        store with `capabilities.Capabilities.remembers` gets this argument.

        Raises `DataKeyMissing` if the tenant's data key of a sealed payload is missing or disabled, or if the tenant's
        responses were erased since the key was first used. Number 0 needs no key.
        """
        ...

    def release(self, key: StorageKey, token: bytes) -> State | None:
        """Remove the record, so that the key may run again. An absent record is already released. Returns None then.

        A record whose journal has an effect is never removed. It is paused (returns PROCESSING): its lease ends now, its
        token is spent, and the next retry resumes it. If a plain step of it is in doubt, it is quarantined instead, with the
        reason `step-in-doubt` (returns QUARANTINED): the token may still complete the request, but no longer write to its
        journal. One that is quarantined as `lease-expired` keeps that reason. A repeat returns the same.

        This cancels the token: for at least a minute, a claim with it raises `StoreUnavailable`, because its worker gave
        up before the claim arrived. A store may forget that once another request has the key.

        Raises `LeaseLost` for a record that is completed or was marked corrupt; it stays.
        """
        ...

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        """Quarantine the record, because its worker does not know the outcome. The token may still `complete` it.

        A quarantined record keeps its first reason. Raises `LeaseLost` for one that is completed or was marked corrupt.
        """
        ...

    def read(self, key: StorageKey) -> Record | None:
        """Return the current record, or None if it is absent or expired. Never writes.

        A record that is remembered after `keep` has the payload `model.skeleton_of`: see `Record.is_skeleton`.
        """
        ...

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        """Quarantine a completed record that holds this payload, because its response is unreadable.

        Its reason is `model.CORRUPT`. Its payload and token stay, and it no longer expires. Its worker may complete it
        again, and nothing else. Any other record or payload stays as it is.
        """
        ...


Writing: TypeAlias = Callable[[Callable[[Sequence[StoredPayload]], None]], None]
"""Calls its argument with the payloads of a claim's records, and again with new ones after `DataKeyMissing`."""


class WatchedTransaction(Protocol):
    """The application's own database transaction, while a view or a step writes through it."""

    @property
    def committed_early(self) -> bool:
        """Whether the view or the step has committed by itself, so that a rollback no longer undoes its writes.

        Also True if it tried to and the outcome is unknown. May query the database.
        """
        ...

    def roll_back(self) -> None:
        """Roll back what was not committed. Never raises: a dead connection rolls back too."""
        ...

    def leave(self) -> None:
        """Stop watching. Harmless to repeat."""
        ...


class Transaction(WatchedTransaction, Protocol):
    """The application's own database transaction, while one claim's view writes through it.

    From `Transactions.join` on it watches for commits that the claim did not make. It allows them only while this token
    holds the claim. The same commit then marks the point of no return, as `Store.mark_point_of_no_return` does.
    """

    def settle(
        self,
        writing: Writing,
        *,
        keep: float,
        otherwise: Callable[[StorageKey], None],
        remember: float | None = None,
    ) -> None:
        """Commit the application's rows and the completed records together. All are durable on return.

        It flushes the rows, and then calls `writing` with the function that completes the records. That takes one payload
        for each joined key, in their order. It raises `DataKeyMissing` as `Store.complete` does, which also says what `keep`
        and `remember` are: then it has changed nothing, and `writing` may call it again with other payloads.

        Raises `LeaseLost`, and commits nothing, if the token lost the claim. If the database refuses the commit, or does
        not say whether it is done, `otherwise` is called to end each record in another way. It raises `LeaseLost` for a
        completed record, which proves the commit. Without that, raises `NotCommitted`, or `StoreUnavailable` if the outcome
        is still unknown.
        """
        ...

    def has_written(self) -> bool:
        """Return whether the view may have made writes that a rollback undoes. Never raises: True if unknown."""
        ...

    def commit(self, *, to_several: bool = False) -> None:
        """Commit the writes of a view without a claim. `to_several`: also if they are in more than one database.

        Raises `NotCommitted` if it was rolled back, and `StoreUnavailable` if the outcome is unknown.
        """
        ...

    def before_mark(self) -> None:
        """Raise `ConfigurationError` if the state of the session prevents marking the record."""
        ...

    def is_retryable(self, error: BaseException) -> bool:
        """Return whether this database error may pass if the view runs again."""
        ...


class Transactions(Protocol):
    """What a store offers if it keeps its records in the database of the application's session."""

    def begin(self) -> None:
        """Look at the session before anything of a request uses it. For tests, whose sessions may stand on a connection."""
        ...

    def prepare(self) -> None:
        """Check the session before a claim. Raises `ConfigurationError` if its state prevents one."""
        ...

    def join(
        self, keys: Sequence[StorageKey], token: bytes, *, operation: str, on_early_commit: Callable[[], None]
    ) -> Transaction:
        """Watch the session from here on. The first commit that the claim did not make calls `on_early_commit`.

        Without keys, the view has no claim, and its rows are to be committed all the same. Raises `ConfigurationError` if
        another such view is already watched on the same session.
        """
        ...

    def on_committed(self, callback: Callable[[StorageKey, Record], None]) -> None:
        """Call back with each record that a transaction completed, after its commit and never before."""
        ...

    def flush(self, *, to_several: bool = False) -> None:
        """Send the rows of this context's session to the database, before it commits. `to_several` as in `Transaction.commit`.

        What the session raises, it raises, after a rollback. `ConfigurationError` for rows in a database without the records.
        """
        ...

    def unsaved(self) -> bool:
        """Return whether the session holds writes that no commit will follow."""
        ...


class Codec(Protocol):
    """Turns responses into payloads and back. Every method raises `StoreUnavailable` while its keys are unavailable."""

    def prepare(self, key: StorageKey) -> None:
        """Load what sealing for this key needs, so that sealing cannot fail after the view ran.

        The engine calls it when a claim is granted. Raises `KeyProviderUnavailable` if another service than the store is
        the cause.
        """
        ...

    def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
        """Seal a response. Raises `NotStorable` for one that could not be opened again unchanged."""
        ...

    def open(self, payload: StoredPayload, binding: SealContext) -> StoredResponse:
        """Open a payload. Raises `CorruptRecord` unless `seal` made exactly this for the same context."""
        ...

    def forget(self, key: StorageKey) -> None:
        """Drop the cached data key of this tenant: the store says that it is gone. `seal` then uses another."""
        ...

    @property
    def steps(self) -> StepCodec:
        """What seals and opens the entries of journals."""
        ...


@valueclass(frozen=True, slots=True)
class StepContext:
    """The entry that a step's item and result are sealed for. They open in no other entry, record or claim."""

    key: StorageKey
    step: bytes
    """`Entry.id`."""
    fence: int
    """`Entry.fence`: of the claim that entered it."""
    fingerprint: bytes = field(repr=False)
    effects: str
    digest: bytes = field(repr=False)
    state: str
    """`StepState.value`."""


class StepCodec(Protocol):
    """Seals what a journal entry holds. Found as `Codec.steps`. Raises `StoreUnavailable` as `Codec` does."""

    def seal(self, item: bytes, result: bytes | None, context: StepContext) -> StoredPayload:
        """Seal an item, empty if there is none, and a result as tagged JSON. None: the entry has no result."""
        ...

    def open(self, payload: StoredPayload, context: StepContext) -> tuple[bytes, bytes | None]:
        """Return item and result. Raises `CorruptRecord` unless `seal` made exactly this for the same context.

        Raises `ResponseUnavailable` for an erased payload.
        """
        ...


class Schema(Protocol):
    """The tables of a store in a database that other programs use as well.

    Every method raises `StoreUnavailable` if the database does not answer.
    """

    def upgrade(self) -> list[str]:
        """Upgrade the tables to this release. Returns one line for each change, and none if they are up to date."""
        ...

    def faults(self) -> list[str]:
        """Return what does not fit this release, one sentence each, with its remedy. Changes nothing."""
        ...

    def advice(self) -> list[str]:
        """Return what you can improve although no promise is broken, one sentence each. Changes nothing."""
        ...


@dataclass(frozen=True, slots=True)
class MissingGrant:
    """What a role of the database may not do, and the statement that lets it."""

    kind: str
    """`schema`, `table` or `sequence`."""
    name: str
    privileges: tuple[str, ...]
    statement: str


@runtime_checkable
class RoleSchema(Protocol):
    """A schema in a database whose roles have privileges."""

    def missing_grants(self, role: str) -> list[MissingGrant]:
        """Return what this role lacks that the transactions of views need. Raise `ConfigurationError` if there is none."""
        ...
