"""What an operator's commands and console do in the current application: reach its store, and find records of a tenant.

Every function works on `current_app`. Those that need a part that the application lacks raise `Refused` with a sentence.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

from flask import current_app

from flask_idempotency.assembly import Services, identities
from flask_idempotency.engine.capabilities import DataLoss, Recovery, SeenRecord
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.journal import EMPTY, Journal
from flask_idempotency.engine.keys import Identity, StorageKey, owner_mark
from flask_idempotency.engine.model import Record, RequestInfo, State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import SeenStep, Settler, clamp_clock
from flask_idempotency.operations.records import RecordView, Refused, shown
from flask_idempotency.settings import Settings
from flask_idempotency.web.janitor import policy_of, settler_of, steps_of
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.recorded_steps import view_of


def state() -> Any:
    """Return the state of the application of this command: `extension.AppState`."""
    found = current_app.extensions.get("idempotency")
    if found is None:
        raise IdempotencyError("Idempotency is not set up on this application: call init_app first.")
    return found


def built() -> Services:
    """Return the engine, the codec and the store parts of the application."""
    parts: Services | None = state().built
    if parts is None:
        raise Refused("IDEMPOTENCY_ENABLED is False, so this application has no store to look into.")
    return parts


def settings() -> Settings:
    chosen: Settings = state().settings
    return chosen


def policies() -> Policies:
    chosen: Policies | None = state().policies
    if chosen is None:
        raise Refused("IDEMPOTENCY_ENABLED is False, so no policy applies to any endpoint of this application.")
    return chosen


def policy_for(about: RequestInfo) -> Policy:
    """Return the policy of the endpoint, inbox or task of this record."""
    return policy_of(policies(), state().loaders.operations, about)


def recovery() -> Recovery:
    """Return the part of the store that finds records by state."""
    found = built().recovery
    if found is None:
        raise Refused("The store of this application cannot be searched: it has no `recovery`.")
    return found


def settler() -> Settler:
    found = settler_of(built(), settings(), state().observers)
    if found is None:
        raise Refused("The store of this application lets only the worker end its claim: it has no `recovery`.")
    return found


def identity() -> Identity:
    """Return the identity under the newest secret."""
    return identities(settings())[0]


def publish(event: Event) -> None:
    """Publish an event to the observers of this application."""
    state().observers(event)


def tids_by_secret(tenant: str | None) -> list[tuple[bytes, ...]]:
    """Return the ids of the parts of this tenant: under every secret in use, the newest first, then under the former
    namespace."""
    former, namespaces = settings().former_identity, [settings().namespace]
    if former is not None and former.namespace not in (None, namespaces[0]):
        namespaces.append(former.namespace or "")
    return [who.tenant_ids(namespace, tenant) for namespace in namespaces for who in identities(settings())]


def every_tids(tenant: str | None) -> list[tuple[bytes, ...]]:
    """Return the same, and the ids before a change of identity. Other tenants may share these: use them with a token only."""
    former, own = settings().former_identity, tids_by_secret(tenant)
    if former is None:
        return own
    namespace, before = former.namespace or settings().namespace, None if former.tenant is False else tenant
    return own + [who.tenant_ids(namespace, before) for who in identities(settings())]


def tids(tenant: str | None) -> list[bytes]:
    """Return all ids of this tenant: of every part, under every secret in use."""
    return list(chain.from_iterable(tids_by_secret(tenant)))


def check_layout() -> None:
    """Raise `Refused` if the settings of this host look for a tenant where the store does not keep it."""
    memory = built().data_loss
    if memory is not None and DataLoss.FOREIGN.value in memory.status().losses:
        raise Refused(
            "This is not the Redis that IDEMPOTENCY_STORE_ID names, or it was set up with another IDEMPOTENCY_TENANT_SHARDS: "
            "most records of the tenant would be missed. Nothing was changed. See `flask idempotency redis status`."
        )


def pseudonym(tenant: str | None) -> str:
    """Return the pseudonym of this tenant in logs."""
    return "-" if tenant is None else identity().pseudonym(tenant)


def show_of(found: SeenRecord, *, steps: bool = False) -> RecordView:
    """Return what an operator may know of this record. `steps`: with its recorded steps."""
    record, journal, seen = found.record, EMPTY, tuple[SeenStep, ...]()
    may_be_paused = record.state is State.PROCESSING and record.remaining <= 0
    if steps or may_be_paused:
        journal, seen = recorded_of(found)
    views = tuple(map(view_of, seen)) if steps else None
    return shown(found, policy_for(record.info), identity().label(found.key), journal=journal, steps=views)


def recorded_of(found: SeenRecord) -> tuple[Journal, tuple[SeenStep, ...]]:
    """Return the journal of this record and its steps. A completed record has none."""
    if found.record.state is State.COMPLETED:
        return EMPTY, ()
    return steps_of(built(), settings(), found)


def read(key: StorageKey) -> Record | None:
    """Read this key, by the store's clock or this host's, whichever is earlier."""
    record = built().engine.read(key)
    return None if record is None else clamp_clock(record, time.time())


def is_spelled(stored: str, typed: str | None) -> bool:
    """Return whether a record has no name, or this one: in clear, or as a hash under a secret in use."""
    if not stored:
        return True
    return typed is not None and stored in (typed, *(each.pseudonym(typed) for each in identities(settings())))


def owners() -> tuple[bytes, ...]:
    """Return the prefixes of this application's tokens, also those before a change of its namespace."""
    former = settings().former_identity
    names = {settings().namespace, settings().namespace if former is None else former.namespace or settings().namespace}
    return tuple(map(owner_mark, names))
