"""What the engine needs of the rooms below it. Whoever offers these may stand against it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    ClaimRequest,
    Grant,
    InFlight,
    Mismatched,
    OverQuota,
    Record,
    StoredPayload,
    StoredResponse,
    Unknown,
)
from flask_idempotency.engine.quota import Quota

# Whose time it is.


class Clock(Protocol):
    """Answers "what time is it?" in seconds since the epoch, or declines with None.

    Stores compare deadlines against their own server's time, because two web hosts never agree to the millisecond.
    Returning None keeps it so; tests return a number instead and make time pass by assignment.
    """

    def __call__(self) -> float | None: ...


def store_time() -> None:
    """The production clock: declines, so that the store's own time decides."""
    return


class SteadyClock:
    """Seconds since the epoch that never step: read once, then advanced by the monotonic clock.

    The memory store's own time. A wall clock set back by an operator must not lengthen a lease, one set forward must
    not end them all at once.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()


StoreOutcome: TypeAlias = Grant | Record | InFlight | Mismatched | Unknown | OverQuota


class Store(Protocol):
    """Keeps one record per key and decides, atomically, who may work on it.

    A store never interprets `payload` and never waits: blocking, retrying and encoding belong to the engine, so that
    stores do not do them each in their own way. Durations go in, never deadlines: the store's own clock makes those.
    All durations are seconds; one that is not finite and above 0 raises `ValueError`, for a record without a deadline
    cannot exist. The shipped `StoreContract` (`flask_idempotency.testing`) is the specification.

    Every method raises `StoreUnavailable` when the store cannot answer; then nobody knows whether it acted. So each is
    idempotent per token: repeating it after a lost reply ends as once would have. Writes by a token that is no longer
    the record's raise `LeaseLost` and change nothing.

    A record that cannot be read raises `CorruptRecord` and is never taken for absent: a claim that meets one leaves it
    where time does not end it.
    """

    def claim(self, request: ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None) -> StoreOutcome:
        """Classify the key and, when it is free, take it: one atomic step.

        In this order: an expired record is absent; another fingerprint is `Mismatched`; COMPLETED is its `Record`;
        QUARANTINED is `Unknown`; PROCESSING with this very token is its `Grant` again; PROCESSING with lease left is
        `InFlight`; PROCESSING without is taken over or quarantined, as the record says; absent is a `Grant`.
        Anything but a `Grant`, and the quarantining of a lapsed record, writes nothing. A `Grant` again is as granted
        before: same fence, and no more lease than is left. A take-over writes the new owner's request into the record,
        except when the key was first used.

        With a quota, an absent key is granted only if its tenant stays within it, and is `OverQuota` else: decided in the
        same step, limit by limit in the order of `quota.LIMITS`. What the tenant's own limits say (`Ledger.limit`) goes
        before what is passed here. The record is counted from then on; one that is taken over stays as it was. A store
        that cannot count raises `ConfigurationError`.
        """
        ...

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        """The lease ends no sooner than `lease` seconds from now, and is never shortened.

        One that was quarantined because its lease ended stays so, with the lease that it is given: whoever would settle it
        sees that its owner lives. One that is quarantined for another reason, or that this token has completed, stays as it
        is, without an error.
        """
        ...

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        """From now on a lapse quarantines this record; nobody will take it over. Durable when it returns.

        One that is quarantined already stays as it is. One that is completed, or was condemned since, raises `LeaseLost`.
        """
        ...

    def complete(self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float) -> None:
        """The result is durable and replayable for `keep` seconds. Accepted late and from quarantine, by the token.

        Repeated by the same token it changes nothing: what was stored first stays. The life of a counted record ends at
        the next edge of a bucket (`quota.bucket_edge_ms`), so up to a thirty-second later.

        A payload that is sealed is stored only while the tenant's data key of that number is there and not closed, and if
        the answers of its tenant have not been erased since the key was first used; else raises `DataKeyMissing`. Number 0
        needs no key.
        """
        ...

    def release(self, key: StorageKey, token: bytes) -> None:
        """The key may run again. An absent record is already released.

        The token is spent: for a minute at least nothing is granted to a claim by it, which raises `StoreUnavailable`
        instead. Such a claim was sent before its asker gave up. A store may forget that when somebody else has the key.

        A completed one raises `LeaseLost` and stays, and so does one that was condemned since.
        """
        ...

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        """Quarantine the record: its owner does not know what happened either. The token stays good for `complete`.

        One that is quarantined already keeps its first reason. One that is completed, or was condemned since, raises
        `LeaseLost`.
        """
        ...

    def read(self, key: StorageKey) -> Record | None:
        """The record as it stands, or None when absent or expired. Never writes."""
        ...

    def mark_corrupt(self, key: StorageKey, payload: StoredPayload) -> None:
        """Quarantine a completed record that holds this very payload, because nobody can open it.

        Its reason is `record.CORRUPT`, its payload and its token stay, and time ends it no more. It was completed: its
        owner may complete it again, and nothing else. Anything else that is there by now, also another payload, stays as
        it is.
        """
        ...


Writing: TypeAlias = Callable[[Callable[[Sequence[StoredPayload]], None]], None]
"""Calls the function that it is given with the payloads of a claim's records, again with others after `DataKeyMissing`."""


