"""Define a key's record, its states and transitions, and the outcomes of a claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeVar

from flask_idempotency.engine.errors import DataKeyMissing, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.values import valueclass

__all__ = [
    "CALLER_UNKNOWN",
    "CORRUPT",
    "TRANSITIONS",
    "Callers",
    "ClaimRequest",
    "Expired",
    "Grant",
    "InFlight",
    "Mismatched",
    "OnExpiry",
    "OtherCaller",
    "OverQuota",
    "Record",
    "RequestInfo",
    "SealedBy",
    "State",
    "StoredPayload",
    "Unknown",
    "Voided",
]


WrittenT = TypeVar("WrittenT")


@valueclass(frozen=True, slots=True)
class Grant:
    """The store's grant of a claim. `fence` only rises on one key. Compare `token` for equality only."""

    token: bytes = field(repr=False)
    fence: int
    attempt: int
    lease: float
    """Seconds left when the store granted it."""
    era: int = 0
    """Changes with each data loss of a store that detects it. Compare it for equality only."""
    taken_from: str = field(default="", repr=False)
    """The trace of the claim that this one took over, if its record had one."""


@valueclass(frozen=True, slots=True)
class InFlight:
    """The same request is running now. `retry_after`: seconds left of its lease, which renewal may extend."""

    retry_after: float


@valueclass(frozen=True, slots=True)
class Mismatched:
    """The key belongs to another request, first seen at this time (seconds since the epoch, store's clock)."""

    first_seen: float


@valueclass(frozen=True, slots=True)
class Unknown:
    """The outcome of the key is unknown. It does not run again until a resolver or an operator resolves it."""

    reason: str


@valueclass(frozen=True, slots=True)
class Voided:
    """The key was voided before a request used it, and no request runs under it. `first_seen`: when it was voided."""

    first_seen: float


@valueclass(frozen=True, slots=True)
class OtherCaller:
    """The key has the record of another caller, first seen at this time: see `Callers`. Nothing was written."""

    first_seen: float


CALLER_UNKNOWN: Final = "caller-unknown"
"""Why a record is not taken over that does not show for which caller it was written. The record itself stays as it is."""


@valueclass(frozen=True, slots=True)
class OverQuota:
    """The tenant's quota is used up, so a new key is not granted. Nothing was written; known keys still pass."""

    limit: str
    """The first limit that was reached: a key of `quota.LIMITS`."""
    allowed: int
    retry_after: float = 0.0
    """Seconds until part of it may be free again, as far as the store can tell; else 0."""
    window: float | None = None
    """The length of the window of a limit on new keys, in seconds."""


@valueclass(frozen=True, slots=True)
class Erased:
    """The same request completed before, and its response was erased with the tenant's data key. It never runs again."""


@valueclass(frozen=True, slots=True)
class Expired:
    """The same request completed before, first seen at this time, and its response is no longer kept. It does not run again.

    The store remembers that until the record's `remembered_until`.
    """

    first_seen: float


LARGEST_KEPT: Final = 1024 * 1024
"""Bytes of the body of a request that is kept for the janitor: a journal is read as a whole, so it stays small."""

LARGEST_PAYLOAD: Final = 65 * 1024 * 1024
"""Most bytes of `StoredPayload.data`. Codecs make at most 64 MiB plus what sealing adds; longer data is damaged."""

