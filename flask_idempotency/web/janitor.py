"""Assemble the janitor of one application: its tasks, its resolvers, and the monitors that look for a missing janitor.

The monitors also report a change of the identity of keys. They look at the store now and then, when a keyed request ends.
A missing janitor costs space and leaves unknown outcomes waiting; no promise depends on it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from threading import Lock
from typing import Any, Final

from flask import Flask

from flask_idempotency.assembly import Services, identities, is_process_local
from flask_idempotency.engine.capabilities import SeenRecord, TaskLog
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import DataLossDetected, Event, JanitorMissing
from flask_idempotency.engine.keys import Identity, marked, owner_mark
from flask_idempotency.engine.model import RequestInfo, StoredResponse
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Happened, Resolution, Settler, UnknownOutcome
from flask_idempotency.maintenance.janitor import (
    Batcher,
    HeartbeatReport,
    Janitor,
    Task,
    Work,
    expire,
    heartbeat,
    reconcile,
)
from flask_idempotency.maintenance.reap import FIRST_PAUSE_SECONDS, ReapReport, ResolverContext, reap
from flask_idempotency.maintenance.rotate import rotate
from flask_idempotency.operations.identity import (
    FORMER_LOADER,
    LOADER,
    NOT_SET_UP,
    NOTED_EVERY_SECONDS,
    IdentityShape,
    look,
    shape_of,
)
from flask_idempotency.settings import Settings
from flask_idempotency.web.callbacks import Callbacks
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.principals import extensions_of, may_have_httpauth
from flask_idempotency.web.responses import capture

BATCHES: Final = {"reap": 200, "expire": 1000, "rotate": 500, "reconcile": 20, "heartbeat": 1}
"""Records in one batch: some tens of milliseconds of the store's time, or some hundred of the janitor's."""

BUDGET_SHARE: Final = 0.8
"""The share of its interval that a task may run, so that it ends before its next run."""

LONGEST_BUDGET_SECONDS: Final = 3600.0
SHORTEST_BUDGET_SECONDS: Final = 5.0


def intervals(settings: Settings) -> dict[Task, float]:
    """Return the seconds between two runs of each scheduled task."""
    every: dict[Task, float | None] = {
        "reap": settings.reap_interval,
        "expire": settings.expire_interval,
        "rotate": settings.rotate_interval,
        "reconcile": settings.reconcile_interval,
        "heartbeat": settings.heartbeat_interval,
    }
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
    built: Services = state.built
    work = work_of(app, built, state.settings, state.loaders, state.policies, state.observers)
    return Janitor(work, task_log=built.tasks, observers=state.observers, host_clock=host_clock)


def settler_of(built: Services, settings: Settings, observers: Callable[[Event], None]) -> Settler | None:
    """Return what resolves keys of this application. None: the store cannot search its records."""
    if built.recovery is None:
        return None
    return Settler(built.recovery, built.codec, observers, label=identities(settings)[0].label)


def work_of(
    app: Flask,
    built: Services,
    settings: Settings,
    loaders: Callbacks,
    policies: Policies,
    observers: Callable[[Event], None],
) -> dict[Task, Work]:
    """Return each task that this application and its store have work for."""
    work: dict[Task, Work] = {}
    owner = owner_mark(settings.namespace)
    settler = settler_of(built, settings, observers)
    if built.recovery is not None and settler is not None:
        every = identities(settings)
        leases = [
            policies.resolve(endpoint, method).policy.lease
            for endpoint, method in policies.pairs()
            if endpoint in loaders.resolvers
        ]
        context = ResolverContext(
            resolvers=callable_resolvers(app, loaders.resolvers, policies),
            policy_of=partial(policy_of, policies),
            settler=settler,
            downstream=partial(downstream_key, every, settings.namespace),
            owner=owner,
            # A worker renews its lease after a third of it.
            first_pause=max([FIRST_PAUSE_SECONDS, *(lease / 2 for lease in leases)]),
        )
        recovery, label = built.recovery, every[0].label

        def reaping(horizon: float, drain: Batcher) -> ReapReport:
            # After a data loss a worker may run without a record, and a resolver would find no work of it yet.
            resolving = None if _has_lost_data(built, observers) else context
            return reap(recovery, horizon=horizon, drain=drain, observers=observers, label=label, resolving=resolving)

        work["reap"] = reaping
    if built.expiry is not None:
        expiry = built.expiry
        work["expire"] = lambda horizon, drain: expire(expiry, horizon=horizon, drain=drain)
    responses, data_keys, ring = built.responses, built.data_keys, settings.key_ring
    if settings.encryption != "off" and responses is not None and data_keys is not None and ring is not None:
        work["rotate"] = lambda horizon, drain: rotate(
            responses, data_keys, built.codec, ring, drain=drain, recovery=built.recovery, owner=owner
        )
    ledger = built.ledger
    if ledger is not None and (settings.quota is not None or loaders.quota is not None):
        work["reconcile"] = lambda horizon, drain: reconcile(ledger, drain=drain)
    if built.tasks is not None:
        task_log = built.tasks

        def beat(horizon: float, drain: Batcher) -> HeartbeatReport:
            return heartbeat(task_log.reports(), store_now=task_log.now(), host_now=time.time())

        work["heartbeat"] = beat
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


def policy_of(policies: Policies, about: RequestInfo) -> Policy:
    """Return the policy of the endpoint of this record, as the application is set up now."""
    return policies.resolve(about.operation, about.method).policy


def callable_resolvers(
    app: Flask, resolvers: Mapping[str, Callable[[UnknownOutcome], Resolution]], policies: Policies
) -> Mapping[str, Callable[[UnknownOutcome], Resolution]]:
    """Return resolvers by endpoint that run in an application context and return a `StoredResponse` in `Happened`.

    Raises `ConfigurationError` for endpoints that the application lacks: no resolver would ever run for their keys.
    """
    unknown = [endpoint for endpoint in resolvers if endpoint not in app.view_functions]
    if unknown:
        raise ConfigurationError(
            *(
                f"resolver({endpoint!r}): this application has no such endpoint. Name one as `url_for` would."
                for endpoint in unknown
            )
        )

    def call(resolver: Callable[[UnknownOutcome], Resolution], unknown: UnknownOutcome) -> Resolution:
        with app.app_context():
            resolution: Resolution = app.ensure_sync(resolver)(unknown)
            if isinstance(resolution, Happened) and not isinstance(resolution.answer, StoredResponse):
                return Happened(result_of(app, resolution.answer, policy_of(policies, unknown.record.info)))
            return resolution

    return {endpoint: partial(call, resolver) for endpoint, resolver in resolvers.items()}


def result_of(app: Flask, answer: Any, policy: Policy) -> StoredResponse:
    """Return what the store keeps of a response that a view might return. Raises `TypeError` for a stream."""
    response = app.make_response(answer)
    taken = capture(response, policy, on_end=lambda end: None, abandoned=deque())
    if taken.tee is not None or taken.result is None:
        raise TypeError("the response of a resolver must not be a stream")
    return taken.result


def downstream_key(identities: Sequence[Identity], namespace: str, found: SeenRecord, name: str) -> str:
    """Return what `current_claim.downstream_key(name)` was for the claim of this record.

    Raises `ConfigurationError` if the secret of that claim is unknown. Under another secret the key would be one that the
    other service has never seen, so it would look as if no work had been done.
    """
    for who in identities:
        if marked(found.record.token, who.mark(namespace)):
            return who.downstream_key(found.key, name)
    raise ConfigurationError(
        "downstream_key(): this key was claimed while two secrets were listed in IDEMPOTENCY_SECRET, or under one that is not "
        "listed any more, so the key that was sent downstream is unknown. Look the request up by other data, or run "
        "`flask idempotency resolve`."
    )


# Monitors.

AGAIN_SECONDS: Final = 60.0
"""The pause after a store did not answer, or while another process records the identity."""

_log = logging.getLogger("flask_idempotency")


def watch_of(built: Services, settings: Settings, observers: Callable[[Event], None]) -> JanitorMonitor | None:
    """Return a monitor, or None if no janitor is expected, the store keeps no task log, or only this process has it."""
    if built.tasks is None or settings.heartbeat_interval is None or is_process_local(settings):
        return None
    return JanitorMonitor(built.tasks, observers, every=settings.heartbeat_interval)


def shape_watch_of(
    app: Flask, built: Services, settings: Settings, loaders: Callbacks, policies: Policies
) -> IdentityMonitor | None:
    """Return a monitor, or None if the store keeps no task log, or only this process has it."""
    if built.shared_task_log is None or is_process_local(settings):
        return None
    return IdentityMonitor(built.shared_task_log, partial(shape_in, app, settings, loaders, policies))


def shape_in(app: Flask, settings: Settings, loaders: Callbacks, policies: Policies) -> IdentityShape:
    """Return the shape of the identity of keys, as the application is set up now."""
    former, extensions = settings.former_identity, extensions_of(app)
    tenant = () if loaders.tenant is None else (LOADER,)
    principal = extensions if loaders.principal is None else (LOADER,)
    before = None
    if former is not None:
        before = (
            former.namespace or settings.namespace,
            _kinds_before(former.tenant, tenant, extensions),
            _kinds_before(former.principal, principal, extensions),
        )
    keeps = []
    for endpoint, method in policies.pairs():
        with suppress(ConfigurationError):  # a fault of that endpoint alone, reported elsewhere
            keeps.append(policies.resolve(endpoint, method).policy.keep)
    return shape_of(
        app.name,
        settings.namespace,
        identities(settings),
        tenant=tenant,
        principal=principal,
        httpauth=may_have_httpauth(),
        keep=max([settings.policy.keep, *keeps]),
        former=before,
    )


def _kinds_before(
    former: tuple[str, ...] | Callable[[], str | None] | bool | None,
    present: tuple[str, ...],
    extensions: tuple[str, ...],
) -> tuple[str, ...]:
    """Return what named tenants or principals before, as IDEMPOTENCY_FORMER_IDENTITY describes it."""
    match former:
        case None:
            return present
        case bool():
            return ()
        case tuple(named):
            there = ("Flask-HTTPAuth", *extensions) if may_have_httpauth() else extensions
            return named if set(named) <= set(there) else (NOT_SET_UP,)
        case _:
            return (FORMER_LOADER,)


class JanitorMonitor:
    """Publish `JanitorMissing` once when no janitor has reported for two intervals.

    Any task counts, also one that cron runs: cron has no heartbeat. After a report, the next silence is published again.
    """

    def __init__(
        self,
        task_log: TaskLog,
        observers: Callable[[Event], None],
        *,
        every: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task_log = task_log
        self._observers = observers
        self._patience = 2 * every
        self._monotonic = monotonic
        self._lock = Lock()
        self._began: float | None = None
        self._due = -inf
        self._published = False

    def look(self) -> None:
        """Look at the task log if it is time. Call this when a keyed request ends; it never raises."""
        now = self._monotonic()
        if now < self._due:
            return
        with self._lock:
            if now < self._due:
                return  # another thread does it
            self._due = now + self._patience
            if self._began is None:
                # The janitor may be starting too.
                self._began = now
                return
        try:
            silence = min((entry.ago for entry in self._task_log.reports().values()), default=None)
        except Exception as error:  # noqa: BLE001 - the response is ready, and a monitor must not spoil it
            _log.debug("It is unknown whether a janitor runs (%s).", type(error).__name__)
            return
        missing = silence is None or silence > self._patience
        if missing and not self._published:
            self._observers(JanitorMissing("", "", now - self._began if silence is None else silence))
        self._published = missing


class IdentityMonitor:
    """Log each change of the identity of keys once.

    It first looks when the first request that claimed a key ends, because loaders may be registered until then. It asks the
    store again every hour. No request waits for it before its view runs.
    """

    def __init__(
        self,
        task_log: TaskLog,
        shape: Callable[[], IdentityShape],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task_log = task_log
        self._shape = shape
        self._monotonic = monotonic
        self._lock = Lock()
        self._due = -inf
        self._logged: set[str] = set()
        self._httpauth = False

    def look(self, *, httpauth: bool = False) -> None:
        """Compare the identity with the store's history if it is time. Call this when a request that claimed a key ends.

        It is nearly always quick, and never raises. `httpauth`: Flask-HTTPAuth named the caller, which is recorded once.
        """
        now = self._monotonic()
        if httpauth and not self._httpauth:
            self._httpauth, self._due = True, now
        if now < self._due:
            return
        with self._lock:
            if now < self._due:
                return  # another thread does it
            self._due = now + NOTED_EVERY_SECONDS
        try:
            history = look(self._task_log, self._shape(), note=True, httpauth=self._httpauth)
        except Exception as error:  # noqa: BLE001 - the response is ready, and a monitor must not spoil it
            self._due = now + AGAIN_SECONDS
            _log.debug("It is unknown whether the identity of keys has changed (%s).", type(error).__name__)
            return
        if not history.noted:
            self._due = now + AGAIN_SECONDS
        for change in history.changes:
            if change.what not in self._logged:
                self._logged.add(change.what)
                _log.log(logging.ERROR if change.certain else logging.WARNING, "%s %s", change.text, change.remedy)
