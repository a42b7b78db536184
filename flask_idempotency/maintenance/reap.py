"""Quarantine claims whose lease expired, and ask the application's resolvers about quarantined keys."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

from flask_idempotency.engine.audit import RESOLVER, SAYS_FAILED, SAYS_NEVER, SAYS_UNKNOWN
from flask_idempotency.engine.capabilities import RecordPage, Recovery, SeenRecord
from flask_idempotency.engine.errors import (
    ConfigurationError,
    CorruptRecord,
    IdempotencyError,
    KeyProviderUnavailable,
    NotApplied,
    StoreUnavailable,
)
from flask_idempotency.engine.events import Event, Quarantined, Reaped, ResolverAsked
from flask_idempotency.engine.journal import EMPTY, NEVER_RESUMED, Journal, Journals
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import LAPSED, OnExpiry, RequestInfo, StoredResponse
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import (
    Happened,
    NeverHappened,
    Resolution,
    Resume,
    SeenStep,
    SettledStep,
    Settler,
    StillUnknown,
    UnknownOutcome,
)
from flask_idempotency.engine.vanished import clamp_clock, max_remaining
from flask_idempotency.maintenance.janitor import Batcher, BatchResult, RunReport, pages

FIRST_PAUSE_SECONDS: Final = 30.0
LAST_PAUSE_SECONDS: Final = 3600.0
"""The pauses between two calls of a resolver for one key double from the first to the last."""

CALLED_AT_ONCE: Final = 1
"""Keys in one step of resolvers. A resolver calls another service and may be slow, so each key has its own step."""

_log = logging.getLogger("flask_idempotency")


@dataclass(frozen=True, slots=True)
class ReapReport(RunReport):
    """The result of one run of `reap`."""

    quarantined: int = 0
    waiting: int = 0
    """Leases that expired under a policy by which the next retry takes over: only a retry ends them."""
    never_resumed: int = 0
    """Requests with recorded steps that no retry resumed within `resume_within`. They are quarantined now."""
    overtaken: int = 0
    """The worker, a retry or another janitor changed the record first."""
    asked: int = 0
    """Quarantined keys that were due, and whose endpoint has a resolver."""
    completed: int = 0
    released: int = 0
    resumed: int = 0
    """Keys of which the resolver settled a step, or let the next retry go on."""
    unknown: int = 0
    """Still unknown; or `NeverHappened`, while the worker may still run."""
    never_happened: int = field(default=0, compare=False)
    """Those of `unknown` of which the resolver says that they never happened."""
    believed_in: float = field(default=0.0, compare=False)
    """Seconds until the last of these is believed."""
    failed: int = 0
    """The resolver raised an exception, or returned an impossible value."""


@dataclass(frozen=True, slots=True)
class ResolverContext:
    """The application's resolvers, and what a key needs to be resolved."""

    resolvers: Mapping[str, Callable[[UnknownOutcome], Resolution]]
    """By endpoint. The response of a `Happened` is already a `StoredResponse`."""
    policy_of: Callable[[RequestInfo], Policy]
    settler: Settler
    downstream: Callable[[SeenRecord, str], str]
    """Return what `current_claim.downstream_key(name)` was for this record. Raises `ConfigurationError` if that is unknown."""
    steps: Callable[[SeenRecord], tuple[Journal, tuple[SeenStep, ...]]] = lambda found: (EMPTY, ())
    """Read the journal of this record, and what a resolver may know of it."""
    owner: bytes | None = None
    """The prefix of this application's tokens. None: the store holds no other application's records."""
    first_pause: float = FIRST_PAUSE_SECONDS
    """Seconds between the first two calls: longer than a living worker needs to renew its lease."""

    def ask(
        self,
        found: SeenRecord,
        resolver: Callable[[UnknownOutcome], Resolution],
        observers: Callable[[Event], None],
        label: Callable[[StorageKey], str],
        horizon: float,
    ) -> str | float:
        """Call the resolver, act on its result, and return the name of the count in `ReapReport` that rises.

        Or return in how many seconds a "never happened" is believed, which is still unknown.
        """
        endpoint = found.record.info.operation

        def failed(error: Exception, why: str) -> str:
            _log.error("The resolver of %s failed or returned an impossible value: %s", endpoint, why)
            observers(ResolverAsked(label(found.key), endpoint, answer=cause_of(error)))
            with suppress(StoreUnavailable):  # the next step of the run meets it
                self.settler.note(found, SAYS_FAILED, cause_of(error))
            return "failed"

        try:
            journal, steps = self.steps(found)
        except CorruptRecord as error:
            return failed(error, str(error))
        unknown = UnknownOutcome(
            found.record,
            lambda name: self.downstream(found, name),
            steps,
            lambda name: self.policy_of(found.record.info).recorded_as(name),
        )
        try:
            resolution = resolver(unknown)
        except Exception as error:  # noqa: BLE001 - an application's function may raise anything; the key's next turn comes
            # Log only the class of a foreign exception: clients of other services may quote a body or a person in its text.
            return failed(error, str(error) if isinstance(error, ConfigurationError) else type(error).__name__)
        try:
            outcome = self._apply(found, journal, resolution, horizon)
            if isinstance(outcome, float) or outcome == "unknown":
                self.settler.note(found, SAYS_NEVER if isinstance(outcome, float) else SAYS_UNKNOWN)
        except Exception as error:
            # The first two may concern one tenant's keys or one response's cache. Neither they nor a wrong value stop the run.
            if isinstance(error, StoreUnavailable) and not isinstance(error, KeyProviderUnavailable | NotApplied):
                raise
            return failed(
                error, str(error) if isinstance(error, IdempotencyError | TypeError) else type(error).__name__
            )
        if isinstance(outcome, float) or outcome == "unknown":
            observers(ResolverAsked(label(found.key), endpoint, answer="still-unknown"))
        return outcome

    def _apply(self, found: SeenRecord, journal: Journal, resolution: Resolution, horizon: float) -> str | float:
        """Resolve the key as its resolver decided. Return as `ask` does."""
        settler, policy = self.settler, self.policy_of(found.record.info)
        match resolution:
            case Happened(response):
                if not isinstance(response, StoredResponse):
                    raise TypeError(f"the response of a resolver is no StoredResponse, but {type(response).__name__}")
                resolved = settler.complete(
                    found, response, keep=policy.keep, remember=policy.remember, actor=RESOLVER, reason="resolved"
                )
                return "completed" if resolved else "overtaken"
            case NeverHappened():
                if found.record.payload is not None:
                    raise ConfigurationError(
                        "a resolver returned NeverHappened() for completed work: the record holds a response"
                    )
                recorded = dict.fromkeys(entry.name for entry in journal.entries if entry.has_effect)
                if recorded:
                    raise ConfigurationError(
                        f"a resolver returned NeverHappened() for a request with recorded steps ({', '.join(recorded)}): they "
                        "would run again. Settle the steps instead."
                    )
                if (wait := self._may_still_act(found, horizon)) is not None:
                    return wait
                return "released" if settler.force_release(found, actor=RESOLVER, reason="resolved") else "overtaken"
            case SettledStep() | Resume():
                settled = (resolution,) if isinstance(resolution, SettledStep) else resolution.settled
                wait = self._may_still_act(found, horizon)
                if wait is not None and not all(step.happened for step in settled):
                    return wait
                resumed = settler.resume(found, journal, settled, actor=RESOLVER, reason="resolved")
                return "resumed" if resumed else "overtaken"
            case StillUnknown():
                return "unknown"
            case unexpected:  # from an application's function
                # Name only its class: it may hold a response.
                raise TypeError(
                    "a resolver returns Happened, NeverHappened, StillUnknown, Resume or a settled step, not "
                    f"{type(unexpected).__name__}"
                )

    def _may_still_act(self, found: SeenRecord, horizon: float) -> float | None:
        """Return for how many seconds the worker may still be about to call the other service. None: it is gone."""
        max_runtime = self.policy_of(found.record.info).max_runtime
        left = max_remaining(clamp_clock(found.record, horizon), max_runtime=max_runtime)
        if left > 0:
            return left
        # A clock that was set may have ended many leases together. A living worker renews its lease before the next turn.
        return self.first_pause if found.record.reason == LAPSED and not found.returned_before else None


