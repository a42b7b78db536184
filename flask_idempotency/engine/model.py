"""A key's record, the states it can be in, and how a claim can end: values, not exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from flask_idempotency.engine.keys import StorageKey


@dataclass(frozen=True, slots=True)
class Grant:
    """What a store gives the winner. `fence` rises for ever on one key; `token` is compared for equality only."""

    token: bytes = field(repr=False)
    fence: int
    attempt: int
    lease: float
    """Seconds left on the store's clock when it answered."""
    era: int = 0
    """Another number after each loss of the store's memory, where it can lose it: it is compared for equality only."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """The same request is running now. `retry_after` is what is left of its lease, in seconds; renewal may extend it."""

    retry_after: float


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The key was used for another request, first seen at this time (seconds since the epoch, store's clock)."""

    first_seen: float


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody knows what became of the work. It will not run again until somebody settles it."""

    reason: str


@dataclass(frozen=True, slots=True)
class OverQuota:
    """The tenant has as much as it may, so a new key is not granted. Nothing was written; known keys still pass."""

    limit: str
    """A key of `quota.LIMITS`: the first limit that is reached."""
    allowed: int
    retry_after: float = 0.0
    """Seconds until something of it may be free again, as far as the store can tell; 0 where it cannot."""
    window: float | None = None
    """Of a limit on new keys: its length in seconds."""


@dataclass(frozen=True, slots=True)
class Erased:
    """Done before, by the same request, and its answer was erased with its tenant's data key. It never runs again."""


LARGEST_PAYLOAD: Final = 65 * 1024 * 1024
"""Bytes of `StoredPayload.data`. Codecs make 64 MiB at most, and what sealing adds: what is longer was not stored by us."""

LATEST: Final = 253_402_300_799.0
"""The last second of the year 9999. A stored time behind it is damage, and no calendar can show it."""


class State(Enum):
    """Where a record stands. A key without a record, or with an expired one, is absent: a state of the key, not here."""

    PROCESSING = "processing"
    COMPLETED = "completed"
    QUARANTINED = "quarantined"


class OnExpiry(Enum):
    """What becomes of a PROCESSING record when its lease runs out with no word from its owner.

    Written into the record by whoever claims it, so that requests and janitors of any release apply the same rule.
    """

    TAKEOVER = "takeover"
    QUARANTINE = "quarantine"


TRANSITIONS: Mapping[tuple[State | None, str], tuple[State | None, str]] = MappingProxyType(
    {
        (None, "claim"): (State.PROCESSING, "anyone; fence rises, attempt is 1"),
        (State.PROCESSING, "claim"): (
            State.PROCESSING,
            "lease over and the record says takeover; fence and attempt rise",
        ),
        (State.PROCESSING, "quarantine_expired"): (State.QUARANTINED, "lease over and the record says quarantine"),
        (State.PROCESSING, "renew"): (State.PROCESSING, "owner's token; the lease is never shortened"),
        (State.PROCESSING, "mark_point_of_no_return"): (
            State.PROCESSING,
            "owner's token; from here on a lapse quarantines",
        ),
        (State.PROCESSING, "quarantine"): (State.QUARANTINED, "owner's token"),
        (State.PROCESSING, "complete"): (State.COMPLETED, "owner's token, also after the lease has run out"),
        (State.PROCESSING, "release"): (None, "owner's token; the key may run again"),
        (State.QUARANTINED, "complete"): (State.COMPLETED, "the late owner's token"),
        (State.QUARANTINED, "release"): (
            None,
            "the late owner's token, unless there is an answer: it alone knows that nothing happened",
        ),
        (State.QUARANTINED, "resolve"): (
            State.COMPLETED,
            "a resolver or a person, by a fresh token: the late owner has lost it",
        ),
        (State.PROCESSING, "force_release"): (None, "a person, by force while its owner may live"),
        (State.QUARANTINED, "force_release"): (None, "a resolver that says it never happened, or a person"),
        (State.COMPLETED, "force_release"): (None, "a person, by force: the work will be done again"),
        (State.COMPLETED, "mark_corrupt"): (State.QUARANTINED, "whoever finds that its answer cannot be opened"),
        (State.COMPLETED, "expire"): (None, "time; COMPLETED is the only state that time ends"),
    }
)
"""Every move a record can make: (state, verb) → (state, who may and when). What is not listed changes nothing.

`None` is an absent key. `docs/` renders this table and the store contract walks it.
"""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What an auditor is told of a request. Never the client's key, never a body."""

    tenant: str = field(default="", repr=False)
    principal: str = field(default="", repr=False)
    method: str = ""
    operation: str = ""


NOBODY = RequestInfo()


@dataclass(frozen=True, slots=True)
class SealedBy:
    """Which key opens an answer. Read from the record, never found by trying."""

    kid: str
    """The key of the ring that wraps the data key."""
    number: int
    """Of the tenant's data key, from 1 on and never used again. 0: there is none, and nothing to open."""


ERASED = SealedBy(kid="", number=0)
"""What a late worker leaves whose tenant's answers have been erased meanwhile: done, and nothing more."""

CORRUPT = "corrupt"
"""The reason of a quarantine that a record got into because it could not be read."""


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """What a store keeps of a result: opaque bytes, and the few clear facts that it may show or count."""

    data: bytes = field(repr=False)
    status: int
    success: bool
    byte_size: int
    """Size of the plain result before compression or sealing: what quotas count."""
    sealed_by: SealedBy | None = None
    """None: it is not encrypted."""


@dataclass(frozen=True, slots=True)
class Record:
    """One key's row as a store tells it. Times are seconds since the epoch on the store's clock."""

    state: State
    token: bytes = field(repr=False)
    fence: int
    attempt: int
    fingerprint: bytes = field(repr=False)
    on_expiry: OnExpiry
    info: RequestInfo
    requested_at: float
    deadline: float
    """End of the lease while PROCESSING or QUARANTINED, of the answer's life when COMPLETED. Always there."""
    remaining: float
    """Seconds until `deadline` by the store's clock when it was read; negative when past."""
    completed_at: float | None = None
    payload: StoredPayload | None = None
    reason: str = ""
    """Why it is quarantined: a short code such as `lease-expired`."""
    in_quota: bool = False
    """Whether it is in its tenant's ledger."""
    erased: bool = False
    """Whether the data key that would open its answer was destroyed, by the store's word when it told this."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Asks to work on a key. Frozen when asked: what the view later does to its request changes nothing here."""

    key: StorageKey
    fingerprint: bytes = field(repr=False)
    on_expiry: OnExpiry
    info: RequestInfo = NOBODY
    notify_on_completion: bool = False
    """Whether duplicates may wait for its answer: a store that can shall tell them when the key is settled."""
    key_timestamp: float | None = None
    """When the client made its key, in seconds since the epoch by the client's clock, if the key says so."""
    in_quota: bool = True
    """Whether a quota applies to this name of the key."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer that can be given again: a status, ordered name/value pairs (duplicates allowed) and bytes.

    `reason` is kept only where it differs from the standard phrase for the status.
    """

    status: int
    reason: str = ""
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    body: bytes = field(default=b"", repr=False)
    kept: bool = True
    """False: a tombstone. The work was done and its body was not kept; it must never run again."""

    @property
    def byte_size(self) -> int:
        """Bytes a quota counts for this result, before any encoding."""
        size = len(self.body)
        for name, value in self.metadata:
            size += len(name) + len(value) + 4
        return size

    def without_body(self) -> StoredResponse:
        """The tombstone of this result: its status and metadata stay, its body is gone."""
        return StoredResponse(self.status, self.reason, self.metadata, kept=False)
