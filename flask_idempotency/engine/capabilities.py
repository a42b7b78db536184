"""What a store can offer beside the `Store` protocol: keep data keys, scan its records, count what each tenant has.

Each capability is a protocol, and an attribute of the stores that have it. `offered.Capabilities` lists them. Assembly looks
them up once, and refuses to start without one that the settings need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Final, Protocol

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import (
    ClaimRequest,
    DataLoss,
    DataLossStatus,
    Grant,
    Mismatched,
    OtherCaller,
    OverQuota,
    Record,
    SeenRecord,
    State,
    StoredPayload,
    Voided,
)
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.engine.tasks import TaskLog, TaskReport
from flask_idempotency.engine.values import valueclass

__all__ = [
    "Answer",
    "DataKey",
    "DataKeys",
    "DataLoss",
    "DataLossDetector",
    "DataLossPolicy",
    "DataLossStatus",
    "Expiry",
    "Finding",
    "Health",
    "Ledger",
    "Page",
    "RecordPage",
    "Recovery",
    "Responses",
    "SeenRecord",
    "TaskLog",
    "TaskReport",
    "TenantKeys",
    "UnfinishedCounts",
    "Verdict",
    "Void",
]


class Expiry(Protocol):
    """Removes expired data. Found as `expiry`."""

    def sweep(self, *, horizon: float, limit: int) -> int:
        """Remove up to `limit` items that expired before this horizon, and return how many. 0: none is left.

        A record that is remembered longer than its response loses its response first, as one item.

        Items are expired completed records, released keys that are no longer remembered, and old entries of quotas and
        indexes. PROCESSING and QUARANTINED records stay, however old. Several janitors may sweep at the same time: one of
        them removes each item. A store that expires data by itself may return 0.
        """
        ...


class Verdict(Enum):
    """How serious a finding is."""

    FINE = "fine"
    ADVICE = "advice"
    """No promise is broken, but you can improve the setup."""
    UNKNOWN = "unknown"
    """The check could not run. The text says why, and how to make it run."""
    FAULT = "fault"
    """A promise does not hold, or will not hold after a failure."""


@valueclass(frozen=True, slots=True)
class Finding:
    """One check of `flask idempotency doctor`, and its result."""

    check: str
    """A short name, such as `eviction`: always the same, for scripts."""
    verdict: Verdict
    text: str
    """The result, in one sentence. Names no key, tenant, password or URL."""
    remedy: str = ""
    """What to do, in one sentence. Empty if the verdict is FINE."""


class Health(Protocol):
    """Checks the server of a store. Found as `health`."""

    def findings(self) -> Sequence[Finding]:
        """Check what this store depends on: the server's settings, its tables, its persistence. Changes nothing.

        Raises `StoreUnavailable` if the store does not answer at all.
        """
        ...


class DataLossPolicy(Protocol):
    """What the settings say about keys that the store may have lost."""

    @property
    def store_id(self) -> str | None:
        """The identity that the store must have. None: any."""
        ...

    @property
    def after_loss(self) -> str:
        """`refuse` until an operator acknowledges, `hold` for a time, or `run`."""
        ...

    @property
    def grace(self) -> float:
        """Seconds in which surviving workers may restore their claims before an operator acknowledges."""
        ...


class DataLossDetector(Protocol):
    """Detects data loss. Found as `data_loss`. Every method raises `StoreUnavailable` if the store does not answer."""

    @property
    def rules(self) -> DataLossPolicy:
        """The settings that this store follows after a data loss."""
        ...

    def restore_claim(self, request: ClaimRequest, grant: Grant, *, lease: float, age: float) -> bool:
        """Restore a claim that the store has lost. True: the record is PROCESSING under this token again.

        Works only if the record is absent, and the store lost data after it granted the claim. `age` is how many seconds
        ago the worker requested the claim. Call it only for claims that no request may take over. Else another worker may
        have taken over and finished, and this would revive the claim.
        """
        ...

    def would_run(self, key: StorageKey, *, key_timestamp: float | None = None, record: Record | None = None) -> bool:
        """Return whether a claim would run this key, which is absent, or whose record's lease has expired. Writes nothing.

        Pass the record only if it allows take-over. False: the store lost data after that claim, so it is quarantined.
        Raises `StoreDataLoss` if a claim would. `key_timestamp` is that of `ClaimRequest`.
        """
        ...

    def initialise(self) -> str:
        """Set up a new store, and return its identity. Harmless if it is set up.

        Raises `ConfigurationError` if parts of it were set up before and others lack it, or if a process noticed that it
        was emptied: that is a data loss.
        """
        ...

    def acknowledge(self, *, forced: bool = False, seen: DataLossStatus | None = None) -> DataLossStatus:
        """Let keys run that the store does not know, the lost ones included. Return the status before.

        `seen` is the status that the operator saw. Raises `ConfigurationError` if the store lost more since then, if it is
        foreign, or before `may_be_acknowledged_at` unless `forced`.
        """
        ...

    def status(self) -> DataLossStatus:
        """Return the status of every part. This also records losses that were not detected before."""
        ...


@valueclass(frozen=True, slots=True)
class RecordPage:
    """Some of many records. `after` is where the next page begins; None after the last."""

    found: tuple[SeenRecord, ...]
    after: bytes | None


@valueclass(frozen=True, slots=True)
class UnfinishedCounts:
    """How many records are not completed, and for how long."""

    in_flight: int = 0
    """PROCESSING, and the lease runs."""
    lapsed: int = 0
    """PROCESSING with an expired lease: a janitor will quarantine it, or a retry will take it over."""
    quarantined: int = 0
    lapsed_for: float | None = None
    """Seconds since the earliest lease of the `lapsed` records expired. None: there is no such record."""
    quarantined_for: float | None = None
    """Seconds since the earliest lease of the quarantined records expired, at least 0. None: there is no such record."""


class Recovery(Protocol):
    """Finds records by state, and changes those whose worker vanished. Found as `recovery`.

    An index of unfinished records makes it cheap to find them. Every change is a compare-and-set on the record as it was
    seen: its state, token and deadline. So two janitors do the same work once, and a worker that is faster wins. Horizons
    are seconds since the epoch on the store's clock. Every method raises `StoreUnavailable` if the store does not answer;
    repeat it then.
    """

    def expired_leases(self, *, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        """Return PROCESSING records whose lease expired before this horizon. Leaves out unreadable ones.

        The lease must have expired by the store's clock too. A page covers about `limit` records, so it may be empty and
        not the last. A record that is expired throughout the scan is found at least once.
        """
        ...

    def quarantine_expired(self, seen: SeenRecord, *, horizon: float) -> bool:
        """Quarantine this record with the reason `lease-expired`, if it is as it was seen and its rule is quarantine.

        Return False if the record has changed, if its rule is takeover, or if its lease runs by this horizon or by now.
        """
        ...

    def next_for_resolver(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[SeenRecord]:
        """Return quarantined records that are due for a resolver. Each goes to one caller, and then waits.

        A record is first due immediately. Each further wait is as long as the time since its lease expired, but at least
        `least` and at most `most` seconds. So waits double, and a caller that dies costs one wait. They start at the
        horizon or now, whichever is earlier. The longest waiting comes first, as far as the store can tell.

        `owner`: return only records whose tokens begin with these `keys.OWNER_BYTES` bytes. The others belong to other
        applications in the same store, and stay due.
        """
        ...

    def resolve(
        self,
        seen: SeenRecord,
        *,
        token: bytes,
        payload: StoredPayload,
        keep: float,
        remember: float | None = None,
    ) -> bool:
        """Complete this record in its worker's place, if it is quarantined and as it was seen.

        `token` is a new one: the worker learns that it lost its claim, and gets this response. Otherwise works as
        `Store.complete`, `DataKeyMissing` included. False: the record has changed, and stays so. A repeat with the same
        token after a lost reply returns True.
        """
        ...

    def force_release(self, seen: SeenRecord) -> bool:
        """Remove this record in any state, if it is as it was seen. The key may run again.

        It is not if its worker has passed its point of no return since. The caller decides whether a release is safe. False:
        the record has changed or is absent, and stays so.
        """
        ...

    def scan(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> RecordPage:
        """Return the records in this state, of this tenant if you name one. Payloads may lack the response bytes.

        A page may be empty and not the last, as with `expired_leases`. Records that exist throughout are found at least
        once. Expired completed records are left out.
        """
        ...

    def counts(self) -> UnfinishedCounts:
        """Return how many records are not completed. Fast."""
        ...

    def about_completed(self) -> int | None:
        """Return about how many records are completed, in some milliseconds even for a million.

        May count expired records that are not removed yet. May be an estimate, unless the store holds fewer than a
        thousand things. None: it cannot tell that fast.
        """
        ...


class Void(Protocol):
    """Voids keys. Found as the method `void` of a store."""

    def __call__(
        self, request: ClaimRequest, *, token: bytes, keep: float, quota: Quota | None = None
    ) -> Voided | Mismatched | OtherCaller | OverQuota:
        """Void this key for `keep` seconds if it is free: one atomic step. From then on each claim of it is `Voided`.

        `request` has the fingerprint `model.VOIDED`, and the store decides as it does for a claim of that request. But
        what it writes is no claim: a COMPLETED record with the payload `model.VOID`, which counts in the quota. A key that
        is voided already is `Voided` and stays as it is. A key with any other record, in any state, is `Mismatched`.

        Raises `StoreUnavailable` if the store does not answer. It may have voided the key or not, and you may repeat the
        call. Raises `CorruptRecord` and `StoreDataLoss` wherever a claim would.
        """
        ...


PAGE: Final = 200
"""Records read in one step: some tens of milliseconds of the store's time."""


