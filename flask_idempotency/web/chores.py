"""What there is to do for the janitor of one application, put together from its settings and its store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

from flask import Flask

from flask_idempotency.assembly import Built, identities
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import Event, LossNoticed
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.engine.recovery import Settler
from flask_idempotency.maintenance.janitor import Chore, Drain, Heartbeat, Janitor, Work, expire, heartbeat, reconcile
from flask_idempotency.maintenance.reap import FIRST_PAUSE_SECONDS, Asking, Reaping, reap
from flask_idempotency.maintenance.rotate import rotate
from flask_idempotency.settings import Settings
from flask_idempotency.web.loaders import Loaders
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.resolvers import callable_resolvers, downstream_key, policy_of

BATCHES: Final = {"reap": 200, "expire": 1000, "rotate": 500, "reconcile": 20, "heartbeat": 1}
"""How many at once: each is some tens of milliseconds of the store's time, or some hundred of ours."""

BUDGET_SHARE: Final = 0.8
"""Of a chore's interval: the next one is not to find it still at work."""

LONGEST_BUDGET_SECONDS: Final = 3600.0
SHORTEST_BUDGET_SECONDS: Final = 5.0


def intervals(settings: Settings) -> dict[Chore, float]:
    """Seconds between two runs of each chore that is done by itself."""
    every: dict[Chore, float | None] = {
        "reap": settings.reap_every,
        "expire": settings.expire_every,
        "rotate": settings.rotate_every,
        "reconcile": settings.reconcile_every,
        "heartbeat": settings.heartbeat_every,
    }
    return {chore: seconds for chore, seconds in every.items() if seconds is not None}


def drain_of(chore: Chore, settings: Settings) -> Drain:
    """At what pace this chore is done. One that is never done by itself may take an hour when a person asks for it."""
    every = intervals(settings).get(chore, LONGEST_BUDGET_SECONDS)
    budget = min(max(every * BUDGET_SHARE, SHORTEST_BUDGET_SECONDS), LONGEST_BUDGET_SECONDS)
    return Drain(batch=BATCHES[chore], budget=budget, rate=settings.expire_rate if chore == "expire" else None)


def janitor_of(app: Flask, *, host_clock: Callable[[], float] = time.time) -> Janitor:
    """The janitor of this application. Raises `ConfigurationError` where there is none, or its resolvers cannot hold."""
    state: Any = app.extensions.get("idempotency")
    if state is None or state.built is None or state.policies is None:
        raise ConfigurationError(
            "Idempotency is not set up on this application, or IDEMPOTENCY_ENABLED is False: there is nothing to look after."
        )
    built: Built = state.built
    work = work_of(app, built, state.settings, state.loaders, state.policies, state.observers)
    return Janitor(work, book=built.chores, observers=state.observers, host_clock=host_clock)


def settler_of(built: Built, settings: Settings, observers: Callable[[Event], None]) -> Settler | None:
    """What settles keys in their owners' place. None: nobody can find them in this store."""
    if built.unsettled is None:
        return None
    return Settler(built.unsettled, built.codec, observers, label=identities(settings)[0].label)


def work_of(
    app: Flask,
    built: Built,
    settings: Settings,
    loaders: Loaders,
    policies: Policies,
    observers: Callable[[Event], None],
) -> dict[Chore, Work]:
    """Each chore that this application and its store give any work for."""
    work: dict[Chore, Work] = {}
    owner = owner_mark(settings.namespace)
    settler = settler_of(built, settings, observers)
    if built.unsettled is not None and settler is not None:
        every = identities(settings)
        asking = Asking(
            resolvers=callable_resolvers(app, loaders.resolvers, policies),
            policy_of=partial(policy_of, policies),
            settler=settler,
            downstream=partial(downstream_key, every, settings.namespace),
            owner=owner,
            # Leases are renewed every third of themselves.
            first_pause=max([FIRST_PAUSE_SECONDS, *(lease / 2 for lease in _leases(policies, loaders.resolvers))]),
        )
        unsettled, label = built.unsettled, every[0].label

        def reaping(horizon: float, drain: Drain) -> Reaping:
            # Where something is forgotten, somebody may be at work whom no record names: a resolver would find nothing yet.
            asked = asking if _remembers(built, observers) else None
            return reap(unsettled, horizon=horizon, drain=drain, observers=observers, label=label, asking=asked)

        work["reap"] = reaping
    if built.expiry is not None:
        expiry = built.expiry
        work["expire"] = lambda horizon, drain: expire(expiry, horizon=horizon, drain=drain)
    answers, data_keys, ring = built.answers, built.data_keys, settings.key_ring
    if settings.encryption != "off" and answers is not None and data_keys is not None and ring is not None:
        work["rotate"] = lambda horizon, drain: rotate(
            answers, data_keys, built.codec, ring, drain=drain, unsettled=built.unsettled, owner=owner
        )
    ledger = built.ledger
    if ledger is not None and (settings.quota is not None or loaders.quota is not None):
        work["reconcile"] = lambda horizon, drain: reconcile(ledger, drain=drain)
    if built.chores is not None:
        book = built.chores

        def beat(horizon: float, drain: Drain) -> Heartbeat:
            return heartbeat(book.last(), store_now=book.now(), host_now=time.time())

        work["heartbeat"] = beat
    return work


def _remembers(built: Built, observers: Callable[[Event], None]) -> bool:
    """Whether the store has all that it promised, or somebody has looked at what it has not. Tells a loss that is new."""
    memory = built.memory
    if memory is None:
        return True
    standing = memory.standing()
    remembers = standing.runs_unknown(memory.rules.after_loss)
    if standing.noticed and standing.gravest is not None and not remembers:
        observers(LossNoticed("", "reap", loss=standing.gravest.value))
    return remembers


def _leases(policies: Policies, endpoints: Iterable[str]) -> Iterator[float]:
    """How long the leases of these endpoints are, by whichever method they are called."""
    for endpoint, method in policies.pairs():
        if endpoint in endpoints:
            yield policies.resolve(endpoint, method).policy.lease


def hurried(drain: Drain, *, budget: float, told: Callable[[int], object]) -> Drain:
    """The same pace for somebody who watches, says how long it may take, and hears how far it is."""
    return replace(drain, budget=budget, told=told)
