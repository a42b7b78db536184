"""What a store remembers of the steps of a request: the entries of a journal, and the protocol that keeps them.

A journal belongs to one record and one life of it: a key that is released and runs again has another `requested_at` and an
empty journal. `docs/how-it-works/promises.md` says what each state means to a retry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Final, Literal, Protocol, TypeAlias

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import LARGEST_KEPT, SeenRecord, StoredPayload
from flask_idempotency.engine.store import StepContext, WatchedTransaction
from flask_idempotency.engine.values import valueclass

Effects: TypeAlias = Literal["plain", "deduplicated", "transactional", "pure"]

MOST_STEPS: Final = 200
"""Entries of one journal."""
LARGEST_RESULT: Final = 64 * 1024
"""Bytes of one result as tagged JSON, before compression and sealing."""
LARGEST_ITEM: Final = 1024
"""Bytes of an item as tagged JSON: a number, a UUID or a short name, and no document."""
LARGEST_JOURNAL: Final = 1024 * 1024
"""Bytes of all results of one request, counted the same way."""
LARGEST_ENTRY: Final = LARGEST_KEPT + 64 * 1024
"""Bytes of one entry: a result, or a kept request with its path, query and header fields."""

BESIDE: Final = "@"
"""How the name of an entry begins that is no step: no step has such a name."""
KEPT_REQUEST: Final = "@request"
"""The name of the entry that holds the request."""
TRY: Final = "@try"
"""The name of an entry for each try of the janitor to finish the request. Its item is the number, from 1 up."""
MOST_TRIES: Final = 5

STEPS_CHANGED: Final = "steps-changed"
"""The quarantine reason of a request whose recorded steps do not fit the code that runs now."""
NEVER_RESUMED: Final = "never-resumed"
"""The quarantine reason of a request that was paused or abandoned, and that no retry resumed in time."""
MEMORY_LOST: Final = "memory-lost"
"""The quarantine reason of a request with a journal whose store lost data since: the journal may lack a step."""


class StepState(Enum):
    """How far a step has come. A step without an entry has not begun, as far as the store knows."""

    BEGUN = "begun"
    FINISHED = "finished"


@valueclass(frozen=True, slots=True)
class Entry:
    """One step in a journal."""

    id: bytes
    """12 bytes of a keyed hash of the step's name and item, because an item is the application's data."""
    name: str
    effects: Effects
    state: StepState
    in_line: bool
    """Whether the view's own thread took it, so that it has a place in the order of steps."""
    digest: bytes = field(default=b"", repr=False)
    """16 bytes: a keyed digest of the arguments that are compared. Empty: none are."""
    payload: StoredPayload | None = field(default=None, repr=False)
    """The sealed item and, if the step has finished, its result. `byte_size` is the plain size that quotas count.

    None only if there is neither. `sealed_by == ERASED`: its tenant was erased since.
    """
    kept: bool = True
    """False: the step finished and its result could not be kept."""
    took: float = 0.0
    """Seconds that the function ran, by its worker's monotonic clock."""
    fence: int = 0
    """Of the claim that entered it: its payload is sealed for that. The store sets it and the times itself."""
    began_at: float = 0.0
    """Seconds since the epoch by the store's clock."""
    finished_at: float | None = None

    def with_payload(self, payload: StoredPayload | None) -> Entry:
        """Return this entry with another payload. Each step calls it twice, and `replace` takes ten times as long."""
        ours = self.id, self.name, self.effects, self.state, self.in_line, self.digest
        return Entry(*ours, payload, self.kept, self.took, self.fence, self.began_at, self.finished_at)

    @property
    def is_step(self) -> bool:
        """Whether the view took this step. Otherwise the entry is the request itself, or a try to finish it."""
        return self.name[:1] != BESIDE

    @property
    def has_effect(self) -> bool:
        """Whether a release must keep the record because of this step."""
        return self.effects != "pure"

    @property
    def in_doubt(self) -> bool:
        """Whether its effect may have happened, and nothing but a person or a resolver can tell."""
        return self.effects == "plain" and self.state is StepState.BEGUN

    def context(self, key: StorageKey, fingerprint: bytes) -> StepContext:
        """Return what its payload is sealed for, and opened with. `key` and `fingerprint` are those of its record."""
        return StepContext(key, self.id, self.fence, fingerprint, self.effects, self.digest, self.state.value)


