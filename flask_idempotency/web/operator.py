"""What an operator's commands and console do in the current application: reach its store, and find records of a tenant.

Every function works on `current_app`. Those that need a part that the application lacks raise `Refused` with a sentence.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

from flask import current_app

from flask_idempotency.assembly import Services, identities
from flask_idempotency.engine.audit import AuditEntry
from flask_idempotency.engine.capabilities import Ledger, Recovery, SeenRecord
from flask_idempotency.engine.errors import CorruptRecord, IdempotencyError, StoreUnavailable
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.journal import EMPTY, Journal
from flask_idempotency.engine.keys import Identity, Scope, StorageKey, new_token, owner_mark
from flask_idempotency.engine.model import (
    ERASED,
    DataLoss,
    OverQuota,
    Record,
    RequestInfo,
    State,
    StoredResponse,
)
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import SeenStep, Settler
from flask_idempotency.engine.status import KeyStatus, status_of, void_key
from flask_idempotency.engine.vanished import clamp_clock
from flask_idempotency.operations.records import Case, RecordView, Refused, doubts, shown
from flask_idempotency.settings import Settings
from flask_idempotency.settings.reading import FormerIdentity
from flask_idempotency.web.callbacks import load_quota, named_requests
from flask_idempotency.web.janitor import is_known, policy_of, result_of, settler_of
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.recorded_steps import downstream_key, read_steps, view_of

if TYPE_CHECKING:
    from flask_idempotency.outbox.outbox import OutboxServices  # needs a package that is optional

_CACHED: Final = (
    "The record holds a response, and other hosts have a cache that would still replay it. IDEMPOTENCY_REDIS_URL is not set "
    "here, so this process cannot invalidate that cache. Nothing was changed. Do it where that is set as for the web "
    "hosts; --force does not help. If no host has a cache any more, see `A cache that is gone` in docs/operate/records.md."
)
PAUSED: Final = (
    "There is nothing to resolve: the request is paused, and the next retry goes on after its finished steps. Ask the client "
    "to send it again with the same key. Nothing was changed."
)

T = TypeVar("T")

NOT_COUNTING: Final = (
    "Quotas are off in this application, so it counts no keys and no limit holds: set IDEMPOTENCY_QUOTA_* or register "
    "a quota_loader."
)


def state() -> Any:
    """Return the state of the application of this command: `extension.AppState`."""
    found = current_app.extensions.get("idempotency")
    if found is None:
        raise IdempotencyError("Idempotency is not set up on this application: call init_app first.")
    return found


def needed(part: T | None, why_not: str) -> T:
    """Return this part of the application. Raise `Refused` if it has none."""
    if part is None:
        raise Refused(why_not)
    return part


def built() -> Services:
    """Return the engine, the codec and the store parts of the application."""
    parts: Services | None = state().built
    return needed(parts, "IDEMPOTENCY_ENABLED is False, so this application has no store to look into.")


def settings() -> Settings:
    chosen: Settings = state().settings
    return chosen


def policies() -> Policies:
    chosen: Policies | None = state().policies
    return needed(chosen, "IDEMPOTENCY_ENABLED is False, so no policy applies to any endpoint of this application.")


def policy_for(about: RequestInfo) -> Policy:
    """Return the policy of the endpoint, inbox or task of this record."""
    return policy_of(policies(), state().loaders.operations, about)


def recovery() -> Recovery:
    """Return the part of the store that finds records by state."""
    return needed(built().recovery, "The store of this application cannot be searched: it has no `recovery`.")


def settler() -> Settler:
    found = settler_of(built(), settings(), state().observers)
    return needed(found, "The store of this application lets only the worker end its claim: it has no `recovery`.")


def ledger_of() -> Ledger:
    """Return the part of the store that counts what each tenant has."""
    return needed(built().ledger, "The store of this application does not count: it has no `ledger`.")


def outbox_of() -> OutboxServices:
    """Return what the outbox of this application works with."""
    state()
    services: OutboxServices | None = current_app.extensions.get("idempotency_outbox")
    return needed(services, "This application has no outbox: call `idempotency.outbox()` when you set it up.")


def counting() -> bool:
    """Return whether a quota applies, so that requests are counted."""
    return settings().quota is not None or state().loaders.quota is not None


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


def keyed_methods(endpoint: str) -> list[str]:
    """Return the methods for which this endpoint takes keys. Raises `Refused` if there are none."""
    rules = policies()
    methods = [each for name, each in rules.pairs() if name == endpoint and not rules.look(name, each).exempt]
    if not methods:
        raise Refused(
            "This application has no such endpoint that takes keys: `flask idempotency policy` names them all."
        )
    return methods


def steps_taken(found: SeenRecord) -> str:
    """Return a sentence with the steps of this record that had, or may have had, an effect. Empty if there are none."""
    names = dict.fromkeys(entry.name for entry in recorded_of(found)[0].entries if entry.has_effect)
    return f" Recorded steps: {', '.join(names)}." if names else ""


def pseudonym(tenant: str | None) -> str:
    """Return the pseudonym of this tenant in logs."""
    return "-" if tenant is None else identity().pseudonym(tenant)


def show_of(found: SeenRecord, *, steps: bool = False) -> RecordView:
    """Return what an operator may know of this record. `steps`: with its recorded steps."""
    record, journal, seen = found.record, EMPTY, tuple[SeenStep, ...]()
    may_be_paused = record.state is State.PROCESSING and record.remaining <= 0
    if steps or may_be_paused:
        try:
            journal, seen = recorded_of(found)
        except CorruptRecord:
            if steps:
                raise
            # In a list: a damaged journal must not hide the other records.
    views = tuple(map(view_of, seen)) if steps else None
    return shown(found, policy_for(record.info), identity().label(found.key), journal=journal, steps=views)


def recorded_of(found: SeenRecord) -> tuple[Journal, tuple[SeenStep, ...]]:
    """Return the journal of this record and its steps. A completed record has none."""
    if found.record.state is State.COMPLETED:
        return EMPTY, ()
    parts, downstream = built(), partial(downstream_key, settings())
    return read_steps(found, parts.journals, parts.codec, downstream=downstream)


def read(key: StorageKey) -> Record | None:
    """Read this key, by the store's clock or this host's, whichever is earlier."""
    record = built().engine.read(key)
    return None if record is None else clamp_clock(record, time.time())


def is_spelled(stored: str, typed: str | None) -> bool:
    """Return whether a record has no name, or this one: in clear, or as a hash under a secret in use."""
    if not stored:
        return True
    return typed is not None and stored in (typed, *(each.pseudonym(typed) for each in identities(settings())))


def check_own(record: Record) -> None:
    """Raise `Refused` for a record of another application in the same store."""
    if not record.token.startswith(owners()):
        raise Refused(
            "This record belongs to another application in the same store. Run the command for that one: set FLASK_APP."
        )


def owners() -> tuple[bytes, ...]:
    """Return the prefixes of this application's tokens, also those before a change of its namespace."""
    former = settings().former_identity
    names = {settings().namespace, settings().namespace if former is None else former.namespace or settings().namespace}
    return tuple(map(owner_mark, names))


