"""What tenants have, and what they may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flask_idempotency.engine.quota import Quota, Usage
from flask_idempotency.engine.upkeep import Ledger


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant has, and its own limits as an operator has set them. `name` is None for no tenant."""

    name: str | None
    usage: Usage
    limits: Quota


def quota_show(ledger: Ledger, tids: Sequence[bytes], *, name: str | None) -> TenantUsage:
    """What a tenant has under all that stands for it: a key is counted under the secret that is the newest to its host.

    During a rotation those are two, and a recount finds a key under both. So the larger number of each is told.
    """
    usages = [asdict(ledger.usage(tid)) for tid in tids]
    most = {count: max(usage[count] for usage in usages) for count in usages[0]}
    return TenantUsage(name, Usage(**most), _own_limits(ledger, tids))


def quota_set(ledger: Ledger, tids: Sequence[bytes], named: Quota, *, clear: bool = False) -> Quota:
    """Set these limits of a tenant, and leave those that are not named. `clear`: take those back. Returns what holds now."""
    limits = named if clear else _own_limits(ledger, tids).overlaid(named)
    for tid in tids:
        ledger.limit(tid, limits)
    return limits


def _own_limits(ledger: Ledger, tids: Sequence[bytes]) -> Quota:
    """Of the newest secret under which there are any: they are set under all at once."""
    every = (ledger.limits(tid) for tid in tids)
    return next((limits for limits in every if not limits.unlimited), Quota())