@valueclass(frozen=True, slots=True)
class Journal:
    """The steps of one request so far, in the order in which they began."""

    entries: tuple[Entry, ...] = ()
    fence: int = 0
    """Of the claim that wrote last."""
    write: int = 0
    """The number of that write. With `fence`, it says whether the journal has changed since it was read."""
    complete: bool = True
    """False: the store has lost data since the claim, so a step that is not here may have happened."""
    erased: bool = False
    """Whether its results were erased with their tenant before the store read this."""

    @property
    def kept_request(self) -> Entry | None:
        """The first entry that holds the request, if its endpoint says `finish="janitor"`."""
        return next(iter(self.kept_requests), None)

    @property
    def kept_requests(self) -> tuple[Entry, ...]:
        """The entries that hold the request: one for each set of records that its claims had while secrets rotated."""
        return tuple(entry for entry in self.entries if entry.name == KEPT_REQUEST)

    @property
    def tries(self) -> tuple[Entry, ...]:
        """The tries of the janitor to finish the request, the oldest first."""
        return tuple(entry for entry in self.entries if entry.name == TRY)


EMPTY: Final = Journal()


@valueclass(frozen=True, slots=True)
class JournalWrite:
    """What one write changes in a journal, and what the journal holds afterwards. See `Journals.write`."""

    number: int
    """1 for the first write of a claim, and one more for each. A write that was given up keeps its number."""
    enter: Sequence[Entry] = ()
    """Steps that have begun or finished. An entry that is finished is never changed."""
    withdraw: Sequence[bytes] = ()
    """The ids of steps that began and did nothing. Only entries of this fence that are begun are removed."""
    steps: int = 0
    """How many entries with effects the journal has after this write. Absolute, so that lost writes cannot skew it."""
    in_doubt: bool = False
    """Whether a plain step is begun and not finished after this write: then no other attempt may go on. Absolute too."""


@valueclass(frozen=True, slots=True)
class StepAnswer:
    """One stored result, for tasks that seal it again."""

    key: StorageKey
    token: bytes = field(repr=False)
    fingerprint: bytes = field(repr=False)
    entry: Entry
    erased: bool = False


@valueclass(frozen=True, slots=True)
class StepPage:
    """Some of all stored results. `after` is where the next page begins; None after the last."""

    answers: tuple[StepAnswer, ...]
    after: bytes | None


@valueclass(frozen=True, slots=True)
class SweptJournals:
    """What a sweep removed: journals whose record is gone, completed, or of another life."""

    removed: int
    after: bytes | None
    """Where the next call begins; None after the last."""


