"""Finding the claims of vanished owners, and what became of their work."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypedDict

from flask_idempotency.engine.capabilities import Recovery, SeenRecord
from flask_idempotency.engine.errors import (
    ConfigurationError,
    IdempotencyError,
    KeyProviderUnavailable,
    NotApplied,
    StoreUnavailable,
)
from flask_idempotency.engine.events import Event, Reaped, ResolverAsked
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnExpiry, RequestInfo, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import (
    LAPSED,
    Happened,
    NeverHappened,
    Resolution,
    Settler,
    StillUnknown,
    UnknownOutcome,
    clamp_clock,
    max_remaining,
)
from flask_idempotency.maintenance.janitor import Batcher, BatchResult

FIRST_PAUSE_SECONDS: Final = 30.0
LAST_PAUSE_SECONDS: Final = 3600.0
"""Between two questions to a resolver about one key: the pauses double from one to the other."""

ASKED_AT_ONCE: Final = 1
"""A resolver calls somebody else, and may take its time: what is to be asked about after that waits for its own turn."""

_log = logging.getLogger("flask_idempotency")


class _Why(TypedDict):
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReapReport:
    """What one run has found."""

    quarantined: int = 0
    waiting: int = 0
    """Lapsed, and to be taken over by the next retry: nothing to do until there is one."""
    overtaken: int = 0
    """Somebody was faster: the owner, a retry, or another janitor."""
    asked: int = 0
    """Quarantined ones whose endpoint has a resolver, and whose turn it was."""
    completed: int = 0
    released: int = 0
    unknown: int = 0
    """Still unknown, or said to have never happened while the owner may still be at it."""
    failed: int = 0
    """The resolver raised, or said something that cannot be."""
    shrunk: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ResolverContext:
    """All it takes to settle what resolvers know."""

    resolvers: Mapping[str, Callable[[UnknownOutcome], Resolution]]
    """By endpoint. The answer of a `Happened` is a `StoredResponse` by then."""
    policy_of: Callable[[RequestInfo], Policy]
    settler: Settler
    downstream: Callable[[SeenRecord, str], str]
    """What `current_claim.downstream_key(name)` was for this record. Raises `ConfigurationError` where nobody can tell."""
    owner: bytes | None = None
    """What the tokens of this application's claims begin with. None: nobody else has any in this store."""
    first_pause: float = FIRST_PAUSE_SECONDS
    """Seconds between the first two questions: longer than an owner that lives needs to renew its lease."""


def reap(
    unsettled: Recovery,
    *,
    horizon: float,
    drain: Batcher,
    observers: Callable[[Event], None],
    label: Callable[[StorageKey], str],
    asking: ResolverContext | None = None,
) -> ReapReport:
    """Quarantine the claims whose lease was over by this horizon (seconds since the epoch, store's clock) and whose rule
    says so, and ask resolvers about those that are quarantined.

    One that is to be taken over is left to the next retry: only that knows the request. Raises `StoreUnavailable` when the
    store does not answer; what was done until then stays done.
    """
    counts: Counter[str] = Counter()
    cursor: bytes | None = b""

    def quarantine(limit: int) -> BatchResult:
        nonlocal cursor
        sheet = unsettled.expired_leases(horizon=horizon, after=cursor or b"", limit=limit)
        for found in sheet.found:
            if found.record.on_expiry is OnExpiry.TAKEOVER:
                continue
            if unsettled.quarantine_expired(found, horizon=horizon):
                counts["quarantined"] += 1
                observers(Reaped(label(found.key), found.record.info.operation))
            else:
                counts["overtaken"] += 1
        # At the end: a step that fails is repeated, and these are met again.
        counts["waiting"] += sum(found.record.on_expiry is OnExpiry.TAKEOVER for found in sheet.found)
        cursor = sheet.after
        return BatchResult(len(sheet.found), more=cursor is not None)

    def ask(limit: int) -> BatchResult:
        if asking is None:
            return BatchResult(0, more=False)
        due = unsettled.next_for_resolver(
            horizon=horizon,
            least=asking.first_pause,
            most=LAST_PAUSE_SECONDS,
            limit=min(limit, ASKED_AT_ONCE),
            owner=asking.owner,
        )
        for found in due:
            resolver = asking.resolvers.get(found.record.info.operation)
            if resolver is not None:
                counts["asked"] += 1
                counts[_resolved(found, resolver, asking, observers, label, horizon=horizon)] += 1
        return BatchResult(len(due), more=bool(due))

    began = drain.monotonic()
    first = drain.run(quarantine)
    rest = replace(drain, budget=drain.budget - (drain.monotonic() - began))
    second = rest.run(ask) if asking is not None and asking.resolvers else None
    return ReapReport(
        **counts,
        shrunk=first.shrunk + (second.shrunk if second else 0),
        finished=first.finished and (second is None or second.finished),
    )


