"""Records that are not completed, and what others than their owners may do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flask_idempotency.engine.key import StorageKey
from flask_idempotency.engine.record import OnLapse, Payload, Record, State
from flask_idempotency.engine.unsettled import Found, Sheet, Standing
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
        self._turns: dict[StorageKey, float] = {}

    def stale(self, *, horizon: float, after: bytes = b"", limit: int) -> Sheet:
        return self._sheet(lambda record, now: _is_stale(record, min(horizon, now)), after, limit)

    def lapse(self, seen: Found, *, horizon: float) -> bool:
        with self._room.lock:
            now = self._room.now()
            record = self._as_seen(seen, now)
            if record is None or not _is_stale(record, min(horizon, now)) or record.on_lapse is OnLapse.TAKEOVER:
                return False
            self._put(seen.key, replace(record, state=State.QUARANTINED, reason="lease-expired"))
            return True

    def due(self, *, horizon: float, least: float, most: float, limit: int) -> Sequence[Found]:
        with self._room.lock:
            now = self._room.now()
            quarantined = {k: r for k, r in self._room.records.items() if r.state is State.QUARANTINED}
            self._turns = {key: turn for key, turn in self._turns.items() if key in quarantined}
            turns = sorted((self._turns.get(key, record.deadline), key) for key, record in quarantined.items())
            taken = [key for turn, key in turns if self._turns.get(key) is None or turn <= min(horizon, now)][:limit]
            for key in taken:
                self._turns[key] = now + min(max(now - quarantined[key].deadline, least), most)
            return [Found(key, self._told(key, quarantined[key], now)) for key in taken]

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
        return self._sheet(
            lambda record, now: record.state is state and not is_over(record, now), after, limit, tid=tid
        )

    def standing(self) -> Standing:
        with self._room.lock:
            now = self._room.now()
            records = self._room.records.values()
            processing = [record for record in records if record.state is State.PROCESSING]
            lapsed = [now - record.deadline for record in processing if record.deadline <= now]
            quarantined = [max(now - record.deadline, 0.0) for record in records if record.state is State.QUARANTINED]
            return Standing(
                in_flight=len(processing) - len(lapsed),
                lapsed=len(lapsed),
                quarantined=len(quarantined),
                lapsed_for=max(lapsed, default=None),
                quarantined_for=max(quarantined, default=None),
            )

    def _sheet(
        self, wanted: Callable[[Record, float], bool], after: bytes, limit: int, *, tid: bytes | None = None
    ) -> Sheet:
        with self._room.lock:
            now = self._room.now()
            keys = sorted((key for key in self._room.records if key.rid > after), key=lambda key: key.rid)[: limit + 1]
            met = ((key, self._room.records[key]) for key in keys[:limit] if tid in (None, key.tid))
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


def _is_stale(record: Record, now: float) -> bool:
    return record.state is State.PROCESSING and record.deadline <= now
