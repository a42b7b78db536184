"""What each event counts for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from flask_idempotency.engine import events
from flask_idempotency.engine.events import Event

Sample: TypeAlias = tuple[tuple[str, ...], float]
"""The values of a family's labels, and by how much it rises, or what a histogram is shown."""

ONE: Sample = ((), 1.0)


@dataclass(frozen=True, slots=True)
class Counts:
    """One family that an event counts for."""

    family: str
    samples: Callable[[Any], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class Uncounted:
    """An event that counts for nothing, and why."""

    because: str


def _one(*values: str) -> Callable[[Any], Iterable[Sample]]:
    samples = ((values, 1.0),)
    return lambda event: samples


def _by(*labels: Callable[[Any], str]) -> Callable[[Any], Iterable[Sample]]:
    return lambda event: ((tuple([label(event) for label in labels]), 1.0),)


def _answer(event: events.ReplayServed | events.Completed) -> str:
    return "kept" if event.kept else "tombstone"


def _class(event: events.Completed) -> str:
    return f"{event.status // 100}xx"


def _cause(event: events.Released | events.Quarantined) -> str:
    if event.reason.startswith("status-"):
        return f"{event.reason[: len('status-') + 1]}xx"
    return event.reason


def _refused(code: str) -> Counts:
    return Counts("refusals", _one(code))


def _size(event: events.Completed) -> Iterable[Sample]:
    return (((), float(event.byte_size)),) if event.kept else ()


def _outcome(event: events.ChoreDone) -> str:
    return "failed" if event.error else "finished" if event.finished else "unfinished"


def _chore_counts(event: events.ChoreDone) -> Iterable[Sample]:
    # What a heartbeat reports is no number of anything, and may be below 0.
    if event.operation == "heartbeat":
        return ()
    return [((event.operation, name), float(count)) for name, count in event.counts.items() if count > 0]


COUNTED: Mapping[type[Event], tuple[Counts, ...] | Uncounted] = MappingProxyType(
    {
        events.ClaimGranted: (Counts("claims", _by(lambda event: "takeover" if event.attempt > 1 else "first")),),
        events.ReplayServed: (Counts("replays", _by(_answer)),),
        events.ConflictRefused: (_refused("in-flight"),),
        events.MismatchRefused: (_refused("key-reused"),),
        events.UnknownRefused: (_refused("outcome-unknown"),),
        events.QuotaRefused: (
            _refused("quota-exceeded"),
            Counts("quota_refusals", _by(lambda event: str(event.limit))),
        ),
        events.ErasedRefused: (_refused("answer-erased"),),
        events.LossRefused: (_refused("memory-lost"),),
        events.LossNoticed: (Counts("memory_losses", _by(lambda event: str(event.loss))),),
        events.ClaimRestored: (Counts("restored_claims", _one()),),
        events.Completed: (Counts("completions", _by(_class, _answer)), Counts("answer_size_bytes", _size)),
        events.Released: (Counts("releases", _by(_cause)),),
        events.Quarantined: (Counts("quarantines", _by(_cause)),),
        events.CommittedEarly: (Counts("early_commits", _one()),),
        events.LeaseExpired: (Counts("lease_losses", _one()),),
        events.RenewalFailed: (Counts("renewal_failures", _one()),),
        events.RenewalStopped: (Counts("overlong_views", _one()),),
        events.SettlementDelayed: (Counts("settlement_failures", _one("delayed")),),
        events.SettlementAbandoned: (Counts("settlement_failures", _one("abandoned")),),
        events.StoreFailed: (
            Counts("store_failures", _by(lambda event: "unprotected" if event.unprotected else "refused")),
        ),
        events.RecordCorrupt: (_refused("record-corrupt"), Counts("corrupt_records", _one())),
        events.ReplayForbidden: (_refused("replay-forbidden"),),
        events.Reaped: (Counts("quarantines", _one("lease-expired")),),
        events.Settled: (
            Counts(
                "settled_by_others",
                _by(
                    lambda event: event.verb if event.certain else "uncertain",
                    lambda event: "resolver" if event.actor == "resolver" else "person",
                ),
            ),
        ),
        events.ResolverAsked: (
            Counts(
                "resolver_misses",
                _by(lambda event: event.answer if event.answer == "still-unknown" else "failed"),
            ),
        ),
        events.TenantErased: (Counts("changes_by_hand", _one("tenant-erased")),),
        events.AnswersSealed: (Counts("changes_by_hand", _one("answers-sealed")),),
        events.QuotaSet: (Counts("changes_by_hand", _one("quota-set")),),
        events.StoreInitialised: (Counts("changes_by_hand", _one("store-initialised")),),
        events.LossAcknowledged: (Counts("changes_by_hand", _one("loss-acknowledged")),),
        events.ChoreDone: (
            Counts("chore_runs", _by(lambda event: event.operation, _outcome)),
            Counts("chore_duration_seconds", lambda event: (((event.operation,), event.seconds),)),
            Counts("chore_counts", _chore_counts),
        ),
        events.JanitorMissing: Uncounted("`idempotency_chore_age_seconds` says it, and goes on saying it"),
    }
)
"""Every event and the families it counts for, or why it counts for none."""
