"""What happened, told to whoever listens: signals, metrics, logs. No key, principal, token or body is ever in one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

_log = logging.getLogger("flask_idempotency")


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened to a key. `record` is a short keyed hash: it tells two keys apart and leads back to neither."""

    record: str
    operation: str


@dataclass(frozen=True, slots=True)
class ClaimGranted(Event):
    """A request won its key and will run. `attempt` above 1: it took the key over from an owner that vanished."""

    fence: int
    attempt: int


@dataclass(frozen=True, slots=True)
class ReplayServed(Event):
    """A stored answer was given again. `kept` is False when only its tombstone was left."""

    status: int
    kept: bool


@dataclass(frozen=True, slots=True)
class ConflictRefused(Event):
    """The same request was still running. `waited` is how long this one waited for it, in seconds."""

    waited: float


@dataclass(frozen=True, slots=True)
class MismatchRefused(Event):
    """The key was used again for another request."""


@dataclass(frozen=True, slots=True)
class UnknownRefused(Event):
    """A retry met a quarantined record. `reason` is the code that the record carries."""

    reason: str


@dataclass(frozen=True, slots=True)
class QuotaRefused(Event):
    """The tenant has as much as it may. `limit` says of what: `records`, `bytes`, `in-flight` or `new-keys`."""

    limit: str


@dataclass(frozen=True, slots=True)
class ErasedRefused(Event):
    """A retry met an answer that was erased with its tenant's data key. It was refused, never run."""


@dataclass(frozen=True, slots=True)
class RefusedAfterDataLoss(Event):
    """A key was refused that the store does not know, because it has lost its memory: `loss` says how (`memory.Loss`)."""

    loss: str


@dataclass(frozen=True, slots=True)
class DataLossDetected(Event):
    """A request, or the janitor, was the first to notice that the store has lost its memory. `loss` says how
    (`memory.Loss`)."""

    loss: str


@dataclass(frozen=True, slots=True)
class ClaimRestored(Event):
    """An owner has put back its claim, which the store had forgotten."""


@dataclass(frozen=True, slots=True)
class Completed(Event):
    """A result is durable. `kept` is False for a tombstone; `byte_size` is what the store was given."""

    status: int
    kept: bool
    byte_size: int


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The key may run again. `reason` says why: a short code such as `status-503`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Quarantined(Event):
    """The owner could not tell what happened, so nobody may run the key again until it is settled."""

    reason: str


@dataclass(frozen=True, slots=True)
class CommittedEarly(Event):
    """A transactional view has committed by itself, before its answer was known. From there on a vanished worker leaves
    an unknown outcome: at most once, and no longer exactly once."""


@dataclass(frozen=True, slots=True)
class LeaseExpired(Event):
    """An owner learnt that its claim is no longer its own. Its answer is not delivered."""


@dataclass(frozen=True, slots=True)
class RenewalFailed(Event):
    """A lease could not be renewed this time; it is tried again. `error` is the exception's class name."""

    error: str


@dataclass(frozen=True, slots=True)
class MaxRuntimeExceeded(Event):
    """A view has run longer than `max_runtime`: its lease is renewed no more, and will lapse while it goes on."""


@dataclass(frozen=True, slots=True)
class CompletionRetrying(Event):
    """The work is done and its caller answered, but the store did not take the result. It is tried again."""

    error: str


@dataclass(frozen=True, slots=True)
class CompletionFailed(Event):
    """A result that the store did not take was given up; the record stays claimed until it lapses."""

    error: str


@dataclass(frozen=True, slots=True)
class StoreFailed(Event):
    """The store could not decide a claim. `unprotected`: the policy let the request run all the same."""

    error: str
    unprotected: bool


@dataclass(frozen=True, slots=True)
class RecordCorrupt(Event):
    """A stored record could not be read, or its answer not be opened. The retry was refused, never run, and the record is
    quarantined."""


@dataclass(frozen=True, slots=True)
class ReplayForbidden(Event):
    """The replay guard refused this caller a stored answer. The record is kept."""


@dataclass(frozen=True, slots=True)
class Reaped(Event):
    """A janitor found a claim whose lease was over, and quarantined it as its rule says."""


@dataclass(frozen=True, slots=True)
class Resolved(Event):
    """Somebody else than its owner has settled a key: an audit event.

    `verb` is `completed`, `released` or `reopened`; `was` the state it was in before, and `forced` whether a warning was
    overruled. `actor` says who: `resolver`, or the operator as the command was told; `reason` why, in their words. `certain`
    is False when the store did not say whether it has done it: it may have, and may not.
    """

    verb: str
    was: str
    actor: str
    reason: str
    forced: bool = False
    certain: bool = True


@dataclass(frozen=True, slots=True)
class ResolverAsked(Event):
    """A resolver was asked what became of a key, and did not settle it. `answer` is `still-unknown`, or the class name of
    the exception that it raised."""

    answer: str


@dataclass(frozen=True, slots=True)
class TenantErased(Event):
    """The answers of a tenant were erased by hand: an audit event about no single key. `tenant` is its pseudonym.

    `finished` is False when nobody can tell whether all of them are.
    """

    tenant: str
    actor: str
    reason: str
    data_keys: int
    wiped: int
    finished: bool


@dataclass(frozen=True, slots=True)
class ResponsesSealed(Event):
    """Plain answers were sealed by hand: an audit event about no single key.

    `sealed` says how many. `finished` is False when the command broke off.
    """

    actor: str
    reason: str
    sealed: int
    finished: bool


@dataclass(frozen=True, slots=True)
class QuotaSet(Event):
    """The limits of a tenant were set by hand: an audit event about no single key. `tenant` is its pseudonym."""

    tenant: str
    actor: str
    reason: str
    limits: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StoreInitialised(Event):
    """A store that can lose its memory was made ready by hand, so that keys run in it: an audit event about no single key."""

    actor: str
    reason: str
    store_id: str


@dataclass(frozen=True, slots=True)
class DataLossAcknowledged(Event):
    """Keys that a store may have forgotten run again, by hand: an audit event about no single key.

    `parts` says how many parts of the store stood how before. `forced`: owners that survived had time left to put their
    claims back. `finished` is False when nobody can tell whether it was done.
    """

    actor: str
    reason: str
    forced: bool
    parts: Mapping[str, int]
    finished: bool


@dataclass(frozen=True, slots=True)
class TaskRun(Event):
    """A chore has run: about no single key, and `operation` is its name. `counts` are its report's numbers, by name.

    `finished` is False when its budget ended first, or an error did: then `error` is the exception's class name.
    """

    seconds: float
    counts: Mapping[str, int]
    finished: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class JanitorMissing(Event):
    """No janitor has reported for two intervals: about no single key. Told once by each process, until one reports again."""

    seconds: float


Observer: TypeAlias = Callable[[Event], None]


def kinds() -> tuple[type[Event], ...]:
    """Every event that there is, in the order of this file."""
    # By name: until it is collected, the class that `slots=True` has replaced is a subclass too.
    return tuple(
        kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
    )


def name_of(kind: type[Event]) -> str:
    """What an event is called where classes have no place: `claim-granted`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower()


def facts_of(kind: type[Event]) -> tuple[str, ...]:
    """The names of what this event tells besides `record` and `operation`."""
    return tuple(name for name in kind.__dataclass_fields__ if name not in Event.__dataclass_fields__)


class Observers:
    """Tells every observer, and lets none of them break a payment: what one raises is logged and passed over."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def __call__(self, event: Event) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception:  # noqa: BLE001 - whatever it is, the payment goes on
                _log.exception("an observer failed on %s", type(event).__name__)
