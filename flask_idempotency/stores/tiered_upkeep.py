"""What a system of record can do besides, where a cache of its answers stands before it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from flask_idempotency.engine.capabilities import Answers, DataKey, DataKeys, KeyShelf, Page
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Payload

_log = logging.getLogger("flask_idempotency")


class Erasing(Protocol):
    """A cache that can be told to forget everything about one tenant."""

    def erase(self, tid: bytes) -> bool:
        """From now on nothing is replayed that was kept for this tenant so far. False: it did not answer."""
        ...


class CachedDataKeys:
    """Implements `upkeep.DataKeys`: the system's, and the cache is told of what is erased."""

    def __init__(self, keys: DataKeys, cache: Erasing) -> None:
        self._keys = keys
        self._cache = cache

    def shelf(self, tid: bytes) -> KeyShelf:
        return self._keys.shelf(tid)

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        return self._keys.add(tid, key, store=store, after=after)

    def close(self, tid: bytes, number: int) -> None:
        self._keys.close(tid, number)

    def retire(self, tid: bytes, number: int) -> None:
        self._keys.retire(tid, number)

    def others(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        return self._keys.others(kid)

    def destroy(self, tid: bytes) -> int:
        gone = self._keys.destroy(tid)
        # Afterwards, so that nothing is filled in between that was told before.
        if not self._erased(tid):
            raise StoreUnavailable(
                "The data keys are destroyed, and the cache of answers did not hear of it. What it holds of this tenant is "
                "replayed for a minute at most where it is encrypted, and to its end where it is not: repeat this when the "
                "cache answers, or empty the cache."
            )
        return gone

    def count(self) -> Mapping[str, int]:
        return self._keys.count()

    def _erased(self, tid: bytes) -> bool:
        try:
            return self._cache.erase(tid)
        except Exception:  # noqa: BLE001 - the keys are destroyed, and whoever asked must hear so
            _log.exception("The cache of answers failed")
            return False


class CachedAnswers:
    """Implements `upkeep.Answers`: the system's, and the cache forgets what is replaced."""

    def __init__(self, answers: Answers, forget: Callable[[StorageKey], None]) -> None:
        self._answers = answers
        self._forget = forget

    def walk(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        return self._answers.walk(after=after, limit=limit, tid=tid, other_than=other_than)

    def replace(self, key: StorageKey, old: Payload, new: Payload) -> bool:
        replaced = self._answers.replace(key, old, new)
        if replaced:
            self._forget(key)
        return replaced

    def count(self) -> Mapping[str, int]:
        return self._answers.count()
