"""Look for a missing janitor, and for a change of the identity of keys: now and then, when a keyed request ends.

A missing janitor costs space and leaves unknown outcomes waiting; no promise depends on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from threading import Lock
from typing import ClassVar, Final

from flask import Flask

from flask_idempotency.assembly import identities
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import Event, JanitorMissing
from flask_idempotency.engine.outages import LogLimit, cause_of
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


@dataclass(eq=False, repr=False)
class Monitor:
    """Looks at the task log now and then. `monotonic` is for tests."""

    question: ClassVar[str]
    """What it finds out."""

    task_log: TaskLog
    monotonic: Callable[[], float] = field(default=time.monotonic, kw_only=True)
    due: float = field(default=-inf, init=False)
    """When it looks next, by `monotonic`."""
    _lock: Lock = field(default_factory=Lock, init=False)

    def look(self) -> None:
        """Look if it is `due`. Call this when a keyed request ends. It never raises."""
        now = self.monotonic()
        with self._lock:
            if now < self.due:
                return  # another thread does it
            self.due = now + AGAIN_SECONDS
        try:
            self.due = now + self._look(now)
        except Exception as error:  # noqa: BLE001 - the response is ready, and a monitor must not spoil it
            _log.debug("It is unknown whether %s (%s).", self.question, cause_of(error))

    def _look(self, now: float) -> float:
        """Look now. Return the seconds until the next time."""
        raise NotImplementedError


@dataclass(eq=False, repr=False)
class JanitorMonitor(Monitor):
    """Publish `JanitorMissing` once when no janitor has reported for two intervals of `every` seconds.

    Any task but `relay` counts, also one that cron runs: cron has no heartbeat. After a report, the next silence is
    published again.
    """

    question = "a janitor runs"

    observers: Callable[[Event], None]
    every: float
    _began: float | None = field(default=None, init=False)
    _published: bool = field(default=False, init=False)

    def _look(self, now: float) -> float:
        patience = 2 * self.every
        if self._began is None:
            # The janitor may be starting too.
            self._began = now
            return patience
        silence = silence_of(self.task_log.reports())
        missing = silence is None or silence > patience
        if missing and not self._published:
            self.observers(JanitorMissing("", "", now - self._began if silence is None else silence))
        self._published = missing
        return patience


@dataclass(eq=False, repr=False)
class IdentityMonitor(Monitor):
    """Log each change of the identity of keys once.

    It first looks when the first request that claimed a key ends, because loaders may be registered until then. It asks the
    store again every hour. No request waits for it before its view runs.
    """

    question = "the identity of keys has changed"

    shape: Callable[[], IdentityShape]
    _logged: LogLimit = field(default_factory=LogLimit, init=False)
    _httpauth: bool = field(default=False, init=False)

    def note_httpauth(self) -> None:
        """Note that Flask-HTTPAuth named a caller: the next look records it."""
        if not self._httpauth:
            self._httpauth, self.due = True, -inf

    def _look(self, now: float) -> float:
        httpauth = self._httpauth
        history = look(self.task_log, self.shape(), note=True, httpauth=httpauth)
        for change in history.changes:
            if self._logged.take(change.what) is not None:
                _log.log(logging.ERROR if change.certain else logging.WARNING, "%s %s", change.text, change.remedy)
        # While it looked, Flask-HTTPAuth may have named its first caller.
        return NOTED_EVERY_SECONDS if history.noted and httpauth is self._httpauth else AGAIN_SECONDS