def void(
    key: str, *, tenant: str | None, principal: str | None, endpoint: str, method: str, actor: str, reason: str
) -> KeyStatus | OverQuota:
    """Void this client's key of an endpoint, as `void_key` does, and remember in the audit trail who did it.

    Raises `Refused` if a former name of the caller cannot be known here: the key may have a record under that.
    """
    resolved, chosen, names = policies().look(endpoint, method), settings(), identities(settings())
    policy = resolved.policy
    if resolved.observed or resolved.faults or policy.principal is not None:
        raise Refused(
            "This endpoint keeps no records of clients' keys: it is a webhook, is only observed, or its policy cannot hold. A "
            "request with this key would run all the same. Nothing was changed."
        )
    if built().process_local and not current_app.testing:
        raise Refused(
            "The records are in the memory of another process, which this command does not reach. Nothing was changed."
        )
    scope = Scope(chosen.namespace, tenant, principal, endpoint if policy.scope == "operation" else None)

    def before(former: FormerIdentity) -> tuple[str | None, str | None]:
        if callable(former.tenant) or former.principal not in (None, False):
            raise Refused(
                "IDEMPOTENCY_FORMER_IDENTITY names a loader, which needs a request: let the client void its key with DELETE "
                "on the status view. Nothing was changed."
            )
        return None if former.tenant is False else tenant, None if former.principal is False else principal

    requests = named_requests(scope, key, names, chosen, policy, method=method, operation=endpoint, before=before)
    quota = load_quota(state().loaders, chosen, tenant, current_app)
    stood = status_of(built().engine, requests).state
    found = void_key(built().engine, requests, policy, quota=quota, actor=actor, reason=reason)
    voided = isinstance(found, KeyStatus) and found.state == "voided" and stood != "voided"
    if voided and (audit := built().audit) is not None:
        audit.append(requests[0].key, AuditEntry("voided", stood, actor, reason), token=new_token())
    return found