MAX_LIMIT: Final = 2**53
"""The largest number that every store can count to, and every database hold."""

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
        (None, "claim"): (State.PROCESSING, "Any request. The fence rises, and the attempt is 1."),
        (None, "void"): (State.COMPLETED, "A client or an operator, before any request. The fence rises."),
        (State.PROCESSING, "claim"): (
            State.PROCESSING,
            "A retry, after the lease has expired, if the record allows take-over. Fence and attempt rise.",
        ),
        (State.PROCESSING, "quarantine_expired"): (
            State.QUARANTINED,
            "A retry or the janitor, after the lease has expired, if the record does not allow take-over, or if the store "
            "has lost data since the claim.",
        ),
        (State.PROCESSING, "renew"): (State.PROCESSING, "The worker, by its token. The lease never becomes shorter."),
        (State.PROCESSING, "mark_point_of_no_return"): (
            State.PROCESSING,
            "The worker, by its token. From here on no retry takes over.",
        ),
        (State.PROCESSING, "quarantine"): (State.QUARANTINED, "The worker, by its token: the outcome is unknown."),
        (State.PROCESSING, "complete"): (
            State.COMPLETED,
            "The worker, by its token, also after its lease has expired.",
        ),
        (State.PROCESSING, "release"): (None, "The worker, by its token. The key may run again."),
        (State.PROCESSING, "write_steps"): (
            State.PROCESSING,
            "The worker, by its token and fence. While a plain step has begun and not finished, no retry takes over.",
        ),
        (State.QUARANTINED, "write_steps"): (
            State.PROCESSING,
            "The late worker, by its token and fence, if only its lease had expired, and no plain step is in doubt.",
        ),
        (State.PROCESSING, "pause"): (
            State.PROCESSING,
            "A release by the worker, if an effect is recorded. The lease ends, and the next retry resumes.",
        ),
        (State.QUARANTINED, "pause"): (
            State.PROCESSING,
            "A release by the late worker, if an effect is recorded, and no plain step is in doubt.",
        ),
        (State.PROCESSING, "doubt"): (State.QUARANTINED, "A release by the worker, while a plain step is in doubt."),
        (State.QUARANTINED, "resume"): (
            State.PROCESSING,
            "A resolver or an operator, with a new token. The lease is over, and the next retry resumes.",
        ),
        (State.PROCESSING, "give_up"): (
            State.QUARANTINED,
            "The janitor, after `resume_within`, if an effect is recorded and no retry came.",
        ),
        (State.QUARANTINED, "complete"): (State.COMPLETED, "The late worker, by its token."),
        (State.QUARANTINED, "release"): (
            None,
            "The late worker, by its token, if the request had no effect. Refused if the record has a response.",
        ),
        (State.QUARANTINED, "resolve"): (
            State.COMPLETED,
            "A resolver or an operator, with a new token. The late worker loses its claim.",
        ),
        (State.PROCESSING, "force_release"): (None, "An operator, by force, while the worker may still run."),
        (State.QUARANTINED, "force_release"): (None, "An operator, or a resolver that rules out any effect."),
        (State.COMPLETED, "force_release"): (None, "An operator, by force. The key may run a second time."),
        (State.COMPLETED, "mark_corrupt"): (
            State.QUARANTINED,
            "A request or a task that cannot open the response.",
        ),
        (State.COMPLETED, "expire"): (
            None,
            "Time, after `keep`, or after a longer `remember`. Only COMPLETED records expire.",
        ),
    }
)
"""All transitions of a record: (state, verb) → (state, who may and when). Any other pair changes nothing.

`None` is an absent key. docs/how-it-works/states.md shows this table, and the store contract tests every pair.
"""


@valueclass(frozen=True, slots=True)
class RequestInfo:
    """What a record shows of its request. Never the client's key or a body."""

    tenant: str = field(default="", repr=False)
    """Empty if there was none. A keyed hash with `IDEMPOTENCY_HASH_IDENTITIES`."""
    principal: str = field(default="", repr=False)
    """The caller, empty if anonymous. A keyed hash with `IDEMPOTENCY_HASH_IDENTITIES`."""
    method: str = ""
    operation: str = ""
    """The endpoint, as `url_for` takes it."""
    trace: str = field(default="", repr=False)
    """The span that holds the claim, as `traceparent` has it: 55 characters. Empty unless `IDEMPOTENCY_OPENTELEMETRY` is on.

    A store keeps it behind the method, after a space. An earlier release shows both.
    """

    @property
    def traced_method(self) -> str:
        """Return method and trace as one text, for a store to keep. Ask for it only if there is a trace."""
        return f"{self.method} {self.trace}"


TRACED: Final = " 00-"
"""How a trace begins behind a method: at this place from the end, if there is one."""
TRACED_AT: Final = slice(-56, -52)


def method_and_trace(text: str) -> tuple[str, str]:
    """Return the two parts of what a store keeps of `RequestInfo.traced_method`."""
    return (text[:-56], text[-55:]) if text[TRACED_AT] == TRACED else (text, "")


NO_INFO = RequestInfo()


@valueclass(frozen=True, slots=True, eq=True)
class SealedBy:
    """The key that opens a response. Read it from the record; never try keys."""

    kid: str
    """The key of the key ring that wraps the data key."""
    number: int
    """The number of the tenant's data key, from 1 on and never reused. 0: there is no key, and nothing to open."""


