"""Assemble the janitor of one application: its tasks and its resolvers.

A worker that only handles requests does not import this: the janitor, the commands and the doctor do.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from flask import Flask

from flask_idempotency.assembly import Services, identities, is_process_local
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import DataLossDetected, Event
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.engine.model import RequestInfo, StoredResponse
from flask_idempotency.engine.operations import CONSUMERS, MESSAGE, Operations
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Happened, Resolution, Settler, StillUnknown, UnknownOutcome
from flask_idempotency.maintenance.finish import FinishReport, finish
from flask_idempotency.maintenance.janitor import (
    Batcher,
    Janitor,
    Task,
    Work,
    expire,
    heartbeat,
    reconcile,
)
from flask_idempotency.maintenance.reap import FIRST_PAUSE_SECONDS, ReapReport, ResolverContext, reap
from flask_idempotency.maintenance.relay import relay
from flask_idempotency.maintenance.rotate import RotateReport, rotate
from flask_idempotency.settings import Settings
from flask_idempotency.web.callbacks import Callbacks
from flask_idempotency.web.finishing import Finisher
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.recorded_steps import as_stored, downstream_key, read_steps
from flask_idempotency.web.responses import capture

if TYPE_CHECKING:
    from flask_idempotency.outbox.outbox import OutboxServices  # needs a package that is optional

_log = logging.getLogger("flask_idempotency")

BATCHES: Final[dict[Task, int]] = {
    "reap": 200,
    "finish": 50,
    "expire": 1000,
    "rotate": 500,
    "reconcile": 20,
    "heartbeat": 1,
    "relay": 100,
}
"""Records in one batch: some tens of milliseconds of the store's time, or some hundred of the janitor's."""

BUDGET_SHARE: Final = 0.8
"""The share of its interval that a task may run, so that it ends before its next run."""

LONGEST_BUDGET_SECONDS: Final = 3600.0
SHORTEST_BUDGET_SECONDS: Final = 5.0


def intervals(settings: Settings) -> dict[Task, float]:
    """Return the seconds between two runs of each scheduled task."""
    every = {task: getattr(settings, f"{task}_interval") for task in BATCHES}
    return {task: seconds for task, seconds in every.items() if seconds is not None}


def drain_of(task: Task, settings: Settings) -> Batcher:
    """Return the pace of this task. A task that is not scheduled may run for an hour when an operator starts it."""
    every = intervals(settings).get(task, LONGEST_BUDGET_SECONDS)
    budget = min(max(every * BUDGET_SHARE, SHORTEST_BUDGET_SECONDS), LONGEST_BUDGET_SECONDS)
    return Batcher(batch=BATCHES[task], budget=budget, rate=settings.expire_rate if task == "expire" else None)


def janitor_of(app: Flask, *, host_clock: Callable[[], float] = time.time) -> Janitor:
    """Return the janitor of this application.

    Raises `ConfigurationError` if the extension is not set up or disabled, and for resolvers of unknown endpoints.
    """
    state: Any = app.extensions.get("idempotency")
    if state is None or state.built is None or state.policies is None:
        raise ConfigurationError(
            "Idempotency is not set up on this application, or IDEMPOTENCY_ENABLED is False: the janitor has no work."
        )
    return Janitor(work_of(app), task_log=state.built.tasks, observers=state.observers, host_clock=host_clock)


def due_tasks(app: Flask) -> dict[str, float]:
    """Return the seconds between two runs of each task that should run for this application. Cron has no heartbeat.

    Empty: none is expected, or its resolvers have a fault, which `doctor` reports.
    """
    state: Any = app.extensions["idempotency"]
    settings: Settings = state.settings
    if (
        settings.heartbeat_interval is None
        or is_process_local(settings)
        or state.built is None
        or state.policies is None
    ):
        return {}
    try:
        # No resolver runs here, so a missing one is nothing to warn of.
        work = work_of(app, warns=False)
    except ConfigurationError:
        return {}
    return {task: every for task, every in intervals(settings).items() if task in work and task != "heartbeat"}


def settler_of(built: Services, settings: Settings, observers: Callable[[Event], None]) -> Settler | None:
    """Return what resolves keys of this application. None: the store cannot search its records."""
    if built.recovery is None:
        return None
    label = identities(settings)[0].label
    return Settler(built.recovery, built.codec, observers, label=label, journals=built.journals, audit=built.audit)


def work_of(app: Flask, *, warns: bool = True) -> dict[Task, Work]:
    """Return each task that this application and its store have work for. `warns`: of resolvers that will not be called."""
    state: Any = app.extensions["idempotency"]
    built: Services = state.built
    settings: Settings = state.settings
    loaders: Callbacks = state.loaders
    policies: Policies = state.policies
    observers: Callable[[Event], None] = state.observers
    work: dict[Task, Work] = {}
    owner = owner_mark(settings.namespace)
    settler = settler_of(built, settings, observers)
    if built.recovery is not None and settler is not None:
        every = identities(settings)
        # Fix no policy: the thread of an exporter asks while the application is still configured.
        leases = [
            policies.look(endpoint, method).policy.lease
            for endpoint, method in policies.pairs()
            if endpoint in loaders.resolvers
        ]
        known = map(loaders.operations.get, loaders.resolvers)
        leases += [operation.policy.lease for operation in known if operation is not None]
        downstream = partial(downstream_key, settings)
        context = ResolverContext(
            resolvers=callable_resolvers(app, loaders, policies, warns=warns),
            policy_of=partial(policy_of, policies, loaders.operations),
            settler=settler,
            downstream=downstream,
            steps=partial(read_steps, journals=built.journals, codec=built.codec, downstream=downstream),
            owner=owner,
            # A worker renews its lease after a third of it.
            first_pause=max([FIRST_PAUSE_SECONDS, *(lease / 2 for lease in leases)]),
        )
        recovery, label = built.recovery, every[0].label

        def resume_within(about: RequestInfo) -> float:
            policy = policy_of(policies, loaders.operations, about)
            return policy.keep if policy.resume_within is None else policy.resume_within

        def reaping(horizon: float, drain: Batcher) -> ReapReport:
            # After a data loss a worker may run without a record, and a resolver would find no work of it yet.
            resolving = None if _has_lost_data(built, observers) else context
            return reap(
                recovery,
                horizon=horizon,
                drain=drain,
                observers=observers,
                label=label,
                resolving=resolving,
                journals=built.journals,
                resume_within=resume_within,
            )

        work["reap"] = reaping
        # Fix no policy: the application may configure more.
        finishes = any(policies.look(*pair).policy.finish == "janitor" for pair in policies.pairs())
        if built.journals is not None and settings.enabled and finishes:
            finisher, journals = Finisher(app, built, settings, loaders, policies, observers, every), built.journals

            def finishing(horizon: float, drain: Batcher) -> FinishReport:
                if _has_lost_data(built, observers):
                    return FinishReport()
                return finish(
                    recovery,
                    journals,
                    horizon=horizon,
                    drain=drain,
                    within=lambda found: finisher.within(found) if found.record.token.startswith(owner) else None,
                    attempt=finisher.attempt,
                    later=finisher.later,
                )

            work["finish"] = finishing
    outbox: OutboxServices | None = app.extensions.get("idempotency_outbox")
    expiries = [] if built.expiry is None else [built.expiry]
    if outbox is not None and outbox.outbox.keep:
        expiries.append(outbox.table)
    if expiries:
        work["expire"] = lambda horizon, drain: expire(*expiries, horizon=horizon, drain=drain, journals=built.journals)
    responses, data_keys, ring = built.responses, built.data_keys, settings.key_ring
    if settings.encryption != "off" and responses is not None and data_keys is not None and ring is not None:

        def rotating(horizon: float, drain: Batcher) -> RotateReport:
            if outbox is not None:
                # First: the rest deletes data keys that no record needs, and messages may still need them.
                outbox.reseal(ring.newest)
            return rotate(
                responses,
                data_keys,
                built.codec,
                ring,
                drain=drain,
                recovery=built.recovery,
                journals=built.journals,
                owner=owner,
            )

        work["rotate"] = rotating
    ledger = built.ledger
    if ledger is not None and (settings.quota is not None or loaders.quota is not None):
        work["reconcile"] = lambda horizon, drain: reconcile(ledger, drain=drain)
    if built.tasks is not None:
        log = built.tasks
        work["heartbeat"] = lambda *_: heartbeat(log.reports(), store_now=log.now(), host_now=time.time())
    if outbox is not None:
        work["relay"] = lambda horizon, drain: relay(outbox.relay(), drain=drain)
    return work


def _has_lost_data(built: Services, observers: Callable[[Event], None]) -> bool:
    """Return whether the store lost data and the loss is not acknowledged. Publish a loss that is new."""
    if built.data_loss is None:
        return False
    status = built.data_loss.status()
    lost = not status.runs_unknown(built.data_loss.rules.after_loss)
    if status.noticed and status.gravest is not None and lost:
        observers(DataLossDetected("", "reap", loss=status.gravest.value))
    return lost


def with_budget(drain: Batcher, *, budget: float, on_progress: Callable[[int], object]) -> Batcher:
    """Return the same pace with the budget of an operator, who sees its progress."""
    return replace(drain, budget=budget, on_progress=on_progress)


# Resolvers.


def policy_of(policies: Policies, operations: Operations, about: RequestInfo) -> Policy:
    """Return the policy of the endpoint, inbox or task of this record, as the application is set up now."""
    return operations.policy_of(about, lambda endpoint, method: policies.resolve(endpoint, method).policy)


def is_known(app: Flask, operations: Operations, about: RequestInfo) -> bool:
    """Return whether this process has the endpoint, inbox or task of this record."""
    if about.method == MESSAGE:
        return operations.get(about.operation) is not None
    return about.operation in app.view_functions


def callable_resolvers(
    app: Flask, loaders: Callbacks, policies: Policies, *, warns: bool = True
) -> Mapping[str, Callable[[UnknownOutcome], Resolution]]:
    """Return resolvers by operation that run in an application context and return a `StoredResponse` in `Happened`.

    Leave out the inboxes and tasks that this process does not know: it knows neither their `max_runtime` nor their values.
    Raises `ConfigurationError` for endpoints that the application lacks: no resolver would ever run for their keys.
    """
    resolvers, operations = loaders.resolvers, loaders.operations
    elsewhere, unknown = unknown_operations(app, loaders)
    for name in elsewhere if warns else ():
        _log.warning(
            "resolver(%r): this process has no such inbox or task, so it resolves none of its keys. Import the module that "
            "makes it where the janitor runs.",
            name,
        )
    if unknown:
        raise ConfigurationError(
            *(
                f"resolver({endpoint!r}): this application has no such endpoint. Name one as `url_for` would."
                for endpoint in unknown
            )
        )

    def call(resolver: Callable[[UnknownOutcome], Resolution], unknown: UnknownOutcome) -> Resolution:
        about = unknown.record.info
        consumer = operations.get(about.operation) if about.method == MESSAGE else None
        if consumer is None and not is_known(app, operations, about):
            return StillUnknown()
        with app.app_context():
            resolution: Resolution = app.ensure_sync(resolver)(unknown)
            if consumer is not None and isinstance(resolution, Happened):
                return Happened(consumer.stored(resolution.answer))
            if isinstance(resolution, Happened) and not isinstance(resolution.answer, StoredResponse):
                return Happened(result_of(app, resolution.answer, policy_of(policies, operations, about)))
            return as_stored(resolution, policy_of(policies, operations, about))

    return {name: partial(call, resolver) for name, resolver in resolvers.items() if name not in elsewhere}


def unknown_operations(app: Flask, loaders: Callbacks) -> tuple[list[str], list[str]]:
    """Return what has a resolver and is unknown here: inboxes and tasks that this process has not imported; and endpoints."""
    unknown = [
        name for name in loaders.resolvers if name not in app.view_functions and loaders.operations.get(name) is None
    ]
    elsewhere = [name for name in unknown if name.startswith(CONSUMERS)]
    return elsewhere, [name for name in unknown if name not in elsewhere]


def result_of(app: Flask, answer: Any, policy: Policy) -> StoredResponse:
    """Return what the store keeps of a response that a view might return. Raises `TypeError` for a stream."""
    response = app.make_response(answer)
    taken = capture(response, policy, on_end=lambda end: None, abandoned=deque())
    if taken.tee is not None or taken.result is None:
        raise TypeError("the response of a resolver must not be a stream")
    return taken.result