class Transaction(Protocol):
    """The application's own database transaction, as far as one claim's work writes through it.

    From `Transactions.join` on it watches for commits that are not its own: those are allowed only while the claim is
    this token's, and make whatever is written with them unrepeatable in the same commit (as `Store.mark` does).
    """

    @property
    def committed_early(self) -> bool:
        """Whether the work has committed by itself, so that what it wrote can no longer be rolled back.

        Also true where it tried to, and nobody can tell whether it has. May ask the database.
        """
        ...

    def settle(self, writing: Writing, *, keep: float, otherwise: Callable[[StorageKey], None]) -> None:
        """Commit the application's rows and the completed records together. All are durable when it returns.

        `writing` is called once the application's rows are flushed, with the function that completes the records. That
        takes one payload for each key that was joined, in their order. It raises `DataKeyMissing` as `Store.complete` does:
        then it has changed nothing, and `writing` may call it again with other payloads.

        Raises `LeaseLost` when the claim is no longer this token's: then nothing is committed. When the database refuses
        the commit, or does not say whether it is done, `otherwise` is called to settle each record in another way; it
        raises `LeaseLost` for one that is completed, and that decides it: `NotCommitted` is raised if there was none, and
        `StoreUnavailable` if nobody can tell yet.
        """
        ...

    def has_written(self) -> bool:
        """Return whether the work may have written anything that a rollback takes away. Never raises: True if unknown."""
        ...

    def commit(self) -> None:
        """Commit what work without a claim has written.

        Raises `NotCommitted`: then it is rolled back; and `StoreUnavailable` when nobody can tell.
        """
        ...

    def roll_back(self) -> None:
        """Nothing of what the work wrote and did not commit remains. Never raises: a dead connection remembers nothing."""
        ...

    def before_mark(self) -> None:
        """Raises `ConfigurationError` when the session as it is would keep the record from being marked."""
        ...

    def leave(self) -> None:
        """Watch no more. Harmless when repeated."""
        ...

    def is_retryable(self, error: BaseException) -> bool:
        """Whether this is the database's way of saying that the same work may succeed if it is only repeated."""
        ...


class Transactions(Protocol):
    """What a store can do besides, when it keeps its records in the database of the application's own session."""

    def prepare(self) -> None:
        """Called before the claim. Raises `ConfigurationError` when the session as it is would stand in its way."""
        ...

    def join(
        self, keys: Sequence[StorageKey], token: bytes, *, operation: str, told: Callable[[], None]
    ) -> Transaction:
        """Watch over the session of the work that begins here. `told` hears of the first commit that is not the claim's.

        Without keys: of work that has no claim, and is to be committed all the same. Raises `ConfigurationError` inside
        other such work on the same session.
        """
        ...

    def on_committed(self, told: Callable[[StorageKey, Record], None]) -> None:
        """Have every record told that was completed in a transaction: after its commit, and never before."""
        ...

    def unsaved(self) -> bool:
        """Whether something was written here that nobody will commit."""
        ...


@dataclass(frozen=True, slots=True)
class SealContext:
    """Which record an answer belongs to. A sealed one opens in no other: not in another tenant's, not in a later one."""

    key: StorageKey
    token: bytes = field(repr=False)
    fence: int
    fingerprint: bytes = field(repr=False)


class Codec(Protocol):
    """Result ⇄ payload. Every method raises `StoreUnavailable` when the keys it needs cannot be had for the moment."""

    def prepare(self, key: StorageKey) -> None:
        """Have at hand whatever sealing for this key needs, so that it cannot fail once the work is done.

        Asked when the claim is granted. Raises `KeyProviderUnavailable` when it is not the store that keeps it from being had.
        """
        ...

    def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
        """Raises `NotStorable` for what could not be opened again unchanged."""
        ...

    def open(self, payload: StoredPayload, binding: SealContext) -> StoredResponse:
        """Raises `CorruptRecord` unless the payload is exactly what `seal` once made for this binding."""
        ...

    def forget(self, key: StorageKey) -> None:
        """The store has said that a key this has sealed with is gone. What `seal` makes from now on has another."""
        ...


class Schema(Protocol):
    """The tables of a store that keeps its records in a database which others look after as well.

    Every method raises `StoreUnavailable` when the database cannot be asked.
    """

    def upgrade(self) -> list[str]:
        """Bring the tables to what this release needs. Returns what was done, one line each; nothing when they were."""
        ...

    def faults(self) -> list[str]:
        """What is not as this release needs it, one sentence each, with its remedy. Changes nothing."""
        ...

    def advice(self) -> list[str]:
        """What breaks no promise and would be better otherwise, one sentence each. Changes nothing."""
        ...
