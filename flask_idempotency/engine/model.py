"""Define a key's record, its states and transitions, and the outcomes of a claim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from flask_idempotency.engine.keys import StorageKey


@dataclass(frozen=True, slots=True)
class Grant:
    """The store's grant of a claim. `fence` only rises on one key. Compare `token` for equality only."""

    token: bytes = field(repr=False)
    fence: int
    attempt: int
    lease: float
    """Seconds left when the store granted it."""
    era: int = 0
    """Changes with each data loss of a store that detects it. Compare it for equality only."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """The same request is running now. `retry_after`: seconds left of its lease, which renewal may extend."""

    retry_after: float


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The key belongs to another request, first seen at this time (seconds since the epoch, store's clock)."""

    first_seen: float


@dataclass(frozen=True, slots=True)
class Unknown:
    """The outcome of the key is unknown. It does not run again until a resolver or an operator resolves it."""

    reason: str


@dataclass(frozen=True, slots=True)
class OverQuota:
    """The tenant's quota is used up, so a new key is not granted. Nothing was written; known keys still pass."""

    limit: str
    """The first limit that was reached: a key of `quota.LIMITS`."""
    allowed: int
    retry_after: float = 0.0
    """Seconds until part of it may be free again, as far as the store can tell; else 0."""
    window: float | None = None
    """The length of the window of a limit on new keys, in seconds."""


@dataclass(frozen=True, slots=True)
class Erased:
    """The same request completed before, and its response was erased with the tenant's data key. It never runs again."""


LARGEST_PAYLOAD: Final = 65 * 1024 * 1024
"""Most bytes of `StoredPayload.data`. Codecs make at most 64 MiB plus what sealing adds; longer data is damaged."""

LATEST: Final = 253_402_300_799.0
"""The last second of the year 9999. A later stored time is damage, and `datetime` cannot show it."""


class State(Enum):
    """The state of a record. A key without a record, or with an expired one, is absent; that is no member here."""

    PROCESSING = "processing"
    COMPLETED = "completed"
    QUARANTINED = "quarantined"


class OnExpiry(Enum):
    """What happens to a PROCESSING record whose lease expires.

    The claim writes it into the record, so that requests and janitors of any release apply the same rule.
    """

    TAKEOVER = "takeover"
    QUARANTINE = "quarantine"


TRANSITIONS: Mapping[tuple[State | None, str], tuple[State | None, str]] = MappingProxyType(
    {
        (None, "claim"): (State.PROCESSING, "any request; fence rises, attempt is 1"),
        (State.PROCESSING, "claim"): (
            State.PROCESSING,
            "lease expired and the record says takeover; fence and attempt rise",
        ),
        (State.PROCESSING, "quarantine_expired"): (State.QUARANTINED, "lease expired and the record says quarantine"),
        (State.PROCESSING, "renew"): (State.PROCESSING, "worker's token; the lease is never shortened"),
        (State.PROCESSING, "mark_point_of_no_return"): (
            State.PROCESSING,
            "worker's token; from here on an expired lease quarantines",
        ),
        (State.PROCESSING, "quarantine"): (State.QUARANTINED, "worker's token"),
        (State.PROCESSING, "complete"): (State.COMPLETED, "worker's token, also after the lease has expired"),
        (State.PROCESSING, "release"): (None, "worker's token; the key may run again"),
        (State.QUARANTINED, "complete"): (State.COMPLETED, "the late worker's token"),
        (State.QUARANTINED, "release"): (
            None,
            "the late worker's token, unless there is a response: only it knows that the request had no effect",
        ),
        (State.QUARANTINED, "resolve"): (
            State.COMPLETED,
            "a resolver or an operator, with a new token: the late worker loses the claim",
        ),
        (State.PROCESSING, "force_release"): (None, "an operator, by force while the worker may still run"),
        (State.QUARANTINED, "force_release"): (None, "a resolver that rules out any effect, or an operator"),
        (State.COMPLETED, "force_release"): (None, "an operator, by force: the key will run a second time"),
        (State.COMPLETED, "mark_corrupt"): (State.QUARANTINED, "a request or task that cannot open the response"),
        (State.COMPLETED, "expire"): (None, "time; only COMPLETED records expire"),
    }
)
"""All transitions of a record: (state, verb) → (state, who may and when). Any other pair changes nothing.

`None` is an absent key. docs/states.md shows this table, and the store contract tests every pair.
"""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What a record shows of its request. Never the client's key or a body."""

    tenant: str = field(default="", repr=False)
    principal: str = field(default="", repr=False)
    method: str = ""
    operation: str = ""


NO_INFO = RequestInfo()


@dataclass(frozen=True, slots=True)
class SealedBy:
    """The key that opens a response. Read it from the record; never try keys."""

    kid: str
    """The key of the key ring that wraps the data key."""
    number: int
    """The number of the tenant's data key, from 1 on and never reused. 0: there is no key, and nothing to open."""


ERASED = SealedBy(kid="", number=0)
"""A late worker stores this if its tenant's responses were erased: completed, without a response."""

CORRUPT = "corrupt"
"""The quarantine reason of an unreadable record."""


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """A response as a store keeps it: opaque bytes, and the few plain facts that it may show or count."""

    data: bytes = field(repr=False)
    status: int
    success: bool
    byte_size: int
    """Size of the plain response before compression or sealing. Quotas count it."""
    sealed_by: SealedBy | None = None
    """None: it is not encrypted."""


@dataclass(frozen=True, slots=True)
class Record:
    """One key's record as a store returns it. Times are seconds since the epoch on the store's clock."""

    state: State
    token: bytes = field(repr=False)
    fence: int
    attempt: int
    fingerprint: bytes = field(repr=False)
    on_expiry: OnExpiry
    info: RequestInfo
    requested_at: float
    deadline: float
    """End of the lease if PROCESSING or QUARANTINED; when the response expires if COMPLETED."""
    remaining: float
    """Seconds until `deadline` when the store read it; negative if past."""
    completed_at: float | None = None
    payload: StoredPayload | None = None
    reason: str = ""
    """Why it is quarantined: a short code such as `lease-expired`."""
    in_quota: bool = False
    """Whether its tenant's quota counts it."""
    erased: bool = False
    """Whether the data key that opens its response was destroyed before the store read this."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A request to claim a key. A copy: what the view later does to its request has no effect here."""

    key: StorageKey
    fingerprint: bytes = field(repr=False)
    on_expiry: OnExpiry
    info: RequestInfo = NO_INFO
    notify_on_completion: bool = False
    """Whether duplicates may wait for the response. A store that can then notifies them when the claim ends."""
    key_timestamp: float | None = None
    """When the client made its key, in seconds since the epoch by the client's clock, if the key says so."""
    in_quota: bool = True
    """Whether a quota applies to this storage key."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response to replay: a status, ordered name/value pairs (duplicates allowed) and bytes.

    `reason` is set only if it differs from the status's standard phrase.
    """

    status: int
    reason: str = ""
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    body: bytes = field(default=b"", repr=False)
    kept: bool = True
    """False: a tombstone. The request completed without keeping the body, and must never run again."""

    @property
    def byte_size(self) -> int:
        """The bytes that a quota counts for this response, before any encoding."""
        size = len(self.body)
        for name, value in self.metadata:
            size += len(name) + len(value) + 4
        return size

    def without_body(self) -> StoredResponse:
        """Return the tombstone of this response: status and metadata, without the body."""
        return StoredResponse(self.status, self.reason, self.metadata, kept=False)