ERASED = SealedBy(kid="", number=0)
"""A late worker stores this if its tenant's responses were erased: completed, without a response."""

VOIDED: Final = b"\0voided".ljust(17, b"\0")
"""The fingerprint of a voided key. No request has it: theirs begin with their version, which is not 0.

An earlier release finds another request's fingerprint here, and refuses the key for that reason.
"""

CORRUPT = "corrupt"
"""The quarantine reason of an unreadable record."""

LAPSED: Final = "lease-expired"
"""The quarantine reason of a record whose lease expired, without word from the worker."""

IN_DOUBT = "step-in-doubt"
"""The quarantine reason of a request that was released while one of its plain steps had begun and not finished."""


@valueclass(frozen=True, slots=True)
class StoredPayload:
    """A response as a store keeps it: opaque bytes, and the few plain facts that it may show or count."""

    data: bytes = field(repr=False)
    status: int
    success: bool
    byte_size: int
    """Size of the plain response before compression or sealing. Quotas count it."""
    sealed_by: SealedBy | None = None
    """None: it is not encrypted."""


VOID: Final = StoredPayload(b"", 409, False, 0, ERASED)
"""What the record of a voided key has in the place of a response: the status of its requests."""


def skeleton_of(payload: StoredPayload | None) -> StoredPayload | None:
    """Return what is left of this payload after `keep`, in a record that is still remembered: its status alone."""
    return None if payload is None else StoredPayload(b"", payload.status, payload.success, 0, ERASED)


def kid_of(payload: StoredPayload | None) -> str:
    """Return the id of the key that this payload is sealed under. It is empty if none is."""
    return "" if payload is None or payload.sealed_by is None else payload.sealed_by.kid


@valueclass(frozen=True, slots=True)
class Record:
    """One key's record as a store returns it. Times are seconds since the epoch on the store's clock."""

    state: State
    token: bytes = field(repr=False)
    """The token of the claim that holds the record, or held it last."""
    fence: int
    """Rises with every claim of this key."""
    attempt: int
    """1 for the first claim, and one more for each take-over."""
    fingerprint: bytes = field(repr=False)
    """A keyed digest of the request."""
    on_expiry: OnExpiry
    info: RequestInfo
    requested_at: float
    """When the key was first used."""
    deadline: float
    """End of the lease if PROCESSING or QUARANTINED; when the response expires if COMPLETED."""
    remaining: float
    """Seconds until `deadline` when the store read it; negative if past."""
    completed_at: float | None = None
    payload: StoredPayload | None = None
    """The stored response, if there is one."""
    reason: str = ""
    """Why it is quarantined: a short code such as `lease-expired`."""
    in_quota: bool = False
    """Whether its tenant's quota counts it."""
    erased: bool = False
    """Whether the data key that opens its response was destroyed before the store read this."""
    remembered_until: float | None = None
    """Until when the key is refused although its response has expired: never before `deadline`. None: it is free then."""

    @property
    def is_skeleton(self) -> bool:
        """Whether its response has expired, and only the fact of completion is remembered."""
        return self.state is State.COMPLETED and self.remembered_until is not None and self.remaining <= 0


@valueclass(frozen=True, slots=True)
class SeenRecord:
    """A record as a resolver, janitor or operator read it. A change applies only if the record still equals it."""

    key: StorageKey
    record: Record
    returned_before: bool = False
    """Set by `Recovery.next_for_resolver`: it has returned this record before, since the worker last renewed."""


@valueclass(frozen=True, slots=True)
class Callers:
    """Whose records count for a claim of a key that several callers may have had.

    Each pair is a tenant and a principal as `RequestInfo` has them. A record with any other pair is another caller's.
    """

    shown: frozenset[tuple[str, str]] = field(repr=False)
    """The spellings of the present caller. Such a record counts for everything."""
    unnamed: frozenset[tuple[str, str]] = field(default=frozenset(), repr=False)
    """Names that lack what tells callers apart. Such a record is replayed and refused, but never taken over."""
    former: bool = False
    """Whether the claim goes on without this key if the record in it is another caller's."""

    def show(self, info: RequestInfo) -> bool | None:
        """Return whether this record was written for the present caller. None: it does not show that."""
        pair = info.tenant, info.principal
        return True if pair in self.shown else None if pair in self.unnamed else False