def every(recovery: Recovery, state: State, *, tids: Iterable[bytes | None] = (None,)) -> Iterator[SeenRecord]:
    """Yield all records in this state, of these tenants or of all. Some may come twice.

    Raises `StoreUnavailable` if the store does not answer.
    """
    for tid in tids:
        after: bytes | None = b""
        while after is not None:
            page = recovery.scan(state, after=after, limit=PAGE, tid=tid)
            yield from page.found
            after = page.after


LARGEST_WRAPPED: Final = 16 * 1024
"""Bytes of a wrapped data key. A key of the key ring makes 61, key services less than 1,000."""


@valueclass(frozen=True, slots=True)
class DataKey:
    """A tenant's data key as the store keeps it: wrapped by a key of the key ring, and useless without that."""

    number: int
    kid: str
    wrapped: bytes = field(repr=False)
    closed_for: float | None = None
    """Seconds since it was disabled, by the store's clock: it still opens, but seals no more. None: it is enabled."""


@valueclass(frozen=True, slots=True)
class TenantKeys:
    """The data keys of one tenant, and their store. The store reads all of it in one step."""

    store: bytes
    """Identifies the tenant's entry in this store. It changes if the store loses the tenant."""
    keys: tuple[DataKey, ...] = ()
    """The lowest number first."""
    last: int = 0
    """The highest number ever used; 0 if none was. The next key has a higher one, with or without a gap.

    A store that was restored or lost data must not reuse a number while a worker may still cache the old key.
    """


