"""What is looked at in the store now and then, as keyed requests end: whether a janitor comes, and whether the identity of
keys has changed.

A missing janitor costs space and keeps unknown outcomes waiting; no promise hangs on it.
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

from flask_idempotency.assembly import Built, identities, in_one_process
from flask_idempotency.engine.capabilities import ChoreBook
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import Event, JanitorMissing
from flask_idempotency.operations.identity import (
    FORMER_LOADER,
    LOADER,
    NOT_SET_UP,
    NOTED_EVERY_SECONDS,
    Shape,
    look,
    shape_of,
)
from flask_idempotency.settings import Settings
from flask_idempotency.web.loaders import Loaders
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.principals import extensions_of, may_have_httpauth

AGAIN_SECONDS: Final = 60.0
"""After a store that did not answer, or while another process was noting."""

_log = logging.getLogger("flask_idempotency")


def watch_of(built: Built, settings: Settings, observers: Callable[[Event], None]) -> Watch | None:
    """None where no janitor is expected, where nothing tells whether one came, and where none can see the records."""
    if built.chores is None or settings.heartbeat_every is None or in_one_process(settings):
        return None
    return Watch(built.chores, observers, every=settings.heartbeat_every)


def shape_watch_of(
    app: Flask, built: Built, settings: Settings, loaders: Loaders, policies: Policies
) -> ShapeWatch | None:
    """None where the store cannot remember the shape of identity, and where it is forgotten with this process."""
    if built.book is None or in_one_process(settings):
        return None
    return ShapeWatch(built.book, partial(shape_in, app, settings, loaders, policies))


def shape_in(app: Flask, settings: Settings, loaders: Loaders, policies: Policies) -> Shape:
    """The shape of the identity of keys as it is set up now."""
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
        with suppress(ConfigurationError):  # of that endpoint alone, and reported where it belongs
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
    """What named tenants or callers before, by IDEMPOTENCY_FORMER_IDENTITY."""
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


class Watch:
    """Asks the store now and then whether a janitor has reported, and tells once when none has for two intervals.

    Any chore counts, whoever did it: cron has no heartbeat. After one has reported again, the next silence is told anew.
    """

    def __init__(
        self,
        book: ChoreBook,
        observers: Callable[[Event], None],
        *,
        every: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = book
        self._observers = observers
        self._patience = 2 * every
        self._monotonic = monotonic
        self._lock = Lock()
        self._began: float | None = None
        self._due = -inf
        self._told = False

    def look(self) -> None:
        """Called as each keyed request ends. Nearly always it only looks at a clock, and it never fails."""
        now = self._monotonic()
        if now < self._due:
            return
        with self._lock:
            if now < self._due:
                return  # another thread has been sent
            self._due = now + self._patience
            if self._began is None:
                # The janitor may be starting as we are.
                self._began = now
                return
        self._ask(watched=now - self._began)

    def _ask(self, *, watched: float) -> None:
        try:
            silence = min((entry.ago for entry in self._book.last().values()), default=None)
        except Exception as error:  # noqa: BLE001 - the answer is given, and nothing may spoil it
            _log.debug("whether a janitor comes is not known (%s)", type(error).__name__)
            return
        missing = silence is None or silence > self._patience
        if missing and not self._told:
            self._observers(JanitorMissing("", "", watched if silence is None else silence))
        self._told = missing


class ShapeWatch:
    """Reports a change of the identity of keys: when the first request that claimed a key has ended, and then each new one.

    Loaders may be registered until the first request, so this cannot be done earlier. It asks the store once, and then
    every hour; no request waits for it before its view runs.
    """

    def __init__(
        self,
        book: ChoreBook,
        shape: Callable[[], Shape],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = book
        self._shape = shape
        self._monotonic = monotonic
        self._lock = Lock()
        self._due = -inf
        self._told: set[str] = set()
        self._httpauth = False

    def look(self, *, httpauth: bool = False) -> None:
        """Called as each request that claimed a key ends. Nearly always it only looks at a clock, and it never fails.

        `httpauth`: Flask-HTTPAuth named the caller. The first time that is noted too.
        """
        now = self._monotonic()
        if httpauth and not self._httpauth:
            self._httpauth, self._due = True, now
        if now < self._due:
            return
        with self._lock:
            if now < self._due:
                return  # another thread has been sent
            self._due = now + NOTED_EVERY_SECONDS
        try:
            history = look(self._book, self._shape(), note=True, httpauth=self._httpauth)
        except Exception as error:  # noqa: BLE001 - the response is there, and nothing may spoil it
            self._due = now + AGAIN_SECONDS
            _log.debug("whether the identity of keys has changed is not known (%s)", type(error).__name__)
            return
        if not history.noted:
            self._due = now + AGAIN_SECONDS
        for change in history.changes:
            if change.what not in self._told:
                self._told.add(change.what)
                _log.log(logging.ERROR if change.certain else logging.WARNING, "%s %s", change.text, change.remedy)
