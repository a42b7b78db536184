"""What is looked at in the store now and then, as keyed requests end: whether a janitor comes, and whether the identity of
keys has changed.

A missing janitor costs space and keeps unknown outcomes waiting; no promise hangs on it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    Chore,
    HeartbeatReport,
    Janitor,
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

# Resolvers as an application registers them, and as the janitor calls them.


def policy_of(policies: Policies, about: RequestInfo) -> Policy:
    """What holds for the endpoint that this record is of, as the application is set up now."""
    return policies.resolve(about.operation, about.method).policy


def callable_resolvers(
    app: Flask, resolvers: Mapping[str, Callable[[UnknownOutcome], Resolution]], policies: Policies
) -> Mapping[str, Callable[[UnknownOutcome], Resolution]]:
    """By endpoint, each in an application context, and with a `StoredResponse` for an answer.

    Raises `ConfigurationError` for endpoints that the application does not have: their keys would wait for ever.
    """
    unknown = [endpoint for endpoint in resolvers if endpoint not in app.view_functions]
    if unknown:
        raise ConfigurationError(
            *(
                f"resolver({endpoint!r}): this application has no such endpoint. Name one as `url_for` would."
                for endpoint in unknown
            )
        )
    return {endpoint: partial(_ask, app, resolver, policies) for endpoint, resolver in resolvers.items()}


def result_of(app: Flask, answer: Any, policy: Policy) -> StoredResponse:
    """What a store keeps of an answer that a view might return. Raises `TypeError` for a stream: there is nobody to read it."""
    response = app.make_response(answer)
    taken = capture(response, policy, on_end=lambda end: None, abandoned=deque())
    if taken.tee is not None or taken.result is None:
        raise TypeError("the answer of a resolver must not be a stream")
    return taken.result


def downstream_key(identities: Sequence[Identity], namespace: str, found: SeenRecord, name: str) -> str:
    """What `current_claim.downstream_key(name)` was for whoever claimed this record.

    Raises `ConfigurationError` where nobody can tell: under another secret it would be a key that the other side has never
    heard of, and that would look as if nothing had been done.
    """
    for who in identities:
        if marked(found.record.token, who.mark(namespace)):
            return who.downstream_key(found.key, name)
    raise ConfigurationError(
        "downstream_key(): this key was claimed while two secrets were listed in IDEMPOTENCY_SECRET, or under one that is not "
        "listed any more, so nobody can tell what the other side was sent. Ask it by something else, or settle the key by "
        "`flask idempotency resolve`."
    )


def _ask(
    app: Flask,
    resolver: Callable[[UnknownOutcome], Resolution],
    policies: Policies,
    unknown: UnknownOutcome,
) -> Resolution:
    with app.app_context():
        said = app.ensure_sync(resolver)(unknown)
        if isinstance(said, Happened) and not isinstance(said.answer, StoredResponse):
            return Happened(result_of(app, said.answer, policy_of(policies, unknown.record.info)))
        resolution: Resolution = said
        return resolution


# What there is to do for the janitor of one application, put together from its settings and its store.

BATCHES: Final = {"reap": 200, "expire": 1000, "rotate": 500, "reconcile": 20, "heartbeat": 1}
"""How many at once: each is some tens of milliseconds of the store's time, or some hundred of ours."""

BUDGET_SHARE: Final = 0.8
"""Of a chore's interval: the next one is not to find it still at work."""

LONGEST_BUDGET_SECONDS: Final = 3600.0
SHORTEST_BUDGET_SECONDS: Final = 5.0


def intervals(settings: Settings) -> dict[Chore, float]:
    """Seconds between two runs of each chore that is done by itself."""
    every: dict[Chore, float | None] = {
        "reap": settings.reap_interval,
        "expire": settings.expire_interval,
        "rotate": settings.rotate_interval,
        "reconcile": settings.reconcile_interval,
        "heartbeat": settings.heartbeat_interval,
    }
    return {chore: seconds for chore, seconds in every.items() if seconds is not None}


def drain_of(chore: Chore, settings: Settings) -> Batcher:
    """At what pace this chore is done. One that is never done by itself may take an hour when a person asks for it."""
    every = intervals(settings).get(chore, LONGEST_BUDGET_SECONDS)
    budget = min(max(every * BUDGET_SHARE, SHORTEST_BUDGET_SECONDS), LONGEST_BUDGET_SECONDS)
    return Batcher(batch=BATCHES[chore], budget=budget, rate=settings.expire_rate if chore == "expire" else None)


def janitor_of(app: Flask, *, host_clock: Callable[[], float] = time.time) -> Janitor:
    """The janitor of this application. Raises `ConfigurationError` where there is none, or its resolvers cannot hold."""
    state: Any = app.extensions.get("idempotency")
    if state is None or state.built is None or state.policies is None:
        raise ConfigurationError(
            "Idempotency is not set up on this application, or IDEMPOTENCY_ENABLED is False: there is nothing to look after."
        )
    built: Services = state.built
    work = work_of(app, built, state.settings, state.loaders, state.policies, state.observers)
    return Janitor(work, book=built.chores, observers=state.observers, host_clock=host_clock)


