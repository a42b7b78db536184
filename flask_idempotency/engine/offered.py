"""Look up what a store can do beside the `Store` protocol: `Capabilities` lists what `capabilities` describes."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from flask_idempotency.engine.values import valueclass

if TYPE_CHECKING:
    from flask_idempotency.engine.activity import ActivityLog
    from flask_idempotency.engine.audit import AuditTrail
    from flask_idempotency.engine.capabilities import (
        DataKeys,
        DataLossDetector,
        Expiry,
        Health,
        Ledger,
        Recovery,
        Responses,
        Void,
    )
    from flask_idempotency.engine.journal import Journals
    from flask_idempotency.engine.observations import Observations
    from flask_idempotency.engine.store import Schema, Transactions
    from flask_idempotency.engine.tasks import TaskLog
    from flask_idempotency.engine.waiting import Notifier


@runtime_checkable
class KnowsCache(Protocol):
    """A store that remembers that some host caches its responses, for hosts that do not know the cache.

    Only a host that knows the cache can invalidate a response there, and it must do so before it releases or resolves a key.
    """

    def note_cache(self) -> None:
        """Record for ever that responses may be cached from now on."""
        ...

    def has_cache(self) -> bool:
        """Return whether any host may have cached responses."""
        ...


@valueclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store offers beside the `Store` protocol: each is an attribute of the store. None: the store lacks it."""

    schema: Schema | None
    """Its tables, in a database that others use as well."""
    transactions: Transactions | None
    """It keeps its records in the database of the application's own session."""
    tenant_shards: int | None
    """Over how many partitions it expects the keys of each tenant to be spread. It refuses to mix two numbers."""
    data_loss: DataLossDetector | None
    """It can lose data, and detects it."""
    notifier: Notifier | None
    """It notifies this process when a claim ends for which requests wait."""
    ledger: Ledger | None
    """It enforces quotas."""
    data_keys: DataKeys | None
    """It keeps wrapped data keys of tenants."""
    responses: Responses | None
    """Its completed records can be scanned and replaced."""
    recovery: Recovery | None
    """Its unfinished records can be found and resolved without their workers."""
    expiry: Expiry | None
    """Its expired data must be removed by a janitor."""
    task_log: TaskLog | None
    """It remembers when maintenance tasks ran."""
    health: Health | None
    """It can check its server."""
    journals: Journals | None
    """It remembers the steps of a request. Without it, no endpoint may list `steps`."""
    activity: ActivityLog | None
    """It adds up what happens at each endpoint, by minute and by hour."""
    observations: Observations | None
    """It remembers keys in observe mode. Without it, no endpoint may set `mode` to `observe` or `warn`."""
    audit: AuditTrail | None
    """It remembers who changed a record and why."""
    void: Void | None
    """It can void keys. Without it, no endpoint may set `void`."""
    remembers: bool | None
    """It can refuse a key after its response has expired. Without it, no endpoint may set `remember`."""
    process_local: bool | None
    """Only the process that made it sees its records. None or false: other processes see them too."""


CAPABILITIES: Final = tuple(field.name for field in fields(Capabilities))
"""The names of these attributes. Calls to them are not timed."""


def capabilities_of(store: object) -> Capabilities:
    """Look up what this store offers. Assembly and the tiered store do so once; no call site looks for an attribute."""
    return Capabilities(**{name: getattr(store, name, None) for name in CAPABILITIES})