@valueclass(frozen=True, slots=True)
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
    callers: Callers | None = None
    """None: this name is the caller's alone."""
    former_fingerprint: bytes | None = field(default=None, repr=False)
    """What an earlier release computed for the same request, if it differs. For the engine: stores compare `fingerprint`."""

    @property
    def as_formerly(self) -> ClaimRequest | None:
        """This request with the fingerprint of an earlier release, for a record with another one than ours."""
        if self.former_fingerprint is None:
            return None
        return replace(self, fingerprint=self.former_fingerprint, former_fingerprint=None)


@valueclass(frozen=True, slots=True)
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

    def without_body(self) -> StoredResponse:
        """Return the tombstone of this response: status and metadata, without the body."""
        return StoredResponse(self.status, self.reason, self.metadata, kept=False)


@valueclass(frozen=True, slots=True)
class SealContext:
    """The record that a response is sealed for. It opens in no other, of another tenant or of a later claim."""

    key: StorageKey
    token: bytes = field(repr=False)
    fence: int
    fingerprint: bytes = field(repr=False)


TRIES: Final = 3
"""How often a payload is sealed for one write. A store that loses its data key three times will lose the next too."""
KEYS_FORGOTTEN: Final = "the store lost the new data key of this tenant three times in a row"


def write_sealed(write: Callable[[], WrittenT], discard: Callable[[DataKeyMissing], None]) -> WrittenT:
    """Write sealed payloads. `discard` drops those whose data key the store lacks; `write` then seals them again.

    Raises `StoreUnavailable` for a store that loses each new data key.
    """
    for _ in range(TRIES):
        try:
            return write()
        except DataKeyMissing as missing:
            discard(missing)
    raise StoreUnavailable(KEYS_FORGOTTEN)


RISK: Final = (
    'run `flask idempotency redis ack --reason "…"` when you have found out why. It risks that requests whose records were '
    "lost run a second time if their clients retry them"
)
"""The one command that lets unknown keys run after a data loss, and its risk. Log lines and reports quote it."""


class DataLoss(Enum):
    """The kinds of data loss. After one, a key that the store does not know may have run before."""

    MISSING = "missing"
    """The store has no identity: it was emptied, or is new."""
    FOREIGN = "foreign"
    """It is not the store that the settings name, or another number of partitions laid out its keys."""
    CHANGED = "changed"
    """Another server process holds the data now: after a restart, a fail-over, or from an older copy."""


@valueclass(frozen=True, slots=True)
class DataLossStatus:
    """Which parts of a store lost data, and when you may acknowledge that."""

    store_id: str | None
    """None: the store has no identity, or its parts disagree."""
    parts: Mapping[str, int]
    """How many parts are `fine`, `acknowledged`, or have each kind of `DataLoss`."""
    since: float | None
    """When the latest data loss was detected, in seconds since the epoch by the store's clock."""
    now: float
    """By the same clock."""
    may_be_acknowledged_at: float | None
    """From then on every surviving worker has had time to restore its claim. None: there is no data loss."""
    notices_restarts: bool
    """False: scripts cannot see which server process runs them, so the store detects only that it was emptied."""
    noticed: bool = False
    """Whether this call is the first to detect one of its losses."""
    losses_so_far: tuple[float | None, ...] = field(default=(), repr=False)
    """When each part last lost data. Compare it with an earlier status to detect a further loss."""
    emptied: bool = False
    """Whether a process that knew the identity of the store noticed that a part lacks it: the store is not new."""

    @property
    def losses(self) -> Mapping[str, int]:
        """Return how many parts have each kind of loss."""
        return {
            name: count for name, count in self.parts.items() if name in {loss.value for loss in DataLoss} and count
        }

    @property
    def gravest(self) -> DataLoss | None:
        """Return the loss to report first."""
        return next((loss for loss in (DataLoss.FOREIGN, *DataLoss) if loss.value in self.losses), None)

    def runs_unknown(self, after_loss: str) -> bool:
        """Return whether keys that the store does not know may run now, under this rule."""
        losses = set(self.losses)
        if DataLoss.FOREIGN.value in losses:
            return False
        if not losses or after_loss == "run":
            return True
        due = self.may_be_acknowledged_at
        return losses == {DataLoss.CHANGED.value} and after_loss == "hold" and due is not None and self.now >= due
