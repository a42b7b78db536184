"""Settling by others in a system of record, where a cache of its answers stands before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flask_idempotency.engine.capabilities import Found, Sheet, UnfinishedCounts, Unsettled
from flask_idempotency.engine.errors import NothingChanged
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Payload, State


class CachedUnsettled:
    """Implements `unsettled.Unsettled`: the system's, and the cache replays nothing that was freed or settled anew.

    Only a record that holds an answer, completed or condemned, can be in the cache: a janitor needs no cache for others.
    """

    def __init__(self, unsettled: Unsettled, withdraw: Callable[[StorageKey, int], bool]) -> None:
        self._unsettled = unsettled
        self._withdraw = withdraw

    def stale(self, *, horizon: float, after: bytes = b"", limit: int) -> Sheet:
        return self._unsettled.stale(horizon=horizon, after=after, limit=limit)

    def lapse(self, seen: Found, *, horizon: float) -> bool:
        return self._unsettled.lapse(seen, horizon=horizon)

    def due(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[Found]:
        return self._unsettled.due(horizon=horizon, least=least, most=most, limit=limit, owner=owner)

    def settle(self, seen: Found, *, token: bytes, payload: Payload, keep: float) -> bool:
        self._forget(seen)
        return self._unsettled.settle(seen, token=token, payload=payload, keep=keep)

    def free(self, seen: Found) -> bool:
        self._forget(seen)
        return self._unsettled.free(seen)

    def walk(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> Sheet:
        return self._unsettled.walk(state, after=after, limit=limit, tid=tid)

    def standing(self) -> UnfinishedCounts:
        return self._unsettled.standing()

    def _forget(self, seen: Found) -> None:
        # Before the system changes: what is withdrawn in vain is cached again when its tombstone is gone, after 90 days, and
        # this may be repeated; what was freed and is replayed could not be freed once more.
        if seen.record.payload is not None and not self._withdraw(seen.key, seen.record.fence):
            raise NothingChanged(
                "Nothing was changed, for the cache of answers did not hear of it and would go on replaying this one: repeat "
                "this when the cache answers, where IDEMPOTENCY_REDIS_URL is set as on the web hosts. If it never will again, "
                "see `A cache that is gone` in docs/operations.md."
            )
