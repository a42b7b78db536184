"""Look for a missing janitor, and for a change of the identity of keys: now and then, when a keyed request ends.

A missing janitor costs space and leaves unknown outcomes waiting; no promise depends on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from threading import Lock
from typing import Final

from flask import Flask

from flask_idempotency.assembly import Services, identities, is_process_local
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import Event, JanitorMissing
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.tasks import TaskLog, silence_of
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
    if built.task_log is None or is_process_local(settings):
        return None
    return IdentityMonitor(built.task_log, partial(shape_in, app, settings, loaders, policies))


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
            keeps.append(policies.resolve(endpoint, method).policy.lifetime)
    return shape_of(
        app.name,
        settings.namespace,
        identities(settings),
        tenant=tenant,
        principal=principal,
        httpauth=may_have_httpauth(),
        keep=max([settings.policy.lifetime, *keeps]),
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

    Any task but `relay` counts, also one that cron runs: cron has no heartbeat. After a report, the next silence is
    published again.
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
            silence = silence_of(self._task_log.reports())
        except Exception as error:  # noqa: BLE001 - the response is ready, and a monitor must not spoil it
            _log.debug("It is unknown whether a janitor runs (%s).", cause_of(error))
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
            _log.debug("It is unknown whether the identity of keys has changed (%s).", cause_of(error))
            return
        if not history.noted:
            self._due = now + AGAIN_SECONDS
        for change in history.changes:
            if change.what not in self._logged:
                self._logged.add(change.what)
                _log.log(logging.ERROR if change.certain else logging.WARNING, "%s %s", change.text, change.remedy)
