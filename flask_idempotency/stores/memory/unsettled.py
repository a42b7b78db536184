"""Records that are not completed, and what others than their owners may do with them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf

from flask_idempotency.engine.capabilities import Found, Sheet, UnfinishedCounts
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import OnLapse, Payload, Record, State
from flask_idempotency.engine.recovery import LAPSED
from flask_idempotency.stores.memory.room import Room, is_over


class MemoryUnsettled:
    """Implements `unsettled.Unsettled`. `put` and `complete` are the store's own, which keep its ledger right."""

    def __init__(
        self,
        room: Room,
        *,
        put: Callable[[StorageKey, Record | None], None],
        complete: Callable[[StorageKey, Record, Payload, float, float], None],
        told: Callable[[StorageKey, Record, float], Record],
    ) -> None:
        self._room = room
        self._put = put
        self._complete = complete
        self._told = told
        self._not_completed: dict[StorageKey, Record] = {}
        self._turns: dict[StorageKey, float] = {}

    def stale(self, *, horizon: float, after: bytes = b"", limit: int) -> Sheet:
        return self._sheet(self._not_completed, lambda record, now: _is_stale(record, min(horizon, now)), after, limit)

    def lapse(self, seen: Found, *, horizon: float) -> bool:
        with self._room.lock:
            now = self._room.now()
            record = self._as_seen(seen, now)
            if record is None or not _is_stale(record, min(horizon, now)) or record.on_lapse is OnLapse.TAKEOVER:
                return False
            self._put(seen.key, replace(record, state=State.QUARANTINED, reason=LAPSED))
            return True

    def due(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[Found]:
        with self._room.lock:
            now = self._room.now()
            quarantined = {
                key: record
                for key, record in self._not_completed.items()
                if record.state is State.QUARANTINED and (owner is None or record.token.startswith(owner))
            }
            waiting = sorted(quarantined, key=lambda key: self._turns.get(key, quarantined[key].deadline))
            come = (key for key in waiting if self._turns.get(key, -inf) <= min(horizon, now))
            taken = list(islice(come, limit))
            found = [
                Found(key, self._told(key, record, now), asked=self._turns.get(key, -inf) > record.deadline)
                for key, record in ((key, quarantined[key]) for key in taken)
            ]
            for key in taken:
                self._turns[key] = min(horizon, now) + min(max(now - quarantined[key].deadline, least), most)
            return found

    def settle(self, seen: Found, *, token: bytes, payload: Payload, keep: float) -> bool:
        with self._room.lock:
            now = self._room.now()
            record = self._room.live(seen.key, now)
            if record is not None and record.state is State.COMPLETED and record.token == token:
                return True
            record = self._as_seen(seen, now)
            if record is None or record.state is not State.QUARANTINED:
                return False
            self._complete(seen.key, replace(record, token=token), payload, keep, now)
            return True

    def free(self, seen: Found) -> bool:
        with self._room.lock:
            if self._as_seen(seen, self._room.now()) is None:
                return False
            self._put(seen.key, None)
            return True

    def walk(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> Sheet:
        records = self._room.records if state is State.COMPLETED else self._not_completed
        return self._sheet(
            records, lambda record, now: record.state is state and not is_over(record, now), after, limit, tid=tid
        )

    def standing(self) -> UnfinishedCounts:
        with self._room.lock:
            now = self._room.now()
            records = self._not_completed.values()
            processing = [record for record in records if record.state is State.PROCESSING]
            lapsed = [now - record.deadline for record in processing if record.deadline <= now]
            quarantined = [max(now - record.deadline, 0.0) for record in records if record.state is State.QUARANTINED]
            return UnfinishedCounts(
                in_flight=len(processing) - len(lapsed),
                lapsed=len(lapsed),
                quarantined=len(quarantined),
                lapsed_for=max(lapsed, default=None),
                quarantined_for=max(quarantined, default=None),
            )

    def _sheet(
        self,
        records: Mapping[StorageKey, Record],
        wanted: Callable[[Record, float], bool],
        after: bytes,
        limit: int,
        *,
        tid: bytes | None = None,
    ) -> Sheet:
        with self._room.lock:
            now = self._room.now()
            left = (key for key in records if key.rid > after)
            keys = heapq.nsmallest(limit + 1, left, key=lambda key: key.rid)
            met = ((key, records[key]) for key in keys[:limit] if tid in (None, key.tid))
            found = tuple(Found(key, self._told(key, record, now)) for key, record in met if wanted(record, now))
            return Sheet(found, after=keys[limit - 1].rid if len(keys) > limit else None)

    def _as_seen(self, seen: Found, now: float) -> Record | None:
        record = self._room.live(seen.key, now)
        if record is None:
            return None
        same = (record.state, record.token, record.deadline) == (
            seen.record.state,
            seen.record.token,
            seen.record.deadline,
        )
        return record if same else None

    # What follows is called by the store, which holds the lock.

    def moved(self, key: StorageKey, record: Record | None) -> None:
        if record is None or record.state is State.COMPLETED:
            self._not_completed.pop(key, None)
            # Should it be quarantined anew, that is another question, and its first turn is at once.
            self._turns.pop(key, None)
        else:
            self._not_completed[key] = record


def _is_stale(record: Record, now: float) -> bool:
    return record.state is State.PROCESSING and record.deadline <= now
