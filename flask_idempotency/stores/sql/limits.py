"""Quotas as statements take them, and tell them."""

from __future__ import annotations

from typing import Any, Final

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.stores.sql.completing import shard_of

MARGIN: Final = 128
"""How far below each limit nobody waits for anybody: limits are exact as long as no more new keys of one tenant are
between look and commit at once. More than the connections that one application has, and than most servers give out."""


def limits_of(quota: Quota) -> dict[str, int | None]:
    new_keys = quota.new_keys
    return {
        "my_max_records": quota.records,
        "my_max_bytes": quota.bytes,
        "my_max_in_flight": quota.in_flight,
        "my_max_new_keys": None if new_keys is None else new_keys.count,
        "my_window_length": None if new_keys is None else max(round(new_keys.seconds * 1_000_000), 1),
    }


def within(key: StorageKey, quota: Quota) -> dict[str, int | None]:
    """What a claim with a quota brings besides."""
    number = int.from_bytes(key.tid[:8], "big", signed=True)
    return {**limits_of(quota), "my_margin": MARGIN, "my_shard": shard_of(key), "my_tenants_number": number}


def checked(standing: Any) -> Any:
    """Return what a statement tells of a tenant. Raise `CorruptRecord` unless all of it is numbers, or not there."""
    if not all(each is None or isinstance(each, int) for each in standing):
        raise CorruptRecord(
            "what the database holds of a tenant's limits or counts cannot be read: set its limits again"
        )
    if (standing.max_new_keys is None) != (standing.max_window_length is None) or (standing.max_window_length or 1) < 1:
        raise CorruptRecord("the limit of new keys that the database holds for a tenant cannot be read: set it again")
    return standing


def is_narrow(quota: Quota) -> bool:
    """Whether some limit is no higher than the margin, so that nobody is ever far from it."""
    new_keys = None if quota.new_keys is None else quota.new_keys.count
    limits = (quota.records, quota.in_flight, new_keys)
    return any(limit is not None and limit <= MARGIN for limit in limits)


def rate(count: int | None, span: int | None) -> NewKeys | None:
    return None if count is None or span is None else NewKeys(count, span / 1_000_000)