# Resolve a key: what speaks against it, and what retries will get.


def check_cache(case: Case) -> None:
    """Raise `Refused` if only another host can invalidate the cached response of this case."""
    cache_marker = built().cache_marker
    if cache_marker is None or settings().redis_url is not None:
        return
    if any(found.record.payload is not None for found in case.found) and cache_marker.has_cache():
        raise Refused(_CACHED)


def objections(case: Case, *, steps: bool = True) -> tuple[list[str], str]:
    """Return what speaks against a release of this key, and the way out. Without objections both are empty.

    `steps`: recorded effects of steps count too.
    """
    about = case.first.record.info
    policy, known = policy_for(about), is_known(current_app, state().loaders.operations, about)
    recorded = [
        entry.name for found in case.found if steps for entry in recorded_of(found)[0].entries if entry.has_effect
    ]
    return doubts(case, policy, known=known, recorded=recorded)


def value_for(about: RequestInfo, body: bytes | None, *, named: str) -> StoredResponse:
    """Return what the record of a message holds: the value that replays return. None: there is none.

    Raises `Refused` if the body, which the operator knows by this name, is no JSON that a record can keep.
    """
    operation = state().loaders.operations.get(about.operation)
    if operation is None:
        raise Refused(
            "This process has no inbox or task of that name, so it cannot write a value that it reads. Import the module that "
            "makes it in this application. Nothing was changed."
        )
    if body is None:
        return StoredResponse(200, kept=False)
    try:
        result: StoredResponse = operation.stored(json.loads(body))
    except (TypeError, ValueError, RecursionError):
        # The original exception may quote the value.
        raise Refused(f"{named} holds no JSON that a record can keep. Nothing was changed.") from None
    return result


def response_for(
    policy: Policy,
    status: int,
    body: bytes | None,
    *,
    content_type: str | None = None,
    fields: Sequence[tuple[str, str]] = (),
) -> tuple[StoredResponse, list[str]]:
    """Return the response that retries will get, and the names of the header fields that they will not.

    None as the body is a response without one; retries then get `response-not-kept`, unless the status has no body. Without a
    type, a body that is JSON is `application/json`, and any other has the type of the application's responses.
    """
    response = current_app.response_class(body or b"", status=status)
    if content_type is not None:
        response.content_type = content_type
    elif body is None:
        del response.headers["Content-Type"]
    else:
        with suppress(ValueError, RecursionError):
            json.loads(body)
            response.content_type = "application/json"
    for name, value in fields:
        response.headers.add(name, value)
    result = result_of(current_app, response, policy)
    kept = {name.lower() for name, _ in result.metadata}
    dropped = [name for name, _ in fields if name.lower() not in kept]
    return (result.without_body() if body is None and result.status not in (204, 304) else result), dropped


def described(stored: StoredResponse) -> str:
    """Return the status, type and size of this response, as retries get them."""
    media_type = next((value for name, value in stored.metadata if name.lower() == "content-type"), "no type")
    return f"{stored.status}, {media_type}, {len(stored.body):,} bytes" if stored.body else f"{stored.status}"


def is_erased(case: Case) -> bool:
    """Return whether the store holds the response of this completed case as erased: its tenant was purged before."""
    try:
        record = read(case.first.key)
    except StoreUnavailable:
        return False  # the change is made, and the command must not report it as failed
    return record is not None and record.payload is not None and (record.erased or record.payload.sealed_by == ERASED)