class Journals(Protocol):
    """Keeps the steps of a request and their results. Found as `journals`.

    The worker's own writes are compared with token *and* fence: a claim that was sent twice may be granted a second time,
    later, under its old token. Every method raises `StoreUnavailable` if the store does not answer. It may have acted or
    not, and you may repeat the call. Times are the store's own.
    """

    def write(self, key: StorageKey, token: bytes, *, fence: int, writing: JournalWrite, lease: float) -> None:
        """Change the journal, set whether other attempts may go on, and renew the lease: one atomic step.

        With `in_doubt` the record's rule becomes quarantine, and else take-over (except after a data loss). Entries of
        `enter` replace begun ones and never finished ones. A write whose number is not above the last one of this fence
        changes nothing, and is no error. Accepted from PROCESSING, and from a quarantine with the reason `lease-expired`,
        which it ends unless `in_doubt`.

        Raises `LeaseLost` unless this very grant holds the record. Raises `DataKeyMissing` as `Store.complete` does, and
        has then changed nothing; payloads with `ERASED` need no key.
        """
        ...

    def recall(self, key: StorageKey, token: bytes, *, fence: int) -> Journal:
        """Return the journal to the claim that has just won its record. Raises `LeaseLost` as `write` does."""
        ...

    def complete(
        self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float, remember: float | None = None
    ) -> None:
        """Do as `Store.complete`, and remove the journal in the same atomic step. Claims of endpoints with steps call it."""
        ...

    def read(self, key: StorageKey) -> Journal:
        """Return the journal of the current record, to resolvers and people. Empty if there is none."""
        ...

    def resume(self, seen: SeenRecord, journal: Journal, *, token: bytes, writing: JournalWrite) -> bool:
        """Settle steps in their worker's place, if record and journal are as they were seen: a compare-and-set.

        The record gets the fresh `token`. Unless `writing.in_doubt`, it is paused: PROCESSING, its rule is take-over, and
        its lease ends now. `writing.number` is ignored: the journal's number rises by one. A repeat with the same token is
        True and changes nothing. False: the record or the journal has changed, is not quarantined, has no entry, or is
        incomplete after a data loss. A quarantine as `corrupt` cannot be resumed either.

        Raises `DataKeyMissing` as `write` does.
        """
        ...

    def give_up(self, seen: SeenRecord, *, horizon: float) -> bool:
        """Quarantine an expired lease with the reason `never-resumed`, if its rule is take-over and it has effects recorded.

        False: the record has changed, has no effect recorded, or its lease runs by this horizon or by now.
        """
        ...

    def walk(
        self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None
    ) -> StepPage:
        """Return stored results, of this tenant if you name one; without those sealed under the key `other_than`.

        A page covers about `limit` records, so it may be empty and not the last. A result that exists during the whole walk
        is found at least once.
        """
        ...

    def replace(self, key: StorageKey, step: bytes, old: StoredPayload, new: StoredPayload) -> bool:
        """Replace this payload of one entry, and keep all else. False: the entry does not hold it.

        Raises `DataKeyMissing` if the data key of the new payload does not exist.
        """
        ...

    def count(self) -> Mapping[str, int]:
        """Return how many stored results each key of the key ring seals, by its id; plain ones have an empty id.

        Leaves out erased ones and steps without a payload.
        """
        ...

    def sweep(self, *, after: bytes = b"", limit: int) -> SweptJournals:
        """Remove journals whose record does not exist, is completed, or is in another life. Look at about `limit` of them."""
        ...


StepWriting: TypeAlias = Callable[[Callable[[Sequence[JournalWrite]], None]], None]
"""Calls its argument with one write for each record of a claim, and again with new ones after `DataKeyMissing`."""


class StepTransaction(WatchedTransaction, Protocol):
    """The application's own database transaction, for one transactional step. Made by `StepTransactions.join_step`.

    It watches for commits that the step's function makes by itself, as `Transaction` does. Such a commit enters the step as
    begun and plain in the same transaction: from there on it is at most once.
    """

    def commit_step(self, writing: StepWriting) -> None:
        """Flush and commit the function's rows together with its entry, in every journal of the claim, or neither.

        Calls `writing` with the function that changes the journals. Raises `LeaseLost` if another attempt took over, and
        `NotCommitted` if the database refused; both roll back. If the reply to the COMMIT was lost, asks the journal on
        another connection: returns if the entry is there, raises `NotCommitted` if it is not, and `StoreUnavailable` if
        that stays unknown.
        """
        ...


class StepTransactions(Protocol):
    """What a store offers for transactional steps. The `transactions` of a store that has `journals` implement it too."""

    def join_step(
        self,
        keys: Sequence[StorageKey],
        token: bytes,
        *,
        fences: Sequence[int],
        lease: float,
        operation: str,
        early: Callable[[], Sequence[JournalWrite]],
        on_early_commit: Callable[[], None],
    ) -> StepTransaction:
        """Watch the session from here on, for one step. `fences` and the result of `early` go with `keys`, one for each.

        The first commit that the step's function makes by itself also does what `early` returns: enter the step as begun and
        plain, and say so with `in_doubt`. It then calls `on_early_commit`. `commit_step` needs a higher number.

        Raises `ConfigurationError` if the session has unsaved or uncommitted writes, because these would be committed with
        the step, or if its transaction prevents the write.
        """
        ...