class DataKeys(Protocol):
    """Keeps the wrapped data keys of tenants, next to the records that are sealed with them. Found as `data_keys`.

    Every method raises `StoreUnavailable` if the store does not answer.
    """

    def read_keys(self, tid: bytes) -> TenantKeys:
        """Return this tenant's data keys, without those that were destroyed."""
        ...

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        """Add a key, if `after` is still the tenant's last number, the key's is higher, and the store is this one.

        False: another worker was faster, so read the keys again.
        """
        ...

    def disable(self, tid: bytes, number: int) -> None:
        """Refuse responses sealed by this key from now on: storing one raises `DataKeyMissing`, as if the key were absent.

        A write that is under way may still arrive, so do not delete the key immediately. Harmless to repeat: `closed_for`
        counts from the first call.
        """
        ...

    def delete(self, tid: bytes, number: int) -> None:
        """Delete a disabled key that no record is sealed with. Harmless if it is gone; an enabled key stays."""
        ...

    def wrapped_by_other(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        """Return all data keys that another key than this one wraps, each with its `tid`."""
        ...

    def sample(self, kid: str, *, limit: int) -> Sequence[tuple[bytes, DataKey]]:
        """Return some data keys that this key wraps, at most `limit`, each with its `tid`. Skip unreadable ones."""
        ...

    def shred(self, tid: bytes) -> int:
        """Erase the responses of this tenant: delete all its data keys, and return how many there were.

        From now on its completed records read as `erased`, whether they were sealed or not. A key that was first used
        before now can no longer be completed with a response. Harmless to repeat.
        """
        ...

    def count(self) -> Mapping[str, int]:
        """Return how many data keys each key of the key ring wraps, by its id."""
        ...


@valueclass(frozen=True, slots=True)
class Answer:
    """A completed record that a scan of the store found."""

    key: StorageKey
    record: Record


@valueclass(frozen=True, slots=True)
class Page:
    """Some of all completed records. `after` is where the next page begins; None after the last."""

    answers: tuple[Answer, ...]
    after: bytes | None


class Responses(Protocol):
    """Scans and replaces completed records, for tasks that seal them again or erase them. Found as `responses`.

    A record that exists throughout a scan is found at least once. Unreadable ones are skipped.
    """

    def scan(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        """Return records of this tenant, if you name one; without those sealed under the key `other_than`.

        A page covers about `limit` records, so it may be empty and not the last.
        """
        ...

    def replace(self, key: StorageKey, old: StoredPayload, new: StoredPayload) -> bool:
        """Replace this payload, and keep all else, its expiry too. False: the record does not hold it.

        As for `Store.complete`, the data key of the new payload must exist; else raises `DataKeyMissing`.
        """
        ...

    def count(self) -> Mapping[str, int]:
        """Return how many completed records each key of the key ring seals, by its id; plain ones have an empty id.

        Leaves out erased ones, whose data key has number 0. Includes expired ones that are not removed yet.
        """
        ...


class Ledger(Protocol):
    """Counts what each tenant stores, and holds its limits. Found as `ledger`."""

    def usage(self, tid: bytes) -> Usage:
        """Return what this tenant has now."""
        ...

    def limits(self, tid: bytes) -> Quota:
        """Return the limits that an operator set for this tenant. Where they are None, the application's apply."""
        ...

    def limit(self, tid: bytes, quota: Quota) -> None:
        """Set all of the tenant's own limits. An unlimited quota removes them."""
        ...

    def tenants(self) -> Sequence[bytes]:
        """Return the `tid` of every tenant that is counted."""
        ...

    def reconcile(self, tid: bytes) -> Drift:
        """Count this tenant's records again, correct its counts, and return the difference.

        Requests may claim and complete at the same time: what they change is left alone, and is not reported as drift.
        """
        ...
