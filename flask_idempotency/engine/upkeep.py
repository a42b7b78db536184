"""What a store can do besides being one: keep data keys, show all its answers, and tell what each tenant has.

Each is a small port of its own, and an attribute of the stores that have it. What needs one asks for it where everything
is put together, and refuses to start without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.quota import Drift, Quota, Usage
from flask_idempotency.engine.record import Payload, Record

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
class KeyShelf:
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

    def shelf(self, tid: bytes) -> KeyShelf:
        """This tenant's data keys. Those that were destroyed are not among them."""
        ...

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        """Keep one more, if `after` is the tenant's last number still, the key's is higher, and the store is this one.

        False: somebody was faster, so look again.
        """
        ...

    def close(self, tid: bytes, number: int) -> None:
        """From now on no answer is stored that this key has sealed: `DataKeyGone`, as if it were not there.

        Whatever is on its way at this moment may still arrive, so it is not retired at once. Harmless when repeated: it
        stays closed since when it was first.
        """
        ...

    def retire(self, tid: bytes, number: int) -> None:
        """Forget a closed key that no record is sealed with any more. Harmless when it has gone; an open one stays."""
        ...

    def others(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        """Every tenant's data keys, by `tid`, that other keys of the ring wrap than this one."""
        ...

    def destroy(self, tid: bytes) -> int:
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


class Answers(Protocol):
    """Every completed record, for chores that seal them anew or wipe them. Found as `answers`.

    A record that is there from the beginning of a walk to its end is met at least once. One that cannot be read is passed
    over.
    """

    def walk(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        """Those of this tenant, if one is named; and not those sealed under this key of the ring.

        About `limit` records are looked at for one page, so a page may be empty and not the last.
        """
        ...

    def replace(self, key: StorageKey, old: Payload, new: Payload) -> bool:
        """Put this payload in the place of that one, and leave everything else, its expiry too. False: it is not there.

        As for `Store.complete`, the data key of the new one must be there; else raises `DataKeyGone`.
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
class KeepsDataKeys(Protocol):
    """A store in which tenants' data keys may be kept."""

    @property
    def data_keys(self) -> DataKeys: ...


@runtime_checkable
class ShowsAnswers(Protocol):
    """A store that can be walked through."""

    @property
    def answers(self) -> Answers: ...


@runtime_checkable
class Fronted(Protocol):
    """A store that remembers that a cache of its answers stands before it, for hosts that do not know the cache.

    What is freed or settled anew must be withdrawn from the cache first, and only a host that knows it can do so.
    """

    def note_cache(self) -> None:
        """Some of its answers may be cached from now on. Remembered for good."""
        ...

    def has_cache(self) -> bool:
        """Whether some may have been, by whatever host."""
        ...


@runtime_checkable
class Counts(Protocol):
    """A store that can hold tenants to quotas."""

    @property
    def ledger(self) -> Ledger: ...
