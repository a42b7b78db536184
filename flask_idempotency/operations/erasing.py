"""Making a tenant's answers unreadable."""

from __future__ import annotations

from collections.abc import Iterable

from flask_idempotency.engine.capabilities import DataKeys
from flask_idempotency.engine.errors import StoreUnavailable


def holds_sealed(data_keys: DataKeys, tids: Iterable[bytes]) -> bool:
    """Whether anything was ever encrypted for this tenant, whatever the settings say of what is stored from now on."""
    return any(data_keys.shelf(tid).last for tid in tids)


def shred(data_keys: DataKeys, tids: Iterable[bytes]) -> int:
    """Erase the answers of a tenant, under all that stands for it. Returns how many data keys it had.

    Raises `StoreUnavailable` when one of them may be left, or is still remembered by a cache; the others are erased.
    """
    destroyed, failures = 0, []
    for tid in tids:
        try:
            destroyed += data_keys.destroy(tid)
        except StoreUnavailable as error:
            failures.append(error)
    if failures:
        raise StoreUnavailable(" ".join(dict.fromkeys(map(str, failures)))) from failures[0]
    return destroyed
