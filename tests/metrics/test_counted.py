"""Every event counts for something, or says why it does not."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask
from prometheus_client import CollectorRegistry

from flask_idempotency.engine import events
from flask_idempotency.engine.events import Event, facts_of, kinds
from flask_idempotency.maintenance.janitor import TASKS
from flask_idempotency.metrics import COUNTED, FAMILIES, OTHER, Meter

RUNS: dict[str, Any] = {
    "attempt": 1,
    "status": 201,
    "byte_size": 5,
    "counts": {"removed": 2},
    "seconds": 0.5,
    "error": "",
    "reason": "status-503",
    "actor": "resolver",
    "verb": "completed",
    "sent": 3,
    "delayed": 2,
    "dead": 0,
}


def made(kind: type[Event], **said: Any) -> Event:
    return kind("r", "expire", **{fact: said.get(fact, RUNS.get(fact, fact)) for fact in facts_of(kind)})


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def meter(registry: CollectorRegistry) -> Meter:
    return Meter(Flask("shop"), name="shop", registry=registry)


def test_every_event_has_a_metric_or_a_reason() -> None:
    """A new event cannot be forgotten."""
    for kind in kinds():
        match COUNTED[kind]:
            case str(because):
                assert because
            case counted:
                assert counted
                assert {counts.family for counts in counted} <= set(FAMILIES)


def test_every_metric_is_changed_by_an_event_or_a_store_call() -> None:
    """One that nothing counts would be 0 for ever, and look like good news."""
    fed = {c.family for counted in COUNTED.values() if not isinstance(counted, str) for c in counted}

    assert {*fed, "store_call_duration_seconds"} == set(FAMILIES)


def rises(meter: Meter, registry: CollectorRegistry, event: Event) -> dict[tuple[str, ...], float]:
    """What this event has made rise, by its name and the values of its labels."""

    def values() -> dict[tuple[str, ...], float]:
        return {
            (
                sample.name.removeprefix("idempotency_"),
                *(v for k, v in sample.labels.items() if k not in ("app", "le")),
            ): (sample.value)
            for metric in registry.collect()
            for sample in metric.samples
            if not sample.name.endswith(("_created", "_bucket"))
        }

    before = values()
    meter.event(event)
    return {name: value - before.get(name, 0.0) for name, value in values().items() if value != before.get(name, 0.0)}


CASES: dict[type[Event], dict[tuple[str, ...], float]] = {
    events.ClaimGranted: {("claims_total", "first"): 1},
    events.ReplayServed: {("replays_total", "kept"): 1},
    events.ConflictRefused: {("refusals_total", "in-flight"): 1},
    events.MismatchRefused: {("refusals_total", "key-reused"): 1},
    events.UnknownRefused: {("refusals_total", "outcome-unknown"): 1},
    events.QuotaRefused: {("refusals_total", "quota-exceeded"): 1, ("quota_refusals_total", OTHER): 1},
    events.ErasedRefused: {("refusals_total", "response-erased"): 1},
    events.ExpiredRefused: {("refusals_total", "key-expired"): 1},
    events.RefusedAfterDataLoss: {("refusals_total", "memory-lost"): 1},
    events.DataLossDetected: {("data_losses_total", OTHER): 1},
    events.ClaimRestored: {("restored_claims_total",): 1},
    events.KeyVoided: {("voided_keys_total",): 1},
    events.VoidedRefused: {("refusals_total", "key-voided"): 1},
    events.Completed: {
        ("completions_total", "2xx", "kept"): 1,
        ("response_size_bytes_count",): 1,
        ("response_size_bytes_sum",): 5,
    },
    events.Released: {("releases_total", "status-5xx"): 1},
    events.Quarantined: {("quarantines_total", "status-5xx"): 1},
    events.Paused: {("pauses_total", "status-5xx"): 1},
    events.StepFinished: {
        ("steps_total", "step", OTHER, "finished"): 1,
        ("step_duration_seconds_count",): 1,
        ("step_duration_seconds_sum",): 0.5,
        ("step_result_size_bytes_count",): 1,
        ("step_result_size_bytes_sum",): 5,
    },
    events.StepRecalled: {("steps_total", "step", OTHER, "recalled"): 1},
    events.StepFailed: {("steps_total", "step", OTHER, "failed"): 1},
    events.StepDoubtful: {("steps_total", "step", OTHER, "in-doubt"): 1},
    events.StepResultNotKept: {("steps_total", "step", OTHER, "not-kept"): 1},
    events.StepsChangedHeld: {},
    events.StepSettled: {("step_resolutions_total", "completed", "resolver"): 1},
    events.CommittedEarly: {("early_commits_total",): 1},
    events.LeaseExpired: {("lease_losses_total",): 1},
    events.RenewalFailed: {("renewal_failures_total",): 1},
    events.MaxRuntimeExceeded: {("max_runtime_exceeded_total",): 1},
    events.CompletionRetrying: {("completion_failures_total", "delayed"): 1},
    events.CompletionFailed: {("completion_failures_total", "abandoned"): 1},
    events.StoreFailed: {("store_failures_total", "unprotected"): 1},
    events.RecordCorrupt: {("refusals_total", "record-corrupt"): 1, ("corrupt_records_total",): 1},
    events.ReplayForbidden: {("refusals_total", "replay-forbidden"): 1},
    events.Reaped: {("quarantines_total", "lease-expired"): 1},
    events.FinishTried: {("finish_tries_total", OTHER): 1},
    events.FinishGaveUp: {("finish_gave_up_total",): 1},
    events.Resolved: {("resolutions_total", "completed", "resolver"): 1},
    events.ResolverAsked: {("resolver_undecided_total", "failed"): 1},
    events.ResponsesSealed: {("operator_actions_total", "responses-sealed"): 1},
    events.TenantErased: {("operator_actions_total", "tenant-erased"): 1},
    events.QuotaSet: {("operator_actions_total", "quota-set"): 1},
    events.StoreInitialised: {("operator_actions_total", "store-initialised"): 1},
    events.DataLossAcknowledged: {("operator_actions_total", "data-loss-acknowledged"): 1},
    events.Observation: {("observations_total", OTHER): 1},
    events.TaskRun: {
        ("task_runs_total", "expire", "finished"): 1,
        ("task_duration_seconds_count", "expire"): 1,
        ("task_duration_seconds_sum", "expire"): 0.5,
        ("task_counts_total", "expire", "removed"): 2,
    },
    events.MessagesRelayed: {("outbox_attempts_total", "sent"): 3, ("outbox_attempts_total", "delayed"): 2},
    events.MessageDead: {},
    events.MessageSettled: {("operator_actions_total", OTHER): 1},
    events.JanitorMissing: {},
}


def test_an_event_changes_these_metrics_only(meter: Meter, registry: CollectorRegistry) -> None:
    for kind in kinds():
        assert CASES[kind] == rises(meter, registry, made(kind)), kind


@pytest.mark.parametrize(
    ("event", "rise"),
    (
        pytest.param(made(events.ClaimGranted, attempt=2), {("claims_total", "takeover"): 1}, id="taken over"),
        pytest.param(made(events.ReplayServed, kept=False), {("replays_total", "tombstone"): 1}, id="tombstone"),
        pytest.param(
            made(events.Completed, kept=False, status=500),
            {("completions_total", "5xx", "tombstone"): 1},
            id="not kept",
        ),
        pytest.param(
            made(events.Completed, kept=False, status=99), {("completions_total", OTHER, "tombstone"): 1}, id="99"
        ),
        pytest.param(
            made(events.QuotaRefused, limit="in-flight"),
            {("refusals_total", "quota-exceeded"): 1, ("quota_refusals_total", "in-flight"): 1},
            id="quota",
        ),
        pytest.param(
            made(events.Released, reason="worker-interrupted"), {("releases_total", "worker-interrupted"): 1}, id="word"
        ),
        pytest.param(
            made(events.Quarantined, reason="memory-lost"), {("quarantines_total", "memory-lost"): 1}, id="lost"
        ),
        pytest.param(
            made(events.Quarantined, reason="k-1234"), {("quarantines_total", OTHER): 1}, id="an unknown word"
        ),
        pytest.param(
            made(events.StoreFailed, unprotected=False), {("store_failures_total", "refused"): 1}, id="refused"
        ),
        pytest.param(
            made(events.Resolved, actor="mallory"),
            {("resolutions_total", "completed", "person"): 1},
            id="by a person",
        ),
        pytest.param(
            made(events.Resolved, certain=False),
            {("resolutions_total", "uncertain", "resolver"): 1},
            id="perhaps",
        ),
        pytest.param(
            made(events.MessageSettled, verb="discarded"),
            {("operator_actions_total", "message-discarded"): 1},
            id="a message",
        ),
        pytest.param(
            made(events.ResolverAsked, answer="still-unknown"),
            {("resolver_undecided_total", "still-unknown"): 1},
            id="unknown",
        ),
    ),
)
def test_the_facts_of_an_event_become_fixed_label_values(
    event: Event, rise: dict[tuple[str, ...], float], meter: Meter, registry: CollectorRegistry
) -> None:
    assert rise == rises(meter, registry, event)


def test_failed_and_unfinished_task_runs_have_different_labels(meter: Meter, registry: CollectorRegistry) -> None:
    outcomes = [
        next(name[2] for name in rises(meter, registry, event) if name[0] == "task_runs_total")
        for event in (
            events.TaskRun("", "reap", 1.0, counts={}, finished=False),
            events.TaskRun("", "reap", 1.0, counts={}, finished=False, error="OSError"),
        )
    ]

    assert ["unfinished", "failed"] == outcomes


def test_a_heartbeat_changes_no_counter(meter: Meter, registry: CollectorRegistry) -> None:
    """A skew is no number of anything, and a counter cannot fall."""
    event = events.TaskRun("", "heartbeat", 0.1, counts={"skew_ms": -5, "stepped_ms": 7}, finished=True)

    assert not [name for name in rises(meter, registry, event) if name[0] == "task_counts_total"]
    assert "heartbeat" in TASKS


def test_unknown_label_values_use_no_memory(meter: Meter) -> None:
    """However many different words are said: neither series nor memory."""
    meter.event(made(events.Quarantined, reason="first"))
    before = len(meter._children)
    for number in range(100):
        meter.event(made(events.Quarantined, reason=f"k-{number}"))

    assert before == len(meter._children)
