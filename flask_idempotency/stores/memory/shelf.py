"""Data keys beside the records, and a walk through all answers."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flask_idempotency.engine.capabilities import Answer, DataKey, KeyShelf, Page
from flask_idempotency.engine.errors import DataKeyGone
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, Payload, Record, State
from flask_idempotency.stores.memory.room import Room


@dataclass(slots=True)
class _Tenant:
    keys: dict[int, DataKey] = field(default_factory=dict)
    closed: dict[int, float] = field(default_factory=dict)
    last: int = 0
    destroyed: int = 0
    erased_at: float | None = None


class MemoryShelf:
    """Implements `upkeep.DataKeys`."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._store = secrets.token_bytes(16)
        self._tenants: dict[bytes, _Tenant] = {}

    def shelf(self, tid: bytes) -> KeyShelf:
        with self._room.lock:
            tenant = self._of(tid)
            return KeyShelf(self._store, tuple(self._as_of_now(tenant)), tenant.last)

    def add(self, tid: bytes, key: DataKey, *, store: bytes, after: int) -> bool:
        with self._room.lock:
            tenant = self._of(tid)
            if store != self._store or tenant.last != after or key.number <= after:
                return False
            tenant.keys[key.number] = key
            tenant.last = key.number
            return True

    def close(self, tid: bytes, number: int) -> None:
        with self._room.lock:
            tenant = self._of(tid)
            if number in tenant.keys:
                tenant.closed.setdefault(number, self._room.now())

    def retire(self, tid: bytes, number: int) -> None:
        with self._room.lock:
            tenant = self._of(tid)
            if tenant.closed.pop(number, None) is not None:
                del tenant.keys[number]

    def others(self, kid: str) -> Sequence[tuple[bytes, DataKey]]:
        with self._room.lock:
            return [
                (tid, key) for tid, each in self._tenants.items() for key in self._as_of_now(each) if key.kid != kid
            ]

    def destroy(self, tid: bytes) -> int:
        with self._room.lock:
            tenant = self._of(tid)
            gone = len(tenant.keys)
            tenant.keys.clear()
            tenant.closed.clear()
            tenant.destroyed, tenant.erased_at = tenant.last, self._room.now()
            return gone

    def count(self) -> Mapping[str, int]:
        with self._room.lock:
            return Counter(key.kid for tenant in self._tenants.values() for key in tenant.keys.values())

    # What follows is called by the store, which holds the lock.

    def check(self, tid: bytes, record: Record, payload: Payload) -> None:
        """Raises `DataKeyGone` when this record may not be completed with this payload."""
        if payload.sealed_by is None or payload.sealed_by.number == 0:
            return
        tenant = self._of(tid)
        if tenant.erased_at is not None and record.requested_at <= tenant.erased_at:
            raise DataKeyGone("the tenant's answers were erased since the key was first used", erased=True)
        if payload.sealed_by.number not in tenant.keys or payload.sealed_by.number in tenant.closed:
            raise DataKeyGone("there is no open data key of this number", erased=False)

    def told(self, key: StorageKey, record: Record) -> Record:
        """This record, with what is known of the key that it was sealed with."""
        tenant = self._tenants.get(key.tid)
        if record.payload is None or tenant is None or tenant.erased_at is None:
            return record
        by = record.payload.sealed_by
        erased = record.requested_at <= tenant.erased_at if by is None else by.number <= tenant.destroyed
        return replace(record, erased=True) if erased else record

    def _as_of_now(self, tenant: _Tenant) -> Iterator[DataKey]:
        now = self._room.now()
        for number, key in tenant.keys.items():
            closed = tenant.closed.get(number)
            yield key if closed is None else replace(key, closed_for=now - closed)

    def _of(self, tid: bytes) -> _Tenant:
        return self._tenants.setdefault(tid, _Tenant())


class MemoryAnswers:
    """Implements `upkeep.Answers`."""

    def __init__(self, room: Room, shelf: MemoryShelf) -> None:
        self._room = room
        self._shelf = shelf

    def walk(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        with self._room.lock:
            now = self._room.now()
            keys = sorted((key for key in self._room.records if key.rid > after), key=lambda key: key.rid)[: limit + 1]
            live = [(key, self._room.live(key, now)) for key in keys[:limit]]
            met = [
                Answer(key, self._shelf.told(key, record))
                for key, record in live
                if record is not None and record.state is State.COMPLETED and tid in (None, key.tid)
            ]
            wanted = tuple(answer for answer in met if other_than is None or _kid(answer.record) != other_than)
            return Page(wanted, after=keys[limit - 1].rid if len(keys) > limit else None)

    def replace(self, key: StorageKey, old: Payload, new: Payload) -> bool:
        with self._room.lock:
            record = self._room.live(key, self._room.now())
            if record is None or record.state is not State.COMPLETED or record.payload != old:
                return False
            self._shelf.check(key.tid, record, new)
            self._room.records[key] = replace(record, payload=new)
            return True

    def count(self) -> Mapping[str, int]:
        with self._room.lock:
            completed = (record for record in self._room.records.values() if record.state is State.COMPLETED)
            return Counter(_kid(record) for record in completed if not _is_wiped(record))


def _is_wiped(record: Record) -> bool:
    return record.payload is not None and record.payload.sealed_by == ERASED


def _kid(record: Record) -> str:
    return "" if record.payload is None or record.payload.sealed_by is None else record.payload.sealed_by.kid
