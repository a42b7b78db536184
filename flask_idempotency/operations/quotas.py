"""What tenants have, and what they may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from flask_idempotency.engine.capabilities import Ledger
from flask_idempotency.engine.quota import Quota, Usage
from flask_idempotency.operations.refusal import Refused


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant has, and its own limits as an operator has set them. `name` is None for no tenant."""

    name: str | None
    usage: Usage
    limits: Quota


def quota_show(ledger: Ledger, theirs: Sequence[Sequence[bytes]], *, name: str | None) -> TenantUsage:
    """What a tenant has: `theirs` are the ids of its parts under each secret, the newest first.

    A key is counted under the secret that is the newest to its host. During a rotation those are two, and a recount finds a
    key under both. So the larger number of each is told.
    """
    usages = [asdict(Usage.together(map(ledger.usage, parts))) for parts in theirs]
    most = {count: max(usage[count] for usage in usages) for count in usages[0]}
    return TenantUsage(name, Usage(**most), _own_limits(ledger, theirs))


def quota_set(ledger: Ledger, theirs: Sequence[Sequence[bytes]], named: Quota, *, clear: bool = False) -> Quota:
    """Set these limits of a tenant, and leave those that are not named. `clear`: take those back. Returns what holds now.

    That may be a little more than was named, because each part has its share, rounded up. Raises `Refused` for limits that
    cannot be divided. Broken off, it has reached some of the parts: it may be run again.
    """
    parts = len(theirs[0])
    if small := named.less_than(parts):
        told = ", ".join(f"{name.replace('_', '-')} {limit}" for name, limit in small.items())
        raise Refused(
            f"The keys of each tenant are spread over {parts} parts (IDEMPOTENCY_TENANT_SHARDS), and this cannot be divided "
            f"over so many: {told}. Set it to {parts} or more, or to 0. Nothing was changed."
        )
    limits = (named if clear else _own_limits(ledger, theirs).overlaid(named)).divided(parts)
    for tid in chain.from_iterable(theirs):
        ledger.limit(tid, limits)
    return limits.multiplied(parts)


def _own_limits(ledger: Ledger, theirs: Sequence[Sequence[bytes]]) -> Quota:
    """Of the newest secret under which there are any: they are set under all at once, and alike for every part."""
    every = map(ledger.limits, chain.from_iterable(theirs))
    return next((limits for limits in every if not limits.unlimited), Quota()).multiplied(len(theirs[0]))