def _resolved(
    found: SeenRecord,
    resolver: Callable[[UnknownOutcome], Resolution],
    asking: ResolverContext,
    observers: Callable[[Event], None],
    label: Callable[[StorageKey], str],
    *,
    horizon: float,
) -> str:
    """Which of a report's counts this was."""

    def unsettled(answer: str) -> None:
        observers(ResolverAsked(label(found.key), found.record.info.operation, answer=answer))

    def failed(error: Exception, why: str) -> str:
        _log.error("the resolver of %s failed, or said what cannot be: %s", found.record.info.operation, why)
        unsettled(type(error).__name__)
        return "failed"

    try:
        resolution = resolver(UnknownOutcome(found.record, lambda name: asking.downstream(found, name)))
    except Exception as error:  # noqa: BLE001 - an application's own function may raise anything, and its turn comes again
        # By its class, unless it is ours: other services' clients may quote what they were to do, and for whom.
        return failed(error, str(error) if isinstance(error, ConfigurationError) else type(error).__name__)
    try:
        policy = asking.policy_of(found.record.info)
        settled = _settle(found, resolution, policy, asking.settler, horizon=horizon)
    except (KeyProviderUnavailable, NotApplied) as error:
        # It may be one tenant's keys alone, or one answer's cache: the others, whose turn it is as well, are not to wait.
        return failed(error, str(error))
    except StoreUnavailable:
        raise
    except Exception as error:  # noqa: BLE001 - nor may what it says lead anywhere else
        return failed(error, str(error) if isinstance(error, IdempotencyError | TypeError) else type(error).__name__)
    if settled == "unknown":
        unsettled("still-unknown")
    return settled


def _settle(found: SeenRecord, resolution: Resolution, policy: Policy, settler: Settler, *, horizon: float) -> str:
    why: _Why = {"actor": "resolver", "reason": "resolved"}
    match resolution:
        case Happened(answer):
            if not isinstance(answer, StoredResponse):
                raise TypeError(f"the answer of a resolver is no result, but {type(answer).__name__}")
            return "completed" if settler.complete(found, answer, keep=policy.keep, **why) else "overtaken"
        case NeverHappened():
            if found.record.payload is not None:
                raise ConfigurationError(
                    "a resolver said NeverHappened() of work that was done: its record holds an answer"
                )
            if max_remaining(clamp_clock(found.record, horizon), max_runtime=policy.max_runtime) > 0:
                # The other side has not heard of it yet, and the owner may be about to ask.
                return "unknown"
            if found.record.reason == LAPSED and not found.asked:
                # Leases that end all at once may have been ended by a clock that was set right. By the next turn an owner
                # that lives has renewed its own.
                return "unknown"
            return "released" if settler.force_release(found, **why) else "overtaken"
        case StillUnknown():
            return "unknown"
        case unexpected:  # of an application's own function
            # By its class alone: it may hold an answer.
            raise TypeError(
                f"a resolver returns Happened, NeverHappened or StillUnknown, not {type(unexpected).__name__}"
            )
