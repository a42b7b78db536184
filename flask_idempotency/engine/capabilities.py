"""What a store can offer beside the `Store` protocol: keep data keys, scan its records, count what each tenant has.

Each capability is a protocol, and an attribute of the stores that have it. `Capabilities` lists them. Assembly looks them up
once, and refuses to start without one that the settings need.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final, Protocol, runtime_checkable

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, Grant, Record, State, StoredPayload
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.engine.store import Schema, Transactions
from flask_idempotency.engine.waiting import Notifier

# What a store does for those who look after it: remember when that was, let one do it at a time, and clear out.

LONGEST_REPORT: Final = 4000
_LARGEST_NUMBER: Final = 2**53

LONGEST_LOCK_SECONDS: Final = 2 * 3600.0
"""Nobody has a task for as long: whoever does has taken it before the clock was set back."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """When a task was last reported, and what it said."""

    ago: float
    """Seconds, by the store's clock."""
    report: str
    """JSON, at most 4,000 characters. Holds numbers and words of ours, and nothing of a key, tenant or body."""

    def facts(self) -> Mapping[str, Any]:
        """Return what the report says. Empty for one that no release of ours wrote: nothing in it is believed."""
        if len(self.report) > LONGEST_REPORT:
            return {}
        try:
            facts = json.loads(self.report)
        except (ValueError, RecursionError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def whole(self, name: str) -> int | None:
        """Return this number of the report. None if it is not there, or larger than any number that a task reports."""
        found = self.facts().get(name)
        return found if type(found) is int and abs(found) <= _LARGEST_NUMBER else None


class TaskLog(Protocol):
    """Where tasks are written down, so that everybody knows whether the janitor comes. Found as `tasks`.

    Names of tasks are words of ours, at most 40 characters. Every method raises `StoreUnavailable` when the store cannot
    answer.
    """

    def now(self) -> float:
        """Seconds since the epoch, by the store's clock."""
        ...

    def report(self, task: str, report: str) -> None:
        """Write down that this task has run just now, over what was written before."""
        ...

    def reports(self) -> Mapping[str, TaskReport]:
        """What was last written of each task."""
        ...

    def lock(self, task: str, token: bytes, *, lease: float) -> bool:
        """Whether this task is the caller's for `lease` seconds. With the same token it is so again, for as long.

        Nothing's correctness may hang on it: a lock saves work, and no more. It is over when the lease is; and one that is
        to last for longer than `LONGEST_LOCK_SECONDS` from now was taken by another clock, and is nobody's.
        """
        ...

    def unlock(self, task: str, token: bytes) -> None:
        """Let the next one have it at once. Harmless when it is somebody else's."""
        ...


class OwnTaskLog:
    """Implements `TaskLog` for one application, in the book of a store that several may share.

    Each has a janitor of its own: one that only the others have must not keep it from being missed.
    """

    def __init__(self, book: TaskLog, *, owner: bytes) -> None:
        """`owner`: the mark of the application."""
        self._book = book
        self._whose = f"@{owner.hex()}"

    def now(self) -> float:
        return self._book.now()

    def report(self, task: str, report: str) -> None:
        self._book.report(task + self._whose, report)

    def reports(self) -> Mapping[str, TaskReport]:
        noted = self._book.reports().items()
        return {name.removesuffix(self._whose): entry for name, entry in noted if name.endswith(self._whose)}

    def lock(self, task: str, token: bytes, *, lease: float) -> bool:
        return self._book.lock(task + self._whose, token, lease=lease)

    def unlock(self, task: str, token: bytes) -> None:
        self._book.unlock(task + self._whose, token)


class Expiry(Protocol):
    """Removes what nobody can see any more. Found as `expiry`."""

    def sweep(self, *, horizon: float, limit: int) -> int:
        """Remove up to `limit` of what was over by this horizon, and is over now. Returns how many; 0 when none is left.

        That is: records whose answer's life has ended, keys that were released and are remembered no longer, entries of
        ledgers and indexes whose time is past. Never one that is PROCESSING or QUARANTINED, whatever the time. Several may
        sweep at once, and each thing is removed by one of them. A store that ends things by itself may return 0 at once.
        """
        ...


# What a store can say about itself to somebody who asks whether all is well.


class Verdict(Enum):
    """How serious a finding is."""

    FINE = "fine"
    ADVICE = "advice"
    """No promise is broken, and something would be better otherwise."""
    UNKNOWN = "unknown"
    """It could not be looked at; the text says why, and how it can."""
    FAULT = "fault"
    """A promise does not hold, or will not when something goes wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of `flask idempotency doctor`, and what came of it."""

    check: str
    """A short name, such as `eviction`: always the same, for scripts."""
    verdict: Verdict
    text: str
    """What was found, in one sentence. Names no key, tenant, password or URL."""
    remedy: str = ""
    """What to do about it, in one sentence. Empty when all is fine."""


class Health(Protocol):
    """Found as `health`."""

    def findings(self) -> Sequence[Finding]:
        """Look at what this store depends on: how its server is configured, its tables, its persistence. Changes nothing.

        Raises `StoreUnavailable` when the store cannot answer at all.
        """
        ...


# What a store that can lose its memory says when it has, and what its owners and operators can do about it.
#
# A key that such a store does not know may have been run before. Protocol: research/correctness.md, sections 1.1, 3 and 8.

RISK: Final = (
    'run `flask idempotency redis ack --reason "…"` when you have found out why. It risks that requests whose records were '
    "lost run a second time if their clients retry them"
)
"""The one command that lets new keys run after a loss, and what it risks. People read it in every log line and report."""


class DataLoss(Enum):
    """What is wrong with a store's memory."""

    MISSING = "missing"
    """Nothing says that it was ever set up: it was emptied, or is new."""
    FOREIGN = "foreign"
    """It is another store than the application was told, or its keys are laid out for another one."""
    CHANGED = "changed"
    """Another process keeps it than the one that made its promises: a restart, a fail-over, an older copy."""


@dataclass(frozen=True, slots=True)
class DataLossStatus:
    """How the parts of a store stand, and what to do about it."""

    store_id: str | None
    """None where nothing says so, or parts disagree."""
    parts: Mapping[str, int]
    """How many parts are `fine`, `acknowledged`, or suffer which `DataLoss`."""
    since: float | None
    """When the latest loss was noticed, in seconds since the epoch by the store's clock."""
    now: float
    """By the same clock."""
    may_be_acknowledged_at: float | None
    """When every owner that survived has had the time to put its claim back. None: nothing is lost."""
    notices_restarts: bool
    """False where the server does not tell scripts which process it is: then only an emptied store is noticed."""
    noticed: bool = False
    """Whether nobody had noticed one of its losses before."""
    losses_so_far: tuple[float | None, ...] = field(default=(), repr=False)
    """When each part was last lost: another one after each loss of any of them."""

    @property
    def losses(self) -> Mapping[str, int]:
        """How many parts suffer which loss."""
        return {
            name: count for name, count in self.parts.items() if name in {loss.value for loss in DataLoss} and count
        }

    @property
    def gravest(self) -> DataLoss | None:
        """Which of its losses to tell of first."""
        return next((loss for loss in (DataLoss.FOREIGN, *DataLoss) if loss.value in self.losses), None)

    def runs_unknown(self, after_loss: str) -> bool:
        """Whether keys run now that the store does not know, under this rule."""
        losses = set(self.losses)
        if DataLoss.FOREIGN.value in losses:
            return False
        if not losses or after_loss == "run":
            return True
        due = self.may_be_acknowledged_at
        return losses == {DataLoss.CHANGED.value} and after_loss == "hold" and due is not None and self.now >= due


class DataLossPolicy(Protocol):
    """What a store was told to do about keys that it may have forgotten."""

    @property
    def store_id(self) -> str | None:
        """Which store it has to be. None: any will do."""
        ...

    @property
    def after_loss(self) -> str:
        """`refuse` until somebody has acknowledged, `hold` for a time, or `run`."""
        ...

    @property
    def grace(self) -> float:
        """For how many seconds owners that survived may put their claims back before anybody acknowledges."""
        ...


class DataLossDetector(Protocol):
    """Found as `memory`. Every method raises `StoreUnavailable` when the store cannot answer."""

    @property
    def rules(self) -> DataLossPolicy: ...

    def restore_claim(self, request: ClaimRequest, grant: Grant, *, lease: float, age: float) -> bool:
        """Put a claim back that the store has forgotten. True: it is this token's again, in progress.

        Only if the record is absent, and the store has lost its memory since the claim was granted, which was asked for
        `age` seconds ago.
        For claims alone that nobody may take over: who was taken over would call back to life what others have finished.
        """
        ...

    def initialise(self) -> str:
        """Make a new store ready, and return its id. Harmless when it is.

        Raises `ConfigurationError` for one that was made ready before and lacks something: that has lost its memory.
        """
        ...

    def acknowledge(self, *, forced: bool = False, seen: DataLossStatus | None = None) -> DataLossStatus:
        """From now on keys run that the store does not know, what it has forgotten among them. How it stood before.

        `seen` is how it stood when whoever acknowledges looked. Raises `ConfigurationError` where something was lost since
        then; before `may_be_acknowledged_at`, unless forced; and for a store that is foreign.
        """
        ...

    def status(self) -> DataLossStatus:
        """How every part stands. Losses that nobody has noticed so far are, by this."""
        ...


# Records whose owners may be gone: how to find them, and what may become of them by another's hand.


@dataclass(frozen=True, slots=True)
class SeenRecord:
    """A record as somebody met it who is not its owner. Whoever acts on it says that this is what they saw."""

    key: StorageKey
    record: Record
    asked: bool = False
    """Of one that `Recovery.due` gives: whether it was given to somebody before, since its owner was last heard of."""


@dataclass(frozen=True, slots=True)
class RecordPage:
    """Some of many. `after` is where the next sheet begins; None after the last one."""

    found: tuple[SeenRecord, ...]
    after: bytes | None


@dataclass(frozen=True, slots=True)
class UnfinishedCounts:
    """How many records are not completed, and since when."""

    in_flight: int = 0
    """PROCESSING, with lease left."""
    lapsed: int = 0
    """PROCESSING, with none left: to be quarantined by a janitor, or taken over by a retry."""
    quarantined: int = 0
    lapsed_for: float | None = None
    """Seconds since the first lease of those ended that have lapsed. None: there are none."""
    quarantined_for: float | None = None
    """Seconds since the first lease of those ended that are quarantined, and never below 0. None: there are none."""


class Recovery(Protocol):
    """The records of vanished owners, and every other, by state. Found as `unsettled`.

    Nothing here looks through all records of a store to find the few that are not completed: there is an index of them.
    Every change is a compare-and-set on the exact record that was seen (its state, its token and its deadline), so two
    who do the same at once do it once, and an owner who was faster wins. Horizons are seconds since the epoch on the
    store's clock. Every method raises `StoreUnavailable` when the store cannot answer; repeating it is harmless.
    """

    def expired_leases(self, *, horizon: float, after: bytes = b"", limit: int) -> RecordPage:
        """PROCESSING records whose lease was over by this horizon, and is over now. Those that cannot be read are left out.

        About `limit` are looked at for one sheet, so it may be empty and not the last. One that is stale from the first
        sheet to the last is met at least once.
        """
        ...

    def quarantine_expired(self, seen: SeenRecord, *, horizon: float) -> bool:
        """Quarantine this record, with the reason `lease-expired`, if it stands as it was seen and its rule says so.

        False: it does not, or its lease was not over by this horizon, or is not over now, or its rule is to be taken over.
        """
        ...

    def next_for_resolver(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[SeenRecord]:
        """Quarantined records whose turn it is to be asked about. Each is given to one caller, and then has to wait.

        The first turn is at once. The next comes after as many seconds as it has been quarantined for (since the end of
        its lease), but not before `least` nor after `most`: so the pauses double, and a caller that dies delays one turn.
        They are counted from the horizon or from now, whichever is earlier. The one that has waited longest comes first, as
        far as the store can tell.

        `owner`: only those whose tokens begin with these `token.OWNER_BYTES` bytes. The others keep their turns: they are
        another application's in the same store.
        """
        ...

    def resolve(self, seen: SeenRecord, *, token: bytes, payload: StoredPayload, keep: float) -> bool:
        """Complete this record in its owner's place, if it is quarantined and stands as it was seen.

        `token` is a fresh one: the owner learns that it has lost its claim, and is told this answer. Otherwise as
        `Store.complete`, and raises `DataKeyMissing` as that does. False: something else is there by now, and stays. Repeated
        with the same token after a lost reply, it is True.
        """
        ...

    def force_release(self, seen: SeenRecord) -> bool:
        """The key may run again, whatever state its record is in, if it stands as it was seen.

        Whether that is wise is not asked here. False: something else is there by now, and stays, or nothing is.
        """
        ...

    def scan(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> RecordPage:
        """Every record in this state, of this tenant if one is named. The answers may be left out of their payloads.

        As with `stale`, a sheet may be empty and not the last; what is there throughout is met at least once. Completed
        records whose life is over are left out.
        """
        ...

    def counts(self) -> UnfinishedCounts:
        """How many records are not completed. Quick."""
        ...


PAGE: Final = 200
"""Records looked at in one step: some tens of milliseconds of the store's time."""


def every(unsettled: Recovery, state: State, *, tids: Iterable[bytes | None] = (None,)) -> Iterator[SeenRecord]:
    """All records in this state, sheet by sheet: of these tenants, or of everybody. Some may be met twice.

    Raises `StoreUnavailable` when the store does not answer.
    """
    for tid in tids:
        after: bytes | None = b""
        while after is not None:
            sheet = unsettled.scan(state, after=after, limit=PAGE, tid=tid)
            yield from sheet.found
            after = sheet.after


LARGEST_WRAPPED: Final = 16 * 1024
"""Bytes of a wrapped data key. A key of the ring makes 61, and key services make less than a thousand."""


@dataclass(frozen=True, slots=True)
class DataKey:
    """A tenant's key, as the store keeps it: wrapped by a key of the ring, and of use to nobody without that."""

    number: int
    kid: str
    wrapped: bytes = field(repr=False)
    closed_for: float | None = None
    """Seconds since it was closed, by the store's clock: it opens what it has sealed, and seals no more. None: it does."""


@dataclass(frozen=True, slots=True)
class TenantKeys:
    """The data keys of one tenant, and which store they are in. All of it is read in one look."""

    store: bytes
    """The same for as long as the store remembers this tenant, and nobody else's."""
    keys: tuple[DataKey, ...] = ()
    """The lowest number first."""
    last: int = 0
    """The highest number that was ever given; 0 when none was. The next key has a higher one, and not always the next.

    A store that was restored, or has forgotten something, must not give a number again to another key while somebody
    still remembers the old.
    """


class DataKeys(Protocol):
    """Keeps the wrapped data keys of tenants, next to the records that are sealed with them. Found as `data_keys`.

    Every method raises `StoreUnavailable` when the store cannot answer.
    """

    def read_keys(self, tid: bytes) -> TenantKeys:
        """This tenant's data keys. Those that were destroyed are not among them."""
        ...

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        """Keep one more, if `after` is the tenant's last number still, the key's is higher, and the store is this one.

        False: somebody was faster, so look again.
        """
        ...

    def disable(self, tid: bytes, number: int) -> None:
        """From now on no answer is stored that this key has sealed: `DataKeyMissing`, as if it were not there.

        Whatever is on its way at this moment may still arrive, so it is not retired at once. Harmless when repeated: it
        stays closed since when it was first.
        """
        ...

    def delete(self, tid: bytes, number: int) -> None:
        """Forget a closed key that no record is sealed with any more. Harmless when it has gone; an open one stays."""
        ...

    def wrapped_by_other(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        """Every tenant's data keys, by `tid`, that other keys of the ring wrap than this one."""
        ...

    def shred(self, tid: bytes) -> int:
        """Erase the answers of this tenant: every data key it has is gone when this returns, and how many that were.

        From now on records that are completed are told as `erased`, whether they were sealed or not; and none whose key
        was first used before now can be completed with an answer. Harmless when repeated.
        """
        ...

    def count(self) -> Mapping[str, int]:
        """How many data keys there are under each key of the ring, by its id."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A completed record, met on a walk through the store."""

    key: StorageKey
    record: Record


@dataclass(frozen=True, slots=True)
class Page:
    """Some of all answers. `after` is where the next page begins; None after the last one."""

    answers: tuple[Answer, ...]
    after: bytes | None


class Responses(Protocol):
    """Every completed record, for tasks that seal them anew or wipe them. Found as `answers`.

    A record that is there from the beginning of a walk to its end is met at least once. One that cannot be read is passed
    over.
    """

    def scan(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        """Those of this tenant, if one is named; and not those sealed under this key of the ring.

        About `limit` records are looked at for one page, so a page may be empty and not the last.
        """
        ...

    def replace(self, key: StorageKey, old: StoredPayload, new: StoredPayload) -> bool:
        """Put this payload in the place of that one, and leave everything else, its expiry too. False: it is not there.

        As for `Store.complete`, the data key of the new one must be there; else raises `DataKeyMissing`.
        """
        ...

    def count(self) -> Mapping[str, int]:
        """How many completed records there are under each key of the ring, by its id; plain ones under an empty id.

        Wiped ones, whose data key has number 0, are under none. Includes those whose life has ended and that have not been
        removed yet.
        """
        ...


class Ledger(Protocol):
    """What each tenant has, as claims and completions count it. Found as `ledger`."""

    def usage(self, tid: bytes) -> Usage:
        """What this tenant has now."""
        ...

    def limits(self, tid: bytes) -> Quota:
        """The tenant's own limits, as an operator has set them. What is None there is as the application says."""
        ...

    def limit(self, tid: bytes, quota: Quota) -> None:
        """Set the tenant's own limits, all of them. An unlimited quota takes them back."""
        ...

    def tenants(self) -> Sequence[bytes]:
        """The `tid` of everybody who has a ledger."""
        ...

    def reconcile(self, tid: bytes) -> Drift:
        """Count this tenant's records again, put the ledger right, and say by how much it was wrong.

        Others may claim and complete meanwhile: what they change is left alone, and not mistaken for a drift.
        """
        ...


@runtime_checkable
class KnowsCache(Protocol):
    """A store that remembers that a cache of its answers stands before it, for hosts that do not know the cache.

    What is freed or settled anew must be withdrawn from the cache first, and only a host that knows it can do so.
    """

    def note_cache(self) -> None:
        """Some of its answers may be cached from now on. Remembered for good."""
        ...

    def has_cache(self) -> bool:
        """Whether some may have been, by whatever host."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store offers beside the `Store` protocol: each is an attribute of the store. None: the store lacks it."""

    schema: Schema | None
    """Its tables, in a database that others use as well."""
    transactions: Transactions | None
    """It keeps its records in the database of the application's own session."""
    tenant_shards: int | None
    """Over how many partitions it expects the keys of each tenant to be spread. It refuses to mix two numbers."""
    data_loss: DataLossDetector | None
    """It can lose data, and detects that."""
    notifier: Notifier | None
    """It publishes the end of claims for which requests wait."""
    ledger: Ledger | None
    """It can hold tenants to quotas."""
    data_keys: DataKeys | None
    """It keeps wrapped data keys of tenants."""
    responses: Responses | None
    """Its completed records can be scanned and replaced."""
    recovery: Recovery | None
    """Others than their workers can find and resolve its unfinished records."""
    expiry: Expiry | None
    """It has to be cleared of what has expired."""
    task_log: TaskLog | None
    """It remembers when maintenance tasks ran."""
    health: Health | None
    """It can check its server."""


CAPABILITIES: Final = tuple(field.name for field in fields(Capabilities))
"""The names of these attributes. Calls to them are not timed."""


def capabilities_of(store: object) -> Capabilities:
    """Look up what this store offers. Assembly and the tiered store do so once; no call site looks for an attribute."""
    return Capabilities(**{name: getattr(store, name, None) for name in CAPABILITIES})