def settler_of(built: Services, settings: Settings, observers: Callable[[Event], None]) -> Settler | None:
    """What settles keys in their owners' place. None: nobody can find them in this store."""
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
) -> dict[Chore, Work]:
    """Each chore that this application and its store give any work for."""
    work: dict[Chore, Work] = {}
    owner = owner_mark(settings.namespace)
    settler = settler_of(built, settings, observers)
    if built.recovery is not None and settler is not None:
        every = identities(settings)
        asking = ResolverContext(
            resolvers=callable_resolvers(app, loaders.resolvers, policies),
            policy_of=partial(policy_of, policies),
            settler=settler,
            downstream=partial(downstream_key, every, settings.namespace),
            owner=owner,
            # Leases are renewed every third of themselves.
            first_pause=max([FIRST_PAUSE_SECONDS, *(lease / 2 for lease in _leases(policies, loaders.resolvers))]),
        )
        unsettled, label = built.recovery, every[0].label

        def reaping(horizon: float, drain: Batcher) -> ReapReport:
            # Where something is forgotten, somebody may be at work whom no record names: a resolver would find nothing yet.
            asked = asking if _remembers(built, observers) else None
            return reap(unsettled, horizon=horizon, drain=drain, observers=observers, label=label, asking=asked)

        work["reap"] = reaping
    if built.expiry is not None:
        expiry = built.expiry
        work["expire"] = lambda horizon, drain: expire(expiry, horizon=horizon, drain=drain)
    answers, data_keys, ring = built.responses, built.data_keys, settings.key_ring
    if settings.encryption != "off" and answers is not None and data_keys is not None and ring is not None:
        work["rotate"] = lambda horizon, drain: rotate(
            answers, data_keys, built.codec, ring, drain=drain, unsettled=built.recovery, owner=owner
        )
    ledger = built.ledger
    if ledger is not None and (settings.quota is not None or loaders.quota is not None):
        work["reconcile"] = lambda horizon, drain: reconcile(ledger, drain=drain)
    if built.chores is not None:
        book = built.chores

        def beat(horizon: float, drain: Batcher) -> HeartbeatReport:
            return heartbeat(book.reports(), store_now=book.now(), host_now=time.time())

        work["heartbeat"] = beat
    return work


def _remembers(built: Services, observers: Callable[[Event], None]) -> bool:
    """Whether the store has all that it promised, or somebody has looked at what it has not. Tells a loss that is new."""
    memory = built.data_loss
    if memory is None:
        return True
    standing = memory.status()
    remembers = standing.runs_unknown(memory.rules.after_loss)
    if standing.noticed and standing.gravest is not None and not remembers:
        observers(DataLossDetected("", "reap", loss=standing.gravest.value))
    return remembers


def _leases(policies: Policies, endpoints: Iterable[str]) -> Iterator[float]:
    """How long the leases of these endpoints are, by whichever method they are called."""
    for endpoint, method in policies.pairs():
        if endpoint in endpoints:
            yield policies.resolve(endpoint, method).policy.lease


def with_budget(drain: Batcher, *, budget: float, told: Callable[[int], object]) -> Batcher:
    """The same pace for somebody who watches, says how long it may take, and hears how far it is."""
    return replace(drain, budget=budget, told=told)


AGAIN_SECONDS: Final = 60.0
"""After a store that did not answer, or while another process was noting."""

_log = logging.getLogger("flask_idempotency")


def watch_of(built: Services, settings: Settings, observers: Callable[[Event], None]) -> JanitorMonitor | None:
    """None where no janitor is expected, where nothing tells whether one came, and where none can see the records."""
    if built.chores is None or settings.heartbeat_interval is None or is_process_local(settings):
        return None
    return JanitorMonitor(built.chores, observers, every=settings.heartbeat_interval)


def shape_watch_of(
    app: Flask, built: Services, settings: Settings, loaders: Callbacks, policies: Policies
) -> IdentityMonitor | None:
    """None where the store cannot remember the shape of identity, and where it is forgotten with this process."""
    if built.book is None or is_process_local(settings):
        return None
    return IdentityMonitor(built.book, partial(shape_in, app, settings, loaders, policies))


def shape_in(app: Flask, settings: Settings, loaders: Callbacks, policies: Policies) -> IdentityShape:
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


class JanitorMonitor:
    """Asks the store now and then whether a janitor has reported, and tells once when none has for two intervals.

    Any chore counts, whoever did it: cron has no heartbeat. After one has reported again, the next silence is told anew.
    """

    def __init__(
        self,
        book: TaskLog,
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
            silence = min((entry.ago for entry in self._book.reports().values()), default=None)
        except Exception as error:  # noqa: BLE001 - the answer is given, and nothing may spoil it
            _log.debug("whether a janitor comes is not known (%s)", type(error).__name__)
            return
        missing = silence is None or silence > self._patience
        if missing and not self._told:
            self._observers(JanitorMissing("", "", watched if silence is None else silence))
        self._told = missing


class IdentityMonitor:
    """Reports a change of the identity of keys: when the first request that claimed a key has ended, and then each new one.

    Loaders may be registered until the first request, so this cannot be done earlier. It asks the store once, and then
    every hour; no request waits for it before its view runs.
    """

    def __init__(
        self,
        book: TaskLog,
        shape: Callable[[], IdentityShape],
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