def reap(
    recovery: Recovery,
    *,
    horizon: float,
    drain: Batcher,
    observers: Callable[[Event], None],
    label: Callable[[StorageKey], str],
    resolving: ResolverContext | None = None,
    journals: Journals | None = None,
    resume_within: Callable[[RequestInfo], float] = lambda about: inf,
) -> ReapReport:
    """Quarantine claims whose lease expired by this horizon, then call resolvers for quarantined keys that are due.

    `horizon` is in seconds since the epoch, by the store's clock. Leave a claim that a retry may take over to the next
    retry: only that knows the request. But with steps recorded it is quarantined as `never-resumed`, once its lease expired
    more than `resume_within` seconds before the horizon. Raises `StoreUnavailable` if the store does not answer; what was
    done until then stays done.
    """
    counts: Counter[str] = Counter()

    def quarantine(page: RecordPage) -> int:
        waiting = 0
        for found in page.found:
            if found.record.on_expiry is OnExpiry.TAKEOVER:
                over = found.record.deadline + resume_within(found.record.info) <= horizon
                if over and journals is not None and journals.give_up(found, horizon=horizon):
                    counts["never_resumed"] += 1
                    observers(Quarantined(label(found.key), found.record.info.operation, NEVER_RESUMED))
                else:
                    waiting += 1
            elif recovery.quarantine_expired(found, horizon=horizon):
                counts["quarantined"] += 1
                observers(Reaped(label(found.key), found.record.info.operation))
            else:
                counts["overtaken"] += 1
        # Count these last: a step that fails runs again, and meets them again.
        counts["waiting"] += waiting
        return len(page.found)

    waits: list[float] = []
    steps = [pages(partial(recovery.expired_leases, horizon=horizon), quarantine)]
    if resolving is not None and resolving.resolvers:
        context = resolving

        def resolve(limit: int) -> BatchResult:
            due = recovery.next_for_resolver(
                horizon=horizon,
                least=context.first_pause,
                most=LAST_PAUSE_SECONDS,
                limit=min(limit, CALLED_AT_ONCE),
                owner=context.owner,
            )
            for found in due:
                resolver = context.resolvers.get(found.record.info.operation)
                if resolver is not None:
                    counts["asked"] += 1
                    outcome = context.ask(found, resolver, observers, label, horizon)
                    if isinstance(outcome, float):
                        waits.append(outcome)
                        outcome = "unknown"
                    counts[outcome] += 1
            return BatchResult(len(due), more=bool(due))

        steps.append(resolve)
    # However many claims expired, resolvers are asked in each run.
    ended = drain.run(*steps, each=True)
    believed_in = max(waits, default=0.0)
    return ReapReport(
        **counts, never_happened=len(waits), believed_in=believed_in, shrunk=ended.shrunk, finished=ended.finished
    )
